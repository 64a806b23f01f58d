"""Signals to whole commands, at every time: one line, the status that a shell shows, nothing half-written, and never a
traceback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread

import pytest

from megalite.system.processes import blocked
from tests.structure.sources import ROOT
from tests.support.configs import write_tokens

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="looks into processes through /proc")
TIMEOUT = 120.0  # seconds: far more than a loaded machine needs
HUGE = {"steps": "100000", "global_batch_size": "4", "micro_batch_size": "2"}
SHAPE = {"hidden_size": "16", "intermediate_size": "32", "num_hidden_layers": "1", "num_attention_heads": "2"}


def start(*words: object, **options: object) -> subprocess.Popen[str]:
    """`python …` in a process group of its own, with Python's own handling of signals whatever started pytest."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.Popen(
        [sys.executable, *map(str, words)],
        **{
            "cwd": ROOT,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
            "env": {**environment, "OMP_NUM_THREADS": "1"},
            **options,
        },  # type: ignore[call-overload]
        text=True,
        process_group=0,
        preexec_fn=lambda: [
            signal.signal(each, signal.SIG_DFL) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        ],
    )


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, finish(process)
        time.sleep(0.01)


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        output, _ = process.communicate(timeout=TIMEOUT)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, output


def in_set(process: subprocess.Popen[str], number: int, *sets: str) -> bool:
    """Whether a signal is in one of a process's sets, by their names in /proc."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return any(int(line.split()[1], 16) >> (number - 1) & 1 for line in lines if line.startswith(sets))


def handles(process: subprocess.Popen[str], number: int) -> bool:
    """Whether a process has a handler for a signal."""
    return in_set(process, number, "SigCgt")


def pending(process: subprocess.Popen[str], number: int) -> bool:
    """Whether a signal that was sent to a process has not reached it yet."""
    return in_set(process, number, "SigPnd", "ShdPnd")


def training(run: Path, *options: str) -> subprocess.Popen[str]:
    section = {
        **{f"model.{name}": value for name, value in SHAPE.items()},
        **{f"train.{name}": value for name, value in HUGE.items()},
    }
    data = {
        "data.train": write_tokens(run.parent, 96),
        "data.sequence_length": "16",
        "run.dir": run.parent,
        "run.name": run.name,
    }
    words = [word for name, value in {**section, **data}.items() for word in (f"--{name}", value)]
    return start("pretrain.py", *words, *options)


def in_step(run: Path, step: int) -> bool:
    metrics = run / "metrics.jsonl"
    return metrics.exists() and metrics.read_text().count("\n") >= step


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 75), (signal.SIGUSR2, 75)])
def test_before_training_a_run_ends_at_once_and_has_changed_nothing(tmp_path, number, status):
    process = training(tmp_path / "run")
    # the last handler that is installed; torch is not imported yet
    wait_until(lambda: handles(process, signal.SIGUSR1), process)
    process.send_signal(number)
    result, output = finish(process)
    *before, line = output.splitlines()
    assert (
        result == status and before in ([], ["starting …"]) and "before the first step; nothing was changed" in line
    ), output
    assert not (tmp_path / "run").exists()


def test_while_training_a_run_saves_although_its_output_is_not_read_any_more(tmp_path):
    """Ctrl-C also ends `tee`, which reads the output: that costs the output alone."""
    run = tmp_path / "run"
    process = training(run)
    wait_until(lambda: in_step(run, 2), process)
    assert process.stdout is not None
    process.stdout.close()
    process.send_signal(signal.SIGINT)
    assert process.wait(TIMEOUT) == 130
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["state"], summary["exit_status"]) == ("interrupted", 130)
    assert summary["checkpoint"] == f"step_{summary['step']:08d}" and not (run / "lock").exists()


def test_ranks_that_wait_for_the_message_of_local_rank_0_are_not_listed_as_failures_by_torchrun():
    """torchrun ends them by SIGTERM once local rank 0 has failed, and lists those that end with another status than
    0."""
    code = "from megalite.config.load import exit_with; exit_with('wrong')"
    process = start(
        "-c", code, env={**os.environ, "PYTHONPATH": str(ROOT), "LOCAL_RANK": "1", "TORCHELASTIC_ERROR_FILE": ""}
    )
    wait_until(lambda: handles(process, signal.SIGTERM), process)
    process.send_signal(signal.SIGTERM)
    assert finish(process) == (0, "")


STUCK = """
import ctypes, os, sys
from megalite.launch import signals
from megalite.training.stop_requests import StopRequest
signals.monotonic = lambda: 2 * signals.SAME_PRESS_S * os.path.exists(sys.argv[1])  # time passes when the test says so
with StopRequest():
    print("in a step", flush=True)
    mutex = (ctypes.c_char * 64)()
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)  # the second time for ever, and no signal handler of Python runs
"""


@pytest.mark.parametrize("launcher", [{}, {"TORCHELASTIC_RUN_ID": "1"}], ids=["alone", "torchrun"])
def test_a_second_one_ends_a_run_at_once_also_if_a_collective_hangs(launcher, tmp_path):
    """Under a launcher, which may forward the Ctrl-C that also came from the terminal, the second one comes later than
    that."""
    later = tmp_path / "later"
    process = start("-c", STUCK, later, env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", **launcher})
    assert process.stdout is not None and process.stdout.readline() == "in a step\n"
    process.send_signal(signal.SIGINT)
    wait_until(lambda: not pending(process, signal.SIGINT), process)  # two pending signals of one kind are one
    time.sleep(0.1)  # until the thread has heard of the first
    process.send_signal(signal.SIGINT)
    if launcher:
        time.sleep(0.5)
        assert process.poll() is None
        later.touch()
        process.send_signal(signal.SIGTERM)  # what torchrun sends at the second Ctrl-C
    assert finish(process) == (130, "interrupted again: exiting immediately without saving\n")


POOL = """
import os
from megalite.data.preparation.pool import encoded
from megalite.data.preparation.tasks import Task
from megalite.data.preparation.texts import Texts
from megalite.data.tokenizer.tokenizers import load
results = encoded(iter([Task(1, texts=("a",)), Task(1, texts=("b",))]), load("byte"), Texts(), 2)
next(results)
os._exit(130)
"""


def test_a_preparation_that_ends_at_once_leaves_no_warning_of_semaphores():
    """It comes from a process that Python starts, and only where an interrupt keeps the pool from closing."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    done = subprocess.run(
        [sys.executable, "-c", POOL], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 130 and "resource_tracker" not in done.stderr


