"""The lock of a run's directory: one job at a time writes into it.

The lock is the file RUN_DIR/lock with the holder's host, process, job and start. It is created by a hard
link, which is atomic on NFS as well, and its modification time is renewed while the job lives. It is stale,
and the next job takes it over, if

- the holder was a process of this host that has ended (a process with its number that started at another time
  is another process),
- the holder was an earlier start of the same job of the scheduler, which the scheduler has ended, or
- it has not been renewed for `STALE_S`, by the clock of the file system, and is not renewed during `2 *
  REFRESH_S` either: the clocks of hosts may differ, and a clock may jump.

Commands that only read a run need no lock.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event, Lock, Thread

from megalite.config import run_files
from megalite.config.errors import ConfigError
from megalite.launch import scheduler
from megalite.launch.exit_status import ExitStatus
from megalite.system.messages import say
from megalite.system.processes import look

REFRESH_S, STALE_S = 10.0, 60.0


class InUseError(ConfigError):
    """Another job uses the run directory. The message names the job."""


@dataclass(frozen=True)
class Holder:
    """The job that holds a lock.

    Attributes:
        machine: identifies the running kernel and its pid namespace; containers on one host have several.
        pid: process id.
        started: start of the process in ticks since boot; None where /proc does not exist.
        job: the scheduler's name of the job; None without a scheduler.
        restart: how often the scheduler has restarted the job.
        since: when the lock was taken, for messages.
    """

    host: str
    machine: str
    pid: int
    started: int | None
    job: str | None
    restart: int
    since: str
    token: str

    @staticmethod
    def own() -> Holder:
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        return Holder(
            os.uname().nodename,
            machine_id(),
            os.getpid(),
            start_of(os.getpid()),
            scheduler.job(),
            scheduler.restarts(),
            since,
            uuid.uuid4().hex,
        )

    def __str__(self) -> str:
        return (
            f"process {self.pid} on {self.host}{f', job {self.job}' if self.job else ''}, since {self.since}"
        )


def machine_id() -> str:
    """Identify the running kernel and its pid namespace."""
    with suppress(OSError):
        boot, namespace = (
            Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip(),
            os.stat("/proc/self/ns/pid").st_ino,
        )
        return f"{os.uname().nodename} {boot} {namespace}"
    return os.uname().nodename


def start_of(pid: int) -> int | None:
    """Return when a process started, in ticks since boot; None if it has ended or without /proc."""
    process = look(pid)
    return None if process is None else process.started


class RunLock:
    """A lock of a run directory, renewed by a thread until it is released.

    Args:
        directory: of the run; created if it does not exist.
        refresh_s, stale_s: seconds between renewals, and without one until the lock counts as stale.
    """

    def __init__(
        self,
        directory: Path,
        holder: Holder | None = None,
        *,
        refresh_s: float = REFRESH_S,
        stale_s: float = STALE_S,
    ):
        self.path, self.holder = directory / run_files.LOCK, holder or Holder.own()
        self._refresh_s, self._stale_s = refresh_s, stale_s
        self._over, self._moving = Event(), Lock()
        self._thread: Thread | None = None

    def acquire(self) -> str | None:
        """Take the lock. Returns a line about the stale lock that was taken over, or None.

        Raises:
            InUseError: another job holds it.
            OSError: the directory cannot be written. It is removed if it is new.
        """
        new = not self.path.parent.exists()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            note = self._take()
        except OSError:
            if new:
                with suppress(OSError):  # another job has put something into it
                    self.path.parent.rmdir()
            raise
        self._thread = Thread(target=self._renew, name="megalite-run-lock", daemon=True)
        self._thread.start()
        return note

    def _take(self) -> str | None:
        """Create the lock, removing a stale one. Returns a line about the stale lock, or None."""
        note = None
        while not self._create(self.path):
            holder, why = self._judge()
            if holder is None:  # released in between
                continue
            if why is None:
                raise InUseError(
                    f"{self.path.parent} is locked by {holder}. Set another run.name or stop that job first. "
                    f"If the job is gone, wait until its lock expires ({self._stale_s:.0f} s) or remove "
                    f"{self.path}."
                )
            if self._remove_stale(holder):
                note = f"took over the lock of {holder}: {why}"
        return note

    def move_directory(self, target: Path) -> None:
        """Rename the locked directory, and lock a new one in its place. Raises InUseError if another job
        locks that first."""
        with self._moving:
            self.path.parent.rename(target)
            self.path.parent.mkdir()
            created = self._create(self.path)
            (target / run_files.LOCK).unlink()
        if not created:
            raise InUseError(f"{self.path.parent} is locked by {read(self.path)}, which has just started.")

    def release(self) -> None:
        """Remove the lock if this job still owns it."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        try:
            holder = read(self.path)
            if holder is not None and holder.token == self.holder.token:
                self.path.unlink(missing_ok=True)
        except OSError as error:  # it is stale once this process has ended
            say(f"could not remove the run lock {self.path}: {error.strerror}")

    def _create(self, path: Path) -> bool:
        """Create the lock file unless it exists. Readers never see a partial file."""
        own = path.with_name(f".{path.name}.{self.holder.token}")
        text = json.dumps(asdict(self.holder)) + "\n"
        try:
            own.write_text(text, encoding="utf-8")
            try:
                os.link(own, path)
            except FileExistsError:
                return own.stat().st_nlink == 2  # a reply of NFS that was lost and asked for again
            # a file system without hard links: still exclusive, but a reader may find it empty for a moment
            except OSError:
                return _create_exclusively(path, text)
        finally:
            own.unlink(missing_ok=True)
        return True

    def _judge(self) -> tuple[Holder | None, str | None]:
        """Return the holder (None: no lock) and why its lock is stale (None: it is not)."""
        holder = read(self.path)
        if holder is None:
            return None, None
        if holder.machine == self.holder.machine and holder.started is not None:
            return holder, None if start_of(holder.pid) == holder.started else "the process has ended"
        if holder.job is not None and holder.job == self.holder.job and holder.restart < self.holder.restart:
            return holder, "the job was restarted"
        before = self._age()
        if before is None:
            return None, None
        if before[0] <= self._stale_s:
            return holder, None
        # a clock may have jumped: a living holder renews its lock meanwhile
        self._over.wait(2 * self._refresh_s)
        after = self._age()
        if after is None:
            return None, None
        return holder, None if after[1] != before[
            1
        ] else f"the lock has not been renewed for {after[0]:.0f} s"

    def _age(self) -> tuple[float, int] | None:
        """Return the seconds since the last renewal and its time, or None if there is no lock.

        Ages are measured with the clock of the file system.
        """
        probe = self.path.with_name(f".{run_files.LOCK}.{self.holder.token}")
        probe.touch()
        try:
            renewed = self.path.stat().st_mtime_ns
            return (probe.stat().st_mtime_ns - renewed) / 1e9, renewed
        except FileNotFoundError:
            return None
        finally:
            probe.unlink()

    def _remove_stale(self, stale: Holder) -> bool:
        """Remove a stale lock and return whether this job did.

        Only one job at a time removes locks, so that none removes a lock that another job has just taken.
        """
        guard = self.path.with_name(f"{run_files.LOCK}.takeover")
        if not self._create(guard):
            with suppress(FileNotFoundError):  # left by a job that was killed at this very point
                if abs(time.time() - guard.stat().st_mtime) > self._stale_s:
                    guard.unlink()
            time.sleep(0.1)
            return False
        try:
            holder = read(self.path)
            if holder is None or holder.token != stale.token:
                return False
            self.path.unlink()
            return True
        finally:
            guard.unlink(missing_ok=True)

    def _renew(self) -> None:
        """Renew the lock until `release`, and report once if it was taken over or removed."""
        reported = False
        while not self._over.wait(self._refresh_s):
            with self._moving:
                problem = self._renew_once()
            if problem is not None and not reported:
                reported = True
                say(f"the run lock {self.path} {problem}")

    def _renew_once(self) -> str | None:
        """Renew the lock, or recreate it if it is gone. Returns an error message, or None."""
        try:
            holder = read(self.path)
            if holder is None:
                self._create(self.path)
                return "was removed and has been recreated"
            # this process was suspended for longer than a lock lives
            if holder.token not in ("", self.holder.token):
                say(f"the run lock {self.path} was taken over by {holder}; stopping without saving")
                os._exit(ExitStatus.IN_USE)
            os.utime(self.path)
        except OSError as error:
            return f"could not be renewed: {error.strerror}"
        return None


def _create_exclusively(path: Path, text: str) -> bool:
    try:
        file = path.open("x", encoding="utf-8")
    except FileExistsError:
        return False
    try:
        with file:
            file.write(text)
    except OSError:  # the disk is full: an empty lock would refuse the next start until it is stale
        path.unlink(missing_ok=True)
        raise
    return True


def read(path: Path) -> Holder | None:
    """Return the holder named in a lock, or None if there is no lock.

    A damaged lock has an unknown holder and is judged by its age.
    """
    try:
        return Holder(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):
        return Holder("an unknown host", "", 0, None, None, 0, "an unknown time", "")
