"""Kernels of weight gradients of codes against the references: codes bit for bit, sums as accurate as fp32."""

import pytest
import torch
from megalite_kernels import backend, fp8, fp8_matmul
from megalite_kernels.groups import Groups
from torch.library import opcheck

from tests.kernels.test_fp8_triton import numbers, same


@pytest.mark.parametrize("name", ["rounding", "small", "not finite", "bf16"])
def test_the_bits_of_the_reference(name: str, monkeypatch, device):
    x = torch.cat((numbers()[name], numbers()[name].roll(1, 0))).to(device)
    codes = [fp8.quantize(x, (128, 1), exact) for exact in (False, True)]
    monkeypatch.setattr(backend, "_on_cpu", False)
    monkeypatch.setattr(backend, "_on_cuda", False)
    for own, exact in zip(codes, (False, True), strict=True):
        assert same(own, fp8.quantize(x, (128, 1), exact))


@pytest.mark.parametrize("sizes", [None, (128, 0, 256)])
@pytest.mark.parametrize("overwrite", [False, True])
def test_sums_are_as_exact_as_in_fp32(sizes, overwrite, monkeypatch, device):
    left, right = (fp8.quantize(torch.randn(512, width).to(device), (128, 1)) for width in (128, 256))
    start = torch.randn(1 if sizes is None else 3, 128, 256).to(device)

    def added(grad: torch.Tensor) -> torch.Tensor:
        if sizes is None:
            fp8_matmul.add_transposed_product(grad[0], left, right, overwrite)
        else:
            groups = Groups(torch.tensor(sizes, device=device))
            fp8_matmul.add_transposed_products(grad, left, right, groups, overwrite)
        return grad

    got = added(start.clone())
    monkeypatch.setattr(backend, "_on_cpu", False)
    monkeypatch.setattr(backend, "_on_cuda", False)
    exact = added(start.double())
    assert (got - exact).norm() <= 2e-7 * exact.norm()


def test_as_operations(device):
    x = torch.randn(128, 128).to(device)
    opcheck(torch.ops.megalite.quantize_tokens, (x, False), test_utils="test_faketensor")
    operand = fp8.quantize(x, (128, 1))
    arguments = (torch.zeros(1, 128, 128, device=device), *operand, *operand, None, True)
    opcheck(torch.ops.megalite.add_fp8_gradient, arguments, test_utils="test_faketensor")