@pytest.mark.parametrize("number, line", [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "stopped by SIGTERM")])
def test_a_preparation_removes_what_is_half_written(tmp_path, number, line):
    """As a terminal sends it: to the whole process group, the workers included."""
    (tmp_path / "text").write_text("Every café at six: quick brown foxes jump over lazy dogs.\n" * 200_000)
    written = tmp_path / "tokens"
    words = ["--input", tmp_path / "text", "--tokenizer", "byte", "--output", written / "a", "--workers", "2"]
    process = start("-m", "megalite", "prepare", *words)
    wait_until(lambda: any(path.stat().st_size for path in written.glob(".a*.bin")), process)  # the workers run
    os.killpg(process.pid, number)
    status, output = finish(process)
    assert status == 128 + number and output.splitlines()[-1] == line and "Traceback" not in output, output
    assert not list(written.glob(".a*.bin")) and not list(written.glob("a*"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_process_that_is_being_started_is_started_whole_although_another_thread_receives_the_signal(number):
    """Otherwise a worker of multiprocessing, whose pipe is closed before anything was written into it, ends with a
    traceback."""
    done = []
    hears, ended = Event(), Event()
    other = Thread(target=lambda: (hears.set(), ended.wait(TIMEOUT)))
    other.start()  # before the block: this thread does not block the signal
    before = signal.signal(number, lambda number, frame: done.append("handled"))
    try:
        with blocked([signal.SIGINT]):
            hears.wait(TIMEOUT)
            os.kill(os.getpid(), number)
            time.sleep(0.05)  # a handler would run here
            done.append("started")
        assert done == ["started", "handled"]
    finally:
        signal.signal(number, before)
        ended.set()
        other.join()


def test_an_interrupt_that_becomes_another_error_is_one_line(tmp_path):
    """Code in C may report an interrupt during an import as an import that failed."""
    code = "from megalite.commands.start import interruptible\n"
    code += (
        "def main():\n    try:\n        print('now', flush=True)\n        import time; time.sleep(60)\n    except "
        "KeyboardInterrupt:\n"
    )
    code += "        raise ImportError('initialization failed') from None\nraise SystemExit(interruptible(main))"
    process = start("-c", code)
    assert process.stdout is not None and process.stdout.readline() == "now\n"
    process.send_signal(signal.SIGINT)
    assert finish(process) == (130, "interrupted\n")


@pytest.mark.parametrize("words", ["train --list_configs", "train --help", "bubble --pp 2 --microbatches 4 --compare"])
def test_a_reader_that_has_seen_enough_causes_no_error(words):
    reader, writer = os.pipe()
    os.close(reader)
    process = start("-m", "megalite", *words.split(), stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    _, errors = process.communicate(timeout=TIMEOUT)
    assert errors == ""
