"""A pipeline schedule as data: which rank computes which stage for which microbatch, in which order. Imports
no torch.

A schedule is a pure function of (name, ranks, microbatches, virtual stages, costs), see `generator.build`: a
placement (stage → rank) and one list of actions for each rank. The same object is printed, validated,
simulated, drawn and executed, so what the tools predict is what runs. Code that reads a schedule must not
assume that a stage's number is its rank, or that the loss is on the last rank: use `placement`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple


class ScheduleError(ValueError):
    """A schedule cannot be built, or would not compute the right result; the message names rank, action and
    reason."""


class ActionKind(StrEnum):
    """The kinds of actions: three compute, four send or receive between two pipeline ranks, two gather and
    free weights."""

    FORWARD = "F"
    BACKWARD = "B"  # gradient of the input; of the weights too, unless the schedule has a WEIGHT pass
    WEIGHT = "W"  # gradient of the weights alone
    SEND_FORWARD = "SF"
    RECEIVE_FORWARD = "RF"
    SEND_BACKWARD = "SB"
    RECEIVE_BACKWARD = "RB"
    GATHER = "G"  # a bucket of weights, over data parallelism (ZeRO-3)
    RESHARD = "R"  # free the bucket's full weights; this rank's shard remains


class Action(NamedTuple):
    """One action of one rank. `stage` is on this rank: the consuming stage of a receive, the producing stage
    of a send.

    Printed form: F0.3 is stage 0's forward of microbatch 3, SF0.3>1 sends its output to rank 1, RF1.3<0
    receives it from rank 0. A gather or reshard belongs to the computation that follows it in the list: G2@5
    starts gathering the rank's bucket 2 when that computation reaches unit 5 of the model, R2@5 frees it when
    the computation leaves unit 5; G2 starts at once.
    """

    kind: ActionKind
    stage: int
    microbatch: int
    peer: int | None = None  # the other rank of a send or receive
    bucket: int | None = None  # of a gather or reshard
    unit: int | None = None  # the unit of the model during which a gather or reshard happens

    @property
    def is_compute(self) -> bool:
        return self.peer is None and self.bucket is None

    @property
    def is_message(self) -> bool:
        return self.peer is not None

    @property
    def is_send(self) -> bool:
        return self.kind in (ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD)

    def __repr__(self) -> str:
        if self.bucket is not None:
            return f"{self.kind.value}{self.bucket}" + ("" if self.unit is None else f"@{self.unit}")
        peer = "" if self.peer is None else f"{'>' if self.is_send else '<'}{self.peer}"
        return f"{self.kind.value}{self.stage}.{self.microbatch}{peer}"


class Costs(NamedTuple):
    """Durations of one microbatch on a rank's whole share of the model (a virtual stage takes its part of
    it), in any unit.

    Schedules are built for these durations, never for measured ones, which would differ between ranks.
    """

    forward: float = 1.0
    input_backward: float = 1.0
    weight_backward: float = 1.0
    comm: float = 0.0  # latency of one message between two ranks


class Unit(NamedTuple):
    """A unit of the model (embedding, layer, head), and the numbers of its rank's buckets that hold shards of
    its weights."""

    number: int
    buckets: tuple[int, ...]


@dataclass(frozen=True)
class Schedule:
    """The plan of one step.

    Attributes:
        name: name of the generator.
        ranks: size of the pipeline axis.
        stages: number of parts of the model, a multiple of ranks; larger than ranks if ranks hold several
            (virtual) stages.
        microbatches: microbatches of one step.
        placement: the rank of each stage.
        actions: for each rank, its actions in order.
        activation_limit: for each rank, the maximum number of (stage, microbatch) activations that it holds
            at once, each from its forward to the end of its last pass.
        passes: the compute kinds that every microbatch passes through on every stage; only FORWARD in
            evaluation.
        units: for each stage, its units, if their weights are sharded and gathered for use (ZeRO-3); else
            empty.
    """

    name: str
    ranks: int
    stages: int
    microbatches: int
    placement: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]
    activation_limit: tuple[int, ...]
    passes: tuple[ActionKind, ...] = (ActionKind.FORWARD, ActionKind.BACKWARD)
    units: tuple[tuple[Unit, ...], ...] = ()

    def __hash__(self) -> int:
        """Of the sizes alone: schedules are the keys of caches, and the actions of a large one are a hundred
        thousand."""
        return hash((self.name, self.ranks, self.stages, self.microbatches, self.passes))

    @cached_property
    def hash(self) -> str:
        """A digest of the plan, independent of rank, machine and Python version: ranks compare it at
        start-up."""
        passes = "".join(kind.value for kind in self.passes)
        shape = (
            self.name,
            self.ranks,
            self.stages,
            self.microbatches,
            self.placement,
            passes,
            self.activation_limit,
            self.units,
        )
        return hashlib.sha256(repr((*shape, self.actions)).encode()).hexdigest()[:16]

    @cached_property
    def forward_prefix(self) -> tuple[int, ...]:
        """For each rank, the number of actions at the start of its list that can be run twice: forwards with
        their messages and gathers, before any backward.

        Closed under messages: every receive in a prefix has its send in a prefix. All ranks can therefore
        discard the results of their prefixes and their messages, and start again.
        """
        forward = (
            ActionKind.FORWARD,
            ActionKind.SEND_FORWARD,
            ActionKind.RECEIVE_FORWARD,
            ActionKind.GATHER,
            ActionKind.RESHARD,
        )
        lengths = [
            next((i for i, action in enumerate(actions) if action.kind not in forward), len(actions))
            for actions in self.actions
        ]
        sent_at = {
            action[1:3]: i
            for actions in self.actions
            for i, action in enumerate(actions)
            if action.kind is ActionKind.SEND_FORWARD
        }

        def cut(rank: int) -> int:
            """The length of a rank's prefix up to the first receive whose send is in no prefix."""
            for i, action in enumerate(self.actions[rank][: lengths[rank]]):
                if action.kind is ActionKind.RECEIVE_FORWARD:
                    assert action.peer is not None
                    if sent_at[action.stage - 1, action.microbatch] >= lengths[action.peer]:
                        return i
            return lengths[rank]

        # A shorter prefix may lose sends that other prefixes receive: repeat until nothing changes.
        while (shorter := [cut(rank) for rank in range(self.ranks)]) != lengths:
            lengths = shorter
        return tuple(lengths)

    def compute(self, rank: int) -> list[Action]:
        """The rank's compute actions, without messages, gathers and reshards."""
        return [action for action in self.actions[rank] if action.is_compute]

    def stages_of(self, rank: int) -> list[int]:
        """The stages that a rank holds, in ascending order."""
        return [stage for stage, owner in enumerate(self.placement) if owner == rank]

    def __str__(self) -> str:
        head = (
            f"{self.name}: {self.stages} stages on {self.ranks} ranks, {self.microbatches} microbatches, "
            f"hash {self.hash}"
        )
        return "\n".join(
            [
                head,
                *(
                    f"rank {rank}: " + " ".join(map(repr, actions))
                    for rank, actions in enumerate(self.actions)
                ),
            ]
        )


