"""The memory of one rank's parameters: flat weight buckets, their gradients and their masters, whole or as ZeRO's shards.

    forward    wait_for(unit): weights gathered after the last step have arrived (bucket by bucket, beside the forward)
    backward   a complete bucket starts its reduction at once (`gradients.py`)
    then       finish_gradients(): reductions awaited; tensor-partial, replicated key-value and tied gradients summed
    optimizer  works on `owned` ranges: the whole bucket (ZeRO-0) or this rank's shard of it
    after      gather(): updated shards travel back

Gradients arrive already divided by the global token count, so every reduction is a plain sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megalite import rng
from megalite.mesh import Mesh, MeshAxis
from megalite.parallel.collectives import Pending, all_gather, all_reduce, all_reduce_together
from megalite.parallel.sharding.buckets import Bucket, bucket_layout, buckets_of_units
from megalite.parallel.sharding.gradients import BucketGradients, GradientReducer
from megalite.parallel.sharding.offload import StateMemory, Uploads, pinned_zeros
from megalite.parallel.sharding.powersgd import PowerSGD
from megalite.parallel.sharding.residency import Residency
from megalite.parallel.sharding.transfers import TransferLog
from megalite.parallel.spec import FlatRectangle, ParamSpec, Rectangle, Segment, rectangles
from megalite.parallel.weight import Weight, WeightGradients


@dataclass(eq=False)
class BucketMemory:
    """A bucket's buffers. `master` covers [start, stop), the range whose optimizer state this rank keeps.

    In fp32 and fp64 the master weights are the weights themselves, unless optimizer state lies elsewhere; in bf16 and fp16 they are a
    separate fp32 copy. Frozen weights have no other master, in any precision, and every rank keeps all of them, but under ZeRO-3.
    """

    layout: Bucket
    weights: Tensor  # [size], compute precision; without memory where they are kept as shards and not in use
    gradients: BucketGradients | None  # None for frozen buckets and without training
    start: int
    stop: int
    master: Tensor  # [stop - start], at least fp32, where the optimizer state lies
    shard: Tensor | None  # [stop - start], compute precision, where the weights are kept as shards
    gathering: Pending | None = None

    @property
    def owned_grads(self) -> Tensor:
        assert self.gradients is not None
        return self.gradients.owned

    @property
    def owned_weights(self) -> Tensor:
        return self.weights[self.start : self.stop] if self.shard is None else self.shard

    @property
    def has_own_master(self) -> bool:
        """Whether the master weights are a copy of the weights."""
        return self.owned_weights.data_ptr() != self.master.data_ptr()

    @property
    def resident(self) -> bool:
        """Whether the full weights have memory."""
        return self.weights.untyped_storage().nbytes() > 0

    def await_weights(self) -> None:
        """Return once the full weights are there."""
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None

    def free(self) -> None:
        """Give back the memory of the full weights."""
        self.weights.untyped_storage().resize_(0)

    def rectangle(self, kind: str, values: Tensor, flat: FlatRectangle, offset: int) -> Rectangle:
        """The part of an owned range's `values` ([stop - start]) that `flat`, whose stored tensor starts at `offset`, describes."""
        own = slice(offset + flat.start - self.start, offset + flat.stop - self.start)
        return Rectangle(f"{kind}/{flat.segment.name}", flat.segment.shape, flat.offsets, values[own].view(flat.sizes))


