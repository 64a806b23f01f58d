"""train.recompute: budget. Which operations of each layer backward computes again, so that no rank needs more
than train.memory_budget and the time of recomputation is least. A pure function of the configuration, the
device and the bytes.

A pipeline rank's peak is the largest of its loads along its list of actions (`memory.Profile`). With m_v the
number of microbatches of which layer v holds what it keeps at that moment, kept_v the bytes that it keeps
although they could be computed again, and a constant for everything else, the layer in whose backward the
rank is included,

    load = constant + Σ_v m_v · kept_v

so a load within the budget is a linear constraint on the choices of the layers, whose costs add up: an
integer programme for each rank, solved exactly by `keeping`. Layers with equal descriptions and equal m_v in
all constraints are exchangeable. Loads that others exceed whatever is chosen are left out; one or two remain
for a stage.

Where attention keeps probabilities (on CPUs, in fp32), the constant includes those of the layer in its
backward, unless every layer of the rank computes them a block at a time: both are solved, and the better one
is taken.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import lru_cache
from operator import ge
from typing import NamedTuple

from megalite.assembly import plan
from megalite.config.dims import ParallelDims
from megalite.config.errors import ConfigError
from megalite.config.recompute import BUDGET, OPERATIONS, written
from megalite.config.schema import Config
from megalite.model.cost.recomputed import Group, Operation, groups
from megalite.model.mtp.losses import layer_count
from megalite.model.unit_numbers import head_unit, layers_in
from megalite.parallel.fp8_choice import Fp8Options
from megalite.parallel.pipeline.schedule import ActionKind as Pass
from megalite.parallel.pipeline.schedule import Schedule
from megalite.parallel.sharding.buckets import BucketLayout
from megalite.planner.budget.integer_program import ItemGroup, Option, solve
from megalite.planner.cost.operations import Operations
from megalite.planner.cost.recomputed_time import of_operation
from megalite.planner.hardware import devices
from megalite.planner.memory.activations import Activations, HeldBytes
from megalite.planner.memory.estimate import Standing, estimate, resolve_layout
from megalite.planner.memory.peak_passes import loads, moments_of
from megalite.planner.memory.states import DeviceType
from megalite.system.text import aligned

CPU = {
    **{
        "tflops": {"fp32": 0.2, "bf16": 0.2, "fp16": 0.2, "fp64": 0.1},
        "sustained": 1.0,
        "multiprocessors": 1,
        "memory_gib": 8.0,
    },
    **{
        "memory_gbs": 12.7,
        "within": {"gbs": 2.2, "latency_us": 120},
        "between": {"gbs": 1, "latency_us": 120},
        "gpus_per_node": 8,
    },
    **{
        "host": {"gbs": 12.7, "latency_us": 1},
        "attention_gflops": [80.0, 107.0],
        "cpu": True,
        "measured": True,
        "kernel_us": 3,
    },
}
"""A CPU that is not named: a core with AVX-512 as `megalite plan --calibrate` measured it. Only the
proportions count."""
GPU = "h100"  # of a GPU that profiling.hardware does not name


def budget_bytes(config: Config, memory: float | None = None) -> int:
    """Return train.memory_budget in bytes.

    Args:
        memory: bytes of the device, if the budget is a fraction of it.

    Raises:
        ConfigError: these are needed, and unknown.
    """
    budget = config.train.memory_budget
    assert budget is not None
    if budget > 1:
        return int(budget)
    if memory is None and config.profiling.hardware is not None:
        memory = _costs(config.profiling.hardware, "cuda").memory
    if memory is None:
        raise ConfigError(
            f"train.memory_budget = {budget:g} is a fraction of the device's memory, which is unknown here. "
            "Use an absolute size such as 70GB, or set profiling.hardware."
        )
    return int(budget * memory)


def resolve_budget(config: Config, device: DeviceType = "cuda", memory: float | None = None) -> Config:
    """Return the configuration with the operations to recompute in place of a budget.

    The dp of the configuration must be resolved. Raises ConfigError.

    Args:
        memory: bytes of the device.
    """
    if config.train.recompute != BUDGET:
        return config
    decision = decide_recomputation(config, budget_bytes(config, memory), device=device)
    return replace(config, train=replace(config.train, recompute=decision.recompute))


@dataclass(frozen=True)
class RankDecision:
    """Operations that a pipeline rank recomputes, and their memory and time.

    Attributes:
        stages: for each of its stages, number and layers.
        modes: the mode of each of its layers, by index.
        seconds: of recomputation per microbatch, as predicted.
        everything, nothing: peak bytes if everything is recomputed, and if nothing is.
        total: peak bytes as decided.
    """

    pp_rank: int
    stages: tuple[tuple[int, range], ...]
    modes: dict[int, str]
    seconds: float
    everything: int
    nothing: int
    total: int = 0


@dataclass(frozen=True)
class Decision:
    """Operations that all ranks recompute; `recompute` is the value of train.recompute, layer by layer."""

    budget: int
    recompute: str
    ranks: tuple[RankDecision, ...]


@dataclass(frozen=True)
class _DecisionInputs:
    """Arguments of a decision; two are equal if their `key` is."""

    key: str
    config: Config = field(compare=False)
    costs: devices.Device = field(compare=False)


def decide_recomputation(
    config: Config,
    budget: int,
    world_size: int | None = None,
    device: DeviceType = "cuda",
    costs: devices.Device | None = None,
    schedule: Schedule | None = None,
) -> Decision:
    """Choose what to recompute so that every rank needs at most `budget` bytes.

    Raises ConfigError with the smallest possible budget if nothing fits.

    Args:
        costs: the device whose times are minimized; default: that of profiling.hardware, or a usual one.
        schedule: a schedule that needs as much memory as the run's, and has fewer microbatches.
    """
    config = _keeping_all(config, world_size)
    costs = costs or _costs(config.profiling.hardware, device)
    if schedule is not None:
        return decision(BudgetProblem(config, device, costs, schedule), budget)
    return _decided(_DecisionInputs(f"{config} {costs}", config, costs), budget, device)


def problem_of(
    config: Config,
    world_size: int,
    device: DeviceType,
    costs: devices.Device,
    schedule: Schedule,
    buckets: dict[Hashable, list[BucketLayout]],
) -> BudgetProblem:
    """Return the problem of a configuration.

    Arguments are as for `decide_recomputation`, buckets as for `Standing`.
    """
    return BudgetProblem(_keeping_all(config, world_size), device, costs, schedule, buckets)


def recompute_within(
    problem: BudgetProblem, budget: int, exact: bool = True, ranks: Iterable[int] | None = None
) -> str | None:
    """Return the train.recompute of `decide_recomputation` without its other results; None if nothing fits.

    Args:
        exact: False takes a good solution in place of the best one, and is fast.
        ranks: the pipeline ranks that have to fit, by default all; others keep everything.
    """
    modes: dict[int, str] = {}
    for rank in range(problem.config.parallel.pp) if ranks is None else ranks:
        least, solution = problem.solved(rank, budget, exact)
        if least > budget or solution is None:
            return None
        modes |= solution.modes
    return _written(problem.config, modes)


def _keeping_all(config: Config, world_size: int | None) -> Config:
    """Return the configuration without recomputation and with its sizes filled in."""
    return resolve_layout(
        replace(config, train=replace(config.train, recompute="none")),
        world_size or ParallelDims.of(config).world,
    )


@lru_cache(maxsize=8)
def _costs(name: str | None, device: DeviceType) -> devices.Device:
    """Return the device of profiling.hardware, or a default one."""
    if name is None:
        return devices.read_device("cpu", dict(CPU)) if device == "cpu" else devices.find_device(GPU)
    try:
        return devices.find_device(name)
    except devices.HardwareError as error:
        raise ConfigError(str(error).replace("--gpu", "profiling.hardware =")) from None


@lru_cache(maxsize=8)  # a start asks several times: to check, to build, to print
def _decided(inputs: _DecisionInputs, budget: int, device: DeviceType) -> Decision:
    config = inputs.config
    return decision(
        BudgetProblem(
            config, device, inputs.costs, plan.schedule(config, ParallelDims.of(config).microbatches)
        ),
        budget,
    )


def decision(problem: BudgetProblem, budget: int) -> Decision:
    """Solve the problem of `decide_recomputation`. Raises ConfigError as it does."""
    config = problem.config
    ranks = [problem.rank(rank, budget) for rank in range(config.parallel.pp)]
    if max(each.everything for each in ranks) > budget:
        raise ConfigError(_too_small(config, budget, ranks))
    modes: dict[int, str] = {}
    for each in ranks:
        modes |= each.modes
    recompute = _written(config, modes)
    chosen = replace(config, train=replace(config.train, recompute=recompute))
    totals = [
        each.total
        for each in estimate(chosen, ParallelDims.of(chosen).world, problem.device, problem.schedule)
    ]
    return Decision(
        budget,
        recompute,
        tuple(replace(each, total=total) for each, total in zip(ranks, totals, strict=True)),
    )


def _written(config: Config, modes: Mapping[int, str]) -> str:
    """Return train.recompute for the modes of layers, by index; other layers keep everything."""
    return written([modes.get(layer, "none") for layer in range(layer_count(config.model))])


def _too_small(config: Config, budget: int, ranks: Sequence[RankDecision]) -> str:
    given = config.train.memory_budget
    value = f"{given:g}" if given is not None and given <= 1 else amount(budget)
    each = ", ".join(
        f"{amount(rank.everything, up=True)} for pipeline rank {rank.pp_rank}"
        for rank in ranks
        if rank.everything > budget
    )
    least = amount(max(rank.everything for rank in ranks), up=True)
    return (
        f"train.memory_budget = {value} is too small even if everything is recomputed, which needs {each}. "
        f"Set at least {least}, reduce train.micro_batch_size, or use more ranks."
    )


def amount(size: float, up: bool = False) -> str:
    """Format bytes as an option accepts them, rounded to four digits, or up to the next one."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if size >= scale:
            digits = 10.0 ** max(0, 3 - len(str(int(size / scale))))
            scaled = size / scale * digits
            rounded = -(-scaled // 1) if up else round(scaled)
            return f"{rounded / digits:g}{unit}"
    return f"{size:.0f}B"


class _Load(NamedTuple):
    """A load of a rank: bytes that no choice changes, and for each stage (m, first): its layers from index
    `first` of the stage on keep their results of m microbatches, those before of m + 1."""

    constant: int
    held: tuple[tuple[int, int], ...]

    def covers(self, other: _Load) -> bool:
        return self.constant >= other.constant and all(map(ge, self.held, other.held))


class _Layer(NamedTuple):
    """A layer on a rank: its number, its stage's place on the rank, and its own place in the stage, the
    embedding included."""

    number: int
    stage: int
    place: int

    def multiple(self, load: _Load) -> int:
        held, first = load.held[self.stage]
        return held + (self.place < first)


class _Programme(NamedTuple):
    """Integer program of a rank, without the number of available bytes.

    Attributes:
        least: bytes of the largest load if everything is recomputed.
        choices: layers that are exchangeable, with what each of them chooses from.
        needs: for each load, its bytes if nothing is recomputed.
    """

    least: int
    layers: list[_Layer]
    choices: list[tuple[list[_Layer], _Choice]]
    kinds: list[ItemGroup]
    needs: list[int]


class BudgetProblem:
    """Integer programs of a configuration that keeps everything, one for each pipeline rank."""

    def __init__(
        self,
        config: Config,
        device: DeviceType,
        costs: devices.Device,
        schedule: Schedule,
        buckets: dict[Hashable, list[BucketLayout]] | None = None,
    ):
        self.config, self.device, self.schedule = config, device, schedule
        self.units = plan.units_of(config)
        self.splits = Pass.WEIGHT in self.schedule.passes
        self._activations_by_mode: dict[str, Activations] = {}
        self.kept = self._activations("none")
        precision, fp8 = config.train.precision, Fp8Options.of(config.train)
        self.operations = Operations(costs, config.model, precision, lora=config.lora, fp8=fp8)
        self._known: dict[tuple[Hashable, bool], list[_Choice]] = {}
        self._scores: dict[Hashable, bool] = {}
        self._programmes: dict[tuple[int, bool], _Programme] = {}
        self._buckets = {} if buckets is None else buckets
        self.besides = Standing(config, schedule, self.kept, self._buckets)

    def stored(self, config: Config, schedule: Schedule) -> BudgetProblem:
        """Return the problem of a configuration with another ZeRO stage or other places of states.

        It shares the programs of this one.

        Args:
            schedule: has the same passes.
        """
        problem = copy(self)
        problem.config, problem.schedule = _keeping_all(config, ParallelDims.of(self.config).world), schedule
        problem.besides = Standing(problem.config, schedule, self.kept, self._buckets)
        return problem

    def _activations(self, recompute: str) -> Activations:
        if recompute not in self._activations_by_mode:
            config = replace(self.config, train=replace(self.config.train, recompute=recompute))
            self._activations_by_mode[recompute] = Activations(config, self.device, self.splits, config.lora)
        return self._activations_by_mode[recompute]

    def solved(self, rank: int, budget: int, exact: bool = True) -> tuple[int, _Solution | None]:
        """Return the bytes of a rank that recomputes everything, and its solution; None if nothing fits."""
        besides = self.besides.of(rank)
        room = budget - besides.total
        scores = sorted({self._has_scores(self._layers(self.schedule.stages_of(rank))), False})
        programmes = [(each, self._programme(rank, each)) for each in scores]
        least = besides.total + max(min(each.least for _, each in programmes), besides.exchanging)
        solutions = [self._solution(programme, room, each, exact) for each, programme in programmes]
        return least, min(
            (each for each in solutions if each is not None), key=lambda each: each.seconds, default=None
        )

    def rank(self, rank: int, budget: int) -> RankDecision:
        """Return what a rank recomputes: everything, if nothing else fits or even that does not fit."""
        stages, (least, best) = self.schedule.stages_of(rank), self.solved(rank, budget)
        (nothing,) = estimate(
            self.config, ParallelDims.of(self.config).world, self.device, self.schedule, [rank]
        )
        return RankDecision(
            rank,
            tuple((stage, range(*self._span(stage))) for stage in stages),
            {} if best is None else best.modes,
            0.0 if best is None else best.seconds,
            least,
            nothing.total,
        )

    def _span(self, stage: int) -> tuple[int, int]:
        """Return the first layer of a stage, and the one after its last."""
        layers = [layer for unit in self.units[stage] for layer in layers_in(self.config.model, unit)]
        return (layers[0], layers[-1] + 1) if layers else (0, 0)

    def _layers(self, stages: Sequence[int]) -> list[_Layer]:
        layers = []
        for place, stage in enumerate(stages):
            for index, unit in enumerate(self.units[stage]):
                # of the parts of a module the layer is the second
                first = index + 2 if unit == head_unit(self.config.model) else index
                layers += [
                    _Layer(layer, place, first + 3 * k)
                    for k, layer in enumerate(layers_in(self.config.model, unit))
                ]
        return layers

    def _has_scores(self, layers: Sequence[_Layer]) -> bool:
        for layer in layers:
            kind = self.kept.units.alike(layer.number)
            if kind not in self._scores:
                of_layer = groups(self.kept.units, layer.number)
                self._scores[kind] = any(
                    "scores" in operation.names for group in of_layer for operation in group
                )
        return any(self._scores[self.kept.units.alike(layer.number)] for layer in layers)

    def _choices(self, layer: int, scores: bool) -> list[_Choice]:
        """Return the choices of a layer."""
        key = self.kept.units.alike(layer), scores
        if key not in self._known:
            choices = [self._choice(group, layer, scores) for group in groups(self.kept.units, layer)]
            self._known[key] = [each for each in choices if each.options]
        return self._known[key]

    def _programme(self, rank: int, scores: bool) -> _Programme:
        """Return the program of a rank.

        Args:
            scores: whether every layer recomputes attention probabilities one block at a time.
        """
        if (rank, scores) not in self._programmes:
            self._programmes[rank, scores] = self._posed(self.schedule.stages_of(rank), scores)
        return self._programmes[rank, scores]

    def _posed(self, stages: Sequence[int], scores: bool) -> _Programme:
        everything = self._activations("+".join(name for name in OPERATIONS if scores or name != "scores"))
        tables = sum(everything.tables(self.units[stage]) for stage in stages)
        loads = _loads(
            self.schedule, [everything.stage(self.units[stage]) for stage in stages], tables, stages
        )
        layers, columns = self._layers(stages), dict[tuple[object, ...], list[_Layer]]()
        for layer in layers:
            key = self.kept.units.alike(layer.number), *(layer.multiple(load) for load in loads)
            columns.setdefault(key, []).append(layer)
        choices, multiples = list[tuple[list[_Layer], _Choice]](), list[list[int]]()
        for alike in columns.values():
            own = [alike[0].multiple(load) for load in loads]
            for group in self._choices(alike[0].number, scores):
                choices.append((alike, group))
                multiples.append(own)
        kept = [
            sum(
                len(alike) * group.kept * own[index]
                for (alike, group), own in zip(choices, multiples, strict=True)
            )
            for index in range(len(loads))
        ]
        kinds = [
            ItemGroup(
                len(alike),
                tuple(
                    Option(cost, tuple([freed * times for times in own])) for _, cost, freed in group.options
                ),
            )
            for (alike, group), own in zip(choices, multiples, strict=True)
        ]
        least = max((load.constant for load in loads), default=0)
        return _Programme(
            least,
            layers,
            choices,
            kinds,
            [load.constant + more for load, more in zip(loads, kept, strict=True)],
        )

    def _solution(self, programme: _Programme, room: int, scores: bool, exact: bool) -> _Solution | None:
        """Return the best choice within `room` bytes, or a good one unless `exact`; None if nothing fits."""
        if programme.least > room:
            return None
        counts = solve(programme.kinds, [need - room for need in programme.needs], exact)
        return None if counts is None else self._written(programme, counts, scores)

    def _choice(self, group: Group, layer: int, scores: bool) -> _Choice:
        """Return the alternatives of a group.

        With `scores`, only those that recompute the probabilities, relative to recomputing nothing
        else.
        """
        size, share = self.kept.bytes_of, self.kept.share
        options = [
            (each.names, sum(of_operation(self.operations, share, layer, each)), size(each.buffers))
            for each in _alternatives(group, scores)
        ]
        if scores and "scores" in group[0].names:
            (_, cost, freed), *options = options
            options = [(names, its_cost - cost, its_freed - freed) for names, its_cost, its_freed in options]
        return _Choice(tuple(options), max((freed for _, _, freed in options), default=0))

    def _written(self, programme: _Programme, counts: Sequence[tuple[int, ...]], scores: bool) -> _Solution:
        layers = programme.layers
        names: dict[int, set[str]] = {layer.number: {"scores"} if scores else set() for layer in layers}
        seconds = (
            sum(self.operations.attention_again(self.kept.share, layer.number) for layer in layers)
            if scores
            else 0.0
        )
        for (alike, group), taken in zip(programme.choices, counts, strict=True):
            first = 0
            for (operations, cost, _), count in zip(group.options, taken, strict=True):
                for layer in alike[first : first + count]:
                    names[layer.number] |= set(operations)
                seconds, first = seconds + count * cost, first + count
        order = list(OPERATIONS)
        modes = {
            number: "+".join(sorted(recomputed, key=order.index)) or "none"
            for number, recomputed in names.items()
        }
        return _Solution(
            {number: "selective" if mode == "scores" else mode for number, mode in modes.items()}, seconds
        )


class _Choice(NamedTuple):
    """Alternatives to keeping a group: (operations, seconds, bytes freed).

    Attributes:
        kept: bytes of the group if none is chosen.
    """

    options: tuple[tuple[tuple[str, ...], float, int], ...]
    kept: int


class _Solution(NamedTuple):
    """The mode of each layer, and the seconds of recomputation per microbatch."""

    modes: dict[int, str]
    seconds: float


def _alternatives(group: Group, scores: bool) -> list[Operation]:
    if scores and "scores" in group[0].names:
        return [each for each in group if each.scores]
    return list(group)


def _loads(
    schedule: Schedule, stages: Sequence[Sequence[HeldBytes]], tables: int, numbers: Sequence[int]
) -> list[_Load]:
    """Return the loads of a rank that no other load covers, given its stages with everything recomputed."""
    largest = dict[tuple[tuple[int, int], ...], int]()
    for load in loads(moments_of(schedule, schedule.placement[numbers[0]]), stages, tables):
        moment = load.moment
        backward = moment.kind is Pass.BACKWARD
        key = tuple(
            (count - backward, load.boundary) if place == moment.place else (count, 0)
            for place, count in enumerate(moment.held)
        )
        largest[key] = max(largest.get(key, 0), load.total)
    return _uncovered([_Load(constant, key) for key, constant in largest.items()])


def _uncovered(loads: list[_Load]) -> list[_Load]:
    kept: list[_Load] = []
    for load in sorted(loads, reverse=True):
        if not any(other.covers(load) for other in kept):
            kept.append(load)
    return kept


def budget_table(decision: Decision) -> list[str]:
    """Format a decision as lines of text: what each stage recomputes, and the peak of each rank."""
    rows: list[tuple[str, ...]] = [
        ("pp rank", "stage", "layers", "recomputed", "peak", "without", "at least")
    ]
    for rank in decision.ranks:
        peaks = [amount(size) for size in (rank.total, rank.nothing, rank.everything)]
        for stage, span in rank.stages:
            for mode, first, last in _runs(rank.modes, span):
                layers = str(first) if first == last else f"{first}-{last}"
                rows.append((str(rank.pp_rank), str(stage), layers, mode.replace("+", ", "), *peaks))
                peaks = ["", "", ""]
    slowest = max(rank.seconds for rank in decision.ranks)
    return [
        f"recomputation within {amount(decision.budget)} per rank, at most {slowest * 1e3:.3g} ms per "
        "microbatch (predicted):",
        *aligned(rows, left=len(rows[0])),
    ]


def _runs(modes: dict[int, str], span: range) -> list[tuple[str, int, int]]:
    """Return (mode, first, last) of consecutive layers with the same mode."""
    runs: list[tuple[str, int, int]] = []
    for layer in span:
        if runs and runs[-1][0] == modes[layer]:
            runs[-1] = (modes[layer], runs[-1][1], layer)
        else:
            runs.append((modes[layer], layer, layer))
    return runs
