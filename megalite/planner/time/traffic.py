"""Bytes that each rank sends per step, by mesh axis, computed from specs, buckets and the schedule's actions.

Collectives are counted as ring algorithms: for a tensor of B bytes over n ranks, each rank sends (n − 1) / n
· B in an all-gather or a reduce-scatter, and twice that in an all-reduce. A message between stages counts its
bytes once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from megalite.assembly import plan
from megalite.assembly.teacher import keeps_start, stored_words, teacher_of
from megalite.config.dims import ParallelDims
from megalite.config.schema import Config
from megalite.config.sections.distillation import distils
from megalite.config.sections.lora import LoraConfig
from megalite.mesh.layout import Coordinates
from megalite.model.cost.recomputed import repeated
from megalite.model.cost.records import (
    AttentionCost,
    Elementwise,
    EmbeddingLookup,
    Matmul,
    RecurrenceCost,
    UnitCost,
)
from megalite.model.parameters import embedding_pair
from megalite.model.unit_numbers import head_unit, layers_in
from megalite.objectives.find import objective_of
from megalite.parallel.pipeline.schedule import ActionKind, Schedule
from megalite.parallel.sharding.buckets import BucketLayout, buckets_of_units
from megalite.parallel.spec import Segment
from megalite.planner.cost.expert_exchange import sent
from megalite.planner.cost.muon_exchange import exchange
from megalite.planner.memory.activations import Activations
from megalite.planner.memory.buffers import NARROW
from megalite.planner.memory.estimate import resolve_layout
from megalite.planner.memory.states import SCALE, Sharing, Widths, matrices

NUMBERS_OF_BASELINE = 16
"""Bytes that are summed over data for the baseline of an objective (`training.reference.set_baseline`)."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that each rank of one pipeline rank sends per step over each axis.

    Reductions over dp and cp together count with dp, and so does Muon's exchange over dp and tp.
    """

    tp: int
    dp: int
    pp: int
    cp: int = 0
    ep: int = 0

    def to_dict(self) -> dict[str, int]:
        return asdict(self)

    def plus(self, other: Traffic) -> Traffic:
        return Traffic(**{name: value + getattr(other, name) for name, value in self.to_dict().items()})


def ring(size: float, ranks: int) -> float:
    """Return the bytes that each of `ranks` sends in an all-gather or a reduce-scatter of `size` bytes."""
    return size * (ranks - 1) / ranks


def traffic(config: Config, world_size: int, schedule: Schedule | None = None) -> list[Traffic]:
    """Return the bytes sent per step, one entry per pipeline rank; arguments as for `memory.estimate`."""
    config = resolve_layout(config, world_size)
    schedule = schedule or plan.schedule(config, ParallelDims.of(config).microbatches)
    return [_rank(config, schedule, pp_rank) for pp_rank in range(config.parallel.pp)]


def _rank(config: Config, schedule: Schedule, pp_rank: int) -> Traffic:
    buckets, units = plan.buckets_of(config, pp_rank), plan.units_of(config)
    own = [unit for stage in schedule.stages_of(pp_rank) for unit in units[stage]]
    tensor = _Tensor(config)
    messages = sum(action.is_send for action in schedule.actions[pp_rank])
    step = Traffic(
        round(schedule.microbatches * sum(map(tensor.microbatch, own)) + tensor.step(buckets)),
        round(_data(config, schedule, pp_rank, buckets)) + exchange(config, buckets).sent,
        round(messages * tensor.sizes.message + _tied(config, schedule, buckets)),
        round(schedule.microbatches * sum(_context(config, tensor.sizes, unit) for unit in own)),
        round(sent(config, own, schedule.microbatches)) if config.parallel.ep > 1 else 0,
    )
    objective, teacher = objective_of(config), teacher_of(config)
    for number in range(0 if objective is None else objective.passes):
        itself = number > 1  # of the passes over mismatched sequences one is of the model itself
        if teacher is None or itself:
            adapters = itself or keeps_start(config)
            step = step.plus(_forward(config, schedule.microbatches, pp_rank, own, buckets, adapters))
        else:
            step = step.plus(_second(teacher, schedule.microbatches, pp_rank))
    if objective is not None and objective.needs_baseline and schedule.placement[-1] == pp_rank:
        numbers = 2 * ring(NUMBERS_OF_BASELINE, ParallelDims.of(config).data)
        step = step.plus(Traffic(0, round(numbers), 0))
    if stored_words(config) is not None and head_unit(config.model) in own:
        # without a cross-entropy its three numbers are not sent
        numbers = 4 - (0 if config.distillation.cross_entropy_weight else 3)
        return step.plus(Traffic(round(schedule.microbatches * tensor.gathered(numbers)), 0, 0))
    if teacher is None or not distils(config):
        return step
    return step.plus(_teacher(config, teacher, schedule.microbatches, pp_rank))


def _second(config: Config, microbatches: int, pp_rank: int) -> Traffic:
    """Return what a rank sends in a forward of a second model."""
    schedule, units = plan.schedule(config, microbatches, forward_only=True), plan.units_of(config)
    own = [unit for stage in schedule.stages_of(pp_rank) for unit in units[stage]]
    return _forward(config, microbatches, pp_rank, own, plan.buckets_of(config, pp_rank), adapters=True)


def _teacher(config: Config, teacher: Config, microbatches: int, pp_rank: int) -> Traffic:
    """Return what a rank sends for a teacher: its forward with its head, which runs in the loss, and the
    statistics of the divergence."""
    schedule, units = plan.schedule(teacher, microbatches, forward_only=True), plan.units_of(teacher)
    buckets, head = plan.buckets_of(teacher, pp_rank), head_unit(teacher.model)
    own = [unit for stage in schedule.stages_of(pp_rank) for unit in units[stage]]
    forward = _second(teacher, microbatches, pp_rank)
    if head not in own:
        return forward
    tensor, options = _Tensor(teacher), config.distillation
    # without a cross-entropy its three numbers are not sent; `forward` of the teacher's head has them as well
    numbers = (4 if options.divergence == "jsd" else 5) - 3 - (0 if options.cross_entropy_weight else 3)
    loss = tensor.gathered(numbers) + (tensor.summed(2) if options.divergence == "jsd" else 0)
    again = [buckets[number] for number in buckets_of_units(buckets)[head]]
    shards = [(bucket, Sharing.of(teacher, bucket.domain)) for bucket in again]
    width = Widths.of(teacher)
    weights = sum(
        ring(bucket.size * width.weights(bucket), sharing.shard)
        for bucket, sharing in shards
        if sharing.weights_sharded
    )
    return forward.plus(Traffic(round(microbatches * loss), round(weights), 0, 0, 0))


def _forward(
    config: Config,
    microbatches: int,
    pp_rank: int,
    own: Sequence[int],
    buckets: Sequence[BucketLayout],
    adapters: bool,
) -> Traffic:
    """Return what a rank sends in a forward pass that scores sequences, with adapters or without."""
    schedule = plan.schedule(config, microbatches, forward_only=True)
    if not adapters:
        config = replace(config, lora=LoraConfig())
    tensor = _Tensor(config)
    messages = sum(action.is_send for action in schedule.actions[pp_rank])
    return Traffic(
        round(microbatches * sum(map(tensor.forward, own))),
        round(_gathered(config, schedule, pp_rank, buckets)),
        round(messages * tensor.sizes.message),
        round(microbatches * sum(_context(config, tensor.sizes, unit, forward_only=True) for unit in own)),
        round(sent(config, own, microbatches, forward_only=True)) if config.parallel.ep > 1 else 0,
    )


def _context(config: Config, sizes: Activations, number: int, forward_only: bool = False) -> float:
    """Return the bytes per microbatch that a unit's blocks exchange over cp.

    See `megalite.parallel.context`.
    """
    total = 0.0
    for layer in layers_in(config.model, number):
        again = repeated(sizes.units, layer, config.train.recompute_of(layer))
        for block in sizes.units.layer(layer).blocks:
            across = (step for step in block.steps if isinstance(step, AttentionCost | RecurrenceCost))
            times = 1 if forward_only else 1 + any(step in again for step in across)
            for each in block.exchanges:
                values = each.forward * times + (0 if forward_only else each.backward)
                wide = each.states * times + (0 if forward_only else each.summed)
                total += ring(values * sizes.width + wide * sizes.accumulate, each.ranks)
    return total


class _Tensor:
    """Bytes sent by tensor parallelism, see `megalite.parallel.tensor`."""

    def __init__(self, config: Config):
        self.config, self.sizes, self.ranks = (
            config,
            Activations(config, lora=config.lora),
            config.parallel.tp,
        )
        self.shared = config.parallel.sequence_parallel and self.ranks > 1

    def gathered(self, numbers: int) -> float:
        """Return the bytes of an all-gather of some numbers of each token."""
        return ring(self.ranks * numbers * self.sizes.share.tokens * self.sizes.accumulate, self.ranks)

    def summed(self, numbers: int) -> float:
        """Return the bytes of an all-reduce of some numbers of each token."""
        return 2 * ring(numbers * self.sizes.share.tokens * self.sizes.accumulate, self.ranks)

    def microbatch(self, number: int) -> float:
        """Return the bytes of one microbatch's forward and backward through a unit."""
        units, model, train = self.sizes.units, self.config.model, self.config.train
        unit, more = units.unit(number), 0.0
        has_logits = number == head_unit(model) and model.output_head == "vocabulary"
        if has_logits:  # each loss reduces maxima, sums and target logits
            further = units.further_losses()
            statistics = (4 if train.label_smoothing else 3) * (1 + len(further))
            more = self.gathered(statistics)
            unit = UnitCost(
                (
                    *unit.blocks,
                    *(block for loss in further for part in loss for block in part.blocks),
                )
            )
        again = [
            step
            for layer in layers_in(model, number)
            for step in repeated(units, layer, train.recompute_of(layer))
        ]
        steps = [*unit.steps, *again]
        forward, backward = (
            sum(
                step.sent_over_tp(self.shared, self.sizes.width)[way]
                for step in each
                if isinstance(step, Matmul | EmbeddingLookup)
            )
            for way, each in enumerate((steps, unit.steps))
        )
        if has_logits and objective_of(self.config) is not None:
            more += self.forward(number)  # the log-probabilities of sequences
        lengths = sum(step.lengths for step in steps if isinstance(step, Matmul))
        # backward, and each forward
        summed = unit.summed + sum(step.summed for step in steps if isinstance(step, Elementwise))
        more += 2 * ring((lengths + summed) * self.sizes.accumulate, self.ranks)
        more += ring(
            sum(step.sent_over_tp(self.shared, self.sizes.accumulate) for step in unit.selections), self.ranks
        )
        return ring(forward + backward, self.ranks) + more

    def forward(self, number: int) -> float:
        """Return the bytes of a forward alone of one microbatch through a unit, without further losses."""
        unit, more = self.sizes.units.unit(number), 0.0
        if number == head_unit(self.config.model):
            more = self.gathered(3)
        lengths = sum(step.lengths for step in unit.steps if isinstance(step, Matmul))
        summed = sum(step.summed for step in unit.steps if isinstance(step, Elementwise))
        more += 2 * ring((lengths + summed) * self.sizes.accumulate, self.ranks)
        sent = (
            step.sent_over_tp(self.shared, self.sizes.width)[0]
            for step in unit.steps
            if isinstance(step, Matmul | EmbeddingLookup)
        )
        return ring(sum(sent), self.ranks) + more

    def step(self, buckets: Sequence[BucketLayout]) -> float:
        """Return the bytes of the all-reduces at the end of a step.

        These are gradients that are partial over tp, and those of replicated key-value heads.
        """
        sharing, width = Sharing.of(self.config), Widths.of(self.config).gradient

        def summed(segment: Segment) -> float:
            size = (
                segment.local(Coordinates.on("tp", 0, self.ranks)).numel
                * width
                / (sharing.shard if sharing.zero else 1)
            )
            return 2 * ring(size, self.ranks if segment.grad_partial_axis else segment.replicas)

        trained = (bucket for bucket in buckets if bucket.trainable)
        return sum(
            summed(segment) for bucket in trained for slot in bucket.slots for segment in slot.spec.segments
        )


