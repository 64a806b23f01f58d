"""Whole runs through torchrun: a signal to one worker, the time limit, resuming, and a configuration that can not run."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.distributed.configs import write_tokens

ROOT = Path(__file__).parents[2]
TIMEOUT = 120.0  # seconds: far more than a loaded machine needs


def command(run: Path, prefix: str, *arguments: str) -> list[str]:
    options = {
        **{"run.dir": run.parent, "run.name": run.name, "data.train": prefix, "data.sequence_length": 16},
        **{"model.hidden_size": 32, "model.intermediate_size": 48, "model.num_hidden_layers": 2},
        **{"train.steps": 100_000, "train.global_batch_size": 4, "train.micro_batch_size": 2},
    }
    values = [part for option, value in options.items() for part in (f"--{option}", str(value))]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "pretrain.py"]
    return [sys.executable, *launcher, *values, "--dp", "2", *arguments]


def start(arguments: list[str]) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(arguments, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        output, _ = process.communicate(timeout=TIMEOUT)
    finally:
        if process.poll() is None:
            process.kill()
    return process.returncode, output


def steps_of(run: Path) -> list[int]:
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return [json.loads(line)["step"] for line in lines if line.endswith("}")]


def worker(launcher: subprocess.Popen[str], rank: int) -> int:
    """The process of a rank: a child of torchrun that has this RANK."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    for child in children:
        if f"\0RANK={rank}\0" in Path(f"/proc/{child}/environ").read_text():
            return int(child)
    raise AssertionError(f"torchrun has no worker of rank {rank} among {children}")


def wait_for_steps(run: Path, process: subprocess.Popen[str], count: int) -> None:
    deadline = time.monotonic() + TIMEOUT
    while len(steps_of(run)) < count:
        assert process.poll() is None and time.monotonic() < deadline, finish(process)
        time.sleep(0.05)


def checkpoint_step(run: Path) -> int:
    latest = (run / "checkpoints" / "latest").read_text().strip()
    return json.loads((run / "checkpoints" / latest / "state.json").read_text())["step"]


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds the workers through /proc")
def test_a_signal_to_one_worker_saves_and_ends_all_and_the_run_resumes_until_its_time_limit(tmp_path):
    run, prefix = tmp_path / "run", write_tokens(tmp_path, 96)
    process = start(command(run, prefix))
    wait_for_steps(run, process, 3)
    os.kill(worker(process, 1), signal.SIGTERM)  # not rank 0: it has to tell the other
    status, output = finish(process)
    assert status == 0, output
    stopped = checkpoint_step(run)
    assert steps_of(run) == list(range(1, stopped + 1))
    assert f"stopping after step {stopped}: another rank asked for it" in output

    status, output = finish(start(command(run, prefix, "--checkpoint.load", "auto", "--train.stop_after", "1s")))
    assert status == 0, output
    assert f"resumed after step {stopped}, at sample {4 * stopped}" in output
    again = checkpoint_step(run)
    assert again > stopped and f"stopping after step {again}" in output
    assert steps_of(run) == list(range(1, again + 1))

    alone = [sys.executable, *command(run, prefix, "--dp", "1", "--model.hidden_size", "64")[6:]]
    status, output = finish(start(alone))
    assert status == 2 and "model.hidden_size was 32, is 64" in output and len(output.splitlines()) == 1, output
    assert checkpoint_step(run) == again


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds the workers through /proc")
@pytest.mark.parametrize(
    "layout, end, limit",
    [("dp 3", signal.SIGKILL, 20.0), ("dp 3", signal.SIGSTOP, 40.0), ("tp 4", signal.SIGKILL, 20.0)],
    ids=["killed", "stopped", "killed, tp"],
)
def test_a_rank_that_is_gone_is_named_by_all_others(tmp_path, layout, end, limit):
    """Killed, its connections close, or its process is seen to be gone; stopped, it does not answer in time. Nobody ever hangs."""
    run, prefix = tmp_path / "run", write_tokens(tmp_path, 96)
    axis, size = layout.split()
    options = ["--run.timeout", "5s", "--train.global_batch_size", "6", "--dp", "1", f"--{axis}", size]
    arguments = command(run, prefix, *options)
    arguments[arguments.index("--nproc-per-node") + 1] = size
    process = start(arguments)
    wait_for_steps(run, process, 3)
    gone, *others = (worker(process, rank) for rank in (1, 0, *range(2, int(size))))
    os.kill(gone, end)
    began = time.monotonic()
    try:
        while any(Path(f"/proc/{other}").exists() for other in others) and time.monotonic() < began + limit:
            time.sleep(0.1)
        assert not any(Path(f"/proc/{other}").exists() for other in others), "a rank still waits"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(gone, signal.SIGKILL)
    status, output = finish(process)
    assert status != 0
    for rank in (0, *range(2, int(size))):
        assert re.search(rf"^rank {rank}: \w+ over \w+ failed, rank \d .*\(rank 1 was lost first\)$", output, re.MULTILINE), output
    assert str(ROOT / "megalite") not in output, "no frame of ours is shown"


def test_a_wrong_configuration_is_one_message(tmp_path):
    """torchrun turns the workers' exit status 2 into 1 and prints its own report, which is all there is beside our message."""
    status, output = finish(start(command(tmp_path / "run", write_tokens(tmp_path, 96), "--tp", "3", "--dp", "1")))
    assert status == 1 and output.count("parallel.tp = 3") == 1, output
    assert "pretrain.py FAILED" in output and "exitcode  : 2" in output, output
    assert str(ROOT / "megalite") not in output, "no frame of ours is shown"


def test_a_checkpoint_that_can_not_be_written_is_one_message(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "checkpoints").write_text("not a directory")
    arguments = command(run, write_tokens(tmp_path, 96), "--dp", "1", "--train.steps", "2")
    status, output = finish(start([sys.executable, *arguments[6:]]))
    assert status == 1 and "Traceback" not in output, output
    assert str(run / "checkpoints") in output.splitlines()[-1], output
