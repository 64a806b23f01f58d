"""An indexer's kernels against torch and float64."""

from unittest.mock import patch

import pytest
import torch
from megalite_kernels import backend, index_scores
from megalite_kernels.launch import Variant
from torch.library import opcheck

from tests.kernels.accuracy import assert_as_accurate


def inputs(queries, rows, batch, heads, dim, dtype, device):
    """Parts of wider tensors."""
    q, k = torch.randn(queries, batch, 2 * heads, dim), torch.randn(rows, batch, 3 * dim)
    w = torch.randn(queries, batch, heads, device=device)
    return q.to(device, dtype)[:, :, heads:], k.to(device, dtype)[..., dim : 2 * dim], w


def by_torch(function, *arguments, **options):
    backend.select("torch")
    try:
        return function(*arguments, **options)
    finally:
        backend.select("triton")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_selects_what_torch_selects(dtype, device):
    """With sums in fp64: all scores have the same bits. Some are equal, of some queries few rows are seen."""
    from megalite_kernels import index_scores_triton

    q, k, w = inputs(4, 80, 2, 5, 8, dtype, device)
    k[30:60] = k[:30]
    positions = torch.tensor([0, 79, 64, 50], device=device)[:, None]
    order = torch.stack([torch.randperm(80) for _ in range(2)], 1).to(device)
    starts = positions // 30 * 30
    for options in (
        {"positions": positions},
        {"positions": positions.expand(-1, 2), "document_start": starts},
        {"positions": positions, "key_positions": order, "document_start": starts.expand(-1, 2)},
    ):
        expected = by_torch(index_scores.select, q, k, w, top=21, **options)
        assert torch.equal(index_scores.select(q, k, w, top=21, **options), expected)
    with patch.object(index_scores_triton, "_BLOCK", 500):  # several blocks of queries
        assert torch.equal(index_scores.select(q, k, w, top=21, **options), expected)
    whole = by_torch(index_scores.select, q, k, w, top=100, positions=positions)
    assert torch.equal(index_scores.select(q, k, w, top=100, positions=positions), whole)


def test_sums_in_fp32(device):
    """Products of small integers are exact in them."""
    q, k, w = (x.round() for x in inputs(2, 200, 1, 16, 8, torch.bfloat16, device))
    positions = torch.tensor([40, 199], device=device)[:, None]
    expected = index_scores.select(q, k, w, top=30, positions=positions)
    assert torch.equal(index_scores.select(q, k, w, top=30, positions=positions, exact=False), expected)


@pytest.mark.parametrize(
    ("heads", "dim", "top", "dtype"),
    [(5, 24, 66, torch.bfloat16), (16, 32, 5, torch.float16), (1, 8, 3, torch.bfloat16)],
)
def test_selected_scores_and_gradients(heads, dim, top, dtype, device):
    from megalite_kernels import selected_rows_triton

    q, k, w = inputs(4, top + 4, 2 if top < 9 else 1, heads, dim, dtype, device)
    positions = torch.tensor([0, top + 3, 4, top + 3], device=device)[:, None]
    selection = by_torch(index_scores.select, q, k, w, top=top, positions=positions)
    dscores = torch.randn(selection.shape, device=device)

    def results(q, k, w, dscores):
        scores = index_scores.selected_scores(q, k, w, selection)
        assert torch.equal(scores == -torch.inf, selection < 0)
        gradients = index_scores.selected_scores_backward(dscores, q, k, w, selection)
        return scores.masked_fill(selection < 0, 0), *gradients

    with patch.object(selected_rows_triton, "_PARTS", 2 * top * dim * q.shape[1]):  # blocks of two queries
        got = results(q, k, w, dscores)
    exact = by_torch(results, *(x.double() for x in (q, k, w, dscores)))
    # the products' gradients are rounded to the inputs' type
    torchs = by_torch(by_definition, q, k, w, dscores, selection)
    for ours, torch_result, true in zip(got, torchs, exact, strict=True):
        assert_as_accurate(ours, true.double(), torch_result.to(ours.dtype))


def by_definition(q, k, w, dscores, selection):
    """Scores and gradients with all rows, in the precision of q."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, w.to(q.dtype))]
    products = torch.einsum("sbhd,tbd->sbht", *leaves[:2]).relu()
    scores = torch.einsum("sbh,sbht->sbt", leaves[2], products).gather(2, selection.clamp_min(0).long())
    scores = scores.masked_fill(selection < 0, 0)
    return scores.detach(), *torch.autograd.grad(scores, leaves, dscores.to(q.dtype))


def test_more_queries_than_a_grid_has_on_its_second_axis(device):
    """CUDA allows 65,535 there and on the third."""
    grids = []
    q, k, w, selection = (torch.zeros(65_536, *shape, device=device) for shape in ((1, 1, 16), (1, 16), (1, 1), (1, 3)))
    with patch.object(Variant, "launch", lambda variant, grid, *arguments: grids.append(grid)):
        index_scores.selected_scores(q.bfloat16(), k.bfloat16(), w, selection.int())
    assert grids[0][0] >= 65_536 > max(grids[0][1:])


def test_no_queries_and_no_rows(device):
    for queries, rows in ((0, 5), (3, 0)):
        q, k, w = inputs(queries, rows, 2, 4, 16, torch.bfloat16, device)
        positions = torch.zeros(queries, 1, dtype=torch.int64, device=device)
        selection = index_scores.select(q, k, w, top=3, positions=positions)
        assert torch.equal(selection, torch.full((queries, 2, 3), -1, dtype=torch.int32, device=device))
        assert (index_scores.selected_scores(q, k, w, selection) == -torch.inf).all()
        gradients = index_scores.selected_scores_backward(torch.zeros(queries, 2, 3, device=device), q, k, w, selection)
        assert all((x == 0).all() for x in gradients)


def test_operations_are_registered_soundly(device):
    q, k, w = inputs(2, 5, 1, 2, 4, torch.bfloat16, device)
    positions = torch.arange(2, device=device)[:, None] * 4
    selection = index_scores.select(q, k, w, top=3, positions=positions)
    operations = torch.ops.megalite
    opcheck(operations.index_scores_select.default, (q, k, w, 3, positions, None, positions // 2, True))
    opcheck(operations.index_scores_selected.default, (q, k, w, selection))
    dscores = torch.randn(2, 1, 3, device=device)
    opcheck(operations.index_scores_selected_backward.default, (dscores, q, k, w, selection))


@pytest.mark.gpu
def test_same_bits_every_run_and_no_wait(device, assert_same_bits_and_no_wait):
    q, k, w = inputs(300, 500, 1, 16, 64, torch.bfloat16, device)
    positions = torch.arange(200, 500, device=device)[:, None]
    selection = index_scores.select(q, k, w, top=100, positions=positions)
    dscores = torch.randn(selection.shape, device=device)
    assert_same_bits_and_no_wait(
        lambda: [
            index_scores.select(q, k, w, top=100, positions=positions),
            index_scores.select(q, k, w, top=100, positions=positions, exact=False),
            *index_scores.selected_scores_backward(dscores, q, k, w, selection),
        ]
    )
