"""Exit statuses of a run, which schedulers act on (docs/runs.md), of its ranks, and of signals."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from enum import IntEnum
from pathlib import Path

END_FILE = "MEGALITE_END_FILE"
"""Environment variable: the file into which local rank 0 writes the run's exit status for the launcher. A
launcher that restarts every process whose exit status is not 0 cannot read it from the process."""


class ExitStatus(IntEnum):
    """The exit status of a run."""

    DONE = 0  # every step is done
    FAILED = 1  # the reason is on stderr; the newest checkpoint can be resumed
    CONFIGURATION = 2  # nothing was started or changed
    IN_USE = 73  # another job uses the run's directory (EX_CANTCREAT of sysexits.h)
    CORRUPTED = 74  # a rank computed wrong values, which the message names (EX_IOERR of sysexits.h)
    STOPPED = 75  # saved after SIGTERM, SIGUSR1 or train.stop_after; start it again to continue (EX_TEMPFAIL)
    INTERRUPTED = 130  # SIGINT (Ctrl-C): saved if it was training, otherwise nothing was changed


def signal_status(number: int) -> int:
    """Return the exit status of a process that was stopped by a signal, as in a shell."""
    return 128 + number


def shell_status(status: int) -> int:
    """Convert a `subprocess` status, which is negative after a signal, to a shell exit status."""
    return status if status >= 0 else signal_status(-status)


def training_status(number: int) -> ExitStatus:
    """Return the exit status of training that a signal stops before or after its steps."""
    return ExitStatus.INTERRUPTED if number == signal.SIGINT else ExitStatus.STOPPED


def process_status(status: ExitStatus) -> int:
    """Return the exit status of this rank for the result of the run.

    Local rank 0 also writes END_FILE. Under torchrun a run that has saved exits with 0, because torchrun
    would otherwise restart it or report a failure.
    """
    if (file := os.environ.get(END_FILE)) and int(os.environ.get("LOCAL_RANK", 0)) == 0:
        with suppress(OSError):  # the launcher then knows only that its processes ended
            Path(file).write_text(str(int(status)), encoding="utf-8")
    saved = status in (ExitStatus.STOPPED, ExitStatus.INTERRUPTED)
    return 0 if saved and "TORCHELASTIC_RUN_ID" in os.environ else int(status)
