"""Requests to stop: a signal to any rank, or the time limit. They set a flag; the ranks agree on it with the next step's gradient norm.

A preempted job gets SIGTERM (torchrun forwards it) or SIGUSR1 (SLURM's --signal, sent to the workers). Agreement costs no collective of
its own, and its deadline is that of the process group: where a peer has died, the collective fails, and nothing is published.
"""

from __future__ import annotations

import signal
import threading
from time import monotonic
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """Whether this rank wants the run to save and end. A context manager: leaving it restores the previous handlers.

    Args:
        seconds: time limit counted from now, or None.
    """

    def __init__(self, seconds: float | None = None):
        self._deadline = None if seconds is None else monotonic() + seconds
        self._signal: int | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._signal = number

    @property
    def reason(self) -> str | None:
        """Why to stop, or None."""
        if self._signal is not None:
            return f"received {signal.Signals(self._signal).name}"
        if self._deadline is not None and monotonic() >= self._deadline:
            return "reached train.stop_after"
        return None

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            self._previous = {each: signal.signal(each, self._handle) for each in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for each, handler in self._previous.items():
            signal.signal(each, handler)
