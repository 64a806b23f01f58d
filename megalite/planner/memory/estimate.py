"""The memory of each rank of a run, computed from a configuration and a number of ranks; a second for 16,384
ranks.

    states          weights, gradients, master weights, moments: as the store's buckets allocate them
                    (`states.py`)
    activations     what each unit keeps per microbatch (`activations.py`), summed along the schedule's list
                    of actions
    communication   gradient buckets in flight, gathered weights (ZeRO-3), pipeline messages, NCCL's
                    connections (`buffers.py`)

tp and dp ranks of one pipeline rank use equal memory, because vocabularies and buckets are padded to equal
parts, so there is one result per pipeline rank. See `docs/memory.md` for the formulas and measurements.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from megalite.assembly import plan
from megalite.config.dims import ParallelDims
from megalite.config.recompute import BUDGET
from megalite.config.schema import Config
from megalite.model.unit_numbers import head_unit, layers_in
from megalite.parallel.fp8_choice import Fp8Options
from megalite.parallel.pipeline.schedule import ActionKind, Schedule
from megalite.parallel.sharding.buckets import BucketLayout
from megalite.planner.cost.muon_exchange import exchange
from megalite.planner.memory.activations import Activations, HeldBytes
from megalite.planner.memory.buffers import (
    channel_bytes,
    gathered_bytes,
    message_bytes,
    open_gradients,
    values_bytes,
)
from megalite.planner.memory.loading import loading_bytes
from megalite.planner.memory.peak_passes import loads, moments_of
from megalite.planner.memory.states import DeviceType, States, Widths, copying_bytes, model_states
from megalite.planner.memory.teacher import teacher_bytes


@dataclass(frozen=True)
class Communication:
    """Bytes of communication buffers, see `buffers`."""

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
        teacher: a teacher's weights, states and logits (`memory.teacher`).
        loading: CPU memory besides the states while a quantized base is read, before the first step
            (`memory.loading`).
        copying: CPU memory of copies of the state (`checkpoint.copy_interval`).
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
    teacher: int = 0
    loading: int = 0
    copying: int = 0

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
        """Return the peak on the device, without offloaded state (`states.host` and `states.disk`)."""
        return self.states.device + max(self.step, self.exchanging) + self.communication + self.teacher

    @property
    def host(self) -> int:
        """Return the peak in CPU memory: offloaded state, and what loading or copies need."""
        return self.states.host + max(self.loading, self.copying)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON: the range of ranks as its start and length, every part in bytes."""
        names = ("parameters", "gradients", "optimizer", "activations", "logits", "communication", "total")
        tree = {
            "states": asdict(self.states),
            "communicating": asdict(self.communicating),
            "workspace": self.workspace,
            "step": self.step,
        }
        tree |= {"exchanging": self.exchanging, "teacher": self.teacher, "loading": self.loading}
        tree |= {"copying": self.copying}
        return {
            "pp_rank": self.pp_rank,
            "first_rank": self.ranks.start,
            "ranks": len(self.ranks),
            **{name: getattr(self, name) for name in names},
            **tree,
        }


def estimate(
    config: Config,
    world_size: int,
    device: DeviceType = "cuda",
    schedule: Schedule | None = None,
    pp_ranks: Sequence[int] | None = None,
) -> list[RankMemory]:
    """Estimate the memory of every rank, one entry per pipeline rank.

    Args:
        config: complete and validated for this number of ranks.
        device: what the ranks compute on. It determines the attention kernel, the default loss chunk, and
            where offloaded state is stored.
        schedule: `plan.schedule(config, …)`, if the caller has it already.
        pp_ranks: the pipeline ranks to compute, by default all.
    """
    config = resolve_layout(config, world_size)
    if config.train.recompute == BUDGET:
        from megalite.planner.budget.decision import resolve_budget

        config = resolve_budget(config, device)
    dims = ParallelDims.of(config)
    schedule = schedule or plan.schedule(config, dims.microbatches)
    activations = Activations(config, device, ActionKind.WEIGHT in schedule.passes, config.lora)
    standing, count = Standing(config, schedule, activations), dims.stage_ranks
    wanted = range(dims.pp) if pp_ranks is None else pp_ranks
    return [
        _rank(schedule, pp_rank, range(pp_rank * count, (pp_rank + 1) * count), activations, standing)
        for pp_rank in wanted
    ]


def resolve_layout(config: Config, world_size: int) -> Config:
    """Return the configuration with dp and the partition filled in.

    The partition is expensive to compute and is read often.
    """
    config = replace(config, parallel=replace(config.parallel, dp=ParallelDims.of(config, world_size).dp))
    return replace(config, parallel=replace(config.parallel, partition=plan.partition(config)))


