"""A pipeline schedule as data: which rank computes which stage for which microbatch, in which order. Imports no torch.

A schedule is a pure function of (name, stages, microbatches): a placement (stage → rank) and one list of actions for each rank.
The very same object is printed, validated, simulated, drawn and executed, so what the tools predict is what runs.
Nothing that reads a schedule may assume that a stage's number is its rank, or that the loss is on the last rank: `placement` says it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import chain
from typing import NamedTuple


class ScheduleError(ValueError):
    """A schedule that cannot be built, or would not run to the right result; the message names rank, action and reason."""


class Kind(StrEnum):
    """What an action does. The first three compute; the others move a tensor between two ranks."""

    FORWARD = "F"
    BACKWARD = "B"  # gradient of the input; of the weights too, unless the schedule has a WEIGHT pass
    WEIGHT = "W"  # gradient of the weights alone
    SEND_FORWARD = "SF"
    RECEIVE_FORWARD = "RF"
    SEND_BACKWARD = "SB"
    RECEIVE_BACKWARD = "RB"


class Action(NamedTuple):
    """One thing that one rank does. `stage` is this rank's own: a receive names the stage that consumes, a send the one that produced.

    Printed compactly: F0.3 is stage 0's forward of microbatch 3, SF0.3>1 sends its output to rank 1, RF1.3<0 receives it from rank 0.
    """

    kind: Kind
    stage: int
    microbatch: int
    peer: int | None = None  # the other rank of a send or receive; None for compute

    @property
    def is_compute(self) -> bool:
        return self.peer is None

    @property
    def is_send(self) -> bool:
        return self.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)

    def __repr__(self) -> str:
        peer = "" if self.peer is None else f"{'>' if self.is_send else '<'}{self.peer}"
        return f"{self.kind.value}{self.stage}.{self.microbatch}{peer}"


@dataclass(frozen=True)
class Schedule:
    """A plan for one step.

    Attributes:
        name: which generator made it.
        ranks: size of the pipeline axis.
        stages: parts of the model, first to last; a multiple of ranks when ranks hold several (virtual) stages.
        microbatches: forward passes of one step.
        placement: the rank of each stage.
        actions: for each rank, what it does, in order.
        activation_limit: for each rank, the promise of how many (stage, microbatch) activations it holds at most.
        passes: the compute kinds that every microbatch goes through on every stage; FORWARD alone is evaluation.
    """

    name: str
    ranks: int
    stages: int
    microbatches: int
    placement: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]
    activation_limit: tuple[int, ...]
    passes: tuple[Kind, ...] = (Kind.FORWARD, Kind.BACKWARD)

    @cached_property
    def hash(self) -> str:
        """A digest that is equal on every rank, machine and Python exactly where the plans are equal."""
        passes = "".join(kind.value for kind in self.passes)
        plan = (self.name, self.ranks, self.stages, self.microbatches, self.placement, passes, self.activation_limit, self.actions)
        return hashlib.sha256(repr(plan).encode()).hexdigest()[:16]

    def compute(self, rank: int) -> list[Action]:
        """The rank's compute actions, without its sends and receives."""
        return [action for action in self.actions[rank] if action.is_compute]

    def stages_of(self, rank: int) -> list[int]:
        """The stages that a rank holds, in ascending order."""
        return [stage for stage, owner in enumerate(self.placement) if owner == rank]

    def __str__(self) -> str:
        head = f"{self.name}: {self.stages} stages on {self.ranks} ranks, {self.microbatches} microbatches, hash {self.hash}"
        return "\n".join([head, *(f"rank {rank}: " + " ".join(map(repr, actions)) for rank, actions in enumerate(self.actions))])


