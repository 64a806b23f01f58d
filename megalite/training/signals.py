"""Stop requests: a signal to any rank, or the time limit. Both set a flag; the ranks agree on it with the next step's gradient norm.

A preempted job gets SIGTERM (torchrun forwards it) or SIGUSR1 (SLURM's --signal, sent to the workers). The agreement needs no collective of
its own and has the process group's timeout: if a peer has died, the collective fails, and no checkpoint is published.
"""

from __future__ import annotations

import signal
import threading
from time import monotonic
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """Whether this rank requests that the run saves and ends. A context manager: its exit restores the previous signal handlers.

    Args:
        seconds: time limit from now; None: no limit.
    """

    def __init__(self, seconds: float | None = None):
        self._deadline = None if seconds is None else monotonic() + seconds
        self._signal: int | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._signal = number

    @property
    def reason(self) -> str | None:
        """The reason to stop; None: no request."""
        if self._signal is not None:
            return f"received {signal.Signals(self._signal).name}"
        if self._deadline is not None and monotonic() >= self._deadline:
            return "reached train.stop_after"
        return None

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # Python allows signal handlers only there
            self._previous = {each: signal.signal(each, self._handle) for each in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for each, handler in self._previous.items():
            signal.signal(each, handler)
