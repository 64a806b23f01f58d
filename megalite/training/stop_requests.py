"""Requests to stop a training run, by a signal to any rank or the time limit, and to save by time.

The ranks sum their requests together with the gradient norm of the next step, so that all ranks act on them
after the same step. This requires no additional collective and has the timeout of the process group: if a
peer has died, the collective fails, and no checkpoint is published.

A preempted job receives SIGTERM (forwarded by torchrun) or SIGUSR1 (SLURM's --signal, sent to the workers).
A launcher that continues the run on another number of ranks sends SIGUSR2.
Ctrl-C sends SIGINT, and a closed terminal SIGHUP. A second SIGINT ends the process immediately, even if a
collective or a save hangs: see `launch.signals`, which also handles signals outside of the steps.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from types import FrameType
from typing import TYPE_CHECKING

from megalite.config.sections.checkpoint import CheckpointConfig
from megalite.launch.exit_status import ExitStatus, signal_status
from megalite.launch.signals import (
    RESIZE_SIGNAL,
    SIGNALS,
    RepeatedSignal,
    SignalListener,
    end_at_once,
)
from megalite.system.activity import Activity
from megalite.system.processes import LAUNCHER

if TYPE_CHECKING:
    from megalite.training.trainer import StepResult

SAVE, STOP, INTERRUPT, RESIZE = 0.5, 1.0, 2.0**17, 2.0**34
"""Values of a rank's request, which can be recovered from the sum over all ranks.

Only rank 0 requests a save, fewer than 2**17 ranks request a stop, and fp64 sums are exact.
"""
SHARE = 0.05  # maximum fraction of time for saves: a save of 1 s is followed by at least 19 s without one


def requested_end(requests: float) -> ExitStatus | None:
    """Return the exit status that the summed requests ask for, or None if the run continues."""
    if requests < STOP:
        return None
    return ExitStatus.INTERRUPTED if requests % RESIZE >= INTERRUPT else ExitStatus.STOPPED


def resize_requested(requests: float) -> bool:
    """Return whether the run only has to stop to continue on another number of ranks, from the same sum."""
    return requests >= RESIZE and requests % RESIZE < STOP


def save_requested(requests: float) -> bool:
    """Return whether rank 0 has requested a save (`SaveTimer`), from the same sum."""
    return requests % STOP > 0


class StopRequest:
    """Context manager with this rank's request to save and end the run.

    Exiting it restores the previous signal handlers, except after an error: the launcher may send SIGTERM
    because another rank has failed, and this rank must still be able to report its own error.

    Args:
        seconds: time limit from now; None for no limit.
        activity: this rank's activity, which crash.md shows for each signal.
    """

    def __init__(self, seconds: float | None = None, activity: Activity | None = None):
        self._activity = activity
        self._deadline = None if seconds is None else monotonic() + seconds
        self._signals: list[int] = []
        self._repeated = RepeatedSignal()
        self._listener: SignalListener | None = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def _react(self, number: int) -> None:
        """Handle a signal. Called on another thread, while the main thread may be anywhere."""
        from megalite.launch.output import RECENT  # already imported by the command

        RECENT.add(f"[received {signal.Signals(number).name} in {self._activity}]\n".encode())
        # At the second Ctrl-C torchrun sends SIGTERM.
        from_torchrun = number == signal.SIGTERM and self._repeated.first is not None and _under_torchrun()
        if number != signal.SIGINT and not from_torchrun:
            return
        if self._repeated.arrived():
            end_at_once("interrupted again: exiting immediately without saving", signal_status(signal.SIGINT))
        if sys.stderr.isatty() and int(os.environ.get("LOCAL_RANK", 0)) == 0:
            os.write(2, b" saving after this step; Ctrl-C again ends at once\n")

    @property
    def reason(self) -> str | None:
        """Reason to stop, or None without a request."""
        if self._signals:
            return f"received {signal.Signals(self._signals[0]).name}"
        if self._deadline is not None and monotonic() >= self._deadline:
            return "reached train.stop_after"
        return None

    @property
    def value(self) -> float:
        """This rank's contribution to the sum that `requested_end` reads."""
        if signal.SIGINT in self._signals:
            return INTERRUPT
        if self.reason is None:
            return 0.0
        return RESIZE if set(self._signals) == {RESIZE_SIGNAL} else STOP

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # Python only allows signal handlers there
            self._listener = SignalListener(
                self._react, (*SIGNALS, signal.SIGUSR1, RESIZE_SIGNAL), self._handle
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or not issubclass(kind, Exception):
            self.close()

    def close(self) -> None:
        """Restore the previous signal handlers."""
        if self._listener is not None:
            self._listener.close()


class SaveTimer:
    """Timer that requests saves in a run without `checkpoint.interval`.

    Saves are requested every `checkpoint.minutes`, and less often if they take long. Only the clock of rank 0
    is used, because the clocks of ranks differ; it requests a save in the same way as a rank requests a stop.

    Args:
        lead: whether this is rank 0.
        clock: time in seconds, with an arbitrary origin.
    """

    def __init__(self, options: CheckpointConfig, lead: bool, clock: Callable[[], float]):
        timed = lead and options.interval is None and options.minutes is not None
        self._every = 60 * options.minutes if timed and options.minutes is not None else None
        self._clock = clock
        self._last, self._pause, self._saved = clock(), self._every or 0.0, -1

    @property
    def value(self) -> float:
        """This rank's contribution to the sum that `save_requested` reads."""
        return SAVE if self._every is not None and self._clock() - self._last >= self._pause else 0.0

    def due(self, results: Sequence[StepResult]) -> bool:
        """Return whether to save now, given the new results. The same on every rank.

        A request from a step that the last save already includes is ignored.
        """
        return any(save_requested(result.stop) and result.step > self._saved for result in results)

    def saved(self, step: int, seconds: float) -> None:
        """Record a save after a step, which paused training for `seconds`."""
        self._saved, self._last = step, self._clock()
        self._pause = max(self._every or 0.0, seconds * (1 / SHARE - 1))

    def rolled_back(self, step: int) -> None:
        """Record a rollback to the checkpoint of a step, which may be older than the last save."""
        self._saved, self._last = step, self._clock()


def _under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ and LAUNCHER not in os.environ
