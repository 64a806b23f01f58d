"""Explanation of a hang from the records that the ranks left in RUN_DIR/stalls/.

It identifies the rank that is responsible, and the ranks that wait for it.

The record of a rank contains its position in the plan of the step, the communication it waits for, and the
number of collectives it has started over each axis. Records are compared by these positions:

- A receive is matched with the send in the plan of the other rank, and a send with the receive. The other
  rank has not reached it, has passed it, or does not have it in its plan.
- A collective is matched by its number over the axis. A rank that has started fewer is behind; if it is
  nevertheless at a later position, it skipped one.
- If the host waits for the device, as with NCCL, torch's flight record provides the same information for the
  collectives of each process group.

Every unmatched wait points to the ranks that it waits for. The rank at the end of this chain is the one to
examine.
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
"""Order of the phases between two executions of a plan, which are counted.

A run that has to stop saves before it validates, so a rank that saves is before one that reads or runs the
first batch of the validation.
"""
IN_PLAN, AFTER = 4, 5
MESSAGE = re.compile(
    r"pipeline message (?P<kind>[SR][FB])(?P<stage>\d+)\.(?P<microbatch>\d+)[<>](?P<peer>\d+)"
)
GROUP = re.compile(r"(?P<operation>.+) over (?P<axis>\w+)")
OWN_FRAMES = 3  # frames of a stack in one line


@dataclass(frozen=True)
class Rank:
    """Known state of a rank, from its own record or from those of other ranks.

    Attributes:
        place: as `launch.peers.Place`.
        state: description of whether its process responded.
        plan: the actions of its plan; empty without a record.
        axes: the ranks along its axes.
        started: number of collectives it has started, by operation and axis ("all_reduce tp").
        flights: for each process group in torch's flight record, the number of the last collective, and
            whether it has completed.
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
        """Return whether the rank can no longer make progress."""
        return self.state != ALIVE or bool(self.place.get("failed"))

    @property
    def position(self) -> tuple[int, int, int, int]:
        """Position of the rank in the run.

        The last element is only comparable between ranks with the same plan.
        """
        place, number = self.place, self.place.get("number")
        phase = IN_PLAN if number is not None else ORDER.get(place.get("action", ""), AFTER)
        return place.get("step", 0), place.get("runs", 0), phase, number or 0

    def collectives(self, axis: str) -> int:
        """Return the number of collectives that the rank has started over an axis."""
        return sum(count for name, count in self.started.items() if name.rpartition(" ")[2] == axis)

    def __str__(self) -> str:
        number = self.place.get("number")
        action = f", action {number + 1} of {self.place['actions']}" if number is not None else ""
        return f"step {self.place.get('step', '?')}, {self.place.get('action', 'an unknown action')}{action}"


@dataclass(frozen=True)
class Wait:
    """A wait of one rank for another that has not done its part.

    Attributes:
        part: the operation that is missing.
        why: how this was determined.
    """

    rank: int
    on: int
    part: str
    why: str
    skipped: bool = False  # the other rank has passed it


@dataclass(frozen=True)
class Explanation:
    """Cause of a hang.

    Attributes:
        unmatched: the first action that another rank waits for in vain, or None if every wait is matched.
        culprit: the responsible rank, or None if the ranks wait for each other in a cycle, or nothing hangs.
        instead: what that rank did instead.
        chain: the waits that lead to that rank.
        waits: all unmatched waits.
    """

    unmatched: str | None
    culprit: int | None
    instead: str
    chain: list[str]
    waits: list[Wait]


def load(run_dir: Path) -> dict[int, Rank]:
    """Load the records of the latest start of a run.

    Records of ranks that have continued are only used if all ranks have.
    """
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
    """Return the known state of a rank, or None if others have seen it at a later position."""
    if known is None or not seen:
        return known
    place = known.place
    return None if (seen["step"], seen["runs"]) > (place["step"], place["runs"]) else known


def _of_record(record: Mapping[str, Any], flights: Mapping[str, tuple[int, bool]]) -> Rank:
    same = {name: record[name] for name in ("rank", "place", "host", "plan", "axes", "frames")}
    return Rank(**same, started=record["traffic"], flights=flights)


def _flights(path: Path) -> dict[str, tuple[int, bool]]:
    """Return the number of the last collective of each process group, and whether it has completed."""
    collectives: dict[str, tuple[int, bool]] = {}
    with suppress(OSError, ValueError, KeyError, TypeError):
        for entry in json.loads(path.read_text(encoding="utf-8"))["entries"]:
            if not entry["is_p2p"]:
                done = bool(entry.get("retired")) or entry.get("state") == "completed"
                collectives[entry["process_group"][0]] = entry["collective_seq_id"], done
    return collectives


