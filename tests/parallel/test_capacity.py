"""Which rows exceed an expert's capacity, against a loop over the slots and positions of one sequence."""

from __future__ import annotations

from math import ceil

import pytest
import torch
from megalite_kernels.groups import Groups
from torch import Tensor

from megalite.config.dims import rows_per_expert
from megalite.mesh.mesh import MeshAxis
from megalite.model.blocks.mixture import capacity
from megalite.model.blocks.mixture.capacity import Capacity, pieces_of
from megalite.model.blocks.mixture.router import choose
from megalite.parallel.context.parts import PositionSegment, zigzag
from megalite.parallel.expert.choice import ExpertChoice
from megalite.parallel.expert.dispatch import LocalDispatch
from megalite.parallel.node import Saved

LENGTH, BATCH, EXPERTS, K, FACTOR = 13, 3, 5, 2, 0.8
ALONE = MeshAxis("sequence", 0, 1, (0,))


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def kept_by_loop(experts: Tensor, valid: Tensor, limit: int) -> Tensor:
    """[seq, batch, k]: whether each row is kept, of experts [seq, batch, k] and valid [seq, batch]."""
    kept = torch.zeros_like(experts, dtype=torch.bool)
    for column in range(experts.shape[1]):
        taken = [0] * EXPERTS
        for counts in (True, False):
            for slot in range(experts.shape[2]):
                for position in range(len(experts)):
                    expert = int(experts[position, column, slot])
                    if bool(valid[position, column]) is counts and taken[expert] < limit:
                        taken[expert] += 1
                        kept[position, column, slot] = True
    return kept


def kept(choice: ExpertChoice, length: int = LENGTH) -> Tensor:
    return (choice.inverse < len(choice.order)).view(length, -1, choice.k)


def inputs(seed: int) -> tuple[Tensor, Tensor]:
    """Scores [seq, batch, experts] that prefer the first experts, and which tokens count."""
    scores = random(LENGTH, BATCH, EXPERTS, seed=seed) - 0.5 * torch.arange(EXPERTS)
    valid = torch.ones(LENGTH, BATCH, dtype=torch.bool)
    valid[4:9, 1] = valid[10:, 2] = False
    return scores, valid


class Products:
    """Experts that multiply by a matrix, [experts, out, in]. Rows of no expert are undefined: NaN."""

    def __init__(self, matrices: Tensor):
        self.matrices = matrices

    def compute(self, x: Tensor, saved: Saved, groups: Groups) -> Tensor:
        return self.multiplied(x, self.matrices.transpose(1, 2), groups)

    def gradient(self, grad: Tensor, saved: Saved, groups: Groups) -> Tensor:
        return self.multiplied(grad, self.matrices, groups)

    def multiplied(self, rows: Tensor, matrices: Tensor, groups: Groups) -> Tensor:
        out = rows.new_full((len(rows), matrices.shape[2]), torch.nan)
        for own, matrix, into in zip(groups.split(rows), matrices, groups.split(out), strict=True):
            into.copy_(own @ matrix)
        return out


@pytest.mark.parametrize("seed", range(3))
def test_drops_what_a_loop_over_slots_and_positions_drops(seed: int) -> None:
    """The output and all gradients are those of the kept rows, each token and expert alone."""
    scores, valid = inputs(seed)
    choice = Capacity(FACTOR, ALONE, 1).limit(choose(scores.flatten(0, 1), K), valid, None)
    limit = ceil(FACTOR * LENGTH * K / EXPERTS)
    expected = kept_by_loop(choice.experts.view(LENGTH, BATCH, K), valid, limit)
    assert torch.equal(kept(choice), expected) and not expected.all()
    assert choice.counts.tolist() == [
        int((choice.experts.view_as(expected)[expected] == expert).sum()) for expert in range(EXPERTS)
    ]

    matrices, x, weights = (
        random(EXPERTS, 6, 4, seed=5),
        random(LENGTH * BATCH, 4, seed=6),
        random(LENGTH * BATCH, K, seed=7),
    )
    theirs = [each.clone().requires_grad_() for each in (x, weights)]
    experts, saved = Products(matrices), []
    out = LocalDispatch().compute(x, weights, saved, choice, experts)
    reference = torch.zeros_like(out)
    for token, slot in expected.flatten(0, 1).nonzero().tolist():
        row = matrices[choice.experts[token, slot]] @ theirs[0][token]
        reference = reference + torch.zeros_like(out).index_put((torch.tensor(token),), theirs[1][token, slot] * row)
    torch.testing.assert_close(out, reference, rtol=1e-12, atol=1e-12)
    gradient = random(*out.shape, seed=8)
    reference.backward(gradient)
    gradients = LocalDispatch().gradient(gradient, saved, choice, experts)
    torch.testing.assert_close(gradients, tuple(each.grad for each in theirs), rtol=1e-12, atol=1e-12)


def test_neither_padding_nor_another_sequence_takes_a_place() -> None:
    scores, valid = inputs(1)
    whole = Capacity(FACTOR, ALONE, 1).limit(choose(scores.flatten(0, 1), K), valid, None)
    scores[~valid] = -scores[~valid]
    scores[:, 0] = -scores[:, 0]
    other = Capacity(FACTOR, ALONE, 1).limit(choose(scores.flatten(0, 1), K), valid, None)
    same = valid.clone()
    same[:, 0] = False
    assert torch.equal(kept(whole)[same], kept(other)[same])


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_parts_of_a_sequence_drop_what_the_whole_drops(tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cp ranks with two segments each, which tp ranks cut. Every rank counts, then each is given all counts."""
    from megalite.parallel.context.parts import SequencePart

    padded, ranks = 24, 2 * tp
    scores, valid = random(padded, BATCH, EXPERTS, seed=4) - 0.3 * torch.arange(EXPERTS), random(padded, BATCH) > -1
    length = padded - 2  # the last two positions are padding
    valid[length:] = False
    whole = Capacity(FACTOR, ALONE, 1).limit(choose(scores[:length].flatten(0, 1), K), valid[:length], None)
    segments = zigzag(padded, 2)
    places = [
        torch.cat([torch.arange(segment.start, segment.stop) for segment in own]) for own in pieces_of(segments, tp)
    ]
    assert torch.cat(places).sort().values.tolist() == list(range(padded))
    counts: list[Tensor] = []

    def gathered(own: Tensor, axis: MeshAxis) -> object:
        if len(counts) < ranks:
            counts.append(own)
        return type(
            "Pending", (), {"wait": lambda self: torch.cat(counts if len(counts) == ranks else [own] * ranks)}
        )()

    monkeypatch.setattr(capacity, "all_gather", gathered)
    for attempt in range(2):
        for rank, own in enumerate(places):
            limit = Capacity(FACTOR, MeshAxis("sequence", rank, ranks, tuple(range(ranks))), tp)
            part = SequencePart(segments, rank // tp, length, None)
            result = kept(limit.limit(choose(scores[own].flatten(0, 1), K), valid[own], part), len(own))
            inside = own < length
            if attempt:
                assert torch.equal(result[inside], kept(whole, length)[own[inside]]) and not result[~inside].any()


def test_sizes() -> None:
    assert rows_per_expert(1.1, 100, 2, 4) == 55, "not 56, which the nearest float gives"
    assert rows_per_expert(1.25, 13, 2, 5) == 7
    assert pieces_of([[(0, 4), (12, 4)], [(4, 8)]], 2) == [
        [PositionSegment(0, 4)],
        [PositionSegment(12, 4)],
        [PositionSegment(4, 4)],
        [PositionSegment(8, 4)],
    ]