def _rank(
    schedule: Schedule, pp_rank: int, ranks: range, activations: Activations, standing: Standing
) -> RankMemory:
    units = {stage: standing.units[stage] for stage in schedule.stages_of(pp_rank)}
    tables = sum(map(activations.tables, units.values()))
    held = {stage: activations.stage(numbers) for stage, numbers in units.items()}
    profile = Profile.of(schedule, pp_rank, held, tables)
    besides = standing.of(pp_rank)
    return RankMemory(
        pp_rank,
        ranks,
        besides.states,
        profile.activations,
        profile.logits,
        profile.workspace,
        profile.step,
        besides.communicating,
        besides.exchanging,
        besides.teacher,
        besides.loading,
        copying_bytes(standing.config),
    )


class Besides(NamedTuple):
    """Memory of a rank other than activations: states, communication buffers, Muon's buffers, a teacher,
    and what reading a base needs."""

    states: States
    communicating: Communication
    exchanging: int
    teacher: int
    loading: int

    @property
    def total(self) -> int:
        """Return the bytes on the device during a step."""
        return self.states.device + self.communicating.total + self.teacher


class Standing:
    """Memory of the pipeline ranks of a resolved configuration, other than activations.

    Ranks with the same ends of the model and alike layers have equal buckets, so these and what follows from
    them are found once.

    Args:
        activations: of the configuration; their device is that of the ranks.
        buckets: those of configurations that split parameters over as many ranks, tensor, expert and data
            parallel, if the caller has them.
    """

    def __init__(
        self,
        config: Config,
        schedule: Schedule,
        activations: Activations,
        buckets: dict[Hashable, list[BucketLayout]] | None = None,
    ):
        self.config, self.schedule, self.activations = config, schedule, activations
        self.units = plan.units_of(config)
        self.buckets: dict[Hashable, list[BucketLayout]] = {} if buckets is None else buckets
        self._known: dict[Hashable, tuple[States, int, int, int]] = {}

    def of(self, pp_rank: int) -> Besides:
        """Return the memory of one rank."""
        config, schedule, device = self.config, self.schedule, self.activations.device
        alike = self._alike(pp_rank)
        if alike not in self.buckets:
            self.buckets[alike] = plan.buckets_of(config, pp_rank)
        buckets, key = self.buckets[alike], (alike, pp_rank == config.parallel.pp - 1)
        if key not in self._known:
            states = model_states(config, buckets, pp_rank, device)
            self._known[key] = (
                states,
                open_gradients(config, schedule, buckets, device),
                exchange(config, buckets).buffers,
                loading_bytes(config, buckets),
            )
        states, gradients, exchanging, loading = self._known[key]
        widths = Widths.of(config)
        communication = Communication(
            message_bytes(schedule, pp_rank, self.activations.message),
            gathered_bytes(schedule, pp_rank, buckets, widths) + values_bytes(buckets, widths),
            gradients,
            channel_bytes(config, schedule, pp_rank) if device == "cuda" else 0,
        )
        teacher = teacher_bytes(config, schedule, pp_rank, self.activations.loss_chunk)
        return Besides(states, communication, exchanging, teacher, loading)

    def _alike(self, pp_rank: int) -> Hashable:
        """Return a key that ranks with the same buckets share."""
        model, units = self.config.model, self.activations.units
        own = [unit for stage in self.schedule.stages_of(pp_rank) for unit in self.units[stage]]
        ends = tuple(unit for unit in own if unit in (0, head_unit(model)))
        layers = tuple(units.alike(layer) for unit in own for layer in layers_in(model, unit))
        return ends, layers, self._in_fp8(own)

    def _in_fp8(self, own: Sequence[int]) -> Hashable:
        """Return a key of what fp8 changes in the buckets of these units."""
        config = self.config
        if config.train.fp8 == "none":
            return ()
        layers, options = config.model.num_hidden_layers, Fp8Options.of(config.train)
        return plan.sharded_domains(config), tuple(options.in_unit(unit, layers) for unit in own)


class Profile(NamedTuple):
    """Peak bytes of each kind on one rank during a step, and the peak of their sum."""

    activations: int
    logits: int
    workspace: int
    step: int

    @classmethod
    def of(
        cls, schedule: Schedule, rank: int, stages: Mapping[int, Sequence[HeldBytes]], tables: int
    ) -> Profile:
        """Return the peaks of a rank, given the units of each of its stages, by number."""
        own = [stages[stage] for stage in schedule.stages_of(rank)]
        activations = logits = workspace = step = 0
        for load in loads(moments_of(schedule, rank), own, tables):
            activations, logits = max(activations, load.activations), max(logits, load.logits)
            workspace, step = max(workspace, load.workspace), max(step, load.total)
        return cls(activations, logits, workspace, step)
