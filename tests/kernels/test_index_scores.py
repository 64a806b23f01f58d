"""An indexer's selections and scores against their definition in float64."""

import pytest
import torch
from megalite_kernels import index_scores, selected_rows


def inputs(queries, rows, batch=2, heads=4, dim=8, dtype=torch.float32, kind=""):
    shapes = (queries, batch, heads, dim), (rows, batch, dim), (queries, batch, heads)
    if kind == "ties":  # sums of small integers: most scores are equal to others
        return [torch.randint(-1, 2, shape).to(dtype) for shape in shapes]
    if kind == "tiny":  # every score is rounded to 0.0 or -0.0
        return [torch.randn(shape, dtype=dtype) * 1e-18 for shape in shapes]
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def scores_of(q, k, w):
    """[queries, batch, rows] in float64."""
    products = torch.einsum("sbhd,tbd->sbht", q.double(), k.double()).relu()
    return torch.einsum("sbh,sbht->sbt", w.double(), products)


def chosen_by_definition(q, k, w, top, positions, key_positions=None, document_start=None):
    scores, batch = scores_of(q, k, w).float(), q.shape[1]
    selection = torch.full((len(q), batch, top), -1, dtype=torch.int32)
    for query in range(len(q)):
        for row in range(batch):
            at = range(len(k)) if key_positions is None else key_positions.expand(-1, batch)[:, row].tolist()
            last = positions.expand(-1, batch)[query, row].item()
            first = 0 if document_start is None else document_start.expand(-1, batch)[query, row].item()
            seen = [key for key in range(len(k)) if first <= at[key] <= last]
            best = sorted(seen, key=lambda key: (-scores[query, row, key].item(), at[key]))[:top]
            selection[query, row, : len(best)] = torch.tensor(sorted(best))
    return selection


