"""A job in its run's directory: claimed before any process group starts, and described by summary.json until
it ends.

Rank 0 holds the lock and writes; every rank learns whether the job may go on.
"""

from __future__ import annotations

import json
import time
import uuid
from typing import TYPE_CHECKING, Any

from megalite.config.errors import ConfigError
from megalite.config.schema import Config
from megalite.launch.exit_status import ExitStatus
from megalite.launch.memory_kills import MemoryKills
from megalite.launch.output import note_job
from megalite.launch.run_lock import InUseError, RunLock
from megalite.training.run_directory import claim
from megalite.training.summary import SummaryWriter

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


class JobEnd(Exception):
    """The job ends before it has begun, with a status and a message for the user: refused, or nothing to
    do."""

    def __init__(self, status: ExitStatus, message: str):
        super().__init__(message)
        self.status = status


class Job:
    """One rank's view of the job. Only rank 0 has a lock.

    Attributes:
        restarted: torchrun or SLURM has started the job again.
        name: identifies this start of the job, on all ranks alike: the clocks of hosts differ.
        since: when it began, in seconds since the epoch.
        kills: tells whether the kernel has killed a process for lack of memory since then.
    """

    def __init__(self, config: Config, lock: RunLock | None, restarted: bool = False, name: str = ""):
        self._config, self._lock, self.restarted, self.name = config, lock, restarted, name
        self._summary: SummaryWriter | None = None
        self.since, self.kills = time.time(), MemoryKills()

    def running(self) -> None:
        """Record that the job trains. Until then it has changed nothing."""
        if self._lock is not None:
            from megalite.data.tokenizer.run_copy import keep
            from megalite.launch import crash

            crash.set_aside(self._config.run.directory)
            keep(self._config.data, self._config.run.directory)
            self._summary = SummaryWriter(self._config, self.name)

    def end(self, status: ExitStatus, reason: str | None = None) -> None:
        """Record how the job ended, if it has trained or failed, and let others use the directory."""
        if self._lock is None:
            return
        if self._summary is None and status == ExitStatus.FAILED:
            self._summary = SummaryWriter(self._config, self.name)
        if self._summary is not None:
            self._summary.end(status, reason)
        self._lock.release()


def begin(
    config: Config, *, restarted: bool, rank: int = 0, store: Store | None = None
) -> tuple[Job, list[str]]:
    """Claim the run's directory on rank 0. Returns the job, and lines for the user. With several ranks all
    call it.

    Args:
        restarted: the job was started again and may find a run that it began itself.
        store: the rendezvous store, through which the other ranks learn what rank 0 found; None: one process.

    Raises:
        JobEnd: on every rank, if the job must not go on, or need not.
    """
    lock, verdict = _claimed(config, restarted) if rank == 0 else (None, {})
    verdict["job"] = uuid.uuid4().hex
    if store is not None:
        if rank == 0:
            store.set("claim", json.dumps(verdict))
        verdict = json.loads(store.get("claim"))
    if verdict["message"] is not None:
        raise JobEnd(ExitStatus(verdict["status"]), verdict["message"])
    note_job(verdict["job"])
    return Job(config, lock, restarted, verdict["job"]), verdict["notes"]


def _claimed(config: Config, restarted: bool) -> tuple[RunLock | None, dict[str, Any]]:
    """The lock, and as plain data what all ranks must know: a message ends the job with a status."""
    try:
        claimed = claim(config, restarted)
    except ConfigError as error:
        status = ExitStatus.IN_USE if isinstance(error, InUseError) else ExitStatus.CONFIGURATION
        return None, {"status": status, "message": str(error), "notes": []}
    if claimed.complete is not None:
        claimed.lock.release()
    return claimed.lock, {"status": ExitStatus.DONE, "message": claimed.complete, "notes": claimed.notes}
