"""How a command starts: the process settings that it relies on."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megalite.commands.start import start
from megalite.launch.local_ranks import package_path
from tests.support.configs import write_tokens


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    """What a command may change is as before afterwards."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE)
    handlers = {number: signal.getsignal(number) for number in numbers}
    yield
    gc.enable()
    signal.set_wakeup_fd(-1)
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_bubble_runs_without_garbage_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    results: list[bool] = []
    monkeypatch.setattr("sys.argv", ["bubble_calc.py"])
    monkeypatch.setattr("megalite.commands.bubble.main", lambda: results.append(gc.isenabled()))
    with pytest.raises(SystemExit) as end:
        start("bubble")
    assert results == [False] and end.value.code == 0


def test_sigterm_ends_a_benchmark_by_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the processes that are being measured are ended, too."""
    monkeypatch.setattr("sys.argv", ["benchmark.py"])
    monkeypatch.setattr("benchmarks.command.main", lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit) as end:
        start("benchmark")
    assert end.value.code == 143


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["doctor", "--quick"]], ids=" ".join)
def test_a_reader_that_ends_early_costs_no_traceback(words: list[str]) -> None:
    """As with `| head`: the pipe is closed before the command writes."""
    environment = {**os.environ, "PYTHONPATH": package_path()}
    with subprocess.Popen([sys.executable, "-m", "megalite", *words], stdout=-1, stderr=-1, env=environment) as command:
        assert command.stdout and command.stderr
        command.stdout.close()
        assert command.stderr.read() == b""
    assert command.returncode == 0


ASCII = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
"""A terminal and a locale that have no other characters."""


@pytest.mark.parametrize(
    "words",
    [["--help"], ["train", "--help"], ["nosuch"], ["bubble", "--pp", "2", "--microbatches", "4", "--compare"]],
    ids=" ".join,
)
def test_a_character_that_the_terminal_lacks_costs_no_traceback(words: list[str]) -> None:
    environment = {**os.environ, "PYTHONPATH": package_path(), **ASCII}
    ended = subprocess.run([sys.executable, "-m", "megalite", *words], capture_output=True, env=environment)
    assert ended.returncode == (2 if words == ["nosuch"] else 0) and b"Error" not in ended.stderr, ended.stderr
    assert (ended.stdout + ended.stderr).decode("ascii")


def test_a_run_on_such_a_terminal_trains(tmp_path: Path) -> None:
    """Its ranks print, too; its files are UTF-8."""
    prefix = write_tokens(tmp_path, 96)
    shape = [
        "--model.hidden_size",
        "16",
        "--model.intermediate_size",
        "32",
        "--model.num_hidden_layers",
        "1",
        "--model.num_attention_heads",
        "2",
    ]
    data = [
        "--data.train",
        prefix,
        "--data.sequence_length",
        "16",
        "--train.global_batch_size",
        "4",
        "--train.steps",
        "2",
    ]
    words = ["train", "--nproc", "2", "--tp", "2", "--run.dir", str(tmp_path), "--run.name", "run", *shape, *data]
    environment = {**os.environ, "PYTHONPATH": package_path(), "OMP_NUM_THREADS": "1", **ASCII}
    ended = subprocess.run([sys.executable, "-m", "megalite", *words], capture_output=True, env=environment)
    assert ended.returncode == 0 and b"Traceback" not in ended.stderr, ended.stderr
    assert "cp 1 x tp 2" in ended.stdout.decode("ascii"), "the mesh is written with ×"
    assert json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))["step"] == 2
