"""The time of a training step under one layout, in seconds: stages, the pipeline schedule, data parallelism,
the optimizer."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from megalite.assembly.plan import may_be_optimistic
from megalite.assembly.teacher import teacher_of
from megalite.config.dims import ParallelDims, fixed_stages
from megalite.config.recompute import mode_of, operations_of
from megalite.config.schema import Config
from megalite.config.sections.lora import LoraConfig
from megalite.config.sections.model import ModelConfig
from megalite.config.sections.muon import MuonConfig
from megalite.model.cost.flops import layer_costs, per_token
from megalite.model.cost.records import Share
from megalite.model.kinds import stage_starts
from megalite.model.mtp.losses import further_losses, layer_count
from megalite.model.parameters import embedding_pair
from megalite.objectives.find import objective_of
from megalite.optimizer.registry import ADAMW, least_bytes
from megalite.parallel.fp8_choice import NO_FP8, Fp8Options
from megalite.parallel.pipeline.generator import placement
from megalite.parallel.pipeline.orders import RECIPES
from megalite.parallel.pipeline.partition import balanced
from megalite.parallel.quantized.layout import BaseForm
from megalite.planner.cost import muon_exchange
from megalite.planner.cost.context_exchange import WHOLE, Rows
from megalite.planner.cost.operations import OURS, Operations, PassTimes, Software
from megalite.planner.hardware.devices import Device
from megalite.planner.hardware.kernels import stream
from megalite.planner.hardware.links import Group, group
from megalite.planner.memory.domains import Parameters, domains
from megalite.planner.time.schedule_time import Durations, PipelineShape, ScheduleTime, pace

STATE_BYTES = 4.0 * (1 + len(ADAMW))
"""The fp32 master weight and the optimizer's state of a parameter."""
HOST_BYTES = 4.0 + 2 * STATE_BYTES + 4.0
"""What an update moves in CPU memory for a parameter: the gradient read, master weight and state read and
written, the weight written."""
OFFLOAD_WIRE = (4.0, 2.0)
"""Bytes sent per parameter to the host (its fp32 gradient) and back (its 16-bit weight)."""


