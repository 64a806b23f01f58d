"""Initial values depend on the seed and the global name alone: every rank holds a slice of one and the same draw."""

from functools import partial
from itertools import pairwise
from threading import Event
from unittest.mock import patch

import pytest
import torch

from megalite.mesh.layout import Coordinates
from megalite.parallel.initial_values import InverseSoftplus, LogIndex, LogUniform
from megalite.parallel.spec import Segment
from megalite.system import rng

SEGMENTS = [
    Segment("rows", (300, 8), 0, init_std=0.02),
    Segment("columns", (300, 8), 1, init_std=0.02),
    Segment("replicated", (4, 6), 0, replicas=2, init_std=1.0),
    Segment("padded", (301, 4), 0, padded=304, init_std=1.0),
    Segment("mostly padding", (129, 4), 0, padded=520, init_std=1.0),
    Segment("ones", (16,), None, init_value=1.0),
    Segment("log of uniform numbers", (300,), 0, initial=LogUniform()),
    Segment("log of the index", (300,), 0, padded=304, initial=LogIndex()),
    Segment("time steps", (12, 20), 1, initial=InverseSoftplus()),
]


def drawn(segment, rank=0, tp=1, seed=7):
    at = Coordinates.on("tp", rank, tp)
    part = segment.local(at)
    values = torch.full((part.numel,), 99.0)
    draws = ((None, draw) for draw in rng.initial_values(segment, at, seed, 0, part.numel))
    for _, first, result in rng.ahead(draws, threads=1):
        values[first:][: result.numel()] = result
    return values.view(part.shape)


@pytest.mark.parametrize("segment", SEGMENTS, ids=lambda segment: segment.name)
@pytest.mark.parametrize("tp", [2, 4])
def test_every_rank_holds_its_slice_of_the_whole(segment, tp):
    values = {name: getattr(segment, name) for name in ("init_std", "init_value", "initial")}
    whole = drawn(Segment(segment.name, segment.shape, **values))
    for rank in range(tp):
        part = segment.local(Coordinates.on("tp", rank, tp))
        values = drawn(segment, rank, tp)
        real = values[tuple(slice(0, size) for size in part.sizes)]
        assert torch.equal(
            real, whole[tuple(slice(low, low + size) for low, size in zip(part.offsets, part.sizes, strict=True))]
        )
        assert values.abs().sum() == real.abs().sum()  # padding is zero


def test_draws_differ_by_name_and_seed_and_have_the_wanted_spread():
    one, other = (drawn(Segment(name, (400, 50), init_std=0.02)) for name in ("a", "b"))
    again = drawn(Segment("a", (400, 50), init_std=0.02), seed=8)
    assert not torch.equal(one, other) and not torch.equal(one, again)
    assert abs(one.std().item() - 0.02) < 5e-4 and abs(one.mean().item()) < 5e-4
    correlation = torch.corrcoef(torch.stack([one.flatten(), other.flatten(), again.flatten()]))
    assert (correlation - torch.eye(3)).abs().max() < 0.03


def test_other_distributions_have_their_range_and_shape():
    rates = drawn(Segment("a", (20_000,), initial=LogUniform())).exp()
    assert 1 <= rates.min() < 1.01 and 15.99 < rates.max() <= 16.0001 and abs(rates.mean() - 8.5) < 0.1
    from_zero = drawn(Segment("a", (20_000,), initial=LogUniform(0.0, 16.0)))
    assert from_zero.isfinite().all() and from_zero.min() < -5
    with patch.object(rng, "uniform_", lambda numbers, *parts: numbers.zero_()):
        assert drawn(Segment("a", (4,), initial=LogUniform(0.0, 16.0))).isfinite().all(), "0 is a number that is drawn"
    assert torch.equal(drawn(Segment("a", (300,), initial=LogIndex())), torch.arange(1.0, 301).double().log().float())
    biases = drawn(Segment("a", (20_000,), initial=InverseSoftplus()))
    steps = torch.nn.functional.softplus(biases.double())
    assert 0.999e-3 < steps.min() < 1.01e-3 and 0.099 < steps.max() < 0.1001
    assert abs(steps.log10().mean() + 2) < 0.02, "uniform in the logarithm"
    floored = drawn(Segment("a", (400,), initial=InverseSoftplus(low=1e-6, floor=1e-4)))
    assert torch.nn.functional.softplus(floored.double()).min() == pytest.approx(1e-4, rel=1e-5)


@pytest.mark.parametrize(
    "values", [lambda: LogUniform(-1.0), lambda: LogUniform(2.0, 2.0), lambda: InverseSoftplus(low=0.0)]
)
def test_ranges_without_a_logarithm_are_rejected(values):
    with pytest.raises(ValueError, match="got low"):
        values()


def test_keys_depend_on_every_part_and_its_type():
    assert len({rng.key(1, "a"), rng.key("1", "a"), rng.key(1, "b"), rng.key("a", 1), rng.key(1, "a", 0)}) == 5


@pytest.mark.parametrize(
    ("low", "high", "numbers"), [(0, 2400, 2400), (1023, 1024, 1024), (1023, 1025, 2048), (2048, 2056, 352), (5, 5, 0)]
)
def test_elements_are_drawn_with_the_rows_of_their_blocks_alone(low, high, numbers, monkeypatch):
    """300 rows of 8: blocks of 1,024, 1,024 and 352 numbers."""
    segment, counted, draw_normal = SEGMENTS[0], [], rng.normal_

    def normal(numbers, *parts):
        counted.append(numbers.numel())
        return draw_normal(numbers, *parts)

    expected = drawn(segment).flatten()[low:high]
    monkeypatch.setattr(rng, "normal_", normal)
    draws = ((None, draw) for draw in rng.initial_values(segment, Coordinates(), 7, low, high))
    results = [(first, value) for _, first, value in rng.ahead(draws, threads=3)]
    values = torch.cat([value for _, value in results]) if results else torch.empty(0)
    first = results[0][0] if results else low
    assert torch.equal(values[low - first : high - first], expected) and sum(counted) == numbers
    assert all(start + value.numel() == next_start for (start, value), (next_start, _) in pairwise(results))


def test_draws_ahead_come_in_their_order():
    """The first of each three waits for the others, which threads call meanwhile; no more than a few are ahead of the
    caller."""
    called, events = [], [Event() for _ in range(4)]

    def fill(number, numbers):
        called.append(number)
        if number % 3 == 2:
            events[number // 3].set()
        elif number % 3 == 0:
            assert events[number // 3].wait(60)
        return numbers.fill_(number)

    draws = ((number, rng.Draw(0, (1,), partial(fill, number), torch.neg)) for number in range(12))
    for number, _, value in rng.ahead(draws, threads=3):
        assert value == -number and len(called) <= number + 5
