"""Requests to stop, by a signal to any rank or the time limit, and to save by time. Ranks agree on them with
the next step's gradient norm.

A preempted job gets SIGTERM (torchrun forwards it) or SIGUSR1 (SLURM's --signal, sent to the workers); Ctrl-C
is SIGINT, a closed terminal SIGHUP. The agreement needs no collective of its own and has the process group's
timeout: if a peer has died, the collective fails, and no checkpoint is published. A second SIGINT ends the
process at once, also if a collective or a save hangs.
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

from megalite.config.schema import CheckpointConfig
from megalite.launch.exit_status import ExitStatus
from megalite.launch.interrupts import SIGNALS, Listener, Second, end, status_of
from megalite.system.activity import Activity
from megalite.system.processes import LAUNCHER

if TYPE_CHECKING:
    from megalite.training.trainer import StepResult

SAVE, STOP, INTERRUPT = 0.5, 1.0, 2.0**24
"""What a rank requests, summed over all ranks: rank 0 alone a save, fewer than 2**24 of them a stop, and fp64
sums them exactly."""
SHARE = 0.05  # of the time at most for saves: one that takes a second is followed by at least 19 without one


def agreed(requests: float) -> ExitStatus | None:
    """How the run has to end, from the sum of all ranks' requests; None: it goes on."""
    return (
        None if requests < STOP else ExitStatus.INTERRUPTED if requests >= INTERRUPT else ExitStatus.STOPPED
    )


def asks_to_save(requests: float) -> bool:
    """Whether rank 0 has asked for a save (`SaveTimer`), from the same sum."""
    return requests % STOP > 0


class StopRequest:
    """Whether this rank requests that the run saves and ends. A context manager: its exit restores the
    previous signal handlers.

    After an error it does not: the launcher may send SIGTERM because another rank has failed, and this one
    still has to say why it ends.

    Args:
        seconds: time limit from now; None: no limit.
        activity: of this rank, for the report about a run whose ranks are ended because one has failed.
    """

    def __init__(self, seconds: float | None = None, activity: Activity | None = None):
        self._activity = activity
        self._deadline = None if seconds is None else monotonic() + seconds
        self._signals: list[int] = []
        self._second = Second()
        self._listener: Listener | None = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def _react(self, number: int) -> None:
        """On another thread, while the main thread may be anywhere."""
        from megalite.launch.output import RECENT  # a command has imported it

        RECENT.add(f"[received {signal.Signals(number).name} in {self._activity}]\n".encode())
        # At the second Ctrl-C torchrun sends SIGTERM.
        if number != signal.SIGINT and not (
            number == signal.SIGTERM and self._second.first is not None and _under_torchrun()
        ):
            return
        if self._second():
            end("interrupted again: ended at once, without saving", status_of(signal.SIGINT))
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
        """What this rank adds to the sum that `agreed` takes."""
        return INTERRUPT if signal.SIGINT in self._signals else STOP if self.reason else 0.0

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # Python allows signal handlers only there
            self._listener = Listener(self._react, (*SIGNALS, signal.SIGUSR1), self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or not issubclass(kind, Exception):
            self.close()

    def close(self) -> None:
        """Restore the previous signal handlers."""
        if self._listener is not None:
            self._listener.close()


class SaveTimer:
    """When a run without `checkpoint.interval` saves: every `checkpoint.minutes`, and less often where a save
    takes long.

    Clocks of ranks differ, so rank 0's alone counts: it asks for a save as a signal asks for the end.

    Args:
        asks: whether this rank may ask for a save: rank 0 alone.
        clock: seconds from any start.
    """

    def __init__(self, options: CheckpointConfig, asks: bool, clock: Callable[[], float]):
        self._every = (
            60 * options.minutes
            if asks and options.interval is None and options.minutes is not None
            else None
        )
        self._clock = clock
        self._last, self._pause, self._saved = clock(), self._every or 0.0, -1

    @property
    def value(self) -> float:
        """What this rank adds to the sum of requests."""
        return SAVE if self._every is not None and self._clock() - self._last >= self._pause else 0.0

    def due(self, results: Sequence[StepResult]) -> bool:
        """Whether to save now, from the results that have become known: the same on every rank. What was
        asked for in a step that the last save has is done."""
        return any(asks_to_save(result.stop) and result.step > self._saved for result in results)

    def saved(self, step: int, seconds: float) -> None:
        """Take in a save after a step, for whatever reason, which has held training for some seconds."""
        self._saved, self._last = step, self._clock()
        self._pause = max(self._every or 0.0, seconds * (1 / SHARE - 1))

    def rolled_back(self, step: int) -> None:
        """Take in a rollback to the checkpoint of a step, which may be before the last save: what comes from
        now on is to be saved."""
        self._saved, self._last = step, self._clock()


def _under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ and LAUNCHER not in os.environ