def dependencies(action: Action, stages: int) -> list[Action]:
    """The compute actions whose results a compute action needs, wherever they run."""
    kind, stage, microbatch, _ = action
    if kind is Kind.FORWARD:
        return [Action(kind, stage - 1, microbatch)] if stage > 0 else []
    if kind is Kind.WEIGHT:
        return [Action(Kind.BACKWARD, stage, microbatch)]
    own = [Action(Kind.FORWARD, stage, microbatch)]
    return [*own, Action(kind, stage + 1, microbatch)] if stage + 1 < stages else own


def peak_activations(schedule: Schedule, until: Kind = Kind.BACKWARD) -> list[int]:
    """For each rank, the most (stage, microbatch) activations held at once, each from its forward to the end of its `until` pass.

    `until=Kind.WEIGHT` counts what a split backward keeps for the weight gradient too. In evaluation nothing outlives its forward.
    """
    last = until if until in schedule.passes else Kind.FORWARD
    peaks = []
    for actions in schedule.actions:
        held = peak = 0
        for action in actions:
            held += action.kind is Kind.FORWARD
            peak = max(peak, held)
            held -= action.kind is last
        peaks.append(peak)
    return peaks


def gpipe(stage: int, stages: int, microbatches: int) -> list[Action]:
    """GPipe (Huang et al. 2019): every forward, then every backward.

    Backward runs in ascending order, not mirrored as in the paper: gradients then add in the same order under every schedule, bit for bit.
    """
    return [Action(kind, stage, i) for kind in (Kind.FORWARD, Kind.BACKWARD) for i in range(microbatches)]


def one_f_one_b(stage: int, stages: int, microbatches: int) -> list[Action]:
    """1F1B (Narayanan et al. 2019): warm up, alternate, drain. At most `stages - stage` activations are held."""
    warmup = min(stages - stage - 1, microbatches)
    forward, backward = ([Action(kind, stage, i) for i in range(microbatches)] for kind in (Kind.FORWARD, Kind.BACKWARD))
    alternate = chain.from_iterable(zip(forward[warmup:], backward, strict=False))
    return [*forward[:warmup], *alternate, *backward[microbatches - warmup :]]


class Generator(NamedTuple):
    """A schedule with one stage for each rank: a stage's actions, and the activations that it promises to hold at most."""

    actions: Callable[[int, int, int], Sequence[Action]]  # (stage, stages, microbatches)
    activations: Callable[[int, int, int], int]


SCHEDULES = {
    "gpipe": Generator(gpipe, lambda stage, stages, microbatches: microbatches),
    "1f1b": Generator(one_f_one_b, lambda stage, stages, microbatches: min(stages - stage, microbatches)),
}


def build(name: str, stages: int, microbatches: int, forward_only: bool = False) -> Schedule:
    """The schedule of compute actions; `with_communication` adds the sends and receives.

    Args:
        forward_only: keep only the forwards, in the same order, for evaluation.

    Raises:
        ScheduleError: the name is unknown, or a size is below 1.
    """
    if name not in SCHEDULES:
        raise ScheduleError(f"parallel.schedule = {name!r} is not a schedule. Choose one of: {', '.join(SCHEDULES)}.")
    for what, size in (("parallel.pp", stages), ("the number of microbatches of a step", microbatches)):
        if size < 1:
            raise ScheduleError(f"{what} = {size}: a pipeline needs at least 1.")
    generator, each = SCHEDULES[name], tuple(range(stages))
    actions = tuple(tuple(generator.actions(stage, stages, microbatches)) for stage in each)
    limit = tuple(generator.activations(stage, stages, microbatches) for stage in each)
    schedule = Schedule(name, stages, stages, microbatches, each, actions, limit)
    return _forward_only(schedule) if forward_only else schedule


def _forward_only(schedule: Schedule) -> Schedule:
    """Dropping the other passes keeps the order valid, since a forward depends on forwards alone."""
    actions = tuple(tuple(action for action in actions if action.kind is Kind.FORWARD) for actions in schedule.actions)
    return replace(schedule, actions=actions, activation_limit=(1,) * schedule.ranks, passes=(Kind.FORWARD,))
