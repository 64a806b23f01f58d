"""One job at a time writes into a run's directory: the lock against other processes, other hosts, dead holders, clocks
and restarts."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from megalite.config import run_files
from megalite.launch.run_lock import Holder, InUseError, RunLock, read
from tests.commands.full_disk import no_room

HOLD = "import sys, time; from megalite.launch.run_lock import RunLock; from pathlib import Path\n"
HOLD += "RunLock(Path(sys.argv[1])).acquire(); print('held', flush=True); time.sleep(600)"
FAST = {"refresh_s": 0.05, "stale_s": 0.5}


def elsewhere(**changes: object) -> Holder:
    """A process of another host."""
    return replace(
        Holder.own(), host="node-7", machine="node-7 boot", pid=4321, started=99, token=os.urandom(8).hex(), **changes
    )  # type: ignore[arg-type]


def hold(directory: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(directory)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_a_living_process_of_this_host_is_named_and_a_killed_one_is_replaced_with_a_line(tmp_path):
    process = hold(tmp_path)
    try:
        with pytest.raises(InUseError, match=rf"locked by process {process.pid} on {os.uname().nodename}.*run\.name"):
            RunLock(tmp_path).acquire()
        assert read(tmp_path / run_files.LOCK).pid == process.pid, "a refused job changes nothing"
    finally:
        process.kill()  # SIGKILL: the lock stays
        process.wait()
    lock = RunLock(tmp_path)
    note = lock.acquire()
    assert f"process {process.pid} on" in note and "has ended" in note
    lock.release()
    assert list(tmp_path.iterdir()) == [], "nothing is left, no temporary file either"


def test_a_process_that_only_has_the_number_of_the_holder_is_another_one(tmp_path):
    RunLock(tmp_path, replace(Holder.own(), started=1, token="old"))._create(tmp_path / run_files.LOCK)
    lock = RunLock(tmp_path)
    assert "has ended" in lock.acquire()
    lock.release()


def test_another_host_is_refused_while_it_renews_and_replaced_once_it_does_not(tmp_path):
    other = RunLock(tmp_path, elsewhere(), **FAST)
    other.acquire()
    os.utime(
        tmp_path / run_files.LOCK, (1, 1)
    )  # its clock, or ours, jumped: it looks old, and is renewed a moment later
    with pytest.raises(InUseError, match="process 4321 on node-7"):
        RunLock(tmp_path, **FAST).acquire()
    other._over.set()  # it is gone without a trace, for example with its host
    other._thread.join()
    os.utime(tmp_path / run_files.LOCK, (1, 1))
    lock = RunLock(tmp_path, **FAST)
    assert "has not been renewed" in lock.acquire()
    lock.release()


@pytest.mark.parametrize("jump", [-86_400, 86_400])
def test_the_clock_of_this_host_decides_nothing(tmp_path, monkeypatch, jump):
    """Age is measured by the clock of the file system alone."""
    other = RunLock(tmp_path, elsewhere(), **FAST)
    other.acquire()
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + jump)
    with pytest.raises(InUseError):
        RunLock(tmp_path, **FAST).acquire()
    other.release()


@pytest.mark.parametrize(
    ("job", "restarts", "shown"),
    [("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM 17"), ("MEGALITE_JOB", "MEGALITE_RESTART_COUNT", "17")],
)
def test_a_restart_of_the_same_job_takes_the_lock_on_any_host_and_another_job_does_not(
    job, restarts, shown, tmp_path, monkeypatch
):
    RunLock(tmp_path, elsewhere(job=shown, restart=0))._create(tmp_path / run_files.LOCK)
    monkeypatch.setenv(job, "18")
    with pytest.raises(InUseError, match=f"job {shown}"):
        RunLock(tmp_path).acquire()
    monkeypatch.setenv(job, "17")
    with pytest.raises(InUseError):
        RunLock(tmp_path).acquire()  # the same start, for example the same script twice
    monkeypatch.setenv(restarts, "1")
    lock = RunLock(tmp_path)
    assert "the job was restarted" in lock.acquire()
    lock.release()


def test_of_many_that_find_a_stale_lock_one_gets_it(tmp_path):
    RunLock(tmp_path, replace(Holder.own(), started=1, token="old"))._create(tmp_path / run_files.LOCK)
    locks, won, lost = [RunLock(tmp_path) for _ in range(8)], [], []

    def contend(lock: RunLock) -> None:
        try:
            lock.acquire()
            won.append(lock)
        except InUseError:
            lost.append(lock)

    threads = [threading.Thread(target=contend, args=(lock,)) for lock in locks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1 and len(lost) == 7
    assert read(tmp_path / run_files.LOCK).token == won[0].holder.token
    won[0].release()


def test_a_removed_or_stolen_lock_is_told_once_and_a_stolen_one_is_left_alone(tmp_path, capfd):
    lock = RunLock(tmp_path, **FAST)
    lock.acquire()
    (tmp_path / run_files.LOCK).unlink()
    deadline = time.monotonic() + 240
    while read(tmp_path / run_files.LOCK) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (tmp_path / run_files.LOCK).write_text(json.dumps(asdict(elsewhere())))
    lock.release()
    assert read(tmp_path / run_files.LOCK).host == "node-7"
    assert capfd.readouterr().err.count("\n") == 1


def test_a_damaged_lock_is_judged_by_its_age(tmp_path):
    (tmp_path / run_files.LOCK).write_text("{")
    with pytest.raises(InUseError, match="an unknown host"):
        RunLock(tmp_path, **FAST).acquire()
    os.utime(tmp_path / run_files.LOCK, (1, 1))
    lock = RunLock(tmp_path, **FAST)
    assert "has not been renewed" in lock.acquire()
    lock.release()


@pytest.mark.parametrize("hard_links", [True, False])
def test_a_full_disk_leaves_no_lock_and_no_new_directory(tmp_path, monkeypatch, hard_links):
    def link(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    if not hard_links:
        monkeypatch.setattr(os, "link", link)
    (tmp_path / "old").mkdir()
    for name in ("old", "new/run"):
        with no_room(), pytest.raises(OSError, match="File too large"):
            RunLock(tmp_path / name).acquire()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["new", "old"]
    lock = RunLock(tmp_path / "old")
    assert lock.acquire() is None, "nothing refuses the next start"
    lock.release()
