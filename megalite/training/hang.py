"""Explains a hang from what every rank has left in RUN_DIR/stalls/: which rank did not do its part, and who
waits for it.

A rank's record says where it is in the plan of the step, which communication it waits for, and how many
collectives it has started over each axis. Records are compared by these positions:

- A receive is matched with the send in the list of the other rank, and a send with the receive: that rank is
  before it, beyond it, or has none.
- A collective is matched by its number over the axis. A rank that has started fewer is behind; if it is at a
  later place all the same, it has skipped one.
- Where the host waits for the device, as with NCCL, torch's flight record tells the same of the collectives
  of each process group.

Every wait that is not matched points to the ranks that it lacks. The rank at the end of these is the one to
look at.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import localtime, strftime
from typing import Any

from megalite.config import run_files
from megalite.system.activity import (
    BETWEEN,
    LOADING,
    READING,
    REDUCING,
    REPORTING,
    SAVING,
    STARTING,
    UPDATING,
)

ALIVE = "answers"
ORDER = {STARTING: 0, LOADING: 0, BETWEEN: 0, REDUCING: 0, UPDATING: 1, REPORTING: 1, SAVING: 2, READING: 3}
"""Order of the phases between two runs of a plan, which are counted. A run that has to stop saves before it
validates, so a rank that saves is before one that reads or runs the first batch of the validation."""
IN_PLAN, AFTER = 4, 5
MESSAGE = re.compile(
    r"pipeline message (?P<kind>[SR][FB])(?P<stage>\d+)\.(?P<microbatch>\d+)[<>](?P<peer>\d+)"
)
GROUP = re.compile(r"(?P<operation>.+) over (?P<axis>\w+)")
OWN_FRAMES = 3  # of a stack, in a line


@dataclass(frozen=True)
class Rank:
    """What is known of one rank, from its own record or from others'.

    Attributes:
        place: as `launch.peers.Place`.
        state: whether its process answered, in words.
        plan: the actions of its list; empty if it has left no record.
        axes: the ranks of its axes.
        started: how many collectives it has started, by operation and axis ("all_reduce tp"). flights: of
        torch's flight record, for each process group the number of the last collective, and whether it is
        complete.
    """

    rank: int
    place: Mapping[str, Any]
    host: str = "unknown"
    state: str = ALIVE
    plan: Sequence[str] = ()
    axes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    started: Mapping[str, int] = field(default_factory=dict)
    frames: Sequence[str] = ()
    flights: Mapping[str, tuple[int, bool]] = field(default_factory=dict)

    @property
    def gone(self) -> bool:
        """Whether it cannot do anything."""
        return self.state != ALIVE or bool(self.place.get("failed"))

    @property
    def position(self) -> tuple[int, int, int, int]:
        """Where it is in the run. Its last part compares only ranks with the same plan."""
        place, number = self.place, self.place.get("number")
        phase = IN_PLAN if number is not None else ORDER.get(place.get("action", ""), AFTER)
        return place.get("step", 0), place.get("runs", 0), phase, number or 0

    def collectives(self, axis: str) -> int:
        """The number of collectives that it has started over an axis."""
        return sum(count for name, count in self.started.items() if name.rpartition(" ")[2] == axis)

    def __str__(self) -> str:
        number = self.place.get("number")
        action = f", action {number + 1} of {self.place['actions']}" if number is not None else ""
        return f"step {self.place.get('step', '?')}, {self.place.get('action', 'an unknown action')}{action}"


@dataclass(frozen=True)
class Wait:
    """A rank waits, and another one has not done its part. part: what that is; why: how this is known."""

    rank: int
    on: int
    part: str
    why: str
    skipped: bool = False  # the other one is beyond it


@dataclass(frozen=True)
class Explanation:
    """What a hang comes down to.

    Attributes:
        unmatched: the first action that another rank waits for in vain; None: every wait is matched. culprit:
        the rank that did not do its part; None: the ranks wait for each other in a cycle, or nothing hangs.
        instead: what it did instead.
        chain: who waits for whom, down to that rank.
        waits: all that are not matched.
    """

    unmatched: str | None
    culprit: int | None
    instead: str
    chain: list[str]
    waits: list[Wait]


def load(run_dir: Path) -> dict[int, Rank]:
    """The records of the latest start of a run; those of ranks that went on since then only if all did."""
    records = {}
    for path in sorted((run_dir / run_files.STALLS).glob("rank_*.json")):
        with suppress(OSError, ValueError, TypeError, KeyError):
            record = json.loads(path.read_text(encoding="utf-8"))
            records[record["rank"]] = record
    if not records:
        return {}
    newest = max(records.values(), key=lambda record: float(record["time"]))["start"]
    own = {rank: record for rank, record in records.items() if record["start"] == newest}
    own = {rank: record for rank, record in own.items() if not record.get("past")} or own
    ranks = {
        rank: _of_record(record, _flights(run_dir / run_files.STALLS / f"collectives_{rank:05d}.json"))
        for rank, record in own.items()
    }
    for record in own.values():
        for key, seen in record["seen"].items():
            known = _outdated(ranks.get(int(key)), seen["place"])
            if known is None:
                ranks[int(key)] = Rank(int(key), seen["place"], seen["host"], seen["state"])
            elif seen["state"] != ALIVE and "lost" not in known.place:
                ranks[int(key)] = replace(known, host=seen["host"], state=seen["state"])
    return ranks


def _outdated(known: Rank | None, seen: Mapping[str, Any]) -> Rank | None:
    """What is known of a rank, unless others have seen it in a later step or run of a plan than it was in
    when it left its record."""
    if known is None or not seen:
        return known
    place = known.place
    return None if (seen["step"], seen["runs"]) > (place["step"], place["runs"]) else known


def _of_record(record: Mapping[str, Any], flights: Mapping[str, tuple[int, bool]]) -> Rank:
    same = {name: record[name] for name in ("rank", "place", "host", "plan", "axes", "frames")}
    return Rank(**same, started=record["traffic"], flights=flights)


def _flights(path: Path) -> dict[str, tuple[int, bool]]:
    """Of a flight record: for each process group, the number of its last collective, and whether that is
    complete."""
    collectives: dict[str, tuple[int, bool]] = {}
    with suppress(OSError, ValueError, KeyError, TypeError):
        for entry in json.loads(path.read_text(encoding="utf-8"))["entries"]:
            if not entry["is_p2p"]:
                done = bool(entry.get("retired")) or entry.get("state") == "completed"
                collectives[entry["process_group"][0]] = entry["collective_seq_id"], done
    return collectives


def explain(ranks: Mapping[int, Rank]) -> Explanation:
    """Match what the ranks wait for, and follow the waits that are not matched."""
    if difference := _different_plans(ranks):
        rank, part, why = difference
        return Explanation(part, rank, why, [], [])
    waits = [wait for rank in ranks.values() for wait in _waits(rank, ranks)]
    culprit = _culprit(ranks, waits)
    if culprit is None:
        return Explanation(
            waits[0].part if waits else None, None, "", [_line(wait, ranks) for wait in waits], waits
        )
    missed = [wait for wait in waits if wait.on == culprit]
    first = min(missed, key=lambda wait: (ranks[wait.rank].position, wait.rank), default=None)
    return Explanation(
        first.part if first else None,
        culprit,
        _instead(ranks.get(culprit), first),
        [_line(wait, ranks) for wait in _chain(waits, culprit)],
        waits,
    )


# ---- who waits for whom


def _waits(rank: Rank, ranks: Mapping[int, Rank]) -> list[Wait]:
    """The waits of a rank that are not matched."""
    what, peer = rank.place.get("waits"), rank.place.get("peer")
    if rank.gone:
        return []
    if what is None:
        return _device_waits(rank, ranks)
    if (match := MESSAGE.match(what)) and peer is not None:
        return _unmatched_message(rank, ranks.get(peer), peer, match)
    if match := GROUP.match(what):
        return _unmatched_collective(rank, ranks, match["operation"], match["axis"], peer)
    return [] if peer is None else [Wait(rank.rank, peer, what, "")]


def _counterpart(match: re.Match[str], own: int) -> str:
    """The action of the other rank that a send or receive is matched with, as printed; own: the pipeline rank
    of this one."""
    kind, stage, microbatch = match["kind"], int(match["stage"]), match["microbatch"]
    step = 1 if kind in ("SF", "RB") else -1
    sends = kind[0] == "S"
    return f"{'R' if sends else 'S'}{kind[1]}{stage + step}.{microbatch}{'<' if sends else '>'}{own}"


def _unmatched_message(rank: Rank, peer: Rank | None, number: int, match: re.Match[str]) -> list[Wait]:
    part = match[0].removeprefix("pipeline message ")
    if peer is None or not peer.plan or not rank.axes.get("pp"):
        return [Wait(rank.rank, number, part, "")]
    wanted = _counterpart(match, list(rank.axes["pp"]).index(rank.rank))
    place = list(peer.plan).index(wanted) if wanted in peer.plan else None
    if place is None or peer.gone:
        return [Wait(rank.rank, number, part, f"its part is {wanted}")]
    there = (*rank.position[:2], IN_PLAN, place)
    if peer.position <= there:
        return [Wait(rank.rank, number, part, f"its part is {wanted}, action {place + 1} of its plan")]
    if wanted[0] == "R" or peer.position[:2] == there[:2]:  # it has started its part
        return []
    return [
        Wait(
            rank.rank,
            number,
            part,
            f"its part is {wanted}, and it is beyond that run of its plan",
            skipped=True,
        )
    ]


def _unmatched_collective(
    rank: Rank, ranks: Mapping[int, Rank], operation: str, axis: str, peer: int | None
) -> list[Wait]:
    """A collective that is not counted, such as a save's, is matched by ranks that wait for the same."""
    others = (
        [peer] if peer is not None else [number for number in rank.axes.get(axis, ()) if number != rank.rank]
    )
    # part of what is counted as reduce_scatter
    counted = f"{operation} {axis}" in rank.started or operation == "all_to_all"
    count, waits = rank.collectives(axis), []
    part = f"{operation} over {axis}" + (f", collective {count} there" if counted else "")
    for number in others:
        other = ranks.get(number)
        if other is None or not other.axes or other.gone:
            waits.append(Wait(rank.rank, number, part, ""))
            continue
        beyond = _beyond(other, rank)
        if not counted:
            if other.place.get("waits") != rank.place["waits"]:
                waits.append(Wait(rank.rank, number, part, "", beyond))
        elif (started := other.collectives(axis)) < count or (
            started == count and beyond and _waits_over(other, axis)
        ):
            waits.append(
                Wait(rank.rank, number, part, f"it has started {started}, rank {rank.rank} {count}", beyond)
            )
    return waits