@pytest.mark.parametrize("kind", ["", "ties", "tiny"])
@pytest.mark.parametrize("top", [1, 5, 40])
def test_selections_are_their_definition(top, kind, monkeypatch):
    """Rows in any order of positions, documents, queries that see fewer rows than they may select."""
    q, k, w = inputs(30, 40, kind=kind)
    positions, order = torch.arange(10, 40)[:, None], torch.stack([torch.randperm(40) for _ in range(2)], 1)
    starts = torch.stack([positions[:, 0] // length * length for length in (7, 40)], 1)
    monkeypatch.setattr(selected_rows, "_ELEMENTS", 1000)  # several blocks of queries
    for options in (
        {"positions": positions},
        {"positions": positions, "document_start": starts},
        {"positions": positions.expand(-1, 2), "key_positions": order, "document_start": starts[:, :1]},
        {"positions": positions - 10, "key_positions": order[:, :1]},
    ):
        selection = index_scores.select(q, k, w, top=top, **options)
        assert selection.dtype == torch.int32
        assert torch.equal(selection, chosen_by_definition(q, k, w, top, **options))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_selection_does_not_depend_on_slices(dtype, monkeypatch):
    """Of the queries, of the keys, and of both in blocks; with scores in bf16, of which many are equal."""
    q, k, w = inputs(64, 96, heads=16, dim=16)
    q, k, w = q.to(dtype), k.to(dtype), w.bfloat16().float()
    positions = torch.arange(32, 96)[:, None]
    whole = index_scores.select(q, k, w, top=12, positions=positions)
    for size in (1, 7):
        by_queries = [
            index_scores.select(q[at : at + size], k, w[at : at + size], top=12, positions=positions[at : at + size])
            for at in range(0, 64, size)
        ]
        assert torch.equal(torch.cat(by_queries), whole)
    every = torch.arange(96)[:, None]
    parts = [(first, min(first + 13, 96)) for first in range(0, 96, 13)]
    for row in range(64):  # the best of the best of each part
        best = [
            index_scores.select(
                q[row : row + 1, :1], k[first:end, :1], w[row : row + 1, :1],
                top=12, positions=positions[row : row + 1], key_positions=every[first:end],
            )[0, 0] + first
            for first, end in parts
        ]  # fmt: skip
        candidates = torch.cat([at[at >= first].long() for at, (first, _) in zip(best, parts, strict=True)])
        merged = index_scores.select(
            q[row : row + 1, :1], k[candidates, :1], w[row : row + 1, :1],
            top=12, positions=positions[row : row + 1], key_positions=every[candidates],
        )[0, 0]  # fmt: skip
        assert torch.equal(candidates[merged.long()].int(), whole[row, 0])
    fast = index_scores.select(q, k, w, top=12, positions=positions, exact=False)
    assert (fast == whole).float().mean() > 0.9  # of nearly equal scores others may win
    monkeypatch.setattr(selected_rows, "_ELEMENTS", 1)
    assert torch.equal(index_scores.select(q, k, w, top=12, positions=positions), whole)


def test_what_a_query_does_not_see_may_be_anything():
    q, k, w = inputs(8, 12)
    positions = torch.arange(8)[:, None]
    expected = index_scores.select(q, k, w, top=4, positions=positions)
    k[8:] = torch.nan  # rows of a cache that are not written yet
    assert torch.equal(index_scores.select(q, k, w, top=4, positions=positions), expected)
    scores = index_scores.selected_scores(q, k, w, expected)
    gradients = index_scores.selected_scores_backward(torch.ones_like(scores), q, k, w, expected)
    assert all(torch.isfinite(each).all() for each in gradients)


def test_all_visible_rows():
    starts = torch.tensor([0, 0, 2, 2])[:, None]
    visible = index_scores.visible_rows(torch.arange(4)[:, None], 5, document_start=starts)
    assert visible.squeeze(1).tolist() == [[0, *[-1] * 4], [0, 1, -1, -1, -1], [2, *[-1] * 4], [2, 3, -1, -1, -1]]
    later = index_scores.visible_rows(torch.arange(2)[:, None], 3, key_positions=torch.tensor([[9], [1], [0]]))
    assert later.squeeze(1).tolist() == [[2, -1, -1], [1, 2, -1]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_scores_and_their_gradients(dtype, as_exact_as, monkeypatch):
    monkeypatch.setattr(selected_rows, "_ELEMENTS", 2000)
    q, k, w = inputs(20, 24, dtype=dtype)
    w = w.to(torch.promote_types(dtype, torch.float32))
    selection = index_scores.select(q, k, w, top=6, positions=torch.arange(20)[:, None])
    filled = selection < 0
    assert filled.any()
    dscores = torch.randn(selection.shape, dtype=w.dtype)
    leaves = [x.double().clone().requires_grad_() for x in (q, k, w)]
    exact = scores_of(*leaves).gather(2, selection.clamp_min(0).long())
    expected = torch.autograd.grad(exact, leaves, dscores.double().masked_fill(filled, 0))
    scores = index_scores.selected_scores(q, k, w, selection)
    assert scores.dtype == w.dtype
    assert torch.equal(scores == -torch.inf, filled)
    as_exact_as(scores.masked_fill(filled, 0), exact.masked_fill(filled, 0).to(w.dtype), exact.masked_fill(filled, 0))
    gradients = index_scores.selected_scores_backward(dscores.masked_fill(filled, torch.nan), q, k, w, selection)
    assert [x.dtype for x in gradients] == [q.dtype, w.dtype, w.dtype]
    for ours, true in zip(gradients, expected, strict=True):
        as_exact_as(ours, true.to(ours.dtype), true)


def test_no_queries_and_no_rows():
    q, k, w = inputs(0, 4)
    assert index_scores.select(q, k, w, top=3, positions=torch.zeros(0, 1)).shape == (0, 2, 3)
    q, k, w = inputs(2, 0)
    selection = index_scores.select(q, k, w, top=3, positions=torch.zeros(2, 1, dtype=torch.int64))
    assert torch.equal(selection, torch.full((2, 2, 3), -1, dtype=torch.int32))
