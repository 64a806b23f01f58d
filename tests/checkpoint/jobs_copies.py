"""Copies of tensors cut up at random, on the ranks of the pool, which are spread over nodes."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from megalite import checkpoint
from megalite.checkpoint.copies import Copies
from megalite.parallel.spec import Rectangle
from tests.checkpoint.jobs import own_rectangles, whole_tensors, world_mesh
from tests.support.pool import RankContext

SEED = 3


@contextmanager
def opened(context: RankContext, directory: Path, nodes: Sequence[str], background: bool = False) -> Iterator[Copies]:
    copies = Copies(directory / nodes[context.rank], world_mesh(context), background=background, timeout=60)
    try:
        yield copies
    finally:
        copies.close()


def parts(context: RankContext, cuts: int) -> list[Rectangle]:
    tensors = {name: value for name, value in whole_tensors(SEED).items() if value.dim()}
    return own_rectangles(context, tensors, cuts)


def copy(context: RankContext, directory: Path, nodes: Sequence[str], steps: Sequence[int]) -> None:
    with opened(context, directory, nodes) as copies:
        for step in steps:
            if (copied := copies.begin(step, parts(context, 10), {"step": step})).error is not None:
                raise copied.error


def found(context: RankContext, directory: Path, nodes: Sequence[str]) -> list[tuple[int, str]]:
    with opened(context, directory, nodes) as copies:
        return [(each.step, each.problem) for each in copies.found()]


def differing(context: RankContext, directory: Path, nodes: Sequence[str], cuts: int) -> list[str]:
    """Load the newest copy: rectangles that differ, or the damage."""
    with opened(context, directory, nodes) as copies:
        manifest = copies.found()[0].manifest
        assert manifest is not None
        expected = parts(context, cuts)
        loaded = [replace(part, tensor=torch.full_like(part.tensor, float("nan"))) for part in expected]
        problems = []
        try:
            checkpoint.load(manifest, loaded)
            pairs = zip(expected, loaded, strict=True)
            problems = [old.name for old, new in pairs if not torch.equal(old.tensor, new.tensor)]
        except checkpoint.DamagedError as error:
            problems = [str(error)]
        torch.distributed.barrier()  # another rank may read from this one
        return problems


def copy_with_full_memory(context: RankContext, directory: Path, nodes: Sequence[str], background: bool) -> list[str]:
    """Three copies, of which rank 2 cannot write the second: the reason of each failure."""
    original = os.fsync

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with opened(context, directory, nodes, background) as copies:
        for step in (1, 2, 3):
            os.fsync = full if step == 2 and context.rank == 2 else original
            copies.begin(step, parts(context, 10), {})
            copies.wait()
        os.fsync = original
        return ["" if each.error is None else str(each.error).removeprefix("rank 2: ") for each in copies.take_ended()]
