"""Triton's interpreter computes in bf16 as torch does, once it is repaired: the kernels' tests rest on it."""

import pytest
import torch
import triton
import triton.language as tl

from tests.conftest import HAS_GPU

pytestmark = pytest.mark.skipif(HAS_GPU, reason="kernels are compiled here")


@triton.jit
def _narrow(x, y, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(y + at, tl.load(x + at).to(tl.bfloat16))


@triton.jit
def _add(x, y, out, larger, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    left, right = tl.load(x + at), tl.load(y + at)
    tl.store(out + at, left + right)
    tl.store(larger + at, left > right)


@triton.jit
def _multiply(x, y, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(out + at, tl.dot(tl.load(x + at), tl.load(y + at)))


def test_fp32_is_rounded_to_the_nearest_bf16_and_ties_to_even(device):
    ties = torch.arange(0x3F800000, 0x3F800000 + 64 * 0x8000, 0x8000, dtype=torch.int32).view(torch.float32)
    x = torch.cat(
        (ties, torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 3.4e38, 1e-40]), torch.randn(186))
    )
    y = torch.empty(256, dtype=torch.bfloat16)
    _narrow[(1,)](x, y, SIZE=256)
    torch.testing.assert_close(y, x.bfloat16(), rtol=0, atol=0, equal_nan=True)


def test_bf16_is_added_and_compared_as_numbers(device):
    x, y = torch.randn(2, 64).bfloat16()
    out, larger = torch.empty_like(x), torch.empty(64, dtype=torch.int8)
    _add[(1,)](x, y, out, larger, SIZE=64)
    assert torch.equal(out, x + y) and torch.equal(larger.bool(), x > y)


def test_bf16_matrices_are_multiplied_in_fp32(device):
    x, y = torch.randn(2, 32, 32).bfloat16()
    out = torch.empty(32, 32)
    _multiply[(1,)](x, y, out, SIZE=32)
    torch.testing.assert_close(out, x.float() @ y.float())
