"""What a rank is doing: other threads can read it, and listeners are notified of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from time import localtime, strftime, time
from typing import Any, Protocol

REDUCING, UPDATING = "reduction", "norm and update"
"""What a rank does besides the actions of its pipeline. As in these, on a GPU its host may wait for the
device anywhere."""


class HostWork(StrEnum):
    """Work that a rank does on its host alone.

    It may take longer than `run.timeout`. Waits for other ranks are recorded where they occur.
    """

    STARTING = "start"
    LOADING = "loading"
    BETWEEN = "between steps"
    READING = "reading its batch"
    REPORTING = "reporting its step"
    SAVING = "saving"
    AWAITING_SAVES = "awaiting saves"


STARTING, LOADING, BETWEEN, READING, REPORTING, SAVING, AWAITING_SAVES = HostWork


class TransferRecorder(Protocol):
    """Interface of what records the tensors that a rank sends and receives."""

    def sent(self, what: str, tensor: Any) -> None:
        """Called before a communication is started with a tensor that it sends."""

    def received(self, what: str, tensors: Sequence[Any]) -> None:
        """Called once a communication has delivered tensors, before they are read."""


class Activity:
    """The progress of a rank. Attributes are replaced as a whole and read without a lock, so an update costs
    one assignment.

    Attributes:
        step: 1-based; 0 before the first.
        action: a pipeline action, or a description of what the rank does between actions.
        communication: the last one that the rank waited for: description, peer rank (None for a group), and
            start time of the wait.
        waiting: whether the rank still waits for it.
        limited: whether `run.timeout` limits that wait; otherwise it is one for work of other ranks' hosts
            (`meeting`).
        busy: whether the rank works on its host alone, whatever its action.
        watched: whether another thread tells when a rank is lost.
        plan: the actions of the schedule that this rank runs, or has run last.
        runs: number of completed runs of a schedule. In a validation nothing else distinguishes one batch
            from the next.
        listeners: called with every change: an action, or a description of what the rank does or waits for.
        transfers: records what the rank sends and receives; None: nothing does.
    """

    __slots__ = (
        "action",
        "busy",
        "communication",
        "limited",
        "listeners",
        "plan",
        "runs",
        "step",
        "transfers",
        "waiting",
        "watched",
    )

    def __init__(self) -> None:
        self.step = 0
        self.action: Any = STARTING
        self.communication: tuple[str, int | None, float] | None = None
        self.waiting, self.limited = False, True
        self.busy = self.watched = False
        self.plan: Sequence[Any] = ()
        self.runs = 0
        self.listeners: tuple[Callable[[Any], None], ...] = ()
        self.transfers: TransferRecorder | None = None

    def __str__(self) -> str:
        what, peer, since = self.communication or ("", None, 0.0)
        place = f"step {self.step}, {self.action}"
        if not self.waiting:
            return place
        return (
            f"{place}, awaiting {what}{'' if peer is None else f', rank {peer}'} since "
            f"{strftime('%H:%M:%S', localtime(since))}"
        )

    def enter(self, action: Any) -> None:
        """Record what the rank starts to do."""
        self.action = action
        self._tell(action)

    def wait_for(self, what: str, peer: int | None, limited: bool = True) -> None:
        """Record that the rank starts to wait for a communication."""
        self.communication, self.limited, self.waiting = (what, peer, time()), limited, True
        self._tell(what)

    def arrived(self) -> None:
        """Record the end of the wait: the rank continues its action."""
        self.waiting = False
        self._tell(self.action)

    def sends(self, what: str, tensor: Any) -> None:
        """Record the tensor, if any, that a communication is about to send."""
        if self.transfers is not None and tensor is not None:
            self.transfers.sent(what, tensor)

    def received(self, what: str, *tensors: Any) -> None:
        """Record the tensors, if any, that a communication has delivered."""
        if self.transfers is not None and tensors[0] is not None:
            self.transfers.received(what, tensors)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Record that the rank works on its host alone, although its action is one that may wait for the
        device."""
        before, self.busy = self.busy, True
        try:
            yield
        finally:
            self.busy = before

    def _tell(self, place: Any) -> None:
        for listener in self.listeners:
            listener(place)
