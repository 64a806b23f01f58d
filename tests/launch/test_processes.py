"""A process that was started by a launcher ends with it, at whatever time that is killed; one that was started by hand
lives on."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from megalite.system.processes import LAUNCHER, look
from tests.launch.marked import MARK, living
from tests.structure.sources import ROOT

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes through /proc")
WITHIN = 120.0  # seconds: far more than a loaded machine needs, and less than a rank sleeps
RANK = "from megalite.system import processes; processes.watch(); print('up', flush=True); import time; time.sleep(600)"
LAUNCH = """
import os, subprocess, sys, time
from megalite.system.processes import marked
kind, command = sys.argv[1], sys.argv[2:]
refused = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "1"}
environment = {"ours": marked(), "torchrun": refused, "by hand": {}}[kind]
subprocess.Popen(command, env={**os.environ, "RANK": "0", **environment}, start_new_session=kind == "torchrun")
time.sleep(600)
"""
WRAPPERS = {"direct": [], "behind bash": ["bash", "-c", '"$@"; true', "bash"]}
LATE = ["bash", "-c", 'sleep 0.5; exec "$@"', "bash"]  # the launcher is gone before the rank looks


@pytest.fixture
def mark() -> Iterator[str]:
    """An environment variable of every process that a test starts; none of them outlives it."""
    value = uuid.uuid4().hex
    yield value
    for pid in living(value):
        os.kill(pid, 9)


def launch(mark: str, kind: str, wrapper: list[str]) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name not in (LAUNCHER, "TORCHELASTIC_RUN_ID")}
    words = [sys.executable, "-c", LAUNCH, kind, *wrapper, sys.executable, "-c", RANK]
    environment |= {MARK: mark, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def wait_for_end(mark: str) -> None:
    deadline = time.monotonic() + WITHIN
    while living(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert living(mark) == []


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("kind", ["ours", "torchrun"])
def test_a_rank_ends_with_its_launcher(mark, kind, wrapper):
    launcher = launch(mark, kind, WRAPPERS[wrapper])
    assert launcher.stdout is not None and launcher.stdout.readline() == "up\n"
    launcher.kill()
    launcher.wait()
    wait_for_end(mark)


@pytest.mark.parametrize("kind", ["ours", "torchrun"])
def test_a_rank_whose_launcher_is_gone_before_it_looks_ends_at_once(mark, kind):
    launcher = launch(mark, kind, LATE)
    while len(living(mark)) < 2:  # the rank is there, and sleeps before its first line
        time.sleep(0.01)
    launcher.kill()
    launcher.wait()
    wait_for_end(mark)


def test_a_process_that_was_started_by_hand_outlives_what_started_it(mark):
    launcher = launch(mark, "by hand", [])
    assert launcher.stdout is not None and launcher.stdout.readline() == "up\n"
    launcher.kill()
    launcher.wait()
    time.sleep(1.5)  # a second between two looks of the thread that there must not be
    (rank,) = living(mark)
    assert look(rank) is not None


def test_workers_of_a_preparation_end_with_it(mark, tmp_path):
    for name in ("one.txt", "two.txt", "three.txt"):
        (tmp_path / name).write_text("Every café at six: quick brown foxes jump over lazy dogs.\n" * 100_000)
    words = ["--input", tmp_path / "*.txt", "--tokenizer", "byte", "--output", tmp_path / "tokens", "--workers", "2"]
    environment = {**os.environ, MARK: mark, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-m", "megalite", "prepare", *map(str, words)], env=environment, stderr=subprocess.DEVNULL
    )
    while len(living(mark)) < 4:  # the tool, two workers, and the tracker of multiprocessing
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    wait_for_end(mark)
