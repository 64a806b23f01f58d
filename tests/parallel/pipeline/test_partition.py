"""The partition against brute force over every contiguous split."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.assembly import parts as build
from megalite.config.schema import Config
from megalite.config.sections.model import ModelConfig
from megalite.config.sections.parallel import ParallelConfig
from megalite.model.cost.flops import layer_costs
from megalite.parallel.pipeline.partition import balanced


def stage_costs(sizes, costs, first_extra, last_extra):
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    totals = [sum(costs[start : start + size]) for start, size in zip(starts, sizes, strict=True)]
    totals[0] += first_extra
    totals[-1] += last_extra
    return totals


def every_split(layers, stages):
    for cuts in combinations(range(1, layers), stages - 1):
        edges = [0, *cuts, layers]
        yield [stop - start for start, stop in pairwise(edges)]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_no_split_is_better(data):
    costs = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=9))
    stages = data.draw(st.integers(1, len(costs)))
    extras = data.draw(st.tuples(st.integers(0, 30), st.integers(0, 60)))
    sizes = balanced(costs, stages, *extras)
    assert len(sizes) == stages and min(sizes) >= 1 and sum(sizes) == len(costs)

    def quality(split):
        totals = stage_costs(split, costs, *extras)
        return max(totals), sum(total**2 for total in totals)

    assert quality(sizes) == min(quality(split) for split in every_split(len(costs), stages))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(1e-3, 1e3), min_size=4, max_size=8), st.integers(1, 4), st.floats(0, 1e3), st.floats(0, 1e3))
def test_fractional_costs(costs, stages, first_extra, last_extra):
    worst = max(stage_costs(balanced(costs, stages, first_extra, last_extra), costs, first_extra, last_extra))
    best = min(max(stage_costs(split, costs, first_extra, last_extra)) for split in every_split(len(costs), stages))
    assert worst == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize(
    "costs, stages, extras, expected",
    [
        ([1] * 8, 4, (0, 0), [2, 2, 2, 2]),
        ([1] * 6, 4, (0, 0), [1, 1, 2, 2]),  # earlier stages hold more activations, so they get fewer layers
        ([1] * 10, 4, (0, 2), [3, 3, 3, 1]),
        ([1] * 10, 4, (1, 1), [2, 3, 3, 2]),
        ([1] * 5, 3, (0, 100), [2, 2, 1]),  # nothing helps the last stage: the others share evenly
        ([5, 1, 1, 1], 2, (0, 0), [1, 3]),
        ([3], 1, (1, 1), [1]),
    ],
)
def test_known_splits(costs, stages, extras, expected):
    assert balanced(costs, stages, *extras) == expected


def test_large_models_split_in_reasonable_time():
    assert balanced([1.0] * 128, 64) == [2] * 64


def test_too_many_stages_are_refused():
    with pytest.raises(
        ValueError, match=r"parallel\.pp=3 is larger than model\.num_hidden_layers=2.*parallel\.pp <= 2"
    ):
        balanced([1, 1], 3)


def test_layer_costs_count_matrix_products_and_attended_pairs():
    model = ModelConfig(
        vocab_size=100,
        hidden_size=8,
        intermediate_size=20,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=2,
        sliding_window_layers=[1],
    )
    weights = {"q": (8, 8), "k": (4, 8), "v": (4, 8), "out": (8, 8), "gate": (20, 8), "up": (20, 8), "down": (8, 20)}
    length = 5
    products = sum(2 * length * rows * columns for rows, columns in weights.values())

    def attention(window):  # scores and weighted values: a product of head_dim 2 each for every head and attended pair
        pairs = sum(1 for i in range(length) for j in range(length) if i - window < j <= i)
        return 2 * (2 * 2 * 4 * pairs)

    costs = layer_costs(model, length)
    assert costs.layers == [products + attention(5), products + attention(2), products + attention(5)]
    assert costs.head == 2 * length * 8 * 100
    assert 0 < costs.embedding < costs.layers[0]
    plain = layer_costs(
        ModelConfig(vocab_size=100, hidden_size=8, intermediate_size=20, num_attention_heads=4, gated_mlp=False), length
    )
    assert plain.layers[0] == products + attention(5) - 2 * length * 8 * 20 + 2 * 2 * length * 4 * 8


def test_a_large_vocabulary_moves_layers_off_the_last_stage():
    model = ModelConfig(
        vocab_size=128_256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32
    )
    costs = layer_costs(model, 4096)
    sizes = balanced(costs.layers, 4, costs.embedding, costs.head)
    assert sum(sizes) == 16 and sizes[-1] < min(sizes[:-1])


def test_measured_costs_replace_the_estimate():
    config = Config(model=ModelConfig(num_hidden_layers=6, vocab_size=32), parallel=ParallelConfig(pp=2))
    assert build.partition(config) == [3, 3]
    config.parallel.layer_costs = [0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0]  # the head costs as much as two layers
    assert build.partition(config) == [4, 2]
    config.parallel.partition = [1, 5]
    assert build.partition(config) == [1, 5]


def test_stages_begin_with_layers_that_may_begin_one():
    """Best of those splits, also where it is worse than the best of all."""
    assert balanced([1.0] * 6, 2) == [3, 3]
    assert balanced([1.0] * 6, 2, starts=[0, 1, 4]) == [4, 2]
    assert balanced([1.0] * 6, 3, starts=[0, 1, 4]) == [1, 3, 2]
    with pytest.raises(ValueError, match="only 3 of the layers may begin a stage"):
        balanced([1.0] * 6, 4, starts=[0, 1, 4])
