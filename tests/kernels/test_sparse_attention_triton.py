"""The kernels of attention to selected rows against torch and float64."""

from unittest.mock import patch

import pytest
import torch
from megalite_kernels import backend, sparse_attention
from megalite_kernels.launch import Variant
from torch.library import opcheck

from tests.kernels.accuracy import assert_as_accurate
from tests.kernels.test_sparse_attention import by_definition, selection_of


def by_torch(function, *arguments):
    backend.select("torch")
    try:
        return function(*arguments)
    finally:
        backend.select("triton")


def test_more_queries_than_a_grid_has_on_its_second_axis(device):
    """CUDA allows 65,535 there and on the third."""
    grids = []
    q, selection = (torch.zeros(65_536, 1, size, device=device) for size in (32, 3))
    arguments = q.view(-1, 1, 2, 16).bfloat16(), q[:4].view(4, 1, 2, 16).bfloat16(), selection.int()
    with patch.object(Variant, "launch", lambda variant, grid, *others: grids.append(grid)):
        _, lse = sparse_attention.forward(*arguments[:2], *arguments[1:], 0.25)
        sparse_attention.probabilities(*arguments, lse, 0.25)
    assert all(grid[0] >= 65_536 > max(grid[1:]) for grid in grids) and len(grids) == 2


@pytest.mark.parametrize(
    ("heads", "groups", "dim", "width", "top", "dtype"),
    [
        (20, 1, 48, -32, 6, torch.bfloat16),
        (3, 1, 24, -24, 70, torch.float16),
        (2, 2, 48, 24, 5, torch.bfloat16),
        (6, 2, 16, 40, 5, torch.float16),
        (70, 1, 40, 16, 5, torch.bfloat16),
    ],
)
def test_as_accurate_as_torch(heads, groups, dim, width, top, dtype, device):
    """A negative width: that of values in the keys. Queries with no rows, fewer than `top`, and all."""
    from megalite_kernels import selected_rows_triton

    queries, batch, rows, scale = 4, 2 if top < 9 else 1, top + 4, dim**-0.5
    q, keys = torch.randn(queries, batch, heads, 2 * dim), torch.randn(rows, batch, groups, 3 * dim)
    values, dout = torch.randn(rows, batch, groups, abs(width)), torch.randn(queries, batch, heads, abs(width))
    q, keys, values, dout = (x.to(device, dtype) for x in (q, keys, values, dout))
    q, keys = q[..., dim:], keys[..., dim : 2 * dim]  # parts of wider tensors
    selection = selection_of(queries, batch, rows, top)
    for query in (1, 2):
        selection[query] = torch.randperm(rows)[:top].sort().values
    selection = selection.to(device)

    def results(q, keys, values, dout):
        given = values if width > 0 else -width
        out, lse = sparse_attention.forward(q, keys, given, selection, scale)
        gradients = sparse_attention.backward(dout, q, keys, given, out, lse, selection, scale)
        p = sparse_attention.probabilities(q, keys, selection, lse, scale)
        assert (lse[-1] == -torch.inf).all()
        return [out, lse[:-1], p, *(x for x in gradients if x is not None)]

    def defined(q, keys, values, dout):
        """All in one precision."""
        leaves = [x.detach().clone().requires_grad_() for x in ((q, keys, values) if width > 0 else (q, keys))]
        out, lse, p = by_definition(*leaves[:2], leaves[2] if width > 0 else leaves[1][..., :-width], selection, scale)
        return [out.detach(), lse[:-1].detach(), p.detach(), *torch.autograd.grad(out, leaves, dout)]

    with patch.object(selected_rows_triton, "_PARTS", 2 * batch * groups * top * max(dim, abs(width))):  # two queries
        got = results(q, keys, values, dout)
    exact = by_torch(results, *(x.double() for x in (q, keys, values, dout)))
    for ours, torchs, true in zip(got, defined(q, keys, values, dout), exact, strict=True):
        assert_as_accurate(ours, true, torchs.to(ours.dtype))


def test_what_is_not_selected_is_not_loaded(device, monkeypatch):
    """It may be memory that nothing has written; and all of the results are written."""
    kept = torch.Tensor.new_empty

    def poisoned(*args, **options):
        new = kept(*args, **options)
        return new.fill_(torch.nan) if new.is_floating_point() else new

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    q, keys, dout = (torch.randn(*s, device=device).half() for s in ((4, 1, 4, 20), (8, 1, 1, 20), (4, 1, 4, 16)))
    selection = selection_of(4, 1, 5, 3).to(device)

    def results():
        out, lse = sparse_attention.forward(q, keys, 16, selection, 0.2)
        dq, dkeys, _ = sparse_attention.backward(dout, q, keys, 16, out, lse, selection, 0.2)
        return out, lse, dq, dkeys, sparse_attention.probabilities(q, keys, selection, lse, 0.2)

    expected = results()
    assert all(torch.isfinite(x).all() for i, x in enumerate(expected) if i != 1)
    keys[5:] = torch.nan
    assert all(torch.equal(one, other) for one, other in zip(results(), expected, strict=True))


def test_no_queries(device):
    q, keys = torch.randn(0, 1, 4, 16, device=device).half(), torch.randn(5, 1, 1, 16, device=device).half()
    selection = torch.zeros(0, 1, 3, dtype=torch.int32, device=device)
    out, lse = sparse_attention.forward(q, keys, 16, selection, 0.2)
    gradients = sparse_attention.backward(out, q, keys, 16, out, lse, selection, 0.2)
    assert (gradients.keys == 0).all()
    assert sparse_attention.probabilities(q, keys, selection, lse, 0.2).shape == (0, 1, 3)


def test_operations_are_registered_soundly(device):
    q, keys, dout = (torch.randn(*s, device=device).half() for s in ((2, 1, 2, 16), (3, 1, 1, 16), (2, 1, 2, 16)))
    selection, operations = torch.tensor([[[0, -1]], [[1, 2]]], dtype=torch.int32, device=device), torch.ops.megalite
    out, lse = sparse_attention.forward(q, keys, 16, selection, 0.2)
    for values in (None, keys.clone()):
        opcheck(operations.sparse_attention_forward.default, (q, keys, values, 16, selection, 0.2))
        opcheck(operations.sparse_attention_backward.default, (dout, q, keys, values, out, lse, selection, 0.2))
    opcheck(operations.sparse_attention_probabilities.default, (q, keys, selection, lse, 0.2))


@pytest.mark.gpu
def test_same_bits_every_run_and_no_wait(device, assert_same_bits_and_no_wait):
    shapes = (200, 1, 64, 96), (400, 1, 1, 96), (200, 1, 64, 64)
    q, keys, dout = (torch.randn(*shape, device=device).bfloat16() for shape in shapes)
    selection = selection_of(200, 1, 400, 70).to(device)

    def run():
        out, lse = sparse_attention.forward(q, keys, 64, selection, 0.1)
        dq, dkeys, _ = sparse_attention.backward(dout, q, keys, 64, out, lse, selection, 0.1)
        return [out, lse, dq, dkeys, sparse_attention.probabilities(q, keys, selection, lse, 0.1)]

    assert_same_bits_and_no_wait(run)
