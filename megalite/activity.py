"""What a rank is doing now, for another thread to read."""

from __future__ import annotations

from time import time
from typing import Any


class Activity:
    """The place that a rank has reached. Each attribute is replaced whole and read without a lock, so noting one costs an assignment.

    Attributes:
        step: 1-based; 0 before the first.
        action: a pipeline action, or what a rank does between them in words.
        communication: the last one that was awaited: what it is, the other rank (None where it is a whole group), and since when.
        waiting: whether it is awaited still.
        runs: how often a schedule has been run to its end: in a validation nothing else may tell one batch from the next.
    """

    __slots__ = ("action", "communication", "runs", "step", "waiting")

    def __init__(self) -> None:
        self.step = 0
        self.action: Any = "start"
        self.communication: tuple[str, int | None, float] | None = None
        self.waiting = False
        self.runs = 0

    def wait_for(self, what: str, peer: int | None) -> None:
        """Note that a communication is awaited from now on; `waiting` is to be set to False once it is there."""
        self.communication, self.waiting = (what, peer, time()), True