class ParameterStore:
    """Every stored tensor of one pipeline rank.

    Args:
        specs: its stored tensors, in the model's order.
        zero: 0 keeps optimizer state of whole buckets on every dp rank, 1 of this rank's shard alone, 2 its gradients alone too,
            3 its weights alone too, but for those in use (`enter`, `leave`).
        dtype: compute precision.
        grad_dtype: what gradients accumulate in; by default at least fp32.
        reduce_dtype: what gradients are rounded to on their way over data parallelism; by default they travel as they accumulate.
        powersgd: compresses that way, with zero 0 and 1.
        state: where master weights and the optimizer's moments lie; by default beside the weights.
        offload_parameters: with 3, shards of weights lie in CPU memory; then they are freed after use on a single rank, too.
        keep_tied_apart: see `Weight.keep_apart`.
        training: False holds weights alone, in `dtype`: no gradient buffers and no masters.
    """

    def __init__(
        self,
        specs: Sequence[ParamSpec],
        mesh: Mesh,
        *,
        zero: int = 0,
        dtype: torch.dtype = torch.float32,
        grad_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        powersgd: PowerSGD | None = None,
        bucket_bytes: float = 25e6,
        device: torch.device | str = "cpu",
        keep_tied_apart: bool = False,
        state: StateMemory | None = None,
        offload_parameters: bool = False,
        training: bool = True,
    ):
        if zero == 0 and mesh.shard.size > 1:
            raise ValueError(f"zero = 0 shares nothing, but the mesh's shard axis has {mesh.shard.size} ranks: make it with dp_shard=1")
        self.mesh = mesh
        self.zero = zero if mesh.shard.size > 1 or offload_parameters else 0
        device = torch.device(device)
        self.state, self._offload_parameters = state or StateMemory(device), offload_parameters
        self.gradients = WeightGradients()
        self.weights: dict[str, Weight] = {}
        layouts = bucket_layout(specs, mesh.tp.rank, mesh.tp.size, mesh.data.size, bucket_bytes)
        wide = torch.promote_types(dtype, torch.float32)
        dtypes = dtype, wide, grad_dtype or wide
        self.buckets = [self._allocate(layout, dtypes, device, training, keep_tied_apart) for layout in layouts]
        self._by_unit = {unit: [self.buckets[number] for number in numbers] for unit, numbers in buckets_of_units(layouts).items()}
        trained = [memory.gradients for memory in self.buckets if memory.gradients is not None]
        self.log = TransferLog()
        self._reducer = GradientReducer(trained, mesh.shard, mesh.replicate, self.log, reduce_dtype)
        self.powersgd = powersgd
        if powersgd is not None:
            for gradients in trained:
                gradients.compression = powersgd.compress(gradients.layout, gradients.owned)
        gather = Uploads(device) if offload_parameters else all_gather
        self.residency = Residency(self.buckets, self._by_unit, mesh.shard, self.log, gather) if self.zero == 3 else None
        for gradients in trained:
            for weight in gradients.weights:
                weight.connect(partial(self._reducer.open, gradients), partial(self._reducer.completed, gradients))
        self._partial = list(self._owned_parts(lambda segment: segment.partial))
        self._replicated = list(self._owned_parts(lambda segment: segment.replicas > 1))

    def _allocate(
        self,
        layout: Bucket,
        dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],  # of weights, masters, gradients
        device: torch.device,
        training: bool,
        keep_tied_apart: bool,
    ) -> BucketMemory:
        dtype, wide, grad_dtype = dtypes
        weights = torch.zeros(layout.size, dtype=dtype, device=device)
        start, stop = layout.part(self.mesh.shard.rank, self.mesh.shard.size) if layout.trainable or self.zero == 3 else (0, layout.size)
        shard = None
        if self.zero == 3:
            count = stop - start
            shard = pinned_zeros(count, dtype, device) if self._offload_parameters else torch.zeros(count, dtype=dtype, device=device)
        own = weights[start:stop] if shard is None else shard
        trains = layout.trainable and training
        in_place = not trains or (wide == dtype and own.device.type == self.state.device.type)
        master = own if in_place else self.state.zeros(stop - start, wide)
        tied = keep_tied_apart and any(slot.spec.contributions > 1 for slot in layout.slots)
        zero = min(self.zero, 1) if tied else self.zero  # two accumulators are kept for the whole step, or their order would be lost
        gradients = BucketGradients.allocate(layout, self.mesh.shard, zero, grad_dtype, device) if trains else None
        memory = BucketMemory(layout, weights, gradients, start, stop, master, shard)
        for index, slot in enumerate(layout.slots):
            # Frozen weights are part of the graph, too: it must reach the adapters behind them.
            tensor = weights[slot.start : slot.stop].view(slot.shape).detach().requires_grad_(training)
            weight = Weight(slot.spec, tensor, grad_dtype if trains else None, self.gradients)
            self.weights[slot.spec.name] = weight
            if gradients is not None:
                weight.grad = None if gradients.full is None else gradients.view(gradients.full, index)
                gradients.weights.append(weight)
        if tied and gradients is not None:
            gradients.keep_apart()
        if shard is not None:
            memory.free()
        return memory

    def __getitem__(self, name: str) -> Weight:
        return self.weights[name]

    # ---- the values of weights

    def fill(self, values: Callable[[Segment], Iterable[Tensor]]) -> None:
        """Set weights; `values` gives this rank's part of a segment, in its local shape, by blocks of rows, or nothing."""
        for memory, segment, start in self._segment_ranges():
            for block in values(segment):
                self._write(memory, start, block.reshape(-1))
                start += block.numel()
            self.state.release(memory.master)

    def initialise(self, seed: int, frozen: bool = True) -> None:
        """Draw every weight, or those that are not frozen, keyed by its global name: the same model under every mesh."""
        tp = self.mesh.tp
        self.fill(lambda each: rng.initial_values(each, tp.rank, tp.size, seed) if frozen or each.trainable else ())

    def to_load(self, trained: bool = True) -> list[Rectangle]:
        """The master weights that this rank keeps, or the frozen ones, for a checkpoint to fill; `publish` then makes them the weights."""
        return [
            memory.rectangle("weight", memory.master, flat, offset)
            for memory in self.buckets
            for flat, offset in self.held(memory, memory.start, memory.stop)
            if trained or not flat.segment.trainable
        ]

    def _segment_ranges(self) -> Iterator[tuple[BucketMemory, Segment, int]]:
        for memory in self.buckets:
            for slot in memory.layout.slots:
                start = slot.start
                for segment in slot.spec.segments:
                    yield memory, segment, start
                    start += segment.local(self.mesh.tp.rank, self.mesh.tp.size).numel

    @staticmethod
    def _write(memory: BucketMemory, start: int, values: Tensor) -> None:
        """Set a flat range of a bucket's weights, and of its master weights where this rank keeps them."""
        with torch.no_grad():
            stop = start + values.numel()
            if memory.shard is None:
                memory.weights[start:stop] = values
            low, high = max(start, memory.start), min(stop, memory.stop)
            for own in (memory.master, memory.shard) if low < high else ():
                if own is not None:
                    own[low - memory.start : high - memory.start] = values[low - start : high - start]

    def publish(self) -> None:
        """Make the master weights the weights, after a load or an undone step, and gather them."""
        with torch.no_grad():
            for memory in self.buckets:
                if memory.has_own_master:
                    memory.owned_weights.copy_(memory.master)
        self.state.release()
        self.gather()

    def gather(self) -> None:
        """Gather the updated weights over dp, where they are whole."""
        if self.residency is not None:
            self.residency.drop()
        for number, memory in enumerate(self.buckets):
            if self.zero and memory.layout.trainable and memory.shard is None:
                gathering = all_gather(memory.owned_weights, self.mesh.shard, memory.weights)
                memory.gathering = self.log.gathering(f"gather {number}", gathering)

    def enter(self, unit: int, x: Tensor) -> Tensor:
        """Make a unit's weights ready for computing on x, and for the backward of that. Returns x."""
        self.wait_for(unit)
        return x if self.residency is None else self.residency.enter(unit, x)

    def leave(self, unit: int, x: Tensor) -> Tensor:
        """The unit has computed x. Returns x."""
        return x if self.residency is None else self.residency.leave(unit, x)

    def wait_for(self, unit: int) -> None:
        """Return once the weights of a unit are up to date: called before each use, cheap when nothing is under way."""
        for memory in self._by_unit.get(unit, ()):
            if memory.shard is None:
                memory.await_weights()

    def finish_gathering(self) -> None:
        """Wait for every weight that is still on its way."""
        for unit in self._by_unit:
            self.wait_for(unit)

    # ---- gradients

    def begin_step(self, microbatches: int, loss_scale: float = 1.0) -> None:
        """Expect a step's gradients, each multiplied by `loss_scale`."""
        self._reducer.begin_step(microbatches, loss_scale)

    def finish_gradients(self) -> None:
        """Wait for the reductions, then sum what tp ranks, key-value replicas and tied copies hold parts of."""
        self._reducer.finish()
        _sum_coalesced(self._partial, self.mesh.tp)
        _sum_coalesced(self._replicated, self.mesh.kv_replica)
        if self.mesh.tied_pair is not None:
            for memory in self.buckets:
                if memory.layout.slots[0].spec.tied and memory.gradients is not None:
                    owned = memory.owned_grads
                    all_reduce(owned, self.mesh.tied_pair, owned).wait()

    def settle_gradients(self, applied: bool) -> None:
        """Hear whether the last reduced gradients became an update, or were thrown away."""
        if self.powersgd is not None:
            self.powersgd.settle(applied)

    def _owned_parts(self, wanted: Callable[[Segment], bool]) -> Iterator[Tensor]:
        """Views of this rank's owned gradients of the wanted segments."""
        for memory, segment, start in self._segment_ranges():
            stop = start + segment.local(self.mesh.tp.rank, self.mesh.tp.size).numel
            low, high = max(start, memory.start), min(stop, memory.stop)
            if memory.gradients is not None and wanted(segment) and low < high:
                yield memory.owned_grads[low - memory.start : high - memory.start]

    # ---- each global element once

    def counted_once(self) -> Iterator[tuple[BucketMemory, FlatRectangle, int]]:
        """Rectangles that cover every global element once over the whole mesh, padding and copies left out.

        Yields (bucket, rectangle, offset): the rectangle's elements lie at [offset + start, offset + stop) of the bucket. Its dp share is
        one of dp shards, under every ZeRO stage; its tp share is that of the owning tp rank.
        """
        share = self.mesh.shard.rank * self.mesh.replicate.size + self.mesh.replicate.rank  # replicas cut their part among themselves
        for memory in self.buckets:
            for flat, offset in self.held(memory, *memory.layout.shard(share)):
                if flat.segment.is_owner(self.mesh.tp.rank):
                    yield memory, flat, offset

    def held(self, memory: BucketMemory, start: int, stop: int) -> Iterator[tuple[FlatRectangle, int]]:
        """The rectangles of global tensors that lie in [start, stop) of a bucket, each with its stored tensor's place in the bucket."""
        tp = self.mesh.tp
        for slot in memory.layout.slots:
            low, high = max(start, slot.start) - slot.start, min(stop, slot.stop) - slot.start
            if low < high:
                for rectangle in rectangles(slot.spec, tp.rank, tp.size, low, high):
                    yield rectangle, slot.start


def _sum_coalesced(parts: list[Tensor], axis: MeshAxis) -> None:
    """Sum many small tensors over an axis in one collective, in place."""
    if not parts or axis.size == 1:
        return
    for part, value in zip(parts, all_reduce_together(parts, axis)(), strict=True):
        part.copy_(value)
