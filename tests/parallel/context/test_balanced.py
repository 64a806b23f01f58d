"""Parts that follow the documents of a batch: what they hold, and how evenly they load the ranks."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from benchmarks import context_parts
from megalite.config.dims import TILE, block_length, part_length
from megalite.config.load import from_dict
from megalite.mesh.mesh import MeshAxis
from megalite.model.kinds import windows
from megalite.parallel.context.balanced import KEYS, balanced, between_ranks, imbalance, visited
from megalite.parallel.context.parts import PositionSegment, zigzag
from megalite.parallel.context.rows import Cut
from megalite.planner.cost.context_exchange import IMBALANCE
from tests.parallel.context.test_parts import positions


def drawn(length: int, count: int, seed: int = 0) -> np.ndarray:
    """Starts of rows of documents of random lengths, [length, count]."""
    random = np.random.default_rng(seed)
    return np.concatenate([context_parts.row(random, length / 10, 1.2, length) for _ in range(count)], axis=1)


def visible(starts: np.ndarray, window: int | None) -> np.ndarray:
    """[queries, keys] of one row."""
    query, key = np.arange(len(starts))[:, None], np.arange(len(starts))
    return (key <= query) & (key >= starts[:, None]) & (query - key < (window or len(starts)))


@pytest.mark.parametrize("window", [None, 100])
def test_visited_tiles_are_those_with_a_visible_pair(window):
    starts, length = drawn(1024, 2), 1024
    tiles = sum(
        visible(row, window).reshape(length // TILE, TILE, length // KEYS, KEYS).any((1, 3)).astype(int)
        for row in starts.T
    )
    blocks = [PositionSegment(start, 2 * TILE) for start in range(0, length, 2 * TILE)]
    expected = tiles.reshape(length // (2 * TILE), 2, length // (2 * TILE), 2 * TILE // KEYS).sum((1, 3))
    assert (visited(blocks, starts, ((window, 1),)) == expected).all()
    both = visited(blocks, starts, ((None, 3), (window, 2)))
    assert (both == 3 * visited(blocks, starts) + 2 * expected).all(), "layers with other windows"
    parts = zigzag(length, 2)
    counted = [
        [
            sum(tiles[i // TILE, j // KEYS] for i in positions(own)[::TILE] for j in positions(its)[::KEYS])
            for its in parts
        ]
        for own in parts
    ]
    assert (between_ranks(parts, starts, ((window, 1),)) == counted).all()


@pytest.mark.parametrize(("length", "ranks"), [(16, 4), (96, 3), (8192, 8), (65536, 4)])
def test_each_position_has_one_rank_and_runs_are_whole_tiles(length, ranks):
    starts = drawn(length, 2)
    parts = balanced(starts, ranks)
    held = [positions(segments) for segments in parts]
    assert sorted(sum(held, [])) == list(range(length))
    assert {len(its) for its in held} == {length // ranks} and all(its == sorted(its) for its in held)
    block = block_length(length // ranks)
    assert all(start % block == length % block == 0 for segments in parts for start, length in segments)
    assert length < 8192 or block % TILE == 0
    assert all(
        one.stop < other.start for segments in parts for one, other in zip(segments, segments[1:], strict=False)
    ), "neighbours are one segment"
    assert balanced(starts.copy(), ranks) == parts, "every rank computes the same"


@pytest.mark.parametrize("documents", context_parts.DOCUMENTS)
def test_tiles_are_balanced_for_log_normal_documents(documents):
    random = np.random.default_rng(1)
    rows = [context_parts.row(random, *context_parts.DOCUMENTS[documents]) for _ in range(12)]
    results = [imbalance([between_ranks(balanced(starts, 8), starts)], "gather") for starts in rows]
    assert np.mean(results) <= 1.05 and max(results) <= 1.15
    hops = [imbalance([between_ranks(balanced(starts, 8, method="ring"), starts)], "ring") for starts in rows]
    assert (
        np.mean(hops)
        <= 1.25
        < np.mean([imbalance([between_ranks(zigzag(8192, 8), starts)], "ring") for starts in rows])
    )
    assert np.mean([imbalance([between_ranks(zigzag(8192, 8), starts)], "gather") for starts in rows]) > 1.15


def test_balance_counts_all_rows_and_the_windows_of_the_layers():
    starts = drawn(8192, 3)
    assert imbalance([between_ranks(balanced(starts, 8), starts)], "gather") <= 1.05
    short = ((128, 5), (None, 1))
    assert imbalance([between_ranks(balanced(starts, 8, short), starts, short)], "gather") <= 1.05


def test_imbalance_of_a_ring_is_that_of_each_hop():
    tiles = np.array([[4, 0], [0, 4]])
    assert imbalance([tiles], "gather") == imbalance([tiles], "ring") == 1.0
    tiles = np.array([[4, 0], [4, 0]])  # rank 1 computes nothing at the first hop, rank 0 nothing at the second
    assert imbalance([tiles], "gather") == 1.0 and imbalance([tiles], "ring") == 2.0
    assert imbalance([tiles, np.array([[1, 1], [1, 1]])], "ring") == (8 + 2) * 2 / 12


def test_parts_follow_the_documents_of_each_microbatch():
    sizes = {"parallel": {"cp": 4, "context": "gather", "context_parts": "balanced"}, "data": {"sequence_length": 61}}
    config = from_dict(sizes)
    cuts = [Cut.of(config, MeshAxis("cp", rank, 4, (0, 1, 2, 3)), windows(config.model)) for rank in range(4)]
    tokens = torch.arange(61).unsqueeze(1).expand(-1, 2)
    for seed in range(3):
        starts = torch.from_numpy(drawn(61, 2, seed))
        batches = [cut(tokens=tokens, targets=tokens, samples=torch.arange(2), document_start=starts) for cut in cuts]
        padded = np.concatenate([starts.numpy(), np.repeat(starts.numpy()[-1:], 4 * part_length(config) - 61, axis=0)])
        parts = balanced(padded, 4)
        tiles = from_dict({}).model.num_hidden_layers * between_ranks(parts, padded)
        assert all(each.part.segments == parts and (each.part.tiles == tiles).all() for each in batches)
        held = torch.cat([each.tokens[each.targets != -100] for each in batches])
        assert sorted(held.tolist()) == sorted(tokens.flatten().tolist()), "each token on one rank"
        assert all((each.tokens == each.positions.where(each.targets != -100, 0)).all() for each in batches)
    alone = cuts[0](tokens=tokens, targets=tokens, samples=torch.arange(2))
    assert alone.segments == zigzag(4 * part_length(config), 4)[0] and alone.part.tiles is None, (
        "rows of one document each"
    )


def test_padding_makes_whole_blocks():
    def part(length: int, **parallel) -> int:
        options = {"cp": 8, "context": "ring", "context_parts": "balanced", **parallel}
        return part_length(from_dict({"parallel": options, "data": {"sequence_length": length}}))

    assert part(8192) == 1024 and part(8000) == 1024 and part(131072) == 16384
    assert part(131000) == 16384 and part(8192, tp=3, sequence_parallel=True) == 1152
    assert part(8000, context="ulysses") == 1000 and part(8000, context_parts="zigzag") == 1000
    assert [block_length(length) for length in (4, 8, 17, 128, 1024, 4096, 16384)] == [1, 1, 1, 16, 128, 128, 512]


def test_the_page_and_the_planner_say_what_was_counted():
    content = json.loads(context_parts.RESULT.read_text())
    page = context_parts.DOCUMENT.read_text().partition(context_parts.BEGIN)[2].partition(context_parts.END)[0]
    assert page == context_parts.section(content), "run python -m benchmarks.context_parts"
    means = {result["parts"]: result for result in content["results"] if result["documents"] == "median 1,024"}
    assert {
        parts: {method: pytest.approx(means[parts][method]["mean"], abs=0.006) for method in methods}
        for parts, methods in IMBALANCE.items()
    } == IMBALANCE
