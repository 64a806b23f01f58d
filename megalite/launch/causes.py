"""Find the rank that failed first.

A rank that is killed or fails makes the ranks that wait for it fail as well.

Kinds count before times: the operating system tells of several ends in no order, and the clocks of hosts
differ. For the same reason what ranks say that they have lost counts before times of different hosts. Imports
no torch.
"""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol, TypeVar

CONNECTION = re.compile(r"Connection (reset|closed|refused)|Socket Timeout|operation timeout")
LIBRARY = re.compile(r"gloo/transport|ncclRemoteError")
"""What errors of torch.distributed say about a rank that has gone, where they are no CommunicationError, and
what its libraries say in any RuntimeError. The first alone is also said of a data set on a server that is
gone."""


class ExitCause(IntEnum):
    """The reason why a rank exited, ordered from cause to consequence."""

    OWN = 0  # by a signal from elsewhere, or by an error of its own
    ABORTED = 1  # SIGABRT: torch's watchdog aborts a process that waits for a lost rank
    LOST = 2  # it lost another rank
    ENDED = 3  # the launcher ended it, since another one had failed


@dataclass(frozen=True)
class Lost:
    """The loss of another rank that made a rank fail.

    Attributes:
        rank: the rank that was lost first; None if unknown.
        reason: a description of the rank, how it was lost, its host and its place.
        host, place: its host and its last known place.
        silent: its process exited without a message, for example because it was killed.
    """

    rank: int | None = None
    reason: str = ""
    host: str = "unknown"
    place: str = "unknown"
    silent: bool = False


def lost_by(error: object) -> Lost | None:
    """Return the loss that caused an error, or None if the error is the rank's own."""
    while isinstance(error, BaseException):
        if isinstance(lost := getattr(error, "lost", None), Lost):
            return lost
        if isinstance(error, RuntimeError) and (hasattr(error, "peer") or _is_of_connection(error)):
            return Lost()
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None


def _is_of_connection(error: RuntimeError) -> bool:
    of_torch = type(error).__module__ == "torch.distributed"
    return LIBRARY.search(str(error)) is not None or (of_torch and CONNECTION.search(str(error)) is not None)


@dataclass(frozen=True)
class End:
    """The exit of a rank's process.

    Attributes:
        status: its exit status; minus a signal's number.
        written: seconds since the epoch.
        lost: the loss of another rank that it has reported.
        note: additional information.
    """

    rank: int
    status: int
    kind: ExitCause
    written: float
    lost: Lost | None = None
    note: str = ""

    def __str__(self) -> str:
        if self.kind is ExitCause.LOST:
            return (
                self.lost.reason
                if self.lost and self.lost.reason
                else f"rank {self.rank} {ended(self.status)}, after losing another rank"
            )
        return f"rank {self.rank} {ended(self.status)}" + (f": {self.note}" if self.note else "")


class _Cause(Protocol):
    @property
    def rank(self) -> int: ...
    @property
    def kind(self) -> int: ...
    @property
    def written(self) -> float: ...


_T = TypeVar("_T", bound=_Cause)


def by_cause(ends: Iterable[_T]) -> list[_T]:
    """Sort the exits of ranks so that causes come before consequences."""
    return sorted(ends, key=lambda end: (end.kind, end.written, end.rank))


class _CauseOnHost(_Cause, Protocol):
    @property
    def host(self) -> str: ...


_H = TypeVar("_H", bound=_CauseOnHost)


def across_hosts(ends: Iterable[_H], losses: Iterable[int | None] = ()) -> list[_H]:
    """Sort exits on several hosts, whose clocks may differ by minutes, like `by_cause`.

    Times tell which of a host's ends is its first. Of the first ones the cause is, within a kind, the one on
    the host whose ranks most others have lost; times of different hosts count only if that tells nothing.

    Args:
        losses: the rank that was lost first by what each rank says that has lost one.
    """
    ordered = by_cause(ends)
    host_of = {end.rank: end.host for end in ordered}
    blamed = Counter(host_of[rank] for rank in losses if rank in host_of)
    first: dict[str, _H] = {}
    for end in ordered:
        first.setdefault(end.host, end)
    causes = sorted(first.values(), key=lambda end: (end.kind, -blamed[end.host], end.written, end.rank))
    return [*causes[:1], *(end for end in ordered if end is not causes[0])]


def ended(status: int) -> str:
    """Describe an exit status, or minus the number of a signal."""
    return f"exited with status {status}" if status >= 0 else f"was killed by {signal_name(-status)}"


def signal_name(number: int) -> str:
    """Return the name of a signal, such as SIGKILL for 9, or "signal 40" if it has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def lost_in(content: Any) -> Lost | None:
    """Parse a `Lost` from plain data that a rank has written; None if the data is invalid."""
    try:
        return None if content is None else Lost(**content)
    except TypeError:
        return None
