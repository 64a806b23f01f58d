"""Requests of a training run to stop, by a signal to any rank or the time limit, and to save, by time.

The ranks sum their requests with the next step's gradient norm, so that all act on them after the same step.
This needs no collective of its own and has the process group's timeout: if a peer has died, the collective
fails, and no checkpoint is published.

A preempted job gets SIGTERM (torchrun forwards it) or SIGUSR1 (SLURM's --signal, sent to the workers); Ctrl-C
is SIGINT, a closed terminal SIGHUP. A second SIGINT ends the process at once, even if a collective or a save
hangs: `launch.signals`, which handles signals outside of the steps, too.
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
from megalite.launch.signals import SIGNALS, RepeatedSignal, SignalListener, end_at_once
from megalite.system.activity import Activity
from megalite.system.processes import LAUNCHER

if TYPE_CHECKING:
    from megalite.training.trainer import StepResult

SAVE, STOP, INTERRUPT = 0.5, 1.0, 2.0**24
"""A rank's request. The sum over all ranks tells them apart: only rank 0 requests a save, fewer than 2**24
ranks request a stop, and fp64 adds exactly."""
SHARE = 0.05  # largest share of time for saves: one that takes 1 s is followed by at least 19 s without one


def requested_end(requests: float) -> ExitStatus | None:
    """How the run has to end, by the sum of all ranks' requests; None: it goes on."""
    if requests < STOP:
        return None
    return ExitStatus.INTERRUPTED if requests >= INTERRUPT else ExitStatus.STOPPED


def save_requested(requests: float) -> bool:
    """Whether rank 0 has requested a save (`SaveTimer`), by the same sum."""
    return requests % STOP > 0


class StopRequest:
    """This rank's request that the run saves and ends, as a context manager.

    Its exit restores the previous signal handlers, except after an error: the launcher may send SIGTERM
    because another rank has failed, and this one still has to report why it ends.

    Args:
        seconds: time limit from now; None: no limit.
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
        """On another thread, while the main thread may be anywhere."""
        from megalite.launch.output import RECENT  # a command has imported it

        RECENT.add(f"[received {signal.Signals(number).name} in {self._activity}]\n".encode())
        # At the second Ctrl-C torchrun sends SIGTERM.
        from_torchrun = number == signal.SIGTERM and self._repeated.first is not None and _under_torchrun()
        if number != signal.SIGINT and not from_torchrun:
            return
        if self._repeated.arrived():
            end_at_once("interrupted again: ended at once, without saving", signal_status(signal.SIGINT))
        if sys.stderr.isatty() and int(os.environ.get("LOCAL_RANK", 0)) == 0:
            os.write(2, b" saving after this step; Ctrl-C again ends at once\n")

    @property
    def reason(self) -> str | None:
        """The reason to stop; None: no request."""
        if self._signals:
            return f"received {signal.Signals(self._signals[0]).name}"
        if self._deadline is not None and monotonic() >= self._deadline:
            return "reached train.stop_after"
        return None

    @property
    def value(self) -> float:
        """This rank's part of the sum that `requested_end` takes."""
        return INTERRUPT if signal.SIGINT in self._signals else STOP if self.reason else 0.0

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # Python allows signal handlers only there
            self._listener = SignalListener(self._react, (*SIGNALS, signal.SIGUSR1), self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or not issubclass(kind, Exception):
            self.close()

    def close(self) -> None:
        """Restore the previous signal handlers."""
        if self._listener is not None:
            self._listener.close()


class SaveTimer:
    """Requests the saves of a run without `checkpoint.interval`.

    It does so every `checkpoint.minutes`, and less often if saves take long. The clocks of ranks differ, so
    only rank 0's counts: it requests a save as any rank requests a stop.

    Args:
        lead: whether this is rank 0.
        clock: seconds from any start.
    """

    def __init__(self, options: CheckpointConfig, lead: bool, clock: Callable[[], float]):
        timed = lead and options.interval is None and options.minutes is not None
        self._every = 60 * options.minutes if timed and options.minutes is not None else None
        self._clock = clock
        self._last, self._pause, self._saved = clock(), self._every or 0.0, -1

    @property
    def value(self) -> float:
        """This rank's part of the sum that `save_requested` takes."""
        return SAVE if self._every is not None and self._clock() - self._last >= self._pause else 0.0

    def due(self, results: Sequence[StepResult]) -> bool:
        """Whether to save now, by the results that have become known: the same on every rank.

        A request in a step that the last save includes is done.
        """
        return any(save_requested(result.stop) and result.step > self._saved for result in results)

    def saved(self, step: int, seconds: float) -> None:
        """Record a save after a step, for whatever reason, which held training for `seconds`."""
        self._saved, self._last = step, self._clock()
        self._pause = max(self._every or 0.0, seconds * (1 / SHARE - 1))

    def rolled_back(self, step: int) -> None:
        """Record a rollback to the checkpoint of a step, which may be older than the last save."""
        self._saved, self._last = step, self._clock()


def _under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ and LAUNCHER not in os.environ
