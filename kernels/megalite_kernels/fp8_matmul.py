"""Matmuls of quantized matrices (`fp8`): a bᵀ, each element a sum over blocks of scales times sums of codes.

On a CPU both operands are converted to fp32, or to fp64 for an fp64 result, and multiplied there. No
communication.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite_kernels.fp8 import Quantized, dequantize
from megalite_kernels.groups import Groups


def multiply(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    """Return a bᵀ: [n, k], [m, k] -> [n, m].

    Args:
        dtype: of the result.
    """
    wide = torch.promote_types(dtype, torch.float32)
    return F.linear(dequantize(a, wide), dequantize(b, wide)).to(dtype)


def multiply_experts(a: Quantized, b: Quantized, groups: Groups, dtype: torch.dtype) -> Tensor:
    """Return the product of the rows of each group with its matrix: [n, k], [groups, m, k] -> [n, m].

    Rows that belong to no group are undefined.
    """
    wide = torch.promote_types(dtype, torch.float32)
    rows, matrices = dequantize(a, wide), dequantize(b, wide)
    out = rows.new_empty(rows.shape[0], matrices.shape[1])
    for own, matrix, into in zip(groups.split(rows), matrices, groups.split(out), strict=True):
        torch.mm(own, matrix.t(), out=into)
    return out.to(dtype)
