"""A job in the directory of its run, from claiming the directory to recording how it ended.

The directory is claimed before any process group starts, and summary.json describes the job until it ends.
Rank 0 holds the lock and writes; every rank receives the decision whether to continue.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from typing import TYPE_CHECKING, Any

from megalite.config import run_files
from megalite.config.errors import ConfigError
from megalite.config.schema import Config
from megalite.launch.exit_status import ExitStatus
from megalite.launch.memory_kills import MemoryKills
from megalite.launch.output import note_job
from megalite.launch.run_lock import InUseError, RunLock
from megalite.training.run_directory import Claim, claim
from megalite.training.summary import SummaryWriter

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from megalite.checkpoint.uploads import RunUploads


class JobEnd(Exception):
    """Raised to end a job before it begins, with an exit status and a message for the user.

    The job was refused, or has nothing left to do.
    """

    def __init__(self, status: ExitStatus, message: str):
        super().__init__(message)
        self.status = status


class Job:
    """A job, as seen by one rank. Only rank 0 has a lock.

    Attributes:
        restarted: whether torchrun or SLURM has started the job again.
        name: identifier of this start of the job. It is the same on all ranks, because the clocks of hosts
            differ.
        since: start time, in seconds since the epoch.
        uploads: of this rank to the store that run.dir names, once the job is running.
        kills: returns whether the kernel has killed a process since then because memory ran out.
    """

    def __init__(
        self, config: Config, lock: RunLock | None, restarted: bool = False, name: str = "", rank: int = 0
    ):
        self._config, self._lock, self.restarted, self.name = config, lock, restarted, name
        self._rank = rank
        self._summary: SummaryWriter | None = None
        self.uploads: RunUploads | None = None
        self.since, self.kills = time.time(), MemoryKills()

    def running(self, step: int) -> None:
        """Record that the job is training. Before this call nothing is changed.

        Args:
            step: steps done, those of the checkpoint that it has resumed.
        """
        if self._config.run.url is not None:
            from megalite.checkpoint.uploads import RunUploads

            leads_node = int(os.environ.get("LOCAL_RANK", self._rank)) == 0
            self.uploads = RunUploads(self._config, self._rank, leads_node)
            self.uploads.start(step)
        if self._lock is not None:
            from megalite.data.tokenizer.run_copy import keep
            from megalite.launch import crash

            crash.set_aside(self._config.run.directory)
            keep(self._config.data, self._config.run.directory)
            self._summary = SummaryWriter(self._config, self.name)

    def end(self, status: ExitStatus, reason: str | None = None) -> None:
        """Record how the job ended, if it has trained or failed, and release the directory."""
        if self._lock is not None:
            self._record(status, reason)
        if self.uploads is not None:
            self.uploads.close()
        if self._lock is not None:
            self._lock.release()

    def _record(self, status: ExitStatus, reason: str | None) -> None:
        if self._summary is None and status == ExitStatus.FAILED:
            self._summary = SummaryWriter(self._config, self.name)
        if self._summary is not None:
            self._summary.end(status, reason)


def begin(
    config: Config, *, restarted: bool, rank: int = 0, store: Store | None = None
) -> tuple[Job, list[str]]:
    """Claim the directory of the run on rank 0. Called by all ranks.

    Args:
        restarted: whether the job was started again, so that it may find a run that it began itself.
        store: the rendezvous store that sends the result of rank 0 to the other ranks; None for one process.

    Returns:
        the job, and lines for the user.

    Raises:
        JobEnd: on every rank, if the job must not or need not continue.
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
    return Job(config, lock, restarted, verdict["job"], rank), verdict["notes"]


def _store_ready(config: Config, claimed: Claim) -> list[str]:
    """Clean up in the store what a killed job has left there. If nothing is left to do, upload what waits in
    the spool.

    Raises ConfigError if the store cannot be reached, and the directory is released.
    """
    from megalite.checkpoint import CheckpointError, latest, step_number
    from megalite.checkpoint.uploads import RunUploads, clean

    try:
        notes = clean(config)
        if claimed.complete is not None:
            newest = latest(config.run.directory / run_files.CHECKPOINTS)
            uploads = RunUploads(config, 0)
            uploads.start((newest and step_number(newest.name)) or 0)
            uploads.wait()
            uploads.close()
    except CheckpointError as error:
        claimed.lock.release()
        raise ConfigError(str(error)) from None
    except BaseException:
        claimed.lock.release()
        raise
    return notes


def _claimed(config: Config, restarted: bool) -> tuple[RunLock | None, dict[str, Any]]:
    """Return the lock, and the result for all ranks as plain data. A message ends the job with its status."""
    try:
        claimed = claim(config, restarted)
        if config.run.url is not None:
            claimed.notes += _store_ready(config, claimed)
    except ConfigError as error:
        status = ExitStatus.IN_USE if isinstance(error, InUseError) else ExitStatus.CONFIGURATION
        return None, {"status": status, "message": str(error), "notes": []}
    if claimed.complete is not None:
        claimed.lock.release()
    return claimed.lock, {"status": ExitStatus.DONE, "message": claimed.complete, "notes": claimed.notes}