def _waits_over(rank: Rank, axis: str) -> bool:
    """Whether a rank waits for a collective over an axis."""
    match = GROUP.match(str(rank.place.get("waits")))
    return match is not None and match["axis"] == axis


def _beyond(rank: Rank, other: Rank) -> bool:
    """Whether a rank is at a later place than another: within a plan only if they have the same."""
    same = rank.plan == other.plan
    return rank.position > other.position if same else rank.position[:2] > other.position[:2]


def _device_waits(rank: Rank, ranks: Mapping[int, Rank]) -> list[Wait]:
    """The collectives that the device of a rank has not completed, by torch's flight record."""
    waits = []
    for group, (number, done) in rank.flights.items():
        for other in ranks.values() if not done else ():
            last = other.flights.get(group)
            if last is not None and last[0] < number:
                part = f"collective {number} of process group {group}"
                waits.append(
                    Wait(
                        rank.rank,
                        other.rank,
                        part,
                        f"it has started {last[0]} (flight record)",
                        _beyond(other, rank),
                    )
                )
    return waits


# ---- who is to blame


def _different_plans(ranks: Mapping[int, Rank]) -> tuple[int, str, str] | None:
    """The first send or receive of a rank that the other one, in the same run of a plan, does not have: rank,
    action, description."""
    for rank in ranks.values():
        line = list(rank.axes.get("pp", ()))
        # else it may be the plan of an earlier run
        inside = rank.rank in line and rank.place.get("number") is not None
        for number, action in enumerate(rank.plan if inside else ()):
            if not (match := MESSAGE.match(f"pipeline message {action}")) or int(match["peer"]) >= len(line):
                continue
            other = ranks.get(line[int(match["peer"])])
            wanted = _counterpart(match, line.index(rank.rank))
            if other is None or not other.plan or wanted in other.plan or not _in_the_same_run(rank, other):
                continue
            why = (
                f"its plan has no {wanted}, which action {number + 1} of rank {rank.rank}, {action}, needs: "
                "the ranks have different plans"
            )
            return other.rank, action, why
    return None


