"""What a rank is doing now: for another thread to read, and for those who want to hear of it."""

from __future__ import annotations

from collections.abc import Callable
from time import time
from typing import Any

READING, REDUCING, UPDATING, BETWEEN = "reading its batch", "reduction", "norm and update", "between steps"
"""What a rank does beside the actions of its pipeline."""


class Activity:
    """The place that a rank has reached. Each attribute is replaced whole and read without a lock, so noting one costs an assignment.

    Attributes:
        step: 1-based; 0 before the first.
        action: a pipeline action, or what a rank does between them in words.
        communication: the last one that was awaited: what it is, the other rank (None where it is a whole group), and since when.
        waiting: whether it is awaited still.
        runs: how often a schedule has been run to its end: in a validation nothing else may tell one batch from the next.
        listeners: each is called with what the rank does from now on: an action, or in words what it does or awaits.
    """

    __slots__ = ("action", "communication", "listeners", "runs", "step", "waiting")

    def __init__(self) -> None:
        self.step = 0
        self.action: Any = "start"
        self.communication: tuple[str, int | None, float] | None = None
        self.waiting = False
        self.runs = 0
        self.listeners: tuple[Callable[[Any], None], ...] = ()

    def enter(self, action: Any) -> None:
        """Note what the rank does from now on."""
        self.action = action
        self._tell(action)

    def wait_for(self, what: str, peer: int | None) -> None:
        """Note that a communication is awaited from now on."""
        self.communication, self.waiting = (what, peer, time()), True
        self._tell(what)

    def arrived(self) -> None:
        """Note that what was awaited is there: the rank goes on with its action."""
        self.waiting = False
        self._tell(self.action)

    def _tell(self, place: Any) -> None:
        for listener in self.listeners:
            listener(place)
