"""The memory of each rank of a run, computed from a configuration and a number of ranks; a second for 16,384 ranks. Imports no torch.

    states          weights, gradients, master weights, moments: as the store's buckets allocate them (`states.py`)
    activations     what each unit keeps per microbatch (`activations.py`), summed along the schedule's list of actions
    communication   gradient buckets in flight, gathered weights (ZeRO-3), pipeline messages, NCCL's connections (`in_flight.py`)

tp and dp ranks of one pipeline rank use equal memory, because vocabularies and buckets are padded to equal parts, so there is one result
per pipeline rank. See `docs/memory.md` for the formulas and measurements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from megalite.build import plan
from megalite.config.dims import ParallelDims
from megalite.config.recomputation import BUDGET
from megalite.config.schema import Config
from megalite.parallel.pipeline.schedule import Kind, Schedule
from megalite.planning.activations import Activations, Held
from megalite.planning.holding import moments_of
from megalite.planning.in_flight import channel_bytes, gathered_bytes, message_bytes, open_gradients
from megalite.planning.orthogonalising import exchange
from megalite.planning.states import Device, States, Widths, model_states


@dataclass(frozen=True)
class Communication:
    """Bytes of communication buffers, see `in_flight`."""

    messages: int
    gathered: int
    gradients: int
    connections: int

    @property
    def total(self) -> int:
        return self.messages + self.gathered + self.gradients + self.connections


@dataclass(frozen=True)
class RankMemory:
    """Peak bytes of every rank in `ranks`.

    Attributes:
        states: bytes that are kept between steps too.
        activations, logits, workspace: the peak of each during a step.
        step: the peak of their sum; their own peaks may occur at different times.
        communicating: buffers of collectives and messages.
        exchanging: buffers of Muon's exchange of matrices, when no activations are held.
    """

    pp_rank: int
    ranks: range
    states: States
    activations: int
    logits: int
    workspace: int
    step: int
    communicating: Communication
    exchanging: int = 0

    @property
    def parameters(self) -> int:
        return self.states.weights

    @property
    def gradients(self) -> int:
        return self.states.gradients

    @property
    def optimizer(self) -> int:
        return self.states.optimizer

    @property
    def communication(self) -> int:
        return self.communicating.total

    @property
    def total(self) -> int:
        """Peak on the device, without offloaded state (`states.host` and `states.disk`)."""
        return self.states.device + max(self.step, self.exchanging) + self.communication

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: the range of ranks as its start and length, every part in bytes."""
        names = ("parameters", "gradients", "optimizer", "activations", "logits", "communication", "total")
        tree = {"states": asdict(self.states), "communicating": asdict(self.communicating), "workspace": self.workspace, "step": self.step}
        tree |= {"exchanging": self.exchanging}
        return {
            "pp_rank": self.pp_rank,
            "first_rank": self.ranks.start,
            "ranks": len(self.ranks),
            **{name: getattr(self, name) for name in names},
            **tree,
        }


def estimate(
    config: Config, world_size: int, device: Device = "cuda", schedule: Schedule | None = None, pp_ranks: Sequence[int] | None = None
) -> list[RankMemory]:
    """The memory of every rank, one entry per pipeline rank.

    Args:
        config: complete and validated for this number of ranks.
        device: what the ranks compute on. It determines the attention kernel, the default loss chunk, and where offloaded state is stored.
        schedule: `plan.schedule(config, …)`, if the caller has it already.
        pp_ranks: the pipeline ranks to compute, by default all.
    """
    config = settled(config, world_size)
    if config.train.recompute == BUDGET:
        from megalite.planning.budget import resolved

        config = resolved(config, device)
    dims = ParallelDims.of(config)
    schedule = schedule or plan.schedule(config, dims.microbatches)
    count = dims.stage_ranks
    wanted = range(dims.pp) if pp_ranks is None else pp_ranks
    return [_rank(config, schedule, pp_rank, range(pp_rank * count, (pp_rank + 1) * count), device) for pp_rank in wanted]


def settled(config: Config, world_size: int) -> Config:
    """The configuration with dp and the partition filled in; the partition is expensive to compute and is read often."""
    config = replace(config, parallel=replace(config.parallel, dp=ParallelDims.of(config, world_size).dp))
    return replace(config, parallel=replace(config.parallel, partition=plan.partition(config)))


def _rank(config: Config, schedule: Schedule, pp_rank: int, ranks: range, device: Device) -> RankMemory:
    buckets = plan.buckets_of(config, pp_rank)
    activations = Activations(config, device, Kind.WEIGHT in schedule.passes, config.lora)
    units = {stage: units for stage, units in plan.units_of(config).items() if schedule.placement[stage] == pp_rank}
    tables = sum(map(activations.tables, units.values()))
    profile = Profile({stage: activations.stage(numbers) for stage, numbers in units.items()}, tables)
    profile.follow(schedule, pp_rank)
    communication = Communication(
        message_bytes(schedule, pp_rank, activations.message),
        gathered_bytes(schedule, pp_rank, buckets, Widths.of(config).compute),
        open_gradients(config, schedule, buckets, device),
        channel_bytes(config, schedule, pp_rank) if device == "cuda" else 0,
    )
    return RankMemory(
        pp_rank,
        ranks,
        model_states(config, buckets, pp_rank, device),
        profile.activations,
        profile.logits,
        profile.workspace,
        profile.step,
        communication,
        exchange(config, buckets).buffers,
    )


class Profile:
    """Memory of a rank's stages while it runs its list of actions; after `follow`, the peak of each kind.

    A forward adds what its units save. A backward goes through them in reverse: a recomputed unit temporarily needs more, then its saved
    bytes are freed, except what a weight pass needs.
    """

    def __init__(self, stages: dict[int, list[Held]], tables: int):
        self.stages = stages
        self.activations = self.logits = self.workspace = self.step = 0
        self._tables, self._held, self._logits = tables, tables, 0

    def follow(self, schedule: Schedule, rank: int) -> None:
        """Note the peaks of a rank, at the passes at which it can hold most."""
        stages = [self.stages[stage] for stage in schedule.stages_of(rank)]
        for moment in moments_of(schedule, rank):
            self._held, self._logits = self._tables, 0
            for units, held, deferred in zip(stages, moment.held, moment.deferred, strict=True):
                self._held += sum(held * unit.saved + deferred * unit.stash for unit in units)
                self._logits += sum(held * unit.logits + deferred * unit.logits_stash for unit in units)
            (self._forward if moment.kind is Kind.FORWARD else self._backward)(stages[moment.place])

    def _note(self, more: int = 0, logits: int = 0, workspace: int = 0) -> None:
        activations, logits = self._held + more, self._logits + logits
        self.activations, self.logits = max(self.activations, activations), max(self.logits, logits)
        self.workspace, self.step = max(self.workspace, workspace), max(self.step, activations + logits + workspace)

    def _forward(self, units: Sequence[Held]) -> None:
        for unit in units:
            self._held, self._logits = self._held + unit.saved, self._logits + unit.logits
            self._note(logits=unit.logits_chunk)

    def _backward(self, units: Sequence[Held]) -> None:
        for unit in reversed(units):
            self._note(unit.recomputed + unit.stash_first, workspace=unit.workspace)
            self._held += unit.stash - unit.saved
            self._logits += unit.logits_stash - unit.logits
        self._note()
