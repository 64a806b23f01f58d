"""What is sent over data parallelism, in time: how long it is under way, and how long a rank does nothing but wait for it."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from megalite.clock import Clock
from megalite.parallel.collectives import Pending


class Transfer(NamedTuple):
    """A collective in time, in seconds as in `clock.Ran`."""

    name: str
    start: float
    awaited: float  # from here to `end` the rank waited for it
    end: float


class TransferLog:
    """Records reductions and gathers while it has a clock; costs nothing without."""

    def __init__(self) -> None:
        self.clock: Clock | None = None
        self._marks: list[tuple[str, Any, Any, Any]] = []

    def record(self, name: str, start: Any, awaited: Any, end: Any) -> None:
        """Record a collective by three marks of the clock."""
        self._marks.append((name, start, awaited, end))

    def take(self) -> list[Transfer]:
        """What has ended since the last call, in that order."""
        marks, self._marks = self._marks, []
        return [] if self.clock is None else [Transfer(*each) for each in self.clock.read(marks)]

    def gathering(self, name: str, pending: Pending) -> Pending:
        """The same collective, recorded when it is awaited."""
        if self.clock is None:
            return pending
        clock, start = self.clock, self.clock.mark()

        def wait() -> Tensor:
            awaited = clock.mark()
            found = pending.wait()
            self.record(name, start, awaited, clock.mark())
            return found

        return Pending([], wait)
