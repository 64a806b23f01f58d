"""Rows in the order of their experts, and back, by kernels: against float64."""

from __future__ import annotations

import pytest
import torch
from megalite_kernels import permutation, permutation_triton
from torch import Tensor
from torch.library import opcheck

from tests.kernels.accuracy import assert_as_accurate

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# tokens, choices of each, width: one needs two parts
SIZES = [(9, 3, 40), (5, 1, 2100), (1, 4, 1), (0, 2, 16), (3, 2, 0)]


def inputs(tokens: int, k: int, width: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows, the row of each token and choice, which of these each row is, weights. The last choice of the first token
    has no row."""
    places = torch.randperm(tokens * k)
    order = places[places != k - 1] if tokens else places
    rows = torch.randn(len(order), width).to(device, dtype)
    index = permutation.inverse_order(order, tokens * k).view(tokens, k)
    return rows, index.to(device), order.to(device), torch.rand(tokens, k).to(device)


def combined(rows: Tensor, index: Tensor, weights: Tensor | None) -> Tensor:
    """Row by row, in the dtype of the rows and of the weights."""
    out = []
    for token in range(len(index)):
        total = torch.zeros(rows.shape[1], dtype=torch.promote_types(rows.dtype, torch.float32), device=rows.device)
        for slot, row in enumerate(index[token].tolist()):
            if row < len(rows):
                total = total + (rows[row] if weights is None else weights[token, slot] * rows[row])
        out.append(total.to(rows.dtype))
    return torch.stack(out) if out else rows.new_empty(0, rows.shape[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens, k, width", SIZES)
def test_as_accurate_as_torch(tokens, k, width, dtype, device):
    rows, index, order, weights = inputs(tokens, k, width, dtype, device)
    for each in (weights, None):
        exact = combined(rows.double(), index, None if each is None else each.double())
        assert_as_accurate(permutation.combine_rows(rows, index, each), exact, combined(rows, index, each))
    grad = torch.randn(tokens, width).to(device, dtype)
    results = permutation.combine_rows_backward(grad, rows, order, weights)
    exact, torchs = (
        permutation_reference(each, rows.to(each.dtype), order, by.double() if each.dtype == torch.float64 else by)
        for each, by in ((grad.double(), weights), (grad, weights))
    )
    for got, right, torch_result in zip(results, exact, torchs, strict=True):
        assert_as_accurate(got, right, torch_result)


def permutation_reference(grad: Tensor, rows: Tensor, order: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """torch's own gradients of the weighted sum of rows."""
    leaves = rows.to(weights.dtype).requires_grad_(), weights.detach().clone().requires_grad_()
    by_row = leaves[1].flatten()[order].unsqueeze(1) * leaves[0]
    total = torch.zeros(*grad.shape, dtype=weights.dtype, device=grad.device).index_add(
        0, order // weights.shape[1], by_row
    )
    drows, dweights = torch.autograd.grad(total, leaves, grad.to(weights.dtype))
    return drows.to(rows.dtype), dweights.flatten()[order]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_copied_in_any_order_and_strides(dtype, device):
    rows = torch.randn(2100, 7).to(device, dtype).t()
    index = torch.tensor([6, 0, 6, 3], device=device)
    assert torch.equal(permutation.gather_rows(rows, index), rows[index])
    assert permutation.gather_rows(rows, index[:0]).shape == (0, 2100)


def test_fp64_takes_the_reference(device, monkeypatch):
    for name in ("gather_rows", "combine_rows", "combine_rows_backward"):
        monkeypatch.setattr(permutation_triton, name, None)
    rows, index, order, weights = inputs(4, 2, 8, torch.float64, device)
    weights = weights.double()
    torch.testing.assert_close(permutation.combine_rows(rows, index, weights), combined(rows, index, weights))
    grad = torch.randn(4, 8, dtype=torch.float64, device=device)
    for got, right in zip(
        permutation.combine_rows_backward(grad, rows, order, weights),
        permutation_reference(grad, rows, order, weights),
        strict=True,
    ):
        torch.testing.assert_close(got, right)
    with pytest.raises(TypeError):  # the kernel is what would have been called
        permutation.gather_rows(rows.float(), order)


def test_operations_are_registered_soundly(device):
    rows, index, order, weights = inputs(3, 2, 16, torch.float32, device)
    grad = torch.randn(3, 16, device=device)
    opcheck(torch.ops.megalite.gather_rows.default, (rows, order[:2] // 2))
    opcheck(torch.ops.megalite.combine_rows.default, (rows, index, weights))
    opcheck(torch.ops.megalite.combine_rows_backward.default, (grad, rows, order, weights))


@pytest.mark.gpu
def test_results_are_the_same_bits_each_time_and_nothing_waits_for_the_host(device, assert_same_bits_and_no_wait):
    rows, index, order, weights = inputs(4096, 2, 4096, torch.bfloat16, device)
    grad = torch.randn(4096, 4096).to(device, torch.bfloat16)

    def run() -> tuple[Tensor, ...]:
        return permutation.combine_rows(rows, index, weights), *permutation.combine_rows_backward(
            grad, rows, order, weights
        )

    assert_same_bits_and_no_wait(run)