def _data(config: Config, schedule: Schedule, pp_rank: int, buckets: Sequence[BucketLayout]) -> float:
    """Return the bytes sent over data parallelism.

    Gradients are sent once per step or microbatch, weights once per step or use.
    """
    widths = Widths.of(config)
    comm_bytes = NARROW if config.parallel.reduce_dtype == "bf16" else widths.gradient
    total = 0.0
    for bucket in buckets:
        if not bucket.trainable:
            continue
        sharing = Sharing.of(config, bucket.domain)
        if spared := _spared(config, bucket):
            total += 2 * ring((bucket.size - spared) * widths.gradient, sharing.data)
        else:
            rounds = (
                schedule.microbatches if sharing.gradients_sharded(bucket, config.run.deterministic) else 1
            )
            total += rounds * ring(bucket.size * comm_bytes, sharing.shard) + 2 * ring(
                sharing.kept(bucket) * comm_bytes, sharing.replicate
            )
        if sharing.zero and not sharing.weights_sharded:
            total += ring(bucket.size * widths.weights(bucket), sharing.shard)
        total += 2 * ring(SCALE * bucket.blocks, sharing.shard)  # maxima of the blocks of codes
    return total + _gathered(config, schedule, pp_rank, buckets)


def _gathered(config: Config, schedule: Schedule, pp_rank: int, buckets: Sequence[BucketLayout]) -> float:
    """Return the bytes of the weights that a schedule gathers."""
    widths = Widths.of(config)
    gathers = [
        buckets[action.bucket]
        for action in schedule.actions[pp_rank]
        if action.kind is ActionKind.GATHER and action.bucket is not None
    ]
    return sum(ring(widths.gathered(bucket), Sharing.of(config, bucket.domain).shard) for bucket in gathers)


def _spared(config: Config, bucket: BucketLayout) -> int:
    """Return the gradient elements that PowerSGD's factors replace; 0 if nothing is compressed."""
    rank = config.parallel.powersgd_rank
    return sum(n * m - (n + m) * rank for n, m in matrices(config, bucket)) if rank else 0


def _tied(config: Config, schedule: Schedule, buckets: Sequence[BucketLayout]) -> float:
    """Return the bytes of the all-reduce of a tied embedding's gradient with copies on two pipeline ranks."""
    sharing, width = Sharing.of(config), Widths.of(config).gradient
    if embedding_pair(config.model, schedule.placement) is None:
        return 0.0
    tied = [bucket for bucket in buckets if bucket.trainable and bucket.tied]
    return sum(2 * ring(sharing.kept(bucket) * width, 2) for bucket in tied)
