"""The memory of a teacher (`distillation.teacher`) on each pipeline rank: weights without gradients, and with
the head what the loss needs.

Its forward pass is over before the first forward of the step. Its activations are not counted: they are those
of one microbatch without a backward.
"""

from __future__ import annotations

from megalite.assembly import plan
from megalite.assembly.teacher import teacher_of
from megalite.config.dims import ParallelDims
from megalite.config.schema import Config
from megalite.model.spec_builder import padded_vocabulary
from megalite.model.unit_numbers import head_unit
from megalite.parallel.pipeline.schedule import Schedule
from megalite.parallel.sharding.buckets import buckets_of_units
from megalite.planner.memory.states import Sharing, Widths

TABLES = {"forward": 5, "reverse": 5, "jsd": 7}
"""Tensors of the size of the logits, in at least fp32, that a divergence holds at a time, by its kind."""


def teacher_bytes(config: Config, schedule: Schedule, pp_rank: int, loss_chunk: int) -> int:
    """Return the bytes that a teacher adds to a rank; 0 without one.

    Args:
        loss_chunk: tokens whose logits exist at a time; 0: those of a microbatch.
    """
    teacher = teacher_of(config)
    if teacher is None:
        return 0
    widths, buckets = Widths.of(teacher), plan.buckets_of(teacher, pp_rank)
    total = 0
    for bucket in buckets:
        sharing = Sharing.of(teacher, bucket.domain)
        kept = bucket.size // sharing.shard if sharing.weights_sharded else bucket.size
        total += kept * widths.weights(bucket)
    if schedule.placement[-1] != pp_rank:
        return total
    for number in buckets_of_units(buckets).get(head_unit(teacher.model), ()):
        bucket = buckets[number]
        if Sharing.of(teacher, bucket.domain).weights_sharded:
            total += bucket.size * widths.weights(bucket)  # gathered until the step ends
    length, batch, hidden = plan.activation_shape(teacher)
    parallel = config.parallel
    tokens = length * batch * (parallel.tp if parallel.sequence_parallel else 1)
    columns = padded_vocabulary(teacher.model.vocabulary, parallel.tp) // parallel.tp
    tables = widths.compute + TABLES[config.distillation.divergence] * widths.accumulate
    logits = min(loss_chunk or tokens, tokens) * columns * tables
    states = ParallelDims.of(config).microbatches * length * batch * hidden * widths.compute
    return total + logits + states
