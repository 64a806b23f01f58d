"""Initial values depend on the seed and the global name alone: every rank holds a slice of one and the same draw."""

import pytest
import torch

from megalite import rng
from megalite.mesh.layout import Coordinates
from megalite.parallel.spec import Segment

SEGMENTS = [
    Segment("rows", (300, 8), 0, init_std=0.02),
    Segment("columns", (300, 8), 1, init_std=0.02),
    Segment("replicated", (4, 6), 0, replicas=2, init_std=1.0),
    Segment("padded", (301, 4), 0, padded=304, init_std=1.0),
    Segment("mostly padding", (129, 4), 0, padded=520, init_std=1.0),
    Segment("ones", (16,), None, init_value=1.0),
]


def drawn(segment, rank=0, tp=1, seed=7):
    return torch.cat(list(rng.initial_values(segment, Coordinates.on("tp", rank, tp), seed)))


@pytest.mark.parametrize("segment", SEGMENTS, ids=lambda segment: segment.name)
@pytest.mark.parametrize("tp", [2, 4])
def test_every_rank_holds_its_slice_of_the_whole(segment, tp):
    whole = drawn(Segment(segment.name, segment.shape, init_std=segment.init_std, init_value=segment.init_value))
    for rank in range(tp):
        part = segment.local(Coordinates.on("tp", rank, tp))
        values = drawn(segment, rank, tp)
        real = values[tuple(slice(0, size) for size in part.sizes)]
        assert torch.equal(real, whole[tuple(slice(low, low + size) for low, size in zip(part.offsets, part.sizes, strict=True))])
        assert values.abs().sum() == real.abs().sum()  # padding is zero


def test_draws_differ_by_name_and_seed_and_have_the_wanted_spread():
    one, other = (drawn(Segment(name, (400, 50), init_std=0.02)) for name in ("a", "b"))
    again = drawn(Segment("a", (400, 50), init_std=0.02), seed=8)
    assert not torch.equal(one, other) and not torch.equal(one, again)
    assert abs(one.std().item() - 0.02) < 5e-4 and abs(one.mean().item()) < 5e-4
    correlation = torch.corrcoef(torch.stack([one.flatten(), other.flatten(), again.flatten()]))
    assert (correlation - torch.eye(3)).abs().max() < 0.03


def test_keys_depend_on_every_part_and_its_type():
    assert len({rng.key(1, "a"), rng.key("1", "a"), rng.key(1, "b"), rng.key("a", 1), rng.key(1, "a", 0)}) == 5
