"""What a rank is doing: other threads can read it, and listeners are notified of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import localtime, strftime, time
from typing import Any

READING, REDUCING, UPDATING, BETWEEN = "reading its batch", "reduction", "norm and update", "between steps"
"""What a rank does besides the actions of its pipeline."""


class Activity:
    """The progress of a rank. Attributes are replaced as a whole and read without a lock, so an update costs one assignment.

    Attributes:
        step: 1-based; 0 before the first.
        action: a pipeline action, or a description of what the rank does between actions.
        communication: the last one that the rank waited for: description, peer rank (None for a group), and start time of the wait.
        waiting: whether the rank still waits for it.
        plan: the actions of the schedule that this rank runs, or has run last.
        runs: number of completed runs of a schedule. In a validation nothing else distinguishes one batch from the next.
        listeners: called with every change: an action, or a description of what the rank does or waits for.
    """

    __slots__ = ("action", "communication", "listeners", "plan", "runs", "step", "waiting")

    def __init__(self) -> None:
        self.step = 0
        self.action: Any = "start"
        self.communication: tuple[str, int | None, float] | None = None
        self.waiting = False
        self.plan: Sequence[Any] = ()
        self.runs = 0
        self.listeners: tuple[Callable[[Any], None], ...] = ()

    def __str__(self) -> str:
        what, peer, since = self.communication or ("", None, 0.0)
        place = f"step {self.step}, {self.action}"
        if not self.waiting:
            return place
        return f"{place}, awaiting {what}{'' if peer is None else f', rank {peer}'} since {strftime('%H:%M:%S', localtime(since))}"

    def enter(self, action: Any) -> None:
        """Record what the rank starts to do."""
        self.action = action
        self._tell(action)

    def wait_for(self, what: str, peer: int | None) -> None:
        """Record that the rank starts to wait for a communication."""
        self.communication, self.waiting = (what, peer, time()), True
        self._tell(what)

    def arrived(self) -> None:
        """Record the end of the wait: the rank continues its action."""
        self.waiting = False
        self._tell(self.action)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Inside a communication, record that this rank works on its own, such as on its part of a save: the others wait for it."""
        waiting, self.waiting = self.waiting, False
        try:
            yield
        finally:
            self.waiting = waiting

    def _tell(self, place: Any) -> None:
        for listener in self.listeners:
            listener(place)
