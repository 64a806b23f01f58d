"""The weight gradients of experts in one launch: against float64."""

from __future__ import annotations

import pytest
import torch
from megalite_kernels import grouped_weight_grad_triton
from megalite_kernels.grouped_weight_grad import add_grouped_gradient
from megalite_kernels.groups import Groups
from torch import Tensor
from torch.library import opcheck

from tests.kernels.accuracy import assert_as_accurate


def inputs(sizes: list[int], height: int, width: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    rows = sum(sizes)
    return (
        torch.randn(len(sizes), height, width, device=device),
        torch.randn(rows, height).to(device, dtype),
        torch.randn(rows, width).to(device, dtype),
    )


def groups_of(sizes: list[int], device: str) -> Groups:
    return Groups(torch.tensor(sizes, device=device))


def exact(grad: Tensor, left: Tensor, right: Tensor, sizes: list[int], overwrite: bool) -> Tensor:
    """In float64."""
    parts = [a.double().t() @ b.double() for a, b in zip(left.split(sizes), right.split(sizes), strict=True)]
    return torch.stack(parts) + (0 if overwrite else grad.double())


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "sizes, height, width", [([3, 0, 70, 1], 20, 17), ([0, 5], 130, 136), ([0, 0], 8, 8), ([4], 1, 1)], ids=str
)
def test_accumulates_in_fp32(sizes, height, width, dtype, overwrite, device):
    """As accurate as products of the same values in fp32; experts without rows keep their gradient, or get zeros."""
    grad, left, right = inputs(sizes, height, width, dtype, device)
    expected = exact(grad, left, right, sizes, overwrite)
    in_fp32 = grad.clone()
    add_grouped_gradient(in_fp32, left.float(), right.float(), groups_of(sizes, device), overwrite)
    if overwrite:
        grad.fill_(torch.nan)
    add_grouped_gradient(grad, left, right, groups_of(sizes, device), overwrite)
    assert_as_accurate(grad, expected, in_fp32)


def test_other_dtypes_and_gradients_take_the_reference(device, monkeypatch):
    monkeypatch.setattr(grouped_weight_grad_triton, "add_grouped_gradient", None)
    for dtype in (torch.float32, torch.float64):
        grad, left, right = (each.to(dtype) for each in inputs([2, 3], 4, 5, torch.float32, device))
        expected = exact(grad, left, right, [2, 3], False)
        add_grouped_gradient(grad, left, right, groups_of([2, 3], device), overwrite=False)
        torch.testing.assert_close(grad, expected.to(dtype))
    grad, left, right = torch.zeros(2, 4, 5, device=device), left.bfloat16(), right.bfloat16()
    with pytest.raises(TypeError):  # the kernel is what would have been called
        add_grouped_gradient(grad, left, right, groups_of([2, 3], device), overwrite=False)


def test_operation_is_registered_soundly(device):
    grad, left, right = inputs([2, 3], 16, 16, torch.bfloat16, device)
    ends = groups_of([2, 3], device).ends
    opcheck(torch.ops.megalite.add_grouped_gradient.default, (grad, left, right, ends, False))


@pytest.mark.gpu
def test_results_are_the_same_bits_each_time(device):
    sizes = [700, 0, 1348, 2048]
    grad, left, right = inputs(sizes, 1024, 2048, torch.bfloat16, device)
    gradients = [grad.clone() for _ in range(10)]
    for each in gradients:
        add_grouped_gradient(each, left, right, groups_of(sizes, device), overwrite=False)
    assert all(torch.equal(gradients[0], each) for each in gradients)
