"""Staging memory of background saves is pinned in pieces that torch does not round up, and holds what the rectangles
held."""

from __future__ import annotations

import torch

from megalite.checkpoint import staging
from megalite.parallel.spec import Rectangle
from megalite.system import pinned_memory


def rounded(size: int) -> int:
    """What torch allocates for a pinned tensor of this many bytes."""
    return 1 << (size - 1).bit_length()


def test_17_gb_of_saves_take_little_more_than_17_gb():
    sizes = [staging.PART] * 200 + [50_000_000] * 72 + [4096] * 400  # as rectangles are split
    pieces = pinned_memory.piece_sizes(sizes)
    assert max(pieces) <= pinned_memory.PIECE == 1 << 30
    assert sum(pieces) >= sum(sizes) > 17e9
    assert sum(map(rounded, pieces)) < 1.1 * sum(sizes)


def test_a_matrix_larger_than_a_piece_is_saved_by_rows(monkeypatch):
    monkeypatch.setattr(staging, "PART", 1 << 10)
    monkeypatch.setattr(pinned_memory, "PIECE", 1 << 12)
    generator = torch.Generator().manual_seed(0)
    shapes, first = ((130, 24), (300,), (5, 7), (1, 900)), (7, 3, 0, 2)
    given = [
        Rectangle(
            str(shape), (1000, *shape[1:]), (at, *(0 for _ in shape[1:])), torch.randn(shape, generator=generator)
        )
        for shape, at in zip(shapes, first, strict=True)
    ]
    memory = staging.Staging()
    copies = memory.copied(given)
    again = memory.copied(given)
    assert [x.tensor.data_ptr() for x in copies] == [x.tensor.data_ptr() for x in again], "memory is reused"
    for rectangle in given:
        parts = [copy for copy in copies if copy.name == rectangle.name]
        assert all(part.tensor.nbytes <= staging.PART or part.tensor.shape[0] == 1 for part in parts)
        assert all(
            part.global_shape == rectangle.global_shape and part.offsets[1:] == rectangle.offsets[1:] for part in parts
        )
        rows = [part.offsets[0] + row for part in parts for row in range(part.tensor.shape[0])]
        assert rows == list(range(rectangle.offsets[0], rectangle.offsets[0] + rectangle.tensor.shape[0]))
        assert torch.equal(torch.cat([part.tensor for part in parts]), rectangle.tensor)