@dataclass(frozen=True)
class LayoutChoice:
    """One layout of a model over ranks.

    The names of methods are as in `parallel`; those of context count with cp > 1 and that of experts with ep
    > 1.

    Attributes:
        virtual_stages: stages per rank.
        dp_shard: as in `parallel`.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    schedule: str = "1f1b"
    virtual_stages: int = 1
    zero: int = 1
    micro_batch_size: int = 1
    recompute: str = "none"
    offload: str = "none"
    offload_parameters: bool = False
    sequence_parallel: bool = False
    cp: int = 1
    context: str = "ulysses"
    context_inner: int = 1
    ep: int = 1
    expert_dispatch: str = "all_to_all"
    context_parts: str = "zigzag"
    dp_shard: int | None = None

    @functools.cached_property
    def dims(self) -> ParallelDims:
        """Return the sizes of the mesh. The shard groups are those of ZeRO 1 to 3."""
        return ParallelDims(
            pp=self.pp,
            dp=self.dp,
            cp=self.cp,
            tp=self.tp,
            dp_shard=self.dp_shard,
            virtual_stages=self.virtual_stages,
            ep=self.ep,
        )

    @functools.cached_property
    def gpus(self) -> int:
        return self.dims.world

    @functools.cached_property
    def data(self) -> int:
        """Return the number of ranks over which gradients are summed."""
        return self.dims.data

    @property
    def asked_stages(self) -> int | None:
        """Return virtual_stages as in the configuration: None unless it is set for the schedule."""
        return self.virtual_stages if fixed_stages(self.schedule) is None else None

    @property
    def splits(self) -> bool:
        return RECIPES[self.schedule].splits


@dataclass(frozen=True)
class StepTime:
    """A predicted step. `total` is the time of the pipeline and of what follows it; the other fields break it
    down for the busiest rank.

    Attributes:
        compute: kernels of the busiest rank, except those counted below.
        recompute: kernels of recomputed forwards.
        tensor, context, experts: exposed communication of tensor, context and expert parallelism.
        bubble: idle time in the pipeline, including the imbalance between the busiest rank and the others.
        gradients, weights: exposed data-parallel reduction and gathering.
        optimizer: the optimizer, and its transfers to the host and back.
        nodes: waiting for the latest of several nodes.
        reference: the forward passes of the reference model of an objective, or of a teacher.
    """

    total: float
    compute: float
    recompute: float
    tensor: float
    bubble: float
    gradients: float
    weights: float
    optimizer: float
    bubble_fraction: float
    context: float = 0.0
    experts: float = 0.0
    nodes: float = 0.0
    reference: float = 0.0

    def parts(self) -> dict[str, float]:
        """Return the seconds of each part; their sum is the total."""
        names = (
            "compute",
            "recompute",
            "tensor",
            "context",
            "experts",
            "bubble",
            "gradients",
            "weights",
            "optimizer",
            "nodes",
            *(("reference",) if self.reference else ()),
        )
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class PlannedJob:
    """Model, device and batch: everything except the layout (`LayoutChoice`)."""

    model: ModelConfig
    device: Device
    sequence_length: int
    global_batch_size: int
    precision: str = "bf16"
    software: Software = OURS
    gradient_bytes: int = 4  # per parameter in the data-parallel reduction
    muon: MuonConfig | None = None  # of a run with that optimizer
    moments: float = 4.0 * len(ADAMW)  # bytes per parameter (`optimizer.registry.least_bytes`)
    lora: LoraConfig | None = None  # adapters; all other weights are frozen
    fp8: Fp8Options = NO_FP8
    rows: Rows = WHOLE
    optimistic_step: bool = True  # where a step may be (`assembly.plan.may_be_optimistic`)
    scores_sequences: bool = False  # an objective over sequences: the head's forward runs twice
    reference_passes: int = 0  # forwards of whole batches before each step (`Objective.passes`)
    teacher: PlannedJob | None = None  # a second model, whose forwards run before each step
    teacher_passes: int = 0

    @staticmethod
    def of(config: Config, device: Device) -> PlannedJob:
        """Return the job of a configuration."""
        fp8, objective = Fp8Options.of(config.train), objective_of(config)
        teacher, passes = teacher_of(config), 0 if objective is None else objective.passes
        # of the passes over mismatched sequences, one is of the model itself
        of_teacher = 0 if teacher is None else 1 if objective is None else passes - objective.needs_baseline
        return PlannedJob(
            config.model,
            # no such run has been
            device if fp8.recipe == config.lora.base == "none" else replace(device, compared=False),
            config.data.sequence_length,
            config.train.global_batch_size,
            config.train.precision,
            gradient_bytes=2 if "bf16" in (config.train.grad_dtype, config.parallel.reduce_dtype) else 4,
            muon=config.muon if config.optimizer.name == "muon" else None,
            moments=least_bytes(config),
            lora=config.lora,
            fp8=fp8,
            rows=Rows.of(config),
            optimistic_step=config.parallel.optimistic_step,
            scores_sequences=objective is not None and objective.reads == "likelihoods",
            reference_passes=passes if teacher is None else passes and passes - of_teacher,
            teacher=None if teacher is None else PlannedJob.of(teacher, device),
            teacher_passes=of_teacher,
        )

    def microbatches(self, choice: LayoutChoice) -> int:
        return int(self.global_batch_size // (choice.dp * choice.micro_batch_size))

    def tokens_per_second_per_gpu(self, choice: LayoutChoice, seconds: float) -> float:
        return self.global_batch_size * self.sequence_length / seconds / choice.gpus

    def mfu(self, choice: LayoutChoice, seconds: float) -> tuple[float, float]:
        """Return the fractions of the device's dense peak, by PaLM's convention and by the causal one.

        PaLM's counts every pair of positions, the causal one only half.
        """
        rate = self.tokens_per_second_per_gpu(choice, seconds) / self.device.peak(self.precision)
        palm, causal = (
            per_token(self.model, self.sequence_length, name, lora=self.lora).model
            for name in ("palm", "causal")
        )
        return rate * palm, rate * causal


def recomputed_share(recompute: str) -> float:
    """Return the fraction of layers with a fully recomputed forward, if all are treated alike."""
    if recompute == "full":
        return 1.0
    return 1 / int(recompute.removeprefix("every-")) if recompute.startswith("every-") else 0.0


class _Left(NamedTuple):
    """Communication of a rank that its own passes do not hide, in seconds.

    Attributes:
        gradients: reduction after its last backward.
        weights: gathering at the start of its first forward.
    """

    gradients: float
    weights: float


class Stepper:
    """Predictor of step times for one job. It caches results that several layouts share."""

    def __init__(self, job: PlannedJob):
        self.job, self.device = job, job.device
        self.teacher = None if job.teacher is None else Stepper(job.teacher)
        self.operations = Operations(
            job.device, job.model, job.precision, job.software, job.lora, job.rows, job.fp8
        )
        self.operations.scores_sequences = job.scores_sequences
        # bytes of a code that is gathered, with its part of a scale
        self.quantized_base = job.lora is not None and job.lora.base != "none"
        self.code = 1.0
        if job.lora is not None and self.quantized_base:
            self.code = BaseForm(job.lora.base, job.lora.double_quant).bytes_per_element
        self.fp8_times, units = self.operations.fp8_times, self.operations.units(Share(job.sequence_length))
        self.kinds = [units.alike(index) for index in range(layer_count(job.model))]
        self.layers_of_stages = functools.lru_cache(maxsize=None)(self._layers_of_stages)
        self._stage = functools.lru_cache(maxsize=None)(self._stage_of)
        self._all_stages = functools.lru_cache(maxsize=None)(self._stages)
        self.filled = functools.lru_cache(maxsize=None)(self._filled)
        self._parameters = functools.lru_cache(maxsize=None)(self._parameters_of)
        self._alike = functools.lru_cache(maxsize=None)(self._alike_layers)
        self._pace = functools.lru_cache(maxsize=None)(pace)

    def _layers_of_stages(self, stages: int) -> list[int]:
        """Return the number of layers per stage under a run's default partition."""
        costs = layer_costs(self.job.model, self.job.sequence_length)
        return balanced(costs.layers, stages, costs.embedding, costs.head, stage_starts(self.job.model))

    def step(self, choice: LayoutChoice) -> StepTime:
        """Predict the time of one step under a layout, which is not validated."""
        passes, sizes, _ = self.stages(choice)
        passes, waits = self._with_data(choice, passes, sizes, self.layers_of_stages(len(passes)))
        slow, blocking = self.slow(choice), self._blocking(choice)
        durations = Durations(
            tuple(slow * each.forward + blocking for each in passes),
            tuple(slow * each.backward + blocking for each in passes),
            tuple(slow * each.weight for each in passes),
            self._message(choice),
        )
        pipeline = PipelineShape(
            choice.schedule, choice.pp, self.job.microbatches(choice), choice.asked_stages
        )
        timed = self._pace(pipeline, durations)
        return self._closed(choice, timed, passes, waits)

    def _reference(self, choice: LayoutChoice, passes: list[PassTimes]) -> float:
        """Return the time of the forward passes before a step: of a reference model, or of a teacher.

        Args:
            passes: of the step's stages, whose forwards take as long, but for adapters and the gradients of
                loss chunks.
        """
        total = self.job.reference_passes * self.forward(choice, passes) if self.job.reference_passes else 0.0
        if self.teacher is not None:
            passes, _, _ = self.teacher.stages(replace(choice, recompute="none"))
            total += self.job.teacher_passes * self.teacher.forward(choice, passes)
        return total

    def forward(self, choice: LayoutChoice, passes: Sequence[PassTimes]) -> float:
        """Return the time of a forward pass over a step's microbatches without gradients.

        The head computes log-probabilities, as `Operations.scores`.
        """
        slow, blocking, none = self.slow(choice), self._blocking(choice), (0.0,) * len(passes)
        head = self.operations.head(self._share(choice), choice.splits)
        scores = self.operations.scores(self._share(choice))
        forwards = [each.forward for each in passes]
        forwards[-1] += scores - head.forward
        durations = Durations(
            tuple(slow * each + blocking for each in forwards), none, none, self._message(choice)
        )
        count = self.job.microbatches(choice)
        pipeline = PipelineShape(choice.schedule, choice.pp, count, choice.asked_stages, forward_only=True)
        return self._pace(pipeline, durations).makespan

    def divided(self, choice: LayoutChoice) -> float:
        """Return a cheap lower bound of the step time: the layers' work, divided evenly over the pipeline."""
        share, again = self._share(choice), recomputed_share(choice.recompute)
        work = 0.0
        for index, count in self._alike(0, self.job.model.num_hidden_layers):
            layer = self.operations.layer(share, index)
            work += count * (layer.total + again * layer.forward)
        return self.slow(choice) * self.job.microbatches(choice) * work / choice.pp

    def _alike_layers(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return (first index, count) of each kind of layer of a stage."""
        own = self.own(start, stop)
        kinds = [self.kinds[index] for index in own]
        return [(own[kinds.index(kind)], kinds.count(kind)) for kind in dict.fromkeys(kinds)]

    def least(self, choice: LayoutChoice, pipeline: float = 0.0) -> float:
        """Return a lower bound of the step time.

        It is the pipeline time (`filled`, or `pipeline` if larger), the communication of gradients and
        weights that no rank can hide, and the optimizer. It is exact with one pipeline rank and without
        recomputation.
        """
        _, sizes, _ = self.stages(choice)
        plain = replace(choice, offload="none")
        filled = self.filled(plain if choice.zero >= 2 else replace(plain, zero=0, dp_shard=None))
        passes, held = self.slowed(choice), self.held(choice, sizes)
        least, weights, slow = max(filled, pipeline), 0.0, self.slow(choice)
        busy = self._by_rank(choice, [each.total for each in passes])
        between = self._message(choice) + self._blocking(choice)
        # a rank's first pass waits for these
        before = [0.0, *accumulate(slow * each.forward + between for each in passes)]
        hides, own = self._hides, placement(choice.schedule, choice.pp, choice.asked_stages)
        ended = least
        for rank, left in enumerate(self._left(choice, passes, held)):
            first = before[own.index(rank)]
            alone = (
                least if self.in_turn(choice) else first + slow * self.job.microbatches(choice) * busy[rank]
            )
            ended = max(ended, alone + left.gradients)
            weights = max(weights, left.weights - (first if hides else 0.0))
        return ended + self._tied(choice) + weights + self._optimizer(choice, held) + self._late(choice)

    def slowed(self, choice: LayoutChoice) -> list[PassTimes]:
        """Return the passes of each stage with the communication of ZeRO-2 and 3 that they wait for."""
        passes, sizes, _ = self.stages(choice)
        return self._with_data(choice, passes, sizes, self.layers_of_stages(len(passes)))[0]

    def alone(self, choice: LayoutChoice, rank: int) -> float:
        """Return a lower bound of the step time from one pipeline rank.

        It includes the rank's work, the communication of ZeRO-2 and 3 that it waits for, and its part of the
        optimizer.
        """
        passes, sizes, _ = self.stages(choice)
        layers, placed = (
            self.layers_of_stages(len(passes)),
            placement(choice.schedule, choice.pp, choice.asked_stages),
        )
        own = [
            (passes[stage], sizes[stage], layers[stage]) for stage, each in enumerate(placed) if each == rank
        ]
        its_passes, its_sizes, its_layers = map(list, zip(*own, strict=True))
        slowed, _ = self._with_data(choice, its_passes, its_sizes, its_layers)
        work = self.slow(choice) * self.job.microbatches(choice) * sum(each.total for each in slowed)
        return work + self._optimizer(choice, [Parameters(*map(sum, zip(*its_sizes, strict=True)))])

    def _filled(self, choice: LayoutChoice) -> float:
        """Return a lower bound of the pipeline time.

        It is the work of a rank, after the forwards and before the backwards of the stages in front of it.
        """
        passes = self.slowed(choice)
        own = placement(choice.schedule, choice.pp, choice.asked_stages)
        busy = self._by_rank(choice, [each.total for each in passes])
        before = [0.0, *accumulate(each.forward for each in passes)]
        after = [0.0, *accumulate(each.backward for each in passes)]
        # may run after a rank's last backward
        put_off = self._by_rank(choice, [each.weight if choice.splits else 0.0 for each in passes])
        count, least = self.job.microbatches(choice), 0.0
        for rank in range(choice.pp):
            first = own.index(rank)
            start, end = (0.0, 0.0) if self.in_turn(choice) else (before[first], after[first])
            least = max(least, start + count * busy[rank] + max(0.0, end - count * put_off[rank]))
        return self.slow(choice) * least

    def slow(self, choice: LayoutChoice) -> float:
        """Return the slowdown of computation on the slowest of many devices."""
        return 1 / self.device.constants.slowest if choice.gpus > 1 and not self.device.cpu else 1.0

    def _late(self, choice: LayoutChoice) -> float:
        """Return the seconds of a step that nodes wait for the latest one.

        The expected maximum of independent, exponentially distributed delays grows with the logarithm
        of their number.
        """
        nodes = math.ceil(choice.gpus / self.device.per_node)
        return 0.0 if self.device.cpu else self.device.constants.delay * math.log(nodes)

    def _share(self, choice: LayoutChoice) -> Share:
        return Share.of(choice, self.job.sequence_length, choice.micro_batch_size)

    # --- stages
    # --------------------------------------------------------------------------------------------------------

    def stages(self, choice: LayoutChoice) -> tuple[list[PassTimes], list[Parameters], list[float]]:
        """Return the passes, the parameters per rank and the recomputation seconds of each stage."""
        return self._all_stages(self._share(choice), choice.dims.stages, choice.recompute, choice.splits)

    def _stages(
        self, share: Share, stages: int, recompute: str, splits: bool
    ) -> tuple[list[PassTimes], list[Parameters], list[float]]:
        split, whole = self.layers_of_stages(stages), recomputed_share(recompute)
        parts = []
        for stage, (start, stop) in enumerate(zip([0, *accumulate(split)], accumulate(split), strict=False)):
            own = self.own(start, stop)
            modes = [recompute if whole else mode_of(recompute, index) for index in own]
            layers = tuple(zip((self.kinds[index] for index in own), modes, strict=True))
            parts.append(self._stage(share, layers, whole, stage == 0, stage == stages - 1, splits))
        passes, sizes, again = zip(*parts, strict=True)
        return list(passes), list(sizes), list(again)

    def _stage_of(
        self,
        share: Share,
        layers: Sequence[tuple[Hashable, str]],
        whole: float,
        first: bool,
        last: bool,
        splits: bool,
    ) -> tuple[PassTimes, Parameters, float]:
        """Return one stage, given the kind of each layer and its recomputation.

        Args:
            whole: as in `recomputed_share`.
        """
        # layers of the model that are alike
        model, own = self.job.model, [self.kinds.index(kind) for kind, _ in layers]
        total = functools.reduce(
            PassTimes.plus,
            [self.operations.layer(share, index).times(count) for index, count in Counter(own).items()],
        )
        kernels, wait = whole * (total.forward - total.forward_wait), whole * total.forward_wait
        if not whole:
            times = [
                self.operations.again(share, index, mode)
                for index, (_, mode) in zip(own, layers, strict=True)
            ]
            kernels, wait = (sum(each) for each in zip(*times, strict=True))
        total = total._replace(
            backward=total.backward + kernels + wait, backward_wait=total.backward_wait + wait
        )
        if first:
            total = total.plus(self.operations.embedding(share))
        if last:
            total = total.plus(self.operations.head(share, splits))
        alone = last and (not model.tied_head or not first)
        # its embedding, which modules look up
        copied = last and not first and further_losses(model) > 0 and not model.tied_head
        return (
            total,
            self._parameters(share.tp, share.ep, tuple(own), first or copied, alone, last),
            kernels,
        )

    def own(self, start: int, stop: int) -> list[int]:
        """Return the layers of a stage; the last stage includes modules of multi-token prediction."""
        layers = self.job.model.num_hidden_layers
        return [*range(start, stop), *(range(layers, layer_count(self.job.model)) if stop == layers else ())]

    def _by_rank(self, choice: LayoutChoice, values: Sequence[float]) -> list[float]:
        """Return sums over the stages of each rank."""
        sums = [0.0] * choice.pp
        for stage, rank in enumerate(placement(choice.schedule, choice.pp, choice.asked_stages)):
            sums[rank] += values[stage]
        return sums

    def _message(self, choice: LayoutChoice) -> float:
        """Return the latency of one message between stages."""
        if choice.pp == 1:
            return 0.0
        job, tp = self.job, choice.tp
        size = self._share(choice).tokens * job.model.hidden_size * self.operations.size
        fabric = self.operations.fabric
        if job.software.splits_messages and not choice.sequence_parallel:
            return fabric.send(size / tp, choice.gpus) + fabric.half(size, group(self.device, tp, 1))
        return fabric.send(size / (tp if choice.sequence_parallel else 1), choice.gpus)

    def _blocking(self, choice: LayoutChoice) -> float:
        """Return the seconds that a pass waits until its result is sent."""
        return 0.0 if self.job.software.hides_messages and not self.device.cpu else self._message(choice)

    # --- data parallelism
    # --------------------------------------------------------------------------------------------------

    def _with_data(
        self, choice: LayoutChoice, passes: list[PassTimes], sizes: list[Parameters], layers: list[int]
    ) -> tuple[list[PassTimes], list[float]]:
        """Passes of some stages with the exposed communication of ZeRO-2 and 3 per microbatch added, and its
        seconds per stage.

        Args:
            layers: the number of each stage.
        """
        if choice.zero < 2 or (
            choice.data == 1 and choice.dims.expert_data == 1 and not choice.offload_parameters
        ):
            return passes, [0.0] * len(passes)
        slowed, waits, uses = [], [], dict[tuple[Parameters, int], tuple[float, float]]()
        for each, size, count in zip(passes, sizes, layers, strict=True):
            if (size, count) not in uses:
                uses[size, count] = self._for_each_use(choice, size, count)
            reduce, gather = uses[size, count]
            again = 0.0 if self.fp8_times is None else self.fp8_times.at_each_use(choice, size)
            forward = self._beside(each.forward + again, gather)
            backward = self._beside(each.backward + each.weight + again, gather + reduce)
            waits.append(forward + backward - each.total - 2 * again)
            slowed.append(each._replace(forward=forward, backward=backward - each.weight))
        return slowed, waits

    def _for_each_use(self, choice: LayoutChoice, size: Parameters, layers: int) -> tuple[float, float]:
        """Return the seconds per microbatch of a stage under ZeRO-2 and 3.

        These are the reduction of its gradients, and one gathering of its weights.
        """
        fabric, width = self.operations.fabric, self.operations.size
        reduce = gather = 0.0
        for domain in domains(self.device, choice, size):
            reduce += layers * fabric.half(domain.trained / layers * self.job.gradient_bytes, domain.shard)
            if choice.zero == 3 and choice.dims.shard > 1:
                coded = 0.0 if choice.offload_parameters else domain.coded * (width - self.code)
                gather += layers * fabric.half((domain.stored * width - coded) / layers, domain.shard)
            if choice.offload_parameters:  # its shard comes from the host first
                coded = domain.coded * (width - self.code) if self.quantized_base else 0.0
                gather += (domain.stored * width - coded) / domain.shard.size / self.device.host.bandwidth
        return reduce, gather

    def _beside(self, computation: float, communication: float) -> float:
        """Return the time of computation and communication that overlap.

        Communication slows computation down while it runs. On a CPU they run one after the other.
        """
        if self.device.cpu:
            return computation + communication
        taken = min(computation, communication) * self.device.constants.overlap
        return max(computation + taken, communication)

    def _reduction(self, choice: LayoutChoice, size: Parameters) -> tuple[float, float]:
        """Return the seconds of the gradient reduction and of the all-gather of updated weights.

        They are for the parameters of one rank. Ranks with the same shard sum it once per step.
        """
        fabric = self.operations.fabric
        reduce = gather = 0.0
        for domain in domains(self.device, choice, size):
            gradients = domain.trained * self.job.gradient_bytes
            if choice.zero == 0 or domain.shard.size == 1:
                reduce += fabric.all_reduce(gradients, domain.ranks)
            else:
                reduce += fabric.half(gradients, domain.shard) if choice.zero == 1 else 0.0
                reduce += fabric.all_reduce(gradients / domain.shard.size, domain.replicate)
            if choice.zero in (1, 2):
                gather += fabric.half(domain.trained * self.operations.size, domain.shard)
        return reduce, gather

    def _tied(self, choice: LayoutChoice) -> float:
        """Return the all-reduce time of a tied embedding's gradients with copies on two pipeline ranks."""
        stages = placement(choice.schedule, choice.pp, choice.asked_stages)
        if embedding_pair(self.job.model, stages) is None:
            return 0.0
        head = self._parameters(choice.tp, choice.ep, (), head=True)
        table = head.trained / (choice.dims.shard if choice.zero else 1)
        nodes = 1 if choice.gpus <= self.device.per_node else 2
        return self.operations.fabric.all_reduce(table * self.job.gradient_bytes, Group(2, 2 // nodes, nodes))

    def _behind(
        self, choice: LayoutChoice, timed: ScheduleTime, passes: list[PassTimes], held: list[Parameters]
    ) -> tuple[float, float]:
        """Return the exposed time after the pipeline.

        These are gradients not yet reduced when the last rank ends, and weights not yet gathered when
        needed.

        Reductions overlap with the last microbatch's backward and gathering with the next step's first
        forward, but for the unit that is reduced last and needed first: the embedding or a layer. A rank that
        ends before the last one has that much more time.
        """
        gradients = weights = 0.0
        for rank, left in enumerate(self._left(choice, passes, held)):
            gradients = max(gradients, left.gradients - (0.0 if self.in_turn(choice) else timed.ends[rank]))
            weights = max(weights, left.weights - (timed.starts[rank] if self._hides else 0.0))
        return gradients + self._tied(choice), weights

    @property
    def _hides(self) -> bool:
        return self.job.software.hides_gradients and not self.device.cpu

    def _left(self, choice: LayoutChoice, passes: list[PassTimes], held: list[Parameters]) -> list[_Left]:
        """Return the communication of each rank that its last backward and first forward do not hide."""
        ends, left = self._ends(choice, held), []
        backward = self._by_rank(choice, [each.backward + each.weight for each in passes])
        forward = self._by_rank(choice, [each.forward for each in passes])
        times = {size: self._reduction(choice, size) for size in dict.fromkeys(held)}
        for rank, size in enumerate(held):
            reduce, gather = times[size]
            window, ahead = (backward[rank], forward[rank]) if self._hides else (0.0, 0.0)
            gradients = max(self._beside(window, reduce) - window, reduce * ends[rank])
            left.append(_Left(gradients, max(gather - ahead, gather * ends[rank])))
        return left

    def _ends(self, choice: LayoutChoice, held: list[Parameters]) -> list[float]:
        """Return each rank's fraction of parameters in the unit that is reduced last and gathered first."""
        stages = choice.dims.stages
        fractions = [1 / count for count in self._by_rank(choice, self.layers_of_stages(stages))]
        fractions[0] = max(
            fractions[0], self._parameters(choice.tp, choice.ep, (), embedding=True).trained / held[0].trained
        )
        return fractions

    def parameters(self, choice: LayoutChoice, layers: Sequence[int]) -> Parameters:
        """Return the parameters of some layers on one rank."""
        return self._parameters(
            choice.tp, choice.ep, tuple(self.kinds.index(self.kinds[index]) for index in layers)
        )

    def _parameters_of(
        self,
        tp: int,
        ep: int,
        layers: tuple[int, ...],
        embedding: bool = False,
        head: bool = False,
        further: bool = False,
    ) -> Parameters:
        """Return `Parameters.of`, which does not depend on a rank's part of the batch."""
        return Parameters.of(
            self.operations.units(Share(self.job.sequence_length, tp=tp, ep=ep)),
            layers,
            embedding,
            head,
            further,
        )

    def held(self, choice: LayoutChoice, sizes: list[Parameters]) -> list[Parameters]:
        """Return the parameters of each pipeline rank, given those of the stages."""
        kinds = (self._by_rank(choice, kind) for kind in zip(*sizes, strict=True))
        return [Parameters(*rank) for rank in zip(*kinds, strict=True)]

    def _closed(
        self, choice: LayoutChoice, timed: ScheduleTime, passes: list[PassTimes], waits: list[float]
    ) -> StepTime:
        """Return the step's time, given the pipeline's, broken down for the busiest rank."""
        _, sizes, again = self.stages(choice)
        held = self.held(choice, sizes)
        gradients, weights = self._behind(choice, timed, passes, held)
        optimizer, nodes = self._optimizer(choice, held), self._late(choice)
        reference = self._reference(choice, passes)
        pipeline = timed.longest_span if self.in_turn(choice) else timed.makespan
        busiest = max(range(choice.pp), key=lambda rank: timed.busy[rank])
        exchanges = (
            self._exchanges(choice, self.operations.exchange, choice.cp, "attention"),
            self._exchanges(choice, self.operations.dispatch, choice.ep, "experts"),
        )
        within, recompute, waiting, context, experts = (
            self.job.microbatches(choice) * self._by_rank(choice, values)[busiest]
            for values in (
                [each.forward_wait + each.backward_wait for each in passes],
                again,
                waits,
                *exchanges,
            )
        )
        return StepTime(
            total=pipeline + gradients + weights + optimizer + nodes + reference,
            compute=timed.busy[busiest] - within - recompute - waiting,
            recompute=recompute,
            tensor=max(within - context - experts, 0.0),
            context=context,
            experts=experts,
            nodes=nodes,
            bubble=pipeline - timed.busy[busiest],
            gradients=gradients,
            weights=weights + waiting,
            optimizer=optimizer,
            bubble_fraction=1 - sum(timed.busy) / (choice.pp * pipeline),
            reference=reference,
        )

    def _exchanges(
        self,
        choice: LayoutChoice,
        layer: Callable[[Share, int], tuple[float, float]],
        ranks: int,
        operation: str,
    ) -> list[float]:
        """Return the exposed seconds per microbatch of each stage for a communication inside an operation."""
        split, share = self.layers_of_stages(choice.dims.stages), self._share(choice)
        if ranks == 1:
            return [0.0] * len(split)
        exchanges = []
        for start, stop in zip([0, *accumulate(split)], accumulate(split), strict=False):
            own = self.own(start, stop)
            named = sum(operation in operations_of(mode_of(choice.recompute, index)) for index in own)
            again = recomputed_share(choice.recompute) or named / len(own)
            times = [(count, layer(share, index)) for index, count in self._alike(start, stop)]
            exchanges.append(
                sum(count * ((1 + again) * forward + backward) for count, (forward, backward) in times)
            )
        return exchanges

    def in_turn(self, choice: LayoutChoice) -> bool:
        """Return whether ranks end a step, and start the next, one after the other without a barrier.

        See `megalite.training.weight_update`.
        """
        job = self.job
        precision = "fp32" if job.software.optimistic_in_fp16 else job.precision
        return job.optimistic_step and may_be_optimistic(
            choice.schedule, choice.pp, choice.offload, job.model, precision
        )

    def _optimizer(self, choice: LayoutChoice, held: list[Parameters]) -> float:
        """Return the time of the largest update on one rank, and of the gradient norm's all-reduce."""
        device = self.device
        split = [domains(device, choice, size) for size in dict.fromkeys(held)]
        own = max(
            sum(domain.trained / (domain.shard.size if choice.zero else 1) for domain in each)
            for each in split
        )
        norm = self.operations.fabric.all_reduce(64, group(device, choice.gpus, 1))
        codes = 0.0 if self.fp8_times is None else self.fp8_times.after_update(choice, held)
        if choice.offload == "none":
            moments = 2 * (self.job.moments - 4 * len(ADAMW)) if self.job.muon is None else 0.0
            adam = stream(device, own * (self.job.software.adam_bytes + moments))
            return adam + norm + self._matrices(choice) + codes
        wire = own * max(OFFLOAD_WIRE) / device.host.bandwidth if not device.cpu else 0.0
        disk = own * 2 * STATE_BYTES / device.disk if choice.offload == "disk" else 0.0  # read and written
        return max(own * HOST_BYTES / device.host_memory, wire, disk) + norm + codes

    def _matrices(self, choice: LayoutChoice) -> float:
        """Return the time of Muon's iterations, and of the overlapping exchange of matrices."""
        model, muon, ranks = self.job.model, self.job.muon, choice.data * choice.tp
        if muon is None:
            return 0.0
        layers = max(self._by_rank(choice, self.layers_of_stages(choice.dims.stages)))
        work = muon_exchange.seconds(model, muon, self.device, self.job.precision, layers, ranks)
        if ranks == 1:
            return work
        # bytes
        own = layers * muon_exchange.matrix_elements(model) / ranks * (2 if muon.ns_dtype == "bf16" else 4)
        return self._beside(
            work, 2 * self.operations.fabric.half(own, group(self.device, ranks, 1, choice.gpus))
        )
