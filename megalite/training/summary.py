"""The status of a run in summary.json, for schedulers and scripts. Written by rank 0."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import megalite
from megalite import checkpoint
from megalite.config import run_files
from megalite.config.dims import ParallelDims
from megalite.config.schema import Config
from megalite.launch.exit_status import ExitStatus
from megalite.monitoring.metrics import MEMBER
from megalite.monitoring.starts import now
from megalite.system.messages import write_or_say

TAIL = 1 << 20
STATES = {
    ExitStatus.DONE: "done",
    ExitStatus.STOPPED: "stopped",
    ExitStatus.INTERRUPTED: "interrupted",
}


@dataclass
class RunSummary:
    """Content of summary.json.

    Attributes:
        state: running, done, stopped, interrupted (both saved and resumable) or failed. A run that was killed
            stays "running".
        exit_status: see docs/runs.md; None while the run is active.
        reason: first line of the error, if the run failed.
        step, steps: number of steps done in all starts of the run, and train.steps.
        loss, val_loss: last values in metrics.jsonl, as are `tokens_seen`, `epoch` and, for a blend, the
            `epochs` of its members.
        checkpoint: name of the newest checkpoint.
        started, ended: start and end of this start of the run, in UTC; it took `seconds`.
        job: identifier of this start.
    """

    run: str
    steps: int
    ranks: int
    host: str = field(default_factory=lambda: os.uname().nodename)
    pid: int = field(default_factory=os.getpid)
    megalite: str = megalite.__version__
    started: str = field(default_factory=now)
    state: str = "running"
    exit_status: int | None = None
    reason: str | None = None
    step: int = 0
    loss: float | None = None
    val_loss: float | None = None
    tokens_seen: int | None = None
    epoch: float | None = None
    epochs: dict[str, float] = field(default_factory=dict)
    checkpoint: str | None = None
    ended: str | None = None
    seconds: float = 0.0
    job: str = ""


class SummaryWriter:
    """Writer of summary.json at the start and the end of training.

    If the file cannot be written, a line is printed on stderr.
    """

    def __init__(self, config: Config, job: str = ""):
        self._directory, self._since = config.run.directory, time.monotonic()
        self.summary = RunSummary(
            run=config.run.name, steps=config.train.steps, ranks=ParallelDims.of(config).world, job=job
        )
        self._write()

    def end(self, status: ExitStatus, reason: str | None = None) -> None:
        """Record how the run ended."""
        summary = self.summary
        summary.state, summary.exit_status = STATES.get(status, "failed"), int(status)
        summary.reason = reason.strip().split("\n")[0] if reason else None
        summary.ended, summary.seconds = now(), round(time.monotonic() - self._since, 3)
        self._write()

    def _write(self) -> None:
        def write(path: Path) -> None:
            self._measure(self.summary)
            path.write_text(json.dumps(asdict(self.summary), indent=2) + "\n", encoding="utf-8")

        write_or_say(self._directory / run_files.SUMMARY, write, shared=True)  # with launchers

    def _measure(self, summary: RunSummary) -> None:
        """Read the progress of the run from its files."""
        # also lines that a resume has removed since the last time
        for record in last_records(self._directory / run_files.METRICS):
            summary.step = record.get("step", summary.step)
            for name in ("loss", "val_loss", "tokens_seen", "epoch"):
                setattr(summary, name, record.get(name, getattr(summary, name)))
            summary.epochs |= {
                key.removeprefix(MEMBER): value for key, value in record.items() if key.startswith(MEMBER)
            }
        newest = checkpoint.latest(self._directory / run_files.CHECKPOINTS)
        summary.checkpoint = newest.name if newest else None


def launcher_failed(config: Config, status: int, reason: str, since: float, job: str = "") -> None:
    """Record how a run ended if its ranks could not, or had less information.

    If the file is missing or belongs to an earlier start, the run has not trained, and nothing is changed.

    Args:
        since: start time in seconds since the epoch. Files without a job identifier that are older belong to
            an earlier start. The host of rank 0, which writes the file, may have a different time.
    """
    path = config.run.directory / run_files.SUMMARY
    try:
        written, content = path.stat().st_mtime, json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    if content["job"] != job if job and content.get("job") else written < since:
        return
    content |= {
        "state": "failed",
        "exit_status": status,
        "reason": reason.strip().split("\n")[0],
        "ended": content.get("ended") or now(),
    }
    text = json.dumps(content, indent=2) + "\n"
    write_or_say(path, lambda fresh: fresh.write_text(text, encoding="utf-8"), shared=True)


def last_records(metrics: Path) -> Iterator[dict[str, Any]]:
    """Yield the last complete lines of metrics.jsonl, at most TAIL bytes."""
    if not metrics.is_file():
        return
    with metrics.open("rb") as file:
        file.seek(max(0, metrics.stat().st_size - TAIL))
        for line in file:
            with suppress(ValueError):  # truncated, at the start of the tail or by a kill
                yield json.loads(line)