def dependencies(action: Action, stages: int) -> list[Action]:
    """The compute actions whose results a compute action needs, on any rank."""
    kind, stage, microbatch = action[:3]
    if kind is ActionKind.FORWARD:
        return [Action(kind, stage - 1, microbatch)] if stage > 0 else []
    if kind is ActionKind.WEIGHT:
        return [Action(ActionKind.BACKWARD, stage, microbatch)]
    own = [Action(ActionKind.FORWARD, stage, microbatch)]
    return [*own, Action(kind, stage + 1, microbatch)] if stage + 1 < stages else own


def peak_activations(
    schedule: Schedule, until: ActionKind = ActionKind.BACKWARD, sizes: Sequence[float] | None = None
) -> list[float]:
    """For each rank, the maximum of (stage, microbatch) activations held at once, each from its forward to
    the end of its `until` pass.

    Args:
        until: WEIGHT also counts what a split backward keeps for the weight gradient. Without that pass in
        the schedule, activations are
            held to the end of its last pass: the backward, or the forward in evaluation.
        sizes: memory of one activation on each stage; default: 1 each.
    """
    last = until if until in schedule.passes else schedule.passes[-1]
    size = sizes or [1] * schedule.stages
    peaks: list[float] = []
    for actions in schedule.actions:
        held: float = 0
        peak: float = 0
        for kind, stage, *_ in actions:
            if kind is ActionKind.FORWARD:
                held += size[stage]
                peak = max(peak, held)
            if kind is last:
                held -= size[stage]
        peaks.append(peak)
    return peaks
