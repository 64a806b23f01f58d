"""The model's states on one rank in bytes: weights, accumulated gradients and what the optimizer keeps. Imports no torch.

Computed from the buckets that the store allocates (`megalite.parallel.sharding`), so padding is counted and nothing is a rule of thumb:
`megalite train --dry_run` builds the same buckets on the meta device and ends with an error where one byte differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

from megalite.build.plan import optimistic_step
from megalite.config.dims import ParallelDims
from megalite.config.schema import Config
from megalite.layout import Coordinates
from megalite.optimizer.state_kinds import state_kinds
from megalite.parallel.sharding.buckets import Bucket

Device = Literal["cuda", "cpu"]

WIDTH = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}
"""Bytes of an element, by train.precision."""


@dataclass(frozen=True)
class Widths:
    """Bytes of an element: of what is computed with, of what accumulates (at least fp32), of an accumulated gradient."""

    compute: int
    accumulate: int
    gradient: int

    @staticmethod
    def of(config: Config) -> Widths:
        compute = WIDTH[config.train.precision]
        accumulate = max(compute, WIDTH["fp32"])
        return Widths(compute, accumulate, accumulate if config.train.grad_dtype == "wide" else WIDTH[config.train.grad_dtype])


@dataclass(frozen=True)
class Sharing:
    """Who keeps which part: the ranks that share a bucket, and the ZeRO stage that this amounts to (0 where nobody shares)."""

    data: int
    shard: int
    replicate: int  # groups that hold the same shards (HSDP)
    zero: int

    @staticmethod
    def of(config: Config) -> Sharing:
        parallel, dims = config.parallel, ParallelDims.of(config)
        zero = parallel.zero if dims.shard > 1 or parallel.offload_parameters else 0
        return Sharing(dims.data, dims.shard, dims.replicate, zero)

    def kept(self, bucket: Bucket) -> int:
        """Elements of a bucket whose optimizer state one rank keeps; of a frozen one, those of its weights."""
        return bucket.size // self.shard if bucket.trainable or self.weights_sharded else bucket.size

    @property
    def weights_sharded(self) -> bool:
        """Whether weights are whole only while they are used (ZeRO-3)."""
        return self.zero == 3

    def gradients_sharded(self, bucket: Bucket, deterministic: bool) -> bool:
        """Whether only this rank's part of a bucket's gradients is kept (ZeRO-2 and 3)."""
        return self.zero >= 2 and self.shard > 1 and not (deterministic and shared_by_both_ends(bucket))


def kinds_of(bucket: Bucket) -> int:
    """How many kinds of state the optimizer keeps of each element of a bucket, besides the master weight."""
    return len(state_kinds(bucket.slots[0].spec.segments[0]))


def shared_by_both_ends(bucket: Bucket) -> bool:
    """Whether embedding and head share the bucket's tensor on this rank."""
    return any(slot.spec.contributions > 1 for slot in bucket.slots)


@dataclass(frozen=True)
class States:
    """Bytes between steps, and what a step adds until it is known to be applied.

    Attributes:
        weights, gradients: in compute precision; as they accumulate.
        master: master weights where they are not the weights themselves.
        moments: AdamW's two.
        powersgd: errors and factors of compressed gradients.
        copies: transient: of the optimizer state under schedules that update before the norm is known; PowerSGD's new errors and factors.
        host, disk: of all these, what lies in CPU memory or in a file instead of on the device.
    """

    weights: int = 0
    gradients: int = 0
    master: int = 0
    moments: int = 0
    powersgd: int = 0
    copies: int = 0
    host: int = 0
    disk: int = 0

    @property
    def optimizer(self) -> int:
        """What the optimizer keeps between steps, wherever it lies."""
        return self.master + self.moments + self.powersgd

    @property
    def device(self) -> int:
        """What lies on the device while a step runs."""
        return self.weights + self.gradients + self.optimizer + self.copies - self.host - self.disk

    def __add__(self, other: States) -> States:
        return States(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


def model_states(config: Config, buckets: Sequence[Bucket], pp_rank: int, device: Device = "cuda") -> States:
    """The states of a pipeline rank with these buckets.

    Args:
        device: where it computes; offloaded state lies elsewhere only beside a GPU.
    """
    total = sum((_bucket(config, bucket, device) for bucket in buckets), States())
    ahead = optimistic_step(config) and config.train.precision != "fp16"
    if ahead and pp_rank < config.parallel.pp - 1:
        kept = sum((1 + kinds_of(bucket)) * Sharing.of(config).kept(bucket) for bucket in buckets if bucket.trainable)
        total += States(copies=kept * Widths.of(config).accumulate)
    return total


def _bucket(config: Config, bucket: Bucket, device: Device) -> States:
    parallel, widths, sharing = config.parallel, Widths.of(config), Sharing.of(config)
    kept, sharded = sharing.kept(bucket), sharing.weights_sharded
    weights = (kept if sharded else bucket.size) * widths.compute
    weights_at = "cpu" if sharded and parallel.offload_parameters else device
    state_at = device if parallel.offload == "none" else "cpu"
    is_own_master = not bucket.trainable or (widths.accumulate == widths.compute and weights_at == state_at)
    master = 0 if is_own_master else kept * widths.accumulate
    moments = kinds_of(bucket) * kept * widths.accumulate
    away = master + moments if parallel.offload == "disk" or state_at != device else 0
    compressed = _compressed(config, bucket) * widths.gradient
    return States(
        weights=weights,
        gradients=_gradients(config, bucket) * widths.gradient,
        master=master,
        moments=moments,
        powersgd=compressed,
        copies=compressed,
        host=(weights if weights_at != device else 0) + (away if parallel.offload != "disk" else 0),
        disk=away if parallel.offload == "disk" else 0,
    )


def _gradients(config: Config, bucket: Bucket) -> int:
    """Elements that accumulate between microbatches."""
    sharing, deterministic = Sharing.of(config), config.run.deterministic
    if not bucket.trainable:
        return 0
    if sharing.gradients_sharded(bucket, deterministic):
        return sharing.kept(bucket)
    return bucket.size * (2 if deterministic and shared_by_both_ends(bucket) else 1)


def matrices(config: Config, bucket: Bucket) -> list[tuple[int, int]]:
    """The shapes of the matrices of a bucket whose gradients PowerSGD compresses, see `megalite.parallel.sharding.powersgd`."""
    rank, tp = config.parallel.powersgd_rank, config.parallel.tp
    if not rank or Sharing.of(config).data == 1 or not bucket.trainable:
        return []
    segments = (segment for slot in bucket.slots for segment in slot.spec.segments)
    compressed = [segment for segment in segments if segment.grad_partial_axis is None and segment.replicas == 1]
    shapes = [shape for segment in compressed if len(shape := segment.local(Coordinates.on("tp", 0, tp)).shape) == 2]
    return [(n, m) for n, m in shapes if (n + m) * rank < n * m]


def _compressed(config: Config, bucket: Bucket) -> int:
    """Elements of the errors and factors that PowerSGD keeps of them."""
    return sum(n * m + m * (config.parallel.powersgd_rank or 0) for n, m in matrices(config, bucket))
