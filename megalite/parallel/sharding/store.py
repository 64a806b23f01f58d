"""Memory of one rank's parameters: flat buckets of weights, gradients and master weights.

The buckets are full or ZeRO shards.

    forward    `gatherer` waits for the weights gathered after the last step, or gathers them for use (ZeRO-3)
    backward   `weight_grads` computes weight gradients; a complete bucket immediately starts its reduction
               (`reducer`)
    then       `reducer.finish()` waits for the reductions and sums tensor-partial, replicated key-value and
               tied gradients
    optimizer  updates `owned` ranges: the whole bucket (ZeRO-0) or this rank's shard of it
    after      `gatherer.gather_updated()` starts gathering the updated shards

The store allocates this memory, sets the values of weights, and enumerates the rectangles of global tensors
on this rank. Its gatherer and reducer do the communication.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megalite.mesh.mesh import Domain, Mesh
from megalite.parallel.collectives import all_gather, meet
from megalite.parallel.quantized.buffers import QuantizedBuffers
from megalite.parallel.sharding.bucket_buffers import BucketBuffers
from megalite.parallel.sharding.buckets import BucketLayout, Slot, bucket_layout, buckets_of_units
from megalite.parallel.sharding.gradient_bucket import GradientBucket
from megalite.parallel.sharding.offload import Uploads, pinned_zeros
from megalite.parallel.sharding.reducer import GradientReducer
from megalite.parallel.sharding.shard_gatherer import ShardGatherer
from megalite.parallel.sharding.state_memory import StateMemory
from megalite.parallel.sharding.transfers import TransferLog
from megalite.parallel.sharding.weight_gatherer import WeightGatherer
from megalite.parallel.spec import WEIGHT, FlatRectangle, ParamSpec, Rectangle
from megalite.parallel.weight import Weight
from megalite.parallel.weight_grad_queue import WeightGradQueue
from megalite.system import rng

if TYPE_CHECKING:
    from megalite.parallel.sharding.powersgd import PowerSGD


@dataclass(frozen=True)
class _Dtypes:
    """Dtypes of the weights, the master weights and the accumulated gradients."""

    compute: torch.dtype
    master: torch.dtype  # at least fp32
    gradients: torch.dtype

    def weights(self, layout: BucketLayout) -> torch.dtype:
        """Return the dtype of a bucket's weights."""
        return self.master if layout.at_least_fp32 else self.compute


@dataclass(frozen=True)
class StoreOptions:
    """Options for storing the parameters of a rank.

    Attributes:
        zero: ZeRO stage. 0: every dp rank keeps all of every bucket; 1: optimizer state is sharded; 2:
            gradients are also sharded; 3: weights are also sharded, except those in use.
        dtype: compute precision. Weights that are at least fp32 (`ParamSpec.at_least_fp32`) may be wider.
        grad_dtype: accumulate dtype of gradients; default: `dtype`, but at least fp32.
        reduce_dtype: communication dtype of data-parallel gradient reductions; default: the accumulate dtype.
        bucket_bytes, pad: see `bucket_layout`.
        separate_embedding_grad: see `Weight.separate_embedding_grad`.
        offload_parameters: with zero 3, store shards of weights in CPU memory. A single rank then also frees
            its weights after use.
        training: False allocates only weights, without gradient buffers and master weights.
    """

    zero: int = 0
    dtype: torch.dtype = torch.float32
    grad_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    bucket_bytes: float = 25e6
    pad: int = 0
    separate_embedding_grad: bool = False
    offload_parameters: bool = False
    training: bool = True


