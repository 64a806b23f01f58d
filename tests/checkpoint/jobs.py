"""Saving and loading on the ranks of the pool, with tensors cut up at random."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite import checkpoint
from megalite.config.load import from_dict
from megalite.mesh.layout import Coordinates
from megalite.mesh.mesh import Layout, Mesh
from megalite.parallel.spec import ParamSpec, Rectangle, Segment, rectangles
from megalite.training.trainer import Trainer
from tests.support.jobs import mesh_of
from tests.support.pool import RankContext

SHAPES = ((), (1,), (17,), (5, 7), (1, 9), (33, 4), (3, 4, 5), (2, 1, 6, 3), (0, 4))
DTYPES = (torch.float32, torch.bfloat16, torch.float64)

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets, sizes


def world_mesh(context: RankContext) -> Mesh:
    mesh: Mesh = context.cached("world", lambda: Mesh(Layout(dp=context.world)))
    return mesh


def whole_tensors(seed: int) -> dict[str, Tensor]:
    """Global tensors that any process can draw for itself."""
    generator = torch.Generator().manual_seed(seed)
    return {
        f"{kind}/{index}": torch.randn(shape, generator=generator, dtype=torch.float64).to(
            DTYPES[(index + seed + number) % len(DTYPES)]
        )
        for index, shape in enumerate(SHAPES)
        for number, kind in enumerate(("weight", "exp_avg"))
    }


def random_boxes(shape: tuple[int, ...], count: int, draw: random.Random) -> list[Box]:
    """A partition into at most `count` boxes, by cutting a random box at a random place again and again."""
    boxes: list[Box] = [((0,) * len(shape), shape)]
    for _ in range(count - 1):
        offsets, sizes = boxes[draw.randrange(len(boxes))]
        longer = [dim for dim, size in enumerate(sizes) if size > 1]
        if longer:
            boxes.remove((offsets, sizes))
            boxes += halves(offsets, sizes, dim := draw.choice(longer), draw.randrange(1, sizes[dim]))
    return boxes


def halves(offsets: tuple[int, ...], sizes: tuple[int, ...], dim: int, at: int) -> list[Box]:
    def replaced(values: tuple[int, ...], value: int) -> tuple[int, ...]:
        return (*values[:dim], value, *values[dim + 1 :])

    return [(offsets, replaced(sizes, at)), (replaced(offsets, offsets[dim] + at), replaced(sizes, sizes[dim] - at))]


def cut(whole: Tensor, box: Box) -> Tensor:
    offsets, sizes = box
    return whole[tuple(slice(low, low + size) for low, size in zip(offsets, sizes, strict=True))].clone()


def random_rectangles(tensors: dict[str, Tensor], seed: int, rank: int, world: int) -> Iterator[Rectangle]:
    """This rank's share of a random partition of every tensor; the same partition on every rank."""
    draw = random.Random(seed)
    for name, whole in tensors.items():
        for box in random_boxes(tuple(whole.shape), draw.randint(1, 3 * world), draw):
            if draw.randrange(world) == rank:
                yield Rectangle(name, tuple(whole.shape), box[0], cut(whole, box))


def flat_rectangles(tensors: dict[str, Tensor], rank: int, world: int) -> Iterator[Rectangle]:
    """This rank's equal share of each flattened vector and matrix, as sharded optimizer state is cut."""
    for name, whole in tensors.items():
        if whole.dim() in (1, 2):
            spec = ParamSpec(name, 0, (Segment(name, tuple(whole.shape)),))
            share = -(-whole.numel() // world)
            for flat in rectangles(
                spec, Coordinates(), min(rank * share, whole.numel()), min((rank + 1) * share, whole.numel())
            ):
                yield Rectangle(
                    name,
                    tuple(whole.shape),
                    flat.offsets,
                    whole.reshape(-1)[flat.start : flat.stop].view(flat.sizes).clone(),
                )


def own_rectangles(context: RankContext, tensors: dict[str, Tensor], seed: int | None) -> list[Rectangle]:
    """At random, or (without a seed) flat ranges."""
    rectangles = flat_rectangles(tensors, context.rank, context.world)
    return list(rectangles if seed is None else random_rectangles(tensors, seed, context.rank, context.world))


def save(context: RankContext, directory: Path, values: int, cuts: int | None, state: dict[str, Any]) -> None:
    checkpoint.save(directory, own_rectangles(context, whole_tensors(values), cuts), state, world_mesh(context))


def differing(context: RankContext, directory: Path, values: int, cuts: int | None) -> tuple[int, list[str]]:
    """Load this rank's rectangles: how many elements, and which of them are not bit for bit those saved."""
    expected = own_rectangles(context, whole_tensors(values), cuts)
    loaded = [
        Rectangle(
            part.name, part.global_shape, part.offsets, torch.full_like(part.tensor, float("nan"), requires_grad=True)
        )
        for part in expected
    ]
    checkpoint.load(directory, loaded)
    wrong = [
        f"{old.name} {old.offsets}"
        for old, new in zip(expected, loaded, strict=True)
        if not torch.equal(old.tensor, new.tensor)
    ]
    return sum(prod(part.tensor.shape) for part in expected), wrong


def save_with_full_disk(context: RankContext, directory: Path, full: int) -> str:
    """One rank cannot write; every rank must learn it."""
    original = os.fsync

    def no_space(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if context.rank == full:
        os.fsync = no_space
    try:
        save(context, directory, 1, 1, {})
    except checkpoint.CheckpointError as error:
        return str(error)
    finally:
        os.fsync = original
    return "saved"


def save_same_rectangle(context: RankContext, directory: Path) -> str:
    """Every rank holds the same replica and believes to own it."""
    try:
        checkpoint.save(directory, [Rectangle("weight/k", (2, 2), (0, 0), torch.ones(2, 2))], {}, world_mesh(context))
    except checkpoint.CheckpointError as error:
        return str(error)
    return "saved"


def latest_seen_by(context: RankContext, checkpoints: list[Path]) -> str:
    """Each rank sees another file system; all must come to the same answer or the same error."""
    try:
        steps, warning = checkpoint.history(checkpoints[context.rank], world_mesh(context))
    except checkpoint.CheckpointError as error:
        return f"error: {error}"
    return f"{[path.name for path in steps]} {warning}"


def resume_from_each(context: RankContext, config: dict[str, Any], directories: list[str]) -> list[tuple[int, str]]:
    """A trainer with `checkpoint.load: auto` for each run.dir: the step from which it goes on and what it has to say,
    or -1 and why not."""
    outcomes = []
    for directory in directories:
        own_config = from_dict({**config, "run": {**config["run"], "dir": directory}})
        try:
            trainer = Trainer(own_config, mesh_of(context, own_config))
        except checkpoint.CheckpointError as error:
            outcomes.append((-1, str(error)))
        else:
            trainer.close()
            outcomes.append((trainer.step_done, "\n".join(trainer.notes)))
    return outcomes
