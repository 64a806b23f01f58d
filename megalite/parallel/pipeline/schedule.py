"""A pipeline schedule as data: which rank computes which stage for which microbatch, in which order. Imports no torch.

A schedule is a pure function of (name, ranks, microbatches, virtual stages, costs), see `generator.build`: a placement (stage → rank) and
one list of actions for each rank. The very same object is printed, validated, simulated, drawn and executed, so what the tools predict is
what runs.
Nothing that reads a schedule may assume that a stage's number is its rank, or that the loss is on the last rank: `placement` says it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple


class ScheduleError(ValueError):
    """A schedule that cannot be built, or would not run to the right result; the message names rank, action and reason."""


class Kind(StrEnum):
    """What an action does. Three compute, four move a tensor between two ranks of the pipeline, two make weights whole and free them."""

    FORWARD = "F"
    BACKWARD = "B"  # gradient of the input; of the weights too, unless the schedule has a WEIGHT pass
    WEIGHT = "W"  # gradient of the weights alone
    SEND_FORWARD = "SF"
    RECEIVE_FORWARD = "RF"
    SEND_BACKWARD = "SB"
    RECEIVE_BACKWARD = "RB"
    GATHER = "G"  # a bucket of weights, over data parallelism (ZeRO-3)
    RESHARD = "R"  # keep this rank's shard of the bucket alone


class Action(NamedTuple):
    """One thing that one rank does. `stage` is this rank's own: a receive names the stage that consumes, a send the one that produced.

    Printed compactly: F0.3 is stage 0's forward of microbatch 3, SF0.3>1 sends its output to rank 1, RF1.3<0 receives it from rank 0.
    A gather or reshard belongs to the computation that follows it in the list: G2@5 begins to gather the rank's bucket 2 when that
    computation reaches unit 5 of the model, R2@5 frees it when it leaves unit 5; G2 begins at once.
    """

    kind: Kind
    stage: int
    microbatch: int
    peer: int | None = None  # the other rank of a send or receive
    bucket: int | None = None  # of a gather or reshard
    unit: int | None = None  # with which a gather or reshard happens

    @property
    def is_compute(self) -> bool:
        return self.peer is None and self.bucket is None

    @property
    def is_message(self) -> bool:
        return self.peer is not None

    @property
    def is_send(self) -> bool:
        return self.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)

    def __repr__(self) -> str:
        if self.bucket is not None:
            return f"{self.kind.value}{self.bucket}" + ("" if self.unit is None else f"@{self.unit}")
        peer = "" if self.peer is None else f"{'>' if self.is_send else '<'}{self.peer}"
        return f"{self.kind.value}{self.stage}.{self.microbatch}{peer}"


class Costs(NamedTuple):
    """How long one microbatch takes on a rank's whole share of the model (a virtual stage takes its part of it), in any unit.

    A plan is made for these durations; it never depends on measured ones, which would differ between ranks.
    """

    forward: float = 1.0
    input_backward: float = 1.0
    weight_backward: float = 1.0
    comm: float = 0.0  # latency of one message between two ranks


class Unit(NamedTuple):
    """A unit of the model (embedding, layer, head) on its rank, and the rank's buckets that hold its weights as shards."""

    number: int
    buckets: tuple[int, ...]


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
        activation_limit: for each rank, the promise of how many (stage, microbatch) activations it holds at most, from their forward to
            the end of their last pass.
        passes: the compute kinds that every microbatch goes through on every stage; FORWARD alone is evaluation.
        units: for each stage its units, where their weights are kept as shards and gathered for use; else empty.
    """

    name: str
    ranks: int
    stages: int
    microbatches: int
    placement: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]
    activation_limit: tuple[int, ...]
    passes: tuple[Kind, ...] = (Kind.FORWARD, Kind.BACKWARD)
    units: tuple[tuple[Unit, ...], ...] = ()

    @cached_property
    def hash(self) -> str:
        """A digest that is equal on every rank, machine and Python exactly where the plans are equal."""
        passes = "".join(kind.value for kind in self.passes)
        shape = (self.name, self.ranks, self.stages, self.microbatches, self.placement, passes, self.activation_limit, self.units)
        return hashlib.sha256(repr((*shape, self.actions)).encode()).hexdigest()[:16]

    @cached_property
    def forward_prefix(self) -> tuple[int, ...]:
        """For each rank, how many actions at the start of its list can be run twice: forwards, what they need and send, before any
        backward.

        Closed over messages: what a prefix receives is sent by a prefix. All ranks can therefore throw away what their prefixes did, and
        what they sent to each other, and start again.
        """
        forward = (Kind.FORWARD, Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD, Kind.GATHER, Kind.RESHARD)
        lengths = [next((i for i, action in enumerate(actions) if action.kind not in forward), len(actions)) for actions in self.actions]
        sent_at = {action[1:3]: i for actions in self.actions for i, action in enumerate(actions) if action.kind is Kind.SEND_FORWARD}

        def cut(rank: int) -> int:
            """The length of a rank's prefix in front of the first receive whose send is in no prefix."""
            for i, action in enumerate(self.actions[rank][: lengths[rank]]):
                if action.kind is Kind.RECEIVE_FORWARD:
                    assert action.peer is not None
                    if sent_at[action.stage - 1, action.microbatch] >= lengths[action.peer]:
                        return i
            return lengths[rank]

        while (shorter := [cut(rank) for rank in range(self.ranks)]) != lengths:
            lengths = shorter
        return tuple(lengths)

    def compute(self, rank: int) -> list[Action]:
        """The rank's compute actions, without its messages and gatherings."""
        return [action for action in self.actions[rank] if action.is_compute]

    def stages_of(self, rank: int) -> list[int]:
        """The stages that a rank holds, in ascending order."""
        return [stage for stage, owner in enumerate(self.placement) if owner == rank]

    def __str__(self) -> str:
        head = f"{self.name}: {self.stages} stages on {self.ranks} ranks, {self.microbatches} microbatches, hash {self.hash}"
        return "\n".join([head, *(f"rank {rank}: " + " ".join(map(repr, actions)) for rank, actions in enumerate(self.actions))])


def dependencies(action: Action, stages: int) -> list[Action]:
    """The compute actions whose results a compute action needs, wherever they run."""
    kind, stage, microbatch = action[:3]
    if kind is Kind.FORWARD:
        return [Action(kind, stage - 1, microbatch)] if stage > 0 else []
    if kind is Kind.WEIGHT:
        return [Action(Kind.BACKWARD, stage, microbatch)]
    own = [Action(Kind.FORWARD, stage, microbatch)]
    return [*own, Action(kind, stage + 1, microbatch)] if stage + 1 < stages else own


def peak_activations(schedule: Schedule, until: Kind = Kind.BACKWARD, sizes: Sequence[float] | None = None) -> list[float]:
    """For each rank, the most (stage, microbatch) activations held at once, each from its forward to the end of its `until` pass.

    `until=Kind.WEIGHT` counts what a split backward keeps for the weight gradient too; where the backward is whole, nothing outlives it.
    In evaluation nothing outlives its forward. `sizes` gives the memory of one activation on each stage, by default each counts 1.
    """
    last = until if until in schedule.passes else schedule.passes[-1]
    size = sizes or [1] * schedule.stages
    peaks: list[float] = []
    for actions in schedule.actions:
        held: float = 0
        peak: float = 0
        for kind, stage, *_ in actions:
            if kind is Kind.FORWARD:
                held += size[stage]
                peak = max(peak, held)
            if kind is last:
                held -= size[stage]
        peaks.append(peak)
    return peaks
