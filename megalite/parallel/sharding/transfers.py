"""Times of data-parallel collectives: how long each is in flight, and how long the rank waits for it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megalite.parallel.collectives import Pending
from megalite.system.clock import Clock, Transfer


class TransferLog:
    """Log of reductions and gathers. It records nothing without a clock."""

    def __init__(self) -> None:
        self.clock: Clock | None = None
        self._marks: list[tuple[str, Any, Any, Any]] = []

    def record(self, name: str, start: Any, awaited: Any, end: Any) -> None:
        """Record a collective by three marks of the clock."""
        self._marks.append((name, start, awaited, end))

    def take(self) -> list[Transfer]:
        """Return the collectives that have ended since the last call, in order of their ends."""
        marks, self._marks = self._marks, []
        return [] if self.clock is None else [Transfer(*each) for each in self.clock.read(marks)]

    def gathering(self, name: str, pending: Pending) -> Pending:
        """Return a wrapper of a collective that records it when it is waited for."""
        if self.clock is None:
            return pending
        clock, start = self.clock, self.clock.mark()

        def wait() -> Tensor:
            awaited = clock.mark()
            result = pending.wait()
            self.record(name, start, awaited, clock.mark())
            return result

        return Pending([], wait)
