"""fp8 kernels against the references: codes and scales bit for bit, matmuls as accurate as fp32."""

import math

import pytest
import torch
from megalite_kernels import backend, fp8, fp8_matmul, fp8_matmul_triton, fp8_triton
from megalite_kernels.groups import Groups
from torch.library import opcheck

from tests.kernels.test_fp8 import adversarial


def same(one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]) -> bool:
    """Whether codes and scales have the same bits, or are both NaN."""
    pairs = [(a.float(), b.float()) for a, b in zip(one, other, strict=True)]
    return all(((a.view(torch.int32) == b.view(torch.int32)) | (a.isnan() & b.isnan())).all() for a, b in pairs)


def numbers() -> dict[str, torch.Tensor]:
    """Matrices of 128 × 384 with all that rounds, with blocks of zeros and tiny numbers, and with infinity and NaN."""
    rounding = adversarial(128 * 384)[-128 * 384 :].view(128, 384).clone()
    small = torch.randn(128, 384) * torch.exp2(torch.arange(-140.0, -12.0)).unsqueeze(1)
    small[5] = 0
    wrong = torch.randn(128, 384)
    wrong[3, 5], wrong[100, 200], wrong[101, 201] = math.inf, math.nan, -math.nan
    return {"rounding": rounding, "small": small, "not finite": wrong, "bf16": rounding.bfloat16()}


@pytest.mark.parametrize("name", ["rounding", "small", "not finite", "bf16"])
def test_the_bits_of_the_reference(name: str, monkeypatch, device):
    x = numbers()[name].to(device)
    recipes = [(fp8_triton.quantize(x, rows, exact), (rows, exact)) for rows in (1, 128) for exact in (False, True)]
    mx = fp8_triton.quantize_mx(x)
    monkeypatch.setattr(backend, "_on_cpu", False)
    monkeypatch.setattr(backend, "_on_cuda", False)
    for own, (rows, exact) in recipes:
        assert same(own, fp8.quantize(x, (rows, 128), exact))
    assert same(mx, fp8.quantize_mx(x))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [None, (70, 0, 75)])
def test_sums_are_as_exact_as_in_fp32(groups, transposed, monkeypatch, device):
    shape = (256, 384) if groups is None else (len(groups), 256, 384)
    weight = fp8.quantize(torch.randn(shape).to(device), (128, 128))
    if transposed:
        weight = weight.t
    rows = fp8.quantize(torch.randn(150, weight.codes.shape[-1]).to(device), (1, 128))

    def product(dtype: torch.dtype) -> torch.Tensor:
        if groups is None:
            return fp8_matmul.multiply(rows, weight, dtype)
        own = Groups(torch.tensor(groups, device=device))
        return fp8_matmul.multiply_experts(rows, weight, own, dtype)[: sum(groups)]

    got = product(torch.float32)
    monkeypatch.setattr(backend, "_on_cpu", False)
    monkeypatch.setattr(backend, "_on_cuda", False)
    exact = product(torch.float64)
    assert (got - exact).norm() <= 2e-7 * exact.norm()


def test_as_operations(device):
    x = torch.randn(32, 256).to(device)
    codes, scales = fp8_triton.quantize(x, 1, False)
    opcheck(torch.ops.megalite.quantize, (x, 1, False), test_utils="test_faketensor")
    opcheck(torch.ops.megalite.quantize_mx, (x,), test_utils="test_faketensor")
    weight = fp8.quantize(torch.randn(128, 256).to(device), (128, 128))
    arguments = (codes, scales, *weight, torch.bfloat16, None)
    opcheck(torch.ops.megalite.fp8_matmul, arguments, test_utils="test_faketensor")


@pytest.mark.parametrize("architecture, takes", [("sm_80", False), ("sm_90", True), ("gfx942", False)])
def test_architectures_without_e4m3_multiply_what_is_rounded(architecture, takes, monkeypatch):
    monkeypatch.setattr(fp8_matmul_triton, "architecture", lambda device: architecture)
    assert fp8_matmul_triton.takes(torch.device("cpu")) == takes