def explain(ranks: Mapping[int, Rank]) -> Explanation:
    """Match the waits of all ranks, and follow those that are not matched."""
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
    """Return the unmatched waits of a rank."""
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
    """Return the action of the other rank that matches a send or receive, as printed.

    Args:
        own: the pipeline rank of this rank.
    """
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
        return [Wait(rank.rank, number, part, f"it should execute {wanted}")]
    there = (*rank.position[:2], IN_PLAN, place)
    if peer.position <= there:
        return [Wait(rank.rank, number, part, f"it should execute {wanted}, action {place + 1} of its plan")]
    if wanted[0] == "R" or peer.position[:2] == there[:2]:  # it has started its part
        return []
    return [
        Wait(
            rank.rank,
            number,
            part,
            f"it should have executed {wanted}, but has already passed it in its plan",
            skipped=True,
        )
    ]


def _unmatched_collective(
    rank: Rank, ranks: Mapping[int, Rank], operation: str, axis: str, peer: int | None
) -> list[Wait]:
    """Return the waits for ranks that have not started the same collective.

    Collectives that are not counted, such as those of a save, are matched by the ranks that wait for them.
    """
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
                Wait(
                    rank.rank,
                    number,
                    part,
                    f"it has started {started}, rank {rank.rank} has started {count}",
                    beyond,
                )
            )
    return waits


def _waits_over(rank: Rank, axis: str) -> bool:
    """Return whether a rank waits for a collective over an axis."""
    match = GROUP.match(str(rank.place.get("waits")))
    return match is not None and match["axis"] == axis


def _beyond(rank: Rank, other: Rank) -> bool:
    """Return whether a rank is at a later position than another.

    Positions within a plan are only compared if both ranks have the same plan.
    """
    same = rank.plan == other.plan
    return rank.position > other.position if same else rank.position[:2] > other.position[:2]


def _device_waits(rank: Rank, ranks: Mapping[int, Rank]) -> list[Wait]:
    """Return the collectives that a rank's device has not completed, according to torch's flight record."""
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
    """Find the first send or receive without a counterpart in the same execution of the other rank's plan.

    Returns:
        the other rank, the action, and a description.
    """
    for rank in ranks.values():
        line = list(rank.axes.get("pp", ()))
        # otherwise it may be the plan of an earlier run
        inside = rank.rank in line and rank.place.get("number") is not None
        for number, action in enumerate(rank.plan if inside else ()):
            if not (match := MESSAGE.match(f"pipeline message {action}")) or int(match["peer"]) >= len(line):
                continue
            other = ranks.get(line[int(match["peer"])])
            wanted = _counterpart(match, line.index(rank.rank))
            if other is None or not other.plan or wanted in other.plan or not _in_the_same_run(rank, other):
                continue
            why = (
                f"its plan does not contain {wanted}, which matches {action}, action {number + 1} "
                f"of rank {rank.rank}: the ranks have different plans"
            )
            return other.rank, action, why
    return None


def _in_the_same_run(rank: Rank, other: Rank) -> bool:
    """Return whether another rank executes the same plan as this one, or has just finished it.

    Its recorded plan is then that of the same execution.
    """
    ended = (
        other.position[:2] == (rank.position[0], rank.position[1] + 1) and other.place.get("number") is None
    )
    return ended or other.position[:3] == rank.position[:3]


def _culprit(ranks: Mapping[int, Rank], waits: Sequence[Wait]) -> int | None:
    """Return the rank that is responsible.

    This is a rank that was lost, one that has passed the position others wait for, or the one at the end of
    the waits.
    """
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
    """Return the waits that lead to a rank, the farthest first, with each rank at most once."""
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
    """Describe what a rank did while others waited for it."""
    if rank is None:
        return "it left no record"
    if rank.place.get("failed"):
        return f"it failed: {rank.place['failed']}; it was in {rank}"
    if rank.state != ALIVE:
        return f"{rank.state}; last known in {rank}"
    skipped = "it skipped this operation: " if missed is not None and missed.skipped else ""
    waits = f", awaiting {rank.place['waits']}" if rank.place.get("waits") else ""
    stack = f" ({' < '.join(reversed(rank.frames[-OWN_FRAMES:]))})" if rank.frames else ""
    return f"{skipped}it was in {rank}{waits}{stack}"
