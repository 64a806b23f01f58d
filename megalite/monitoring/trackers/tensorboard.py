"""TensorBoard: a directory of event files."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from megalite.config import run_files
from megalite.monitoring.trackers.client import Measurement, TrackedRun


class TensorBoard:
    """Client that writes event files, and hides steps after the one that it continues from."""

    def __init__(self, run: TrackedRun, step: int):
        from torch.utils.tensorboard import SummaryWriter

        requested = run.config.logging.tensorboard
        directory = Path(requested) if isinstance(requested, str) else run.run_dir / run_files.TENSORBOARD
        _silence_threads_of("tensorboard")
        self._writer = SummaryWriter(str(directory), purge_step=step + 1)

    def log(self, measurements: Sequence[Measurement]) -> None:
        for measurement in measurements:
            for name, value in measurement.scalars.items():
                self._writer.add_scalar(name, value, measurement.step, measurement.time)

    def close(self, failed: bool) -> None:
        self._writer.close()


def _silence_threads_of(package: str) -> None:
    """Suppress tracebacks printed by threads of a package.

    Its next call raises the same error, which `Recipient` reports in one line.
    """
    usual = threading.excepthook

    def report(failed: threading.ExceptHookArgs) -> None:
        if not type(failed.thread).__module__.startswith(package):
            usual(failed)

    threading.excepthook = report
