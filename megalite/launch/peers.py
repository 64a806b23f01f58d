"""Monitor the other ranks over the rendezvous store and plain sockets, even while communication hangs.

Every `BEAT_S` a thread of each rank stores the rank's place, and looks at that of the next rank and at a
verdict of others. A second thread answers a socket with the rank's place. A rank whose stored place has not
changed for `SILENT_S` is asked there:

- the connection is refused: its process has ended, which is final: the verdict is stored, and every rank
  learns it with its next beat;
- no answer comes: its process is stopped (SIGSTOP, a debugger, a frozen container). It may go on;
- there is no connection: its host is lost, or the network to it. Both may come back;
- it answers: it is alive, and its place tells what it does.

A store that does not answer means its host: the rank that holds it is asked in the same way. (Under torchrun
and `--nproc` the launcher holds it, and the ranks end with the launcher.) With many ranks the beat is slower,
so that the store has at most `MOST_BEATS` per second.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from threading import Event, Thread
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

from megalite.launch.causes import Lost
from megalite.system.addresses import own_address

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

BEAT_S = 1.0
MOST_BEATS = 1000
SILENT_S = 5.0  # without a beat: a rank, or the store, is asked
ANSWER_S = 3.0  # for one answer
ATTEMPTS = 3  # to get an answer: a loaded host is slow, not lost
ASKED = 8  # ranks of a group that each of its ranks asks when one of them is gone

Place = dict[str, Any]
"""Where a rank is, as plain data: `step`, `action`, what it waits for and for which rank; `lost`, `failed`
and `left` once it ends."""
_T = TypeVar("_T")


class PeerState(StrEnum):
    """The state of another rank. The values are used in messages."""

    ANSWERS = "answers"
    ENDED = "its process has ended"
    STOPPED = "its process exists but does not respond; it may be stopped, or its host overloaded"
    UNREACHABLE = "its host does not respond; the host or the network may be down"
    FAILED = "it failed"
    STUCK = "it is alive but makes no progress"


@dataclass(frozen=True)
class LostRank:
    """A lost rank, how it was lost, and its last known place (`place`)."""

    rank: int
    state: PeerState
    host: str
    place: Place

    @property
    def final(self) -> bool:
        """Return whether the rank cannot come back."""
        return self.state in (PeerState.ENDED, PeerState.FAILED)

    def __str__(self) -> str:
        return (
            f"rank {self.rank} "
            f"{'is stuck' if self.state is PeerState.STUCK else 'was lost first'}: "
            f"{self._reason()}"
        )

    def lost(self) -> Lost:
        """Return the `Lost` of a rank that fails because of this one."""
        return Lost(
            self.rank, str(self), self.host, described(self.place), silent=self.state is PeerState.ENDED
        )

    def described(self) -> str:
        """Describe a rank that may come back."""
        return f"rank {self.rank} does not respond: {self._reason()}"

    def _reason(self) -> str:
        reason = self.place.get("failed") if self.state is PeerState.FAILED else self.state.value
        return f"{reason}; host {self.host}, last known in {described(self.place)}"


def described(place: Place) -> str:
    """Describe a place for messages."""
    if not place:
        return "an unknown action"
    words = f"step {place['step']}, {place['action']}"
    if place.get("number") is not None:
        words += f", action {place['number'] + 1} of {place['actions']}"
    if place.get("waits"):
        words += f", awaiting {place['waits']}" + (
            "" if place.get("peer") is None else f", rank {place['peer']}"
        )
    return words


class Peers:
    """A monitor of the other ranks.

    Args:
        store: the rendezvous store of a process group; opens a separate connection.
        place: returns the current place of this rank. Called by other threads.
        store_rank: the rank whose process hosts the store; None if another process does.

    Attributes:
        own: the exit of this rank, part of its place: `lost` is a rank that it waited for, `failed` the
            reason of its failure, `left` a planned exit.
        verdict: the lost rank that ends the run, equal on every rank; or None.
        start: equal on every rank, and different for every start of the ranks.
    """

    def __init__(
        self, store: Store, rank: int, size: int, place: Callable[[], Place], store_rank: int | None
    ):
        self.rank, self.size, self._place, self._store_rank = rank, size, place, store_rank
        self.token = secrets.token_hex(8)
        self.own: dict[str, Any] = {}
        self.verdict: LostRank | None = None
        # every rank counts its monitors in this store: they agree
        self._prefix = f"peers/{store.add(f'peers/{rank}', 1)}"
        self._store = store.clone()  # type: ignore[attr-defined]
        self.start = store.compare_set("peers/start", "", self.token).decode()
        self._listener = socket.create_server(("", 0), backlog=64)
        address = [own_address(), self._listener.getsockname()[1], self.token, os.uname().nodename]
        store.set(f"{self._prefix}/address/{rank}", json.dumps(address))
        self._watched, self._seen, self._changed = (rank + 1) % size, "", monotonic()
        wanted = {self._watched, *(() if store_rank is None else (store_rank,))}
        self._addresses = {
            each: json.loads(store.get(f"{self._prefix}/address/{each}")) for each in sorted(wanted)
        }
        self._places: dict[int, Place] = {}
        self._beats, self.heard = 0, monotonic()
        self.beat_s = max(BEAT_S, size / MOST_BEATS)
        self._closed, self._wake = Event(), Event()
        # ranks that have answered, see `_ask_warily`
        self._answering: set[int] = set()
        self._threads = [
            Thread(target=each, name=f"megalite-peers{each.__name__}", daemon=True)
            for each in (self._exchange, self._answer)
        ]
        for thread in self._threads:
            thread.start()
        for each in wanted - {rank}:
            self.ask(each)

    # ---- threads

    def _exchange(self) -> None:
        """Store this rank's place and read the watched rank's and the verdict until `close`."""
        with suppress(RuntimeError):  # the store is gone: `heard` stays as it is
            while True:
                closed = self._closed.is_set()
                self._beats += 1
                self._store.set(f"{self._prefix}/place/{self.rank}", json.dumps(self._now()))
                self._look_at_watched()
                self.verdict = self.verdict or self._stored_verdict()
                self.heard = monotonic()
                if closed:
                    return
                self._wake.wait(self.beat_s)
                self._wake.clear()

    def _now(self) -> Place:
        return {**self._place(), **self.own, "beat": self._beats}

    def _look_at_watched(self) -> None:
        for rank in {self._watched, self.rank if self._store_rank is None else self._store_rank} - {
            self.rank
        }:
            key = f"{self._prefix}/place/{rank}"
            text = self._store.get(key).decode() if self._store.check([key]) else ""
            if rank == self._watched and text != self._seen:
                self._seen, self._changed = text, monotonic()
            if text:
                self._places[rank] = json.loads(text)

    def _stored_verdict(self) -> LostRank | None:
        key = f"{self._prefix}/verdict"
        if not self._store.check([key]):
            return None
        content = json.loads(self._store.get(key))
        return LostRank(content["rank"], PeerState(content["state"]), content["host"], content["place"])

    def _answer(self) -> None:
        """Answer every process that connects with the place of this rank."""
        while not self._closed.is_set():
            try:
                link, _ = self._listener.accept()
            except OSError:  # closed, or this process has no file descriptor left for the moment
                self._closed.wait(BEAT_S)
                continue
            with link, suppress(OSError):
                link.settimeout(ANSWER_S)
                link.sendall(json.dumps({"token": self.token, "place": self._now()}).encode())

    # ---- questions

    def ask(self, rank: int) -> tuple[PeerState, Place]:
        """Return whether a rank is alive, and its current or last known place."""
        address = self._address(rank)
        if address is None:
            return PeerState.UNREACHABLE, self._places.get(rank, {})
        state = PeerState.UNREACHABLE
        for _ in range(ATTEMPTS):
            state, place = _question(address)
            if state is PeerState.ANSWERS:
                self._places[rank] = place
                self._answering.add(rank)
                return state, place
            if state is PeerState.ENDED:
                break
        key = f"{self._prefix}/place/{rank}"
        stored = self._in_time(lambda: json.loads(self._store.get(key)) if self._store.check([key]) else None)
        place = stored or self._places.get(rank, {})
        return (PeerState.FAILED if place.get("failed") and state is PeerState.ENDED else state), place

    def _ask_warily(self, rank: int) -> tuple[PeerState, Place]:
        """Ask a rank that nothing but its silence speaks against.

        A firewall may refuse connections, so a refusal only means that the process has ended if the rank has
        answered before.
        """
        state, place = self.ask(rank)
        if state is PeerState.ENDED and rank not in self._answering:
            state = PeerState.UNREACHABLE
        return state, place

    def host(self, rank: int) -> str:
        """Return the host name of a rank."""
        address = self._address(rank)
        return "unknown" if address is None else str(address[3])

    def _address(self, rank: int) -> Any:
        if rank not in self._addresses:
            key = f"{self._prefix}/address/{rank}"
            address = self._in_time(lambda: json.loads(self._store.get(key)))
            if address is None:
                return None
            self._addresses[rank] = address
        return self._addresses[rank]

    def look(self) -> LostRank | None:
        """Return a rank that is lost or does not respond, as far as this rank knows; None if there is none.

        Takes seconds if something is wrong.
        """
        if self.verdict is not None:
            return self.verdict
        now = monotonic()
        limit = max(SILENT_S, 2 * self.beat_s)
        if now - self.heard > limit:
            return self._store_lost()
        if now - self._changed <= limit:
            return None
        return self._next_lost()

    def _store_lost(self) -> LostRank | None:
        """Return the rank that hosts the store, whose state is unknown while the store does not respond."""
        if self._store_rank in (None, self.rank):
            return None
        assert self._store_rank is not None
        state, place = self._ask_warily(self._store_rank)
        return (
            None
            if state is PeerState.ANSWERS or {"left", "lost"} & place.keys()
            else self._lost_rank(self._store_rank, state, place)
        )

    def _next_lost(self) -> LostRank | None:
        """Ask the watched rank. If it has left or is lost, watch the next rank that is alive."""
        silent = None
        for step in range(self.size - 1):
            rank = (self._watched + step) % self.size
            if rank == self.rank:
                break
            state, place = self._ask_warily(rank)
            if state is PeerState.ANSWERS:
                if silent is None:  # those before have left
                    self._watched, self._changed = rank, monotonic()
                break
            if not {"left", "lost"} & place.keys() and (
                silent is None or state in (PeerState.ENDED, PeerState.FAILED)
            ):
                silent = self._lost_rank(rank, state, place)
                if silent.final:
                    break
        else:
            self._changed = monotonic()
        return silent

    def _lost_rank(self, rank: int, state: PeerState, place: Place) -> LostRank:
        lost = LostRank(rank, state, self.host(rank), place)
        return self.agree(lost) if lost.final else lost

    def agree(self, lost: LostRank) -> LostRank:
        """Store a verdict that ends the run, and return the first one that any rank has stored."""
        self.own = self.own or {"lost": lost.rank}
        self._wake.set()
        key, text = f"{self._prefix}/verdict", json.dumps(asdict(lost))
        self._in_time(lambda: self._store.compare_set(key, "", text))
        self.verdict = self.verdict or self._in_time(self._stored_verdict) or lost
        return self.verdict

    def origin(self, peer: int | None, group: Sequence[int] = ()) -> LostRank | None:
        """Find the rank that failed first or is stuck, starting from one that this rank waited for.

        Follows the ranks that others have lost or wait for. Returns None if ranks wait for each other in a
        cycle, or if the last one is alive and makes progress.

        Args:
            group: the ranks of a collective that failed, if its error does not name a rank.
        """
        peer = self._gone(group) if peer is None else peer
        self.own = {"lost": peer}
        self._wake.set()
        seen, deadline, first = {self.rank}, monotonic() + SILENT_S, dict[int, Place]()
        while self.verdict is None and peer is not None and peer not in seen:
            state, place = self.ask(peer)
            if place.get("lost") is not None or (
                state is PeerState.ANSWERS and place.get("peer") is not None and monotonic() > deadline
            ):
                seen.add(peer)
                peer = place["peer"] if place.get("lost") is None else place["lost"]
            elif state is not PeerState.ANSWERS or place.get("failed"):
                return self.agree(
                    self._lost_rank(peer, PeerState.FAILED if place.get("failed") else state, place)
                )
            elif peer in first and monotonic() > deadline:
                return (
                    self.agree(self._lost_rank(peer, PeerState.STUCK, place))
                    if _equal(first[peer], place)
                    else None
                )
            else:
                first.setdefault(peer, place)
                Event().wait(self.beat_s / 4)  # it is alive, and may be about to learn what it has lost
        return self.verdict

    def _gone(self, group: Sequence[int]) -> int | None:
        """Return a rank of a group that has exited, failed or lost another rank.

        Returns None if there is none within the time limit, or if another rank has stored a verdict. Each
        rank asks only the `ASKED` ranks after it, so the number of questions does not grow with the group.
        """
        at = group.index(self.rank) if self.rank in group else 0
        others = [rank for rank in (*group[at + 1 :], *group[:at]) if rank != self.rank][:ASKED]
        deadline = monotonic() + SILENT_S + ANSWER_S
        while others and self.verdict is None and monotonic() < deadline:
            for rank in others:
                state, place = self._ask_warily(rank)
                ended = state in (PeerState.ENDED, PeerState.FAILED)
                if ended or place.get("failed") or place.get("lost") is not None:
                    return rank
            Event().wait(self.beat_s / 4)
        return None

    def followed(self, peer: int | None, verdict: LostRank | None = None) -> dict[int, dict[str, Any]]:
        """Return the state of the ranks that this one depends on, as plain data by rank."""
        records: dict[int, dict[str, Any]] = {}
        if verdict is not None:
            records[verdict.rank] = {
                "state": verdict.state.value,
                "host": verdict.host,
                "place": verdict.place,
            }
        while peer is not None and peer != self.rank and peer not in records:
            state, place = self.ask(peer)
            records[peer] = {"state": state.value, "host": self.host(peer), "place": place}
            peer = place.get("lost", place.get("peer") if state is PeerState.ANSWERS else None)
        return records

    # ---- the end

    def fail(self, reason: str) -> None:
        """Record why this rank fails, for the ranks that depend on it."""
        self.own = {"failed": reason}
        self._wake.set()

    def close(self, left: bool) -> None:
        """Stop the threads.

        Args:
            left: this rank exits as planned and is not reported as lost.
        """
        if left:
            self.own = {"left": True}
        self._closed.set()
        self._wake.set()
        self._threads[0].join(ANSWER_S)  # until that is stored
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        self._listener.close()

    @staticmethod
    def _in_time(question: Callable[[], _T]) -> _T | None:
        """Return the answer of the store, or None if it fails or takes too long.

        A store on a stopped host never answers.
        """
        results: list[_T] = []

        def run() -> None:
            with suppress(RuntimeError, ValueError):
                results.append(question())

        thread = Thread(target=run, daemon=True)
        thread.start()
        thread.join(ANSWER_S)
        return results[0] if results else None


def _equal(place: Place, other: Place) -> bool:
    """Return whether a rank has made no progress between two places."""
    return all(place.get(name) == other.get(name) for name in ("step", "runs", "action", "waits"))


def _question(address: list[Any]) -> tuple[PeerState, Place]:
    """Ask the process at an address once."""
    host, port, token, name = address
    if host.startswith("127.") and name != os.uname().nodename:  # what another host calls itself
        host = name
    try:
        link = socket.create_connection((host, port), timeout=ANSWER_S)
    except (ConnectionRefusedError, ConnectionResetError):
        return PeerState.ENDED, {}
    except OSError:
        return PeerState.UNREACHABLE, {}
    text = b""
    try:
        with link:
            while part := link.recv(1 << 16):
                text += part
        content = json.loads(text)
        return (PeerState.ANSWERS, content["place"]) if content["token"] == token else (PeerState.ENDED, {})
    except TimeoutError:
        return PeerState.STOPPED, {}
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
    ):  # it ended while it answered, or another process has its port
        return PeerState.ENDED, {}
