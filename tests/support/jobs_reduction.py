"""Given gradients through the reductions of data parallelism, on the pool's ranks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.mesh.layout import Coordinates
from megalite.mesh.mesh import Layout, Mesh
from megalite.parallel import collectives
from megalite.parallel.sharding.powersgd import PowerSGD
from megalite.parallel.sharding.store import ParameterStore, StoreOptions
from megalite.parallel.spec import ParamSpec, Segment
from megalite.training.trainer import Trainer
from tests.support.jobs import make_trainer

SEED = 7
SPECS = (
    ParamSpec("fused", 0, (Segment("fused.a", (24, 16)), Segment("fused.b", (8, 16)))),
    ParamSpec("bias", 1, (Segment("bias", (40,), decay=False),)),
    ParamSpec("matrix", 2, (Segment("matrix", (60, 80)),)),
    ParamSpec("small", 2, (Segment("small", (2, 2)),)),
)
Gradients = dict[str, Tensor]
"""By stored tensor: [dp, microbatches, *shape]."""


def random_gradients(
    dp: int,
    microbatches: int = 1,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    specs: Sequence[ParamSpec] = SPECS,
    at: Coordinates = Coordinates(),  # noqa: B008 - frozen
) -> Gradients:
    """Random gradients whose magnitude differs by rank. at: coordinates that give the shape of a rank's part."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {spec.name: (dp, microbatches, *spec.local_shape(at)) for spec in specs}
    sizes = torch.logspace(0, -2, dp, dtype=torch.float64)
    drawn = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    return {name: (value * sizes.view(-1, *[1] * (value.dim() - 1))).to(dtype) for name, value in drawn.items()}


class BytesSent:
    """Counts what this process sends."""

    def __init__(self) -> None:
        self.count, self._isend = 0, dist.isend

    def __call__(self, tensor: Tensor, *args: Any, **options: Any) -> Any:
        self.count += tensor.nbytes
        return self._isend(tensor, *args, **options)


def reduced(context: Any, steps: list[Gradients], options: dict[str, Any]) -> dict[str, Any]:
    """The reduced gradients of this rank's optimizer after each step, and the bytes sent.

    Gradients are, by segment, a list of (offsets, values).

    options: zero, dp_shard, rank (of PowerSGD), skipped (steps that are thrown away), scales (a step's loss scale),
    as_nccl (torch's own collectives, as on a GPU), specs, ep (None: no experts), and what else the store takes.
    """
    defaults = {"zero": 0, "dp_shard": None, "rank": None, "skipped": (), "scales": None}
    options = {**defaults, "as_nccl": False, "specs": SPECS, "ep": None, **options}
    dtype, specs, ep = steps[0]["matrix"].dtype, options["specs"], options["ep"]
    shards = 1 if options["zero"] == 0 else options["dp_shard"]
    layout = Layout(dp=context.world, dp_shard=shards, ep=ep or 1, experts=ep is not None)
    mesh = context.cached(("reduced", shards, ep), lambda: Mesh(layout))
    powersgd = PowerSGD(mesh, options["rank"], SEED) if options["rank"] else None
    rest = {name: value for name, value in options.items() if name in ("reduce_dtype", "bucket_bytes")}
    store = ParameterStore(
        specs, mesh, StoreOptions(zero=options["zero"], dtype=dtype, **{"bucket_bytes": 2e3, **rest}), powersgd=powersgd
    )
    sent, owned_parts = BytesSent(), []
    with ExitStack() as patches:
        patches.enter_context(patch.object(dist, "isend", sent))
        if options["as_nccl"]:
            patches.enter_context(patch.object(collectives, "_is_gloo", lambda axis: False))
        for number, gradients in enumerate(steps):
            scale = options["scales"][number] if options["scales"] else 1.0
            microbatches = gradients["matrix"].shape[1]
            store.reducer.begin_step(microbatches, scale)
            for microbatch in range(microbatches):
                for spec in reversed(specs):
                    store.weights[spec.name].accumulate(gradients[spec.name][context.rank, microbatch] * scale)
            store.reducer.finish()
            owned_parts.append(owned(store))
            store.reducer.confirm(number not in options["skipped"])
    return {"steps": owned_parts, "bytes": sent.count, "buckets": len(store.buckets)}


def owned(store: ParameterStore) -> dict[str, list[tuple[tuple[int, ...], Tensor]]]:
    parts: dict[str, list[tuple[tuple[int, ...], Tensor]]] = {}
    for memory in store.buckets:
        for flat, offset in store.rectangles_in(memory, memory.start, memory.stop):
            part = memory.rectangle("grad", memory.owned_grads, flat, offset)
            parts.setdefault(flat.segment.name, []).append((part.offsets, part.tensor.clone()))
    return parts


def whole(ranks: list[dict[str, Any]], step: int, specs: Sequence[ParamSpec] = SPECS) -> dict[str, Tensor]:
    """Global gradients from the parts of all ranks, which must cover them, and agree where they overlap."""
    tensors: dict[str, Tensor] = {}
    for spec in specs:
        for segment in spec.segments:
            parts = [part for rank in ranks for part in rank["steps"][step].get(segment.name, ())]
            value = torch.full(segment.shape, torch.nan, dtype=parts[0][1].dtype)
            for offsets, part in parts:
                place = value[tuple(slice(low, low + size) for low, size in zip(offsets, part.shape, strict=True))]
                assert place.isnan().all() or torch.equal(place, part), f"ranks differ on {segment.name}"
                place.copy_(part)
            assert not value.isnan().any(), segment.name
            tensors[segment.name] = value
    return tensors


def segments(value: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by stored name ([…, *shape]) cut into segments."""
    by_segment = {}
    for spec in SPECS:
        dim = value[spec.name].dim() - len(spec.segments[0].shape)
        parts = value[spec.name].split([segment.shape[0] for segment in spec.segments], dim=dim)
        by_segment |= {segment.name: part for segment, part in zip(spec.segments, parts, strict=True)}
    return by_segment


# ---- training


def errors(trainer: Trainer) -> dict[str, Tensor]:
    assert trainer.store.reducer.powersgd is not None
    return {matrix.name: matrix.error.clone() for matrix in trainer.store.reducer.powersgd.matrices}


def train_and_save(context: Any, config: dict[str, Any], before: int, after: int) -> dict[str, Any]:
    """Train, save and train on: losses, this rank's errors when it saved, and where."""
    trainer = make_trainer(context, config)
    try:
        losses = [trainer.step().loss for _ in range(before)]
        directory, kept = str(trainer.save()), errors(trainer) if trainer.store.reducer.powersgd else {}
        losses += [trainer.step().loss for _ in range(after)]
        return {"directory": directory, "errors": kept, "losses": losses}
    finally:
        trainer.close()


def resume(context: Any, config: dict[str, Any], steps: int) -> dict[str, Any]:
    trainer = make_trainer(context, config)
    try:
        kept = errors(trainer) if trainer.store.reducer.powersgd else {}
        return {
            "errors": kept,
            "losses": [trainer.step().loss for _ in range(steps)],
            "notes": [note for note in trainer.notes if "PowerSGD" in note],
        }
    finally:
        trainer.close()
