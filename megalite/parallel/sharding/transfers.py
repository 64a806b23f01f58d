"""What travels over data parallelism, in time: how long it is under way, and how long a rank does nothing but wait for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

from megalite.clock import Clock
from megalite.parallel.collectives import Pending

Reduction = Iterator[None]
"""A reduction under way: each `next` awaits a collective and starts the one that follows."""


class Transfer(NamedTuple):
    """A collective in time, in seconds as in `clock.Ran`."""

    name: str
    start: float
    awaited: float  # from here to `end` the rank waited for it
    end: float


class TransferLog:
    """Notes what passes through `reduction` and `gathering` while it has a clock; costs nothing without."""

    def __init__(self) -> None:
        self.clock: Clock | None = None
        self._marks: list[tuple[str, Any, Any, Any]] = []

    def take(self) -> list[Transfer]:
        """What has arrived since the last call, in that order."""
        marks, self._marks = self._marks, []
        return [] if self.clock is None else [Transfer(*each) for each in self.clock.read(marks)]

    def reduction(self, name: str, reduction: Reduction) -> Reduction:
        """The same reduction, noted: a transfer for each collective of which it is made."""
        return reduction if self.clock is None else self._noted(name, reduction, self.clock)

    def _noted(self, name: str, reduction: Reduction, clock: Clock) -> Reduction:
        start = clock.mark()
        more = next(reduction, self) is None
        while more:
            yield
            awaited = clock.mark()
            more = next(reduction, self) is None
            end = clock.mark()
            self._marks.append((name, start, awaited, end))
            start = end

    def gathering(self, name: str, pending: Pending) -> Pending:
        """The same collective, noted."""
        if self.clock is None:
            return pending
        clock, start = self.clock, self.clock.mark()

        def wait() -> Tensor:
            awaited = clock.mark()
            found = pending.wait()
            self._marks.append((name, start, awaited, clock.mark()))
            return found

        return Pending([], wait)
