"""The memory of a second model (`assembly.teacher`) on each pipeline rank: weights without gradients, and of
a teacher, with the head, what the loss needs. Of a teacher that was asked once: its words for the tokens of a
step, and what the loss needs. Where the reference of an objective is the start of a run: that of a copy of
the weights that are trained.

Its forward pass is over before the first forward of the step. Its activations are not counted: they are those
of one microbatch without a backward.
"""

from __future__ import annotations

from collections.abc import Sequence

from megalite.assembly import plan
from megalite.assembly.teacher import keeps_start, stored_words, teacher_of
from megalite.config.dims import ParallelDims
from megalite.config.schema import Config
from megalite.config.sections.distillation import distils
from megalite.model.spec_builder import padded_vocabulary
from megalite.model.unit_numbers import head_unit
from megalite.parallel.pipeline.schedule import Schedule
from megalite.parallel.sharding.buckets import BucketLayout, buckets_of_units
from megalite.planner.memory.states import Sharing, Widths

TABLES = {"forward": 5, "reverse": 5, "jsd": 7}
"""Tensors of the size of the logits, in at least fp32, that a divergence holds at a time, by its kind."""
TABLES_OF_WORDS = 3
"""The same of the divergence from stored words."""
OF_WORD, OF_TOKEN = 4 + 4, 8
"""Bytes of a stored word and its log-probability, and of the probability of all others."""
PLACE = 8 + 1
"""Bytes of the column of a word, and whether it is on the rank."""


def teacher_bytes(config: Config, schedule: Schedule, pp_rank: int, loss_chunk: int) -> int:
    """Return the bytes that a second model, or the copy of a start, adds to a rank; 0 without them.

    Args:
        loss_chunk: tokens whose logits exist at a time; 0: those of a microbatch.
    """
    if keeps_start(config):
        trained = [bucket for bucket in plan.buckets_of(config, pp_rank) if bucket.trainable]
        # a copy of shards in CPU memory is there as well
        return 0 if config.parallel.offload_parameters else _weights(config, trained)
    if (number := stored_words(config)) is not None:
        return _of_words(config, number, loss_chunk if schedule.placement[-1] == pp_rank else None)
    teacher = teacher_of(config)
    if teacher is None:
        return 0
    widths, buckets = Widths.of(teacher), plan.buckets_of(teacher, pp_rank)
    total = _weights(teacher, buckets)
    if schedule.placement[-1] != pp_rank or not distils(config):
        return total
    for number in buckets_of_units(buckets).get(head_unit(teacher.model), ()):
        bucket = buckets[number]
        if Sharing.of(teacher, bucket.domain).weights_sharded:
            total += bucket.size * widths.weights(bucket)  # gathered until the step ends
    length, batch, hidden = plan.activation_shape(teacher)
    tables = widths.compute + TABLES[config.distillation.divergence] * widths.accumulate
    logits = _in_chunk(config, loss_chunk) * _columns(teacher) * tables
    states = ParallelDims.of(config).microbatches * length * batch * hidden * widths.compute
    return total + logits + states


def _of_words(config: Config, number: int, loss_chunk: int | None) -> int:
    """Return the bytes of a teacher's words for the microbatches of a step, and of what the loss needs.

    Args:
        loss_chunk: as that of `teacher_bytes`; None: the rank has no head.
    """
    total = ParallelDims.of(config).microbatches * _tokens(config) * (number * OF_WORD + OF_TOKEN)
    if loss_chunk is None:
        return total
    width = Widths.of(config).accumulate
    # the probabilities of the words in both distributions, and where they are
    each = TABLES_OF_WORDS * _columns(config) * width + number * (2 * width + PLACE)
    return total + _in_chunk(config, loss_chunk) * each


def _tokens(config: Config) -> int:
    """Return the number of a microbatch's tokens on a rank, also of those that are split over tp."""
    length, batch, _ = plan.activation_shape(config)
    return length * batch * (config.parallel.tp if config.parallel.sequence_parallel else 1)


def _in_chunk(config: Config, loss_chunk: int) -> int:
    """Return the number of tokens whose logits exist at a time."""
    return min(loss_chunk or _tokens(config), _tokens(config))


def _columns(config: Config) -> int:
    """Return the number of columns of the logits on a rank."""
    return padded_vocabulary(config.model.vocabulary, config.parallel.tp) // config.parallel.tp


def _weights(config: Config, buckets: Sequence[BucketLayout]) -> int:
    """Return the bytes of the weights of buckets that a rank keeps."""
    widths, total = Widths.of(config), 0
    for bucket in buckets:
        sharing = Sharing.of(config, bucket.domain)
        size = bucket.quantized_bytes or bucket.size * widths.weights(bucket)
        total += size // sharing.shard if sharing.weights_sharded else size
    return total
