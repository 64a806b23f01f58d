"""Pipeline schedule as data: which rank computes which stage for which microbatch, in which order.

This module does not import torch. A schedule is a pure function of (name, ranks, microbatches, virtual
stages, costs), see `generator.build`: a placement (stage → rank) and one list of actions for each rank. The
same object is printed, validated, simulated, drawn and executed, so that the tools predict what actually
runs. Code that reads a schedule must not assume that the number of a stage is its rank, or that the loss is
on the last rank: use `placement`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple


class ScheduleError(ValueError):
    """Raised if a schedule cannot be built, or would not compute the right result.

    The message contains the rank, the action and the reason.
    """


class ActionKind(StrEnum):
    """Kinds of actions: compute passes, sends and receives, and gathers and reshards of weights."""

    FORWARD = "F"
    BACKWARD = "B"  # gradient of the input; of the weights too, unless the schedule has a WEIGHT pass
    WEIGHT = "W"  # gradient of the weights only
    SEND_FORWARD = "SF"
    RECEIVE_FORWARD = "RF"
    SEND_BACKWARD = "SB"
    RECEIVE_BACKWARD = "RB"
    GATHER = "G"  # a bucket of weights, over data parallelism (ZeRO-3)
    RESHARD = "R"  # free the bucket's full weights; this rank's shard remains


class Action(NamedTuple):
    """One action of one rank.

    `stage` is on this rank: the consuming stage of a receive, the producing stage of a send.

    Printed form: F0.3 is stage 0's forward of microbatch 3, SF0.3>1 sends its output to rank 1, RF1.3<0
    receives it from rank 0. A gather or reshard belongs to the computation that follows it in the list: G2@5
    starts gathering the rank's bucket 2 when that computation reaches unit 5 of the model, R2@5 frees it when
    the computation leaves unit 5; G2 starts immediately.
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
    """Durations of one microbatch on a rank's whole share of the model, in any unit.

    A virtual stage takes its part of it. Schedules are built for these durations, never for measured ones,
    which would differ between ranks.
    """

    forward: float = 1.0
    input_backward: float = 1.0
    weight_backward: float = 1.0
    comm: float = 0.0  # latency of one message between two ranks


class Unit(NamedTuple):
    """A unit of the model (embedding, layer, head), with the buckets of shards of its weights."""

    number: int
    buckets: tuple[int, ...]


@dataclass(frozen=True)
class Schedule:
    """Plan of one step.

    Attributes:
        name: name of the generator.
        ranks: size of the pipeline axis.
        stages: number of parts of the model, a multiple of ranks; larger than ranks if ranks have several
            (virtual) stages.
        microbatches: microbatches of one step.
        placement: the rank of each stage.
        actions: for each rank, its actions in order.
        activation_limit: for each rank, the maximum number of (stage, microbatch) activations that it keeps
            at once, each from its forward to the end of its last pass.
        passes: the compute kinds that every microbatch passes through on every stage; only FORWARD in
            evaluation.
        units: for each stage, its units, if their weights are sharded and gathered for use (ZeRO-3);
            otherwise empty.
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
        """Hash the sizes only.

        Schedules are keys of caches, and a large one has a hundred thousand actions.
        """
        return hash((self.name, self.ranks, self.stages, self.microbatches, self.passes))

    @cached_property
    def hash(self) -> str:
        """Return a digest of the plan, independent of rank, machine and Python version.

        The ranks compare it at startup.
        """
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
        """Return the number of actions at the start of each rank's list that can be executed twice.

        These are forwards with their messages and gathers, before any backward. They are closed under
        messages: every receive in a prefix has its send in a prefix. All ranks can therefore discard the
        results and messages of their prefixes, and start again.
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
            """Return the length of a rank's prefix up to the first receive whose send is in no prefix."""
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
        """Return the rank's compute actions, without messages, gathers and reshards."""
        return [action for action in self.actions[rank] if action.is_compute]

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages of a rank, in ascending order."""
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
    """Return the compute actions, on any rank, whose results a compute action needs."""
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
    """Return the maximum number of (stage, microbatch) activations that each rank keeps at once.

    An activation is kept from its forward to the end of its `until` pass.

    Args:
        until: WEIGHT also includes what a split backward keeps for the weight gradient. If the schedule does
            not have this pass, activations are kept to the end of its last pass: the backward, or the forward
            in evaluation.
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