def _in_the_same_run(rank: Rank, other: Rank) -> bool:
    """Whether another rank is in the run of a plan in which this one is, or has just ended it: then its plan
    is that of the same run."""
    ended = (
        other.position[:2] == (rank.position[0], rank.position[1] + 1) and other.place.get("number") is None
    )
    return ended or other.position[:3] == rank.position[:3]


def _culprit(ranks: Mapping[int, Rank], waits: Sequence[Wait]) -> int | None:
    """The rank that did not do its part: lost, or beyond what others wait for, or else at the end of the
    waits."""
    awaited = {wait.on for wait in waits}
    gone = [rank.rank for rank in ranks.values() if rank.gone and "lost" not in rank.place]
    for lost in (set(gone) & awaited, gone):
        if lost:
            return min(lost)
    if skipped := [wait for wait in waits if wait.skipped]:
        return min(skipped, key=lambda wait: (ranks[wait.rank].position, wait.rank)).on
    waiting = {wait.rank for wait in waits}
    ends = sorted(awaited - waiting)
    return min(
        ends, key=lambda end: (ranks[end].position if end in ranks else (0, 0, 0, 0), end), default=None
    )


def _chain(waits: Sequence[Wait], culprit: int) -> list[Wait]:
    """The waits that lead to a rank, the farthest first; each rank once."""
    chain: list[Wait] = []
    level = {culprit}
    while level:
        known = {culprit, *(wait.rank for wait in chain)}
        fresh = {wait.rank: wait for wait in waits if wait.on in level and wait.rank not in known}
        chain = [*fresh.values(), *chain]
        level = set(fresh)
    return chain


def _line(wait: Wait, ranks: Mapping[int, Rank]) -> str:
    rank = ranks[wait.rank]
    since = f" since {strftime('%H:%M:%S', localtime(rank.place['since']))}" if "since" in rank.place else ""
    return f"rank {wait.rank} ({rank}) waits for rank {wait.on}: {wait.part}{since}" + (
        f"; {wait.why}" if wait.why else ""
    )


def _instead(rank: Rank | None, missed: Wait | None) -> str:
    """Describes what a rank did when others waited for it; None: nothing is known of it."""
    if rank is None:
        return "it has left no record"
    if rank.place.get("failed"):
        return f"it failed: {rank.place['failed']}; it was in {rank}"
    if rank.state != ALIVE:
        return f"{rank.state}; last known in {rank}"
    skipped = "it has skipped that: " if missed is not None and missed.skipped else ""
    waits = f", awaiting {rank.place['waits']}" if rank.place.get("waits") else ""
    stack = f" ({' < '.join(reversed(rank.frames[-OWN_FRAMES:]))})" if rank.frames else ""
    return f"{skipped}it was in {rank}{waits}{stack}"
