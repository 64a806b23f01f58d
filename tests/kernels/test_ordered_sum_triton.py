"""The sum of ranks' parts: bit for bit an addition in rank order in fp32."""

from __future__ import annotations

import pytest
import torch
from megalite_kernels import backend, ordered_sum_triton
from megalite_kernels.ordered_sum import ordered_sum
from torch.library import opcheck


@pytest.mark.parametrize("kernels", ["triton", "torch"])
@pytest.mark.parametrize(
    "parts, total",
    [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16)],
    ids=str,
)
@pytest.mark.parametrize("ranks, count", [(2, 4096), (5, 2049), (8, 1), (1, 64), (3, 0)])
def test_is_the_sum_in_rank_order(ranks, count, parts, total, kernels, device):
    backend.select(kernels)
    sizes = torch.logspace(0, -3, ranks, device=device).unsqueeze(1)  # no other order gives the same bits
    parts = (torch.randn(ranks, count, device=device) * sizes).to(parts)
    result = torch.full((count,), torch.nan, dtype=total, device=device)
    ordered_sum(parts, result)
    expected = parts[0].float()
    for part in parts[1:]:
        expected = expected + part.float()
    assert torch.equal(result, expected.to(total))


def test_fp64_takes_the_reference(device):
    parts = torch.rand(3, 40, dtype=torch.float64, device=device)
    result = torch.empty(40, dtype=torch.float64, device=device)
    ordered_sum(parts, result)
    assert torch.equal(result, parts[0] + parts[1] + parts[2])


def test_parts_that_are_not_contiguous_are_refused(device):
    parts = torch.ones(64, 2, dtype=torch.bfloat16, device=device).t()
    with pytest.raises(ValueError, match="must be contiguous"):
        ordered_sum_triton.ordered_sum(parts, torch.empty(64, device=device))


def test_operation_is_registered_soundly(device):
    operands = torch.rand(2, 64, device=device).bfloat16(), torch.empty(64, device=device)
    opcheck(torch.ops.megalite.ordered_sum.default, operands)