class ParameterStore:
    """Stored tensors of one pipeline rank.

    Args:
        specs: the stored tensors of the rank, in the order of the model.
        powersgd: compresses the reductions of gradients, with zero 0 and 1.
        state: memory for master weights and the moments of the optimizer; default: the device of the weights.

    Attributes:
        weights: stored tensors by name, for the model.
        weight_grads: queue of weight-gradient matmuls.
        gatherer: makes the full weights of a unit available before it computes.
        reducer: reduces gradients.
        base: where the weights that were quantized are, and what identifies them (`lora.base`); None: there
            are none, or they have not been read.

    Raises:
        ValueError: zero is 0 but the mesh's shard axis has several ranks.
    """

    def __init__(
        self,
        specs: Sequence[ParamSpec],
        mesh: Mesh,
        options: StoreOptions | None = None,
        *,
        powersgd: PowerSGD | None = None,
        device: torch.device | str = "cpu",
        state: StateMemory | None = None,
    ):
        options = options or StoreOptions()
        if options.zero == 0 and mesh.shard.size > 1:
            raise ValueError(
                f"zero=0 is incompatible with a mesh whose shard axis has {mesh.shard.size} "
                "ranks. Create the mesh with dp_shard=1."
            )
        self.mesh, self.at, self.options = mesh, mesh.coordinates, options
        # Without offloading, a single rank shards nothing. At dp = 1 experts may still have several ranks,
        # whose weights stay whole.
        alone = mesh.shard.size == 1 and not options.offload_parameters
        self.zero = (
            min(options.zero, 2 if mesh.domain("expert").shard.size > 1 else 0) if alone else options.zero
        )
        self.device = torch.device(device)
        self.state = state or StateMemory(self.device)
        self.weight_grads, self.log = WeightGradQueue(), TransferLog()
        self.reducer = GradientReducer(mesh, self.log, options.reduce_dtype, powersgd)
        self.weights: dict[str, Weight] = {}
        self.base: Mapping[str, str | None] | None = None
        owners = {name: mesh.domain(name).owners for name in dict.fromkeys(spec.domain for spec in specs)}
        layouts = bucket_layout(specs, self.at, owners, options.bucket_bytes, options.pad)
        master_dtype = torch.promote_types(options.dtype, torch.float32)
        dtypes = _Dtypes(options.dtype, master_dtype, options.grad_dtype or master_dtype)
        self.buckets = [
            self._allocate(layout, dtypes, shard)
            for layout, shard in zip(layouts, self._shards(layouts, dtypes), strict=True)
        ]
        for bucket in self.buckets:
            if bucket.gradients is not None:
                self.reducer.add(bucket.gradients)
        self.gatherer = self._make_gatherer(layouts)

    def _make_gatherer(self, layouts: Sequence[BucketLayout]) -> WeightGatherer:
        by_unit = {
            unit: [self.buckets[number] for number in numbers]
            for unit, numbers in buckets_of_units(layouts).items()
        }
        if self.zero == 3:
            collective = Uploads(self.device) if self.options.offload_parameters else all_gather
            return ShardGatherer(self.buckets, by_unit, self.log, collective)
        sharded = self.zero > 0 and any(bucket.domain.shard.size > 1 for bucket in self.buckets)
        return WeightGatherer(self.buckets, by_unit, sharded, self.log)

    def _allocate(self, layout: BucketLayout, dtypes: _Dtypes, shard: Tensor | None) -> BucketBuffers:
        if layout.quantized_bytes:
            return self._allocate_quantized(layout, dtypes, shard)
        weights = torch.zeros(layout.size, dtype=dtypes.weights(layout), device=self.device)
        # Frozen buckets have no optimizer state to shard; only ZeRO-3 shards their weights.
        domain, divided = self.mesh.domain(layout.domain), layout.trainable or self.zero == 3
        start, stop = layout.part(domain.shard.rank, domain.shard.size) if divided else (0, layout.size)
        own = weights[start:stop] if shard is None else shard
        trains = layout.trainable and self.options.training
        # With the same dtype and device the weights themselves are the masters.
        in_place = not trains or (dtypes.master == own.dtype and own.device.type == self.state.device.type)
        master = own if in_place else self.state.zeros(stop - start, dtypes.master)
        gradients = self._allocate_gradients(layout, domain, dtypes.gradients) if trains else None
        bucket = BucketBuffers(layout, domain, weights, gradients, start, stop, master, shard)
        for slot in layout.slots:
            weight = self._weight(slot, weights, dtypes.gradients if trains else None)
            if gradients is not None:
                gradients.add(weight)
        if gradients is not None and self._separates(layout):
            gradients.separate_embedding()
        if shard is not None:
            bucket.free()
        return bucket

    def _allocate_quantized(
        self, layout: BucketLayout, dtypes: _Dtypes, shard: Tensor | None
    ) -> BucketBuffers:
        # Views of one element: those of a tensor without memory cannot be made.
        weights = torch.empty(1, dtype=dtypes.compute, device=self.device).expand(layout.size)
        domain = self.mesh.domain(layout.domain)
        quantized = QuantizedBuffers(layout, self.at, domain.shard.rank, shard, self.device)
        bucket = BucketBuffers(layout, domain, weights, None, 0, 0, quantized.kept, shard, quantized)
        for index, slot in enumerate(layout.slots):
            weight = self._weight(slot, weights, None)
            weight.matmuls = quantized.matmuls(index, weight.tensor)
        weights.untyped_storage().resize_(0)
        if shard is not None:
            bucket.free()
        return bucket

    def _weight(self, slot: Slot, weights: Tensor, grad_dtype: torch.dtype | None) -> Weight:
        """Return the stored tensor of a slot, a view of a bucket's weights."""
        tensor = weights[slot.start : slot.stop].view(slot.shape).detach()
        # Frozen weights require grad, too: else no input of the first adapted layer would, and autograd
        # would skip its backward.
        tensor.requires_grad_(self.options.training)
        weight = Weight(slot.spec, tensor, grad_dtype, self.weight_grads)
        self.weights[slot.spec.name] = weight
        return weight

    def _shards(self, layouts: Sequence[BucketLayout], dtypes: _Dtypes) -> Sequence[Tensor | None]:
        """Return this rank's shard of the weights of each bucket, with ZeRO-3."""
        if self.zero < 3:
            return [None] * len(layouts)
        ranks = [self.mesh.domain(layout.domain).shard.size for layout in layouts]
        kinds = [torch.uint8 if each.quantized_bytes else dtypes.weights(each) for each in layouts]
        sizes = [layout.quantized_bytes or layout.size for layout in layouts]
        counts = [size // parts for size, parts in zip(sizes, ranks, strict=True)]
        if self.options.offload_parameters:
            return pinned_zeros(counts, kinds, self.device)
        # A bucket that no other rank has stays whole: experts at ep = dp · cp · tp.
        return [
            torch.zeros(n, dtype=dtype, device=self.device) if size > 1 else None
            for n, size, dtype in zip(counts, ranks, kinds, strict=True)
        ]

    def _allocate_gradients(self, layout: BucketLayout, domain: Domain, dtype: torch.dtype) -> GradientBucket:
        # both accumulators are kept for a step, because adding per microbatch changes the order
        zero = min(self.zero, 1) if self._separates(layout) else self.zero
        return GradientBucket.allocate(layout, domain, zero, dtype, self.device, self.reducer)

    def _separates(self, layout: BucketLayout) -> bool:
        return self.options.separate_embedding_grad and layout.both_ends

    # ---- the values of weights

    def initialize(self, seed: int, threads: int = 1) -> None:
        """Draw the weights of the model. Collective.

        They are keyed by their global names, so that every mesh has the same model.

        Args:
            threads: number of blocks of a weight that are drawn at the same time.
        """
        self.draw(seed, threads)
        meet(self.mesh)  # the first and last stages draw more than others
        self.gatherer.gather_updated(loaded=True)
        self.gatherer.finish()

    def draw(self, seed: int, threads: int = 1, roles: Collection[str] = ()) -> None:
        """Draw the weights with a master on this rank, or only those with some roles.

        `publish` then gathers them.
        """
        for (bucket, start), first, values in rng.ahead(self._draws(seed, roles), threads):
            bucket.write(start + first, values)
            self.state.release(bucket.master)  # offloaded masters: evict the pages that were just written

    def _draws(
        self, seed: int, roles: Collection[str]
    ) -> Iterator[tuple[tuple[BucketBuffers, int], rng.Draw]]:
        """Yield the draws that initialize this rank's masters.

        Each comes with its bucket and the start of its segment in it.
        """
        for bucket in self.buckets:
            for slot in bucket.layout.slots:
                start = slot.start
                for segment in slot.spec.segments:
                    size = segment.local(self.at).numel
                    low, high = max(bucket.start - start, 0), min(bucket.stop - start, size)
                    if not roles or segment.role in roles:
                        yield from zip(
                            repeat((bucket, start)), rng.initial_values(segment, self.at, seed, low, high)
                        )
                    start += size

    def to_load(self, without: Collection[str] = ()) -> list[Rectangle]:
        """Return the master weights on this rank for a checkpoint to fill, except those with some roles.

        `publish` then copies them to the weights.
        """
        return [
            bucket.rectangle(WEIGHT, bucket.master, flat, offset)
            for bucket in self.buckets
            for flat, offset in self.rectangles_in(bucket, bucket.start, bucket.stop)
            if flat.segment.role not in without
        ]

    def publish(self) -> None:
        """Copy the master weights to the weights, and start gathering them.

        Called after a load or an undone step.
        """
        with torch.no_grad():
            for bucket in self.buckets:
                if bucket.has_own_master:
                    bucket.owned_weights.copy_(bucket.master)
        self.state.release()
        self.gatherer.gather_updated(loaded=True)

    # ---- which rectangles of global tensors this rank holds

    def owned_rectangles(self) -> Iterator[tuple[BucketBuffers, FlatRectangle, int]]:
        """Yield rectangles that cover every global element exactly once over the whole mesh.

        Padding, copies and quantized matrices are not included. The elements of (bucket, rectangle, offset)
        are [offset + start, offset + stop) of the bucket. A rank yields its 1/owners of each bucket, with
        every ZeRO stage, and only segments that it owns on the tp axis.
        """
        for bucket in (each for each in self.buckets if not each.layout.quantized_bytes):
            for flat, offset in self.rectangles_in(bucket, *bucket.layout.owned(bucket.domain.share)):
                if flat.segment.is_owner(self.at):
                    yield bucket, flat, offset

    def rectangles_in(
        self, bucket: BucketBuffers, start: int, stop: int
    ) -> Iterator[tuple[FlatRectangle, int]]:
        """Yield the rectangles of global tensors in [start, stop) of a bucket.

        Each comes with the start of its stored tensor in the bucket.
        """
        return bucket.rectangles_in(start, stop, self.at)
