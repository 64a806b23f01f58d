"""How a command starts: the process settings that it relies on."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from megalite.commands.start import start
from megalite.launch.local_ranks import package_path


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
    found: list[bool] = []
    monkeypatch.setattr("sys.argv", ["bubble_calc.py"])
    monkeypatch.setattr("megalite.commands.bubble.main", lambda: found.append(gc.isenabled()))
    with pytest.raises(SystemExit) as end:
        start("bubble")
    assert found == [False] and end.value.code == 0


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
