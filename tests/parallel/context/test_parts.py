"""Which positions a context-parallel rank holds, and what it makes of whole rows."""

from __future__ import annotations

import pytest
import torch

from megalite.config.dims import part_length
from megalite.config.load import from_dict
from megalite.parallel.context.parts import PARTS, PositionSegment, contiguous, grouped, sees, split, zigzag
from megalite.parallel.context.rows import Cut
from megalite.parallel.microbatch import IGNORE_INDEX
from megalite.parallel.sequences import Sequences


def positions(segments) -> list[int]:
    return [position for start, length in segments for position in range(start, start + length)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("cut", [contiguous, zigzag])
def test_each_position_has_one_rank_and_all_have_equally_many(cut, ranks):
    parts = cut(ranks * 12, ranks)
    held = [positions(segments) for segments in parts]
    assert sorted(sum(held, [])) == list(range(ranks * 12))
    assert {len(its) for its in held} == {12}
    assert all(its == sorted(its) for its in held)


@pytest.mark.parametrize("cut", [contiguous, zigzag])
def test_a_length_that_has_no_equal_parts_is_refused(cut):
    with pytest.raises(ValueError, match="divisible by .* got 13"):
        cut(13, 4)


def test_zigzag_balances_one_document_and_contiguous_does_not():
    def imbalance(parts) -> float:
        pairs = [sum(position + 1 for position in positions(segments)) for segments in parts]
        return max(pairs) * len(pairs) / sum(pairs)

    assert imbalance(zigzag(8192, 8)) == 1.0
    assert imbalance(contiguous(8192, 8)) == pytest.approx(1.87, abs=0.01)


@pytest.mark.parametrize("window", [None, 1, 3, 7])
def test_what_sees_what_is_what_a_mask_says(window):
    for ranks in (2, 4):
        for parts in (contiguous(16, ranks), zigzag(16, ranks)):
            for queries in parts:
                for keys in parts:
                    pairs = ((i, j) for i in positions(queries) for j in positions(keys))
                    assert sees(queries, keys, window) == any(
                        j <= i and (window is None or i - j < window) for i, j in pairs
                    )


def rows(length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, targets and document starts, [length, 2]."""
    tokens = torch.arange(100, 101 + length).unsqueeze(1) + torch.tensor([0, 500])
    starts = torch.tensor([0, 4]).repeat_interleave(torch.tensor([4, length - 4])).unsqueeze(1).expand(-1, 2)
    return tokens[:-1], tokens[1:], starts


@pytest.mark.parametrize("length", [16, 13, 9])
@pytest.mark.parametrize("context", PARTS)
def test_the_parts_of_rows_are_the_rows(context, length):
    """No token is lost at the end of a row whose length does not divide, none counts twice, and the target after a
    part's end is kept."""
    config = from_dict({"parallel": {"cp": 4, "context": context}, "data": {"sequence_length": length}})
    parts = PARTS[context](part_length(config) * 4, 4)
    tokens, targets, starts = rows(length)
    results = {}
    for rank in range(4):
        part = Cut(parts, rank)(
            tokens=tokens,
            targets=targets,
            samples=torch.arange(2),
            document_start=starts,
            weights=targets / 2,
            sequences=Sequences(targets, tokens % 2 == 0, torch.arange(4), torch.ones(4), 4),
        )
        assert part.sequences is not None and part.weights is not None and part.sequences.count == 4
        of_targets = part.targets.where(part.targets != IGNORE_INDEX, -1)
        assert torch.equal(part.sequences.index, of_targets)
        assert torch.equal(part.sequences.completion, (part.tokens % 2 == 0) & (of_targets >= 0))
        assert torch.equal(part.weights, of_targets.clamp(min=0) / 2)
        assert len(part.tokens) == part_length(config) and part.positions.max() < length
        for place, position in enumerate(positions(parts[rank])):
            if position >= length:
                assert (part.targets[place] == IGNORE_INDEX).all()
                continue
            assert part.positions[place] == position and position not in results
            results[position] = torch.stack((part.tokens[place], part.targets[place], part.document_start[place]))
        assert (
            part.part is not None
            and part.part.length == length
            and len(part.part.document_start) == len(parts) * part_length(config)
        )
    assert sorted(results) == list(range(length))
    assert torch.equal(
        torch.stack([results[position] for position in range(length)], 1), torch.stack((tokens, targets, starts))
    )


def test_lengths_are_padded_for_zigzag_and_sequence_parallelism():
    def of(length: int, **parallel) -> int:
        return part_length(from_dict({"parallel": parallel, "data": {"sequence_length": length}}))

    # whole rows are not padded: a rule refuses this one
    assert of(13) == 13 and of(13, tp=2, sequence_parallel=True) == 13
    assert of(13, cp=4) == 4 and of(13, cp=4, context="ring") == 4 and of(17, cp=4, context="ring") == 6
    assert of(17, cp=4, tp=2, sequence_parallel=True) == 6 and of(17, cp=4, tp=2) == 5


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_pieces_of_parts_are_joined_to_the_parts(ranks):
    for parts in (
        contiguous(24, 2),
        zigzag(24, 2),
        [(PositionSegment(0, 7), PositionSegment(20, 4), PositionSegment(25, 1)), (PositionSegment(7, 12),)],
    ):
        pieces = split(parts, ranks)
        assert len({len(positions(segments)) for segments in pieces}) == 1 and len(pieces) == len(parts) * ranks
        assert list(map(positions, grouped(tuple(pieces), ranks))) == list(map(positions, parts))
        held = [sum(map(positions, pieces[first : first + ranks]), []) for first in range(0, len(pieces), ranks)]
        assert held == list(map(positions, parts))


def test_runs_know_where_they_end():
    assert PositionSegment(3, 4).stop == 7
