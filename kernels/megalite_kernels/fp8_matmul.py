"""Matmuls of quantized matrices (`fp8`): a bᵀ, each element a sum over blocks of scales times sums of codes.

On a CPU both operands are converted to fp32, or to fp64 for an fp64 result, and multiplied there. No
communication.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite_kernels import backend
from megalite_kernels.fp8 import BLOCK, Quantized, dequantize
from megalite_kernels.groups import Groups


def multiply(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    """Return a bᵀ: [n, k], [m, k] -> [n, m].

    Args:
        dtype: of the result.
    """
    if _takes(a, b, dtype):
        from megalite_kernels.fp8_matmul_triton import fp8_matmul

        return fp8_matmul(*a, *b, dtype)
    wide = torch.promote_types(dtype, torch.float32)
    return F.linear(dequantize(a, wide), dequantize(b, wide)).to(dtype)


def multiply_experts(a: Quantized, b: Quantized, groups: Groups, dtype: torch.dtype) -> Tensor:
    """Return the product of the rows of each group with its matrix: [n, k], [groups, m, k] -> [n, m].

    Rows that belong to no group are undefined.
    """
    if _takes(a, b, dtype):
        from megalite_kernels.fp8_matmul_triton import fp8_matmul

        return fp8_matmul(*a, *b, dtype, groups.ends)
    wide = torch.promote_types(dtype, torch.float32)
    rows, matrices = dequantize(a, wide), dequantize(b, wide)
    out = rows.new_empty(rows.shape[0], matrices.shape[1])
    for own, matrix, into in zip(groups.split(rows), matrices, groups.split(out), strict=True):
        torch.mm(own, matrix.t(), out=into)
    return out.to(dtype)


def add_transposed_product(grad: Tensor, a: Quantized, b: Quantized, overwrite: bool) -> None:
    """Compute grad (+)= aᵀ b: [k, n], [k, m] -> [n, m], with scales of 128 × 1 elements of both."""
    if _adds(grad):
        from megalite_kernels.fp8_weight_grad_triton import add_fp8_gradient

        return add_fp8_gradient(grad.unsqueeze(0), *a, *b, None, overwrite)
    wide = torch.promote_types(grad.dtype, torch.float32)
    product = dequantize(a, wide).t() @ dequantize(b, wide)
    if overwrite:
        grad.copy_(product)
    else:
        grad.add_(product)


def add_transposed_products(
    grad: Tensor, a: Quantized, b: Quantized, groups: Groups, overwrite: bool
) -> None:
    """Compute `add_transposed_product` of the rows of each group, into [groups, n, m].

    Args:
        groups: of whole blocks of 128 rows.
    """
    if _adds(grad):
        from megalite_kernels.fp8_weight_grad_triton import add_fp8_gradient

        return add_fp8_gradient(grad, *a, *b, groups.ends, overwrite)
    if overwrite:  # also groups without rows
        grad.zero_()
    wide = torch.promote_types(grad.dtype, torch.float32)
    left, right = groups.split(dequantize(a, wide)), groups.split(dequantize(b, wide))
    for own, rows, inputs in zip(grad, left, right, strict=True):
        own.add_(rows.t() @ inputs)


def _adds(grad: Tensor) -> bool:
    """Return whether a kernel adds to a gradient."""
    if not backend.takes_triton(grad) or grad.dtype != torch.float32 or not grad.is_contiguous():
        return False
    from megalite_kernels import fp8_weight_grad_triton

    return fp8_weight_grad_triton.takes(grad.device)


def _takes(a: Quantized, b: Quantized, dtype: torch.dtype) -> bool:
    """Return whether a kernel multiplies them: it needs scales of 1 × 128 and of 128 × 128."""
    if not backend.takes_triton(a.scales) or dtype == torch.float64 or a.codes.shape[0] == 0:
        return False
    from megalite_kernels import fp8_matmul_triton

    return b.codes.shape[-2] == BLOCK * b.scales.shape[-2] and fp8_matmul_triton.takes(a.codes.device)
