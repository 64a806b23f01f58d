"""Bytes of the model's states on one rank: weights, accumulated gradients and optimizer state.

Computed from the buckets that the store allocates (`megalite.parallel.sharding`), padding included, so the
numbers are exact: `megalite train --dry_run` builds the same buckets on the meta device and fails if one byte
differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

from megalite.assembly.plan import first_place, optimistic_step
from megalite.config.dims import ParallelDims
from megalite.config.schema import Config
from megalite.model.adapter_parameters import trained_specs
from megalite.model.kinds import dispatch_of
from megalite.model.parameters import model_specs
from megalite.optimizer.registry import is_uniform, kinds_of, state_bytes
from megalite.optimizer.state_tensors import StateTensor
from megalite.parallel.fp8_choice import Fp8Options, code_bytes, fp8_choice
from megalite.parallel.sharding.buckets import BucketLayout
from megalite.parallel.sharding.compressible import compressible
from megalite.parallel.spec import WEIGHT, ParamSpec, Segment

DeviceType = Literal["cuda", "cpu"]

SCALE = 4
"""Bytes of a scale of fp8 codes."""
WIDTH = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}
"""Bytes per element, by train.precision."""


@dataclass(frozen=True)
class Widths:
    """Bytes per element of the compute dtype, the accumulate dtype (at least fp32) and a gradient."""

    compute: int
    accumulate: int
    gradient: int

    @staticmethod
    def of(config: Config) -> Widths:
        compute = WIDTH[config.train.precision]
        accumulate = max(compute, WIDTH["fp32"])
        return Widths(
            compute,
            accumulate,
            accumulate if config.train.grad_dtype == "fp32" else WIDTH[config.train.grad_dtype],
        )

    def weights(self, stored: BucketLayout | ParamSpec) -> int:
        """Return the bytes per element of the weights of a bucket or a stored tensor."""
        return self.accumulate if stored.at_least_fp32 else self.compute

    def gathered(self, bucket: BucketLayout) -> int:
        """Return the bytes that ZeRO-3 gathers of a bucket: its weights, their codes, or a quantized base."""
        return bucket.quantized_bytes or bucket.size * (1 if bucket.coded else self.weights(bucket))


@dataclass(frozen=True)
class Sharing:
    """Sharding of the buckets in a domain.

    Attributes:
        data: number of ranks over which gradients are summed.
        shard: number of ranks that share each bucket.
        replicate: number of groups with the same shards (HSDP).
        zero: effective ZeRO stage; 0 if the buckets are not sharded.
    """

    data: int
    shard: int
    replicate: int
    zero: int

    @staticmethod
    def of(config: Config, domain: str = "dense") -> Sharing:
        parallel, dims = config.parallel, ParallelDims.of(config)
        if dims.shard > 1 or parallel.offload_parameters:
            zero = parallel.zero
        else:  # as `ParameterStore`
            zero = min(parallel.zero, 2 if dims.expert_shard > 1 and dispatch_of(config.model) else 0)
        if domain == "dense":
            return Sharing(dims.data, dims.shard, dims.replicate, zero)
        if dims.expert_shard == 1 and not parallel.offload_parameters:
            zero = min(zero, 2)  # no other rank has the weights to gather
        return Sharing(dims.expert_data, dims.expert_shard, dims.expert_data // dims.expert_shard, zero)

    def kept(self, bucket: BucketLayout) -> int:
        """Return the elements of a bucket whose optimizer state one rank keeps; if frozen, of its weights."""
        return bucket.size // self.shard if bucket.trainable or self.weights_sharded else bucket.size

    @property
    def weights_sharded(self) -> bool:
        """Return whether weights are gathered only while they are used (ZeRO-3)."""
        return self.zero == 3

    def gradients_sharded(self, bucket: BucketLayout, deterministic: bool) -> bool:
        """Return whether only this rank's shard of a bucket's gradients is kept (ZeRO-2 and 3)."""
        return self.zero >= 2 and self.shard > 1 and not (deterministic and bucket.both_ends)


def _state(config: Config, bucket: BucketLayout, shard: int) -> int:
    """Return the bytes of optimizer state in a shard of a bucket, without the master weights."""
    if not bucket.trainable:
        return 0
    ranks = Sharing.of(config, bucket.domain).shard
    start, stop = bucket.part(shard % ranks, ranks)
    return state_bytes(bucket, start, stop, kinds_of(config), Widths.of(config).accumulate)


def fullest_shard(config: Config, buckets: Sequence[BucketLayout]) -> int:
    """Return the index of the shard with the most optimizer state.

    All have the same amount, unless the optimizer keeps more state for some tensors than for others.
    """
    if is_uniform(config):
        return 0
    return max(
        range(Sharing.of(config).shard),
        key=lambda shard: sum(_state(config, bucket, shard) for bucket in buckets),
    )


def checkpoint_bytes(config: Config) -> int:
    """Return the bytes of the tensors in a checkpoint, over all ranks.

    These are weights (master weights if they are trained) and their optimizer state. A quantized base is not
    stored. What PowerSGD and routers keep besides is left out.
    """
    widths, kinds = Widths.of(config), kinds_of(config)
    segments = (
        (spec, each)
        for spec in trained_specs(model_specs(config.model), config)
        for each in spec.segments
        if not each.copy and spec.base is None
    )

    def stored(spec: ParamSpec, segment: Segment) -> int:
        if not segment.trainable:
            return segment.numel * widths.weights(spec)
        tensors = (StateTensor(WEIGHT), *kinds(segment))
        return sum(each.bytes(segment.numel, widths.accumulate) for each in tensors)

    return sum(stored(*each) for each in segments)


COPIES_KEPT = 4
"""Copies in memory that a rank keeps: two of its part of the state, and two of that of a rank elsewhere."""


def copying_bytes(config: Config) -> int:
    """Return the bytes of CPU memory that copies of the state take for each rank, or 0 without any.

    Staging memory of background copies is included. On one node half of the rest is enough.
    """
    options = config.checkpoint
    if options.copy_interval is None:
        return 0
    own = -(-checkpoint_bytes(config) // ParallelDims.of(config).world)
    return (COPIES_KEPT + int(options.async_save)) * own


@dataclass(frozen=True)
class States:
    """Bytes kept between steps, and the copies that a step adds until its update is confirmed.

    Attributes:
        weights: in the compute dtype, or at least fp32; with ZeRO-3 also codes and scales of those that it
            gathers in fp8.
        gradients: in the dtype they accumulate in.
        master: master weights, 0 if the weights themselves are updated.
        moments: the optimizer's state besides them: AdamW's two moments, Muon's one of matrices, and the
            average of the weights.
        powersgd: errors and factors of compressed gradients.
        codes: weights in fp8 with their scales, besides those in the compute dtype, without ZeRO-3.
        copies: transient copies of the optimizer state under schedules that update before the norm is known,
            and PowerSGD's new errors and factors.
        host, disk: the part of the above that is stored in CPU memory or in a file instead of on the device.
    """

    weights: int = 0
    gradients: int = 0
    master: int = 0
    moments: int = 0
    powersgd: int = 0
    codes: int = 0
    copies: int = 0
    host: int = 0
    disk: int = 0

    @property
    def optimizer(self) -> int:
        """Return the optimizer state kept between steps, on the device, in CPU memory or on disk."""
        return self.master + self.moments + self.powersgd

    @property
    def device(self) -> int:
        """Return the bytes on the device while a step runs."""
        kept = self.weights + self.codes + self.gradients + self.optimizer
        return kept + self.copies - self.host - self.disk

    def __add__(self, other: States) -> States:
        return States(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


def model_states(
    config: Config,
    buckets: Sequence[BucketLayout],
    pp_rank: int,
    device: DeviceType = "cuda",
    shard: int | None = None,
) -> States:
    """Return the states of a pipeline rank with these buckets.

    Args:
        device: the device that computes; offloading to CPU memory moves state off the device only if this is
            "cuda".
        shard: its index on the shard axis; default: that with the most state.
    """
    shard = fullest_shard(config, buckets) if shard is None else shard
    total = sum((_bucket(config, bucket, device, shard) for bucket in buckets), States())
    if optimistic_step(config) and pp_rank < config.parallel.pp - 1:
        master = Widths.of(config).accumulate
        copies = sum(
            Sharing.of(config, bucket.domain).kept(bucket) * master + _state(config, bucket, shard)
            for bucket in buckets
            if bucket.trainable
        )
        total += States(copies=copies)
    return total


def _bucket(config: Config, bucket: BucketLayout, device: DeviceType, shard: int) -> States:
    parallel, widths, sharing = config.parallel, Widths.of(config), Sharing.of(config, bucket.domain)
    kept, sharded = sharing.kept(bucket), sharing.weights_sharded
    width = widths.weights(bucket)
    weights = (kept if sharded else bucket.size) * width
    if bucket.quantized_bytes:
        weights = bucket.quantized_bytes // (sharing.shard if sharded else 1)
    weights_at = "cpu" if sharded and parallel.offload_parameters else device
    state_at = device if parallel.offload == "none" else "cpu"
    is_own_master = not bucket.trainable or (width == widths.accumulate and weights_at == state_at)
    master = 0 if is_own_master else kept * widths.accumulate
    moments = _state(config, bucket, shard)
    away = master + moments if parallel.offload == "disk" or state_at != device else 0
    compressed = _compressed(config, bucket) * widths.gradient
    return States(
        weights=weights + (kept + SCALE * bucket.blocks if bucket.coded else 0),
        gradients=_gradients(config, bucket) * widths.gradient,
        master=master,
        moments=moments,
        powersgd=compressed,
        codes=0 if sharded else _codes(config, bucket),
        copies=compressed,
        host=(weights if weights_at != device else 0) + (away if parallel.offload != "disk" else 0),
        disk=away if parallel.offload == "disk" else 0,
    )


def _gradients(config: Config, bucket: BucketLayout) -> int:
    """Return the number of gradient elements that are kept between microbatches."""
    sharing, deterministic = Sharing.of(config, bucket.domain), config.run.deterministic
    if not bucket.trainable:
        return 0
    if sharing.gradients_sharded(bucket, deterministic):
        return sharing.kept(bucket)
    return bucket.size * (2 if deterministic and bucket.both_ends else 1)


def matrices(config: Config, bucket: BucketLayout) -> list[tuple[int, int]]:
    """Return the shapes of the bucket's matrices whose gradients PowerSGD compresses.

    See `megalite.parallel.sharding.powersgd`.
    """
    parallel = config.parallel
    alone = Sharing.of(config).data == 1 or Sharing.of(config, bucket.domain).data == 1
    if not parallel.powersgd_rank or alone or not bucket.trainable:
        return []
    at = first_place(config)
    segments = [segment for slot in bucket.slots for segment in slot.spec.segments]
    compressed = [compressible(segment, segment.local(at), parallel.powersgd_rank) for segment in segments]
    return [(each.n, each.m) for each in compressed if each is not None for _ in range(each.number)]


def _codes(config: Config, bucket: BucketLayout) -> int:
    """Return the bytes of the codes and scales of a bucket's weights, kept from one update to the next."""
    if config.train.fp8 == "none":
        return 0
    layers, at, options = config.model.num_hidden_layers, first_place(config), Fp8Options.of(config.train)
    chosen = ((fp8_choice(slot.spec, at, options, layers).rows, slot.shape[-1]) for slot in bucket.slots)
    return sum(code_bytes(rows, columns, config.train.fp8) for rows, columns in chosen if rows)


def _compressed(config: Config, bucket: BucketLayout) -> int:
    """Return the number of elements in the errors and factors that PowerSGD keeps for a bucket."""
    return sum(n * m + m * (config.parallel.powersgd_rank or 0) for n, m in matrices(config, bucket))
