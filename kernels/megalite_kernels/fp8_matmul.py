"""Matmuls of quantized matrices (`fp8`): a bᵀ, each element a sum over blocks of scales times sums of codes.

    triton       `fp8_matmul_triton` for `block`, `fp8_mx_matmul_triton` for `mxfp8`
    scaled_mm    torch's own (`fp8_library`), where the device's file names it (`device_routes`)

On a CPU, and on request (`train.kernels = torch`), both operands are converted to fp32, or to fp64 for an
fp64 result, and multiplied there; on a GPU to bf16 if their scales are powers of two, which is exact. No
communication.
"""

from __future__ import annotations

import importlib.util

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite_kernels import backend, fp8_library
from megalite_kernels.device_routes import measured
from megalite_kernels.fp8 import BLOCK, Quantized, Recipe, dequantize
from megalite_kernels.groups import Groups
from megalite_kernels.launch import FP8_ARCHITECTURES, fp8_architecture

ARCHITECTURES: dict[Recipe, tuple[str, ...]] = {"block": FP8_ARCHITECTURES, "mxfp8": ("sm_100", "sm_120")}
"""Recipe → the architectures whose tensor cores multiply it."""
GPUS: dict[Recipe, str] = {"block": "Ada, Hopper and Blackwell", "mxfp8": "Blackwell"}


def multiply(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    """Return a bᵀ: [n, k], [m, k] -> [n, m].

    Args:
        dtype: of the result.
    """
    if _named(a) == "scaled_mm" and fp8_library.refuses(a, b, dtype) is None:
        return fp8_library.multiply(a, b, dtype)
    if _takes(a, b, dtype):
        return in_triton(a, b, dtype)
    wide = _converted(a, dtype)
    return F.linear(dequantize(a, wide), dequantize(b, wide)).to(dtype)


def multiply_experts(a: Quantized, b: Quantized, groups: Groups, dtype: torch.dtype) -> Tensor:
    """Return the product of the rows of each group with its matrix: [n, k], [groups, m, k] -> [n, m].

    Rows that belong to no group are undefined.
    """
    if _takes(a, b, dtype):
        return in_triton(a, b, dtype, groups.ends)
    wide = _converted(a, dtype)
    rows, matrices = dequantize(a, wide), dequantize(b, wide)
    out = rows.new_empty(rows.shape[0], matrices.shape[1])
    for own, matrix, into in zip(groups.split(rows), matrices, groups.split(out), strict=True):
        torch.mm(own, matrix.t(), out=into)
    return out.to(dtype)


def missing(device: torch.device, recipe: Recipe) -> str | None:
    """Return why no kernel of a GPU multiplies a recipe, or None if one does.

    None for a CPU, where the reference is as fast as any other matmul.
    """
    if device.type == "cpu":
        return None
    if importlib.util.find_spec("triton") is None:
        return "requires the package triton, which is not installed"
    if fp8_architecture(device) in ARCHITECTURES[recipe]:
        return None
    name = torch.cuda.get_device_name(device)
    if torch.version.hip:
        return f"has no kernel for {name}: the 8-bit format of MI300 (e4m3fnuz) has other exponents"
    return f"requires the tensor cores of {GPUS[recipe]}, which {name} does not have"


def describe(device: torch.device, recipe: Recipe) -> str:
    """Return the route of matmuls of a recipe on a GPU and the reason for it, as text."""
    routes = measured(device)
    fastest = routes.fp8_mxfp8 if recipe == "mxfp8" else routes.fp8_block
    if fastest is not None:
        others = "; experts and what it does not support: triton" if fastest == "scaled_mm" else ""
        return f"fp8 matmuls: {fastest}, measured to be the fastest on {routes.device}{others}"
    if backend.selected == "torch" or missing(device, recipe) is not None:
        return "fp8 matmuls: reference, which multiplies the rounded operands in a wider precision"
    return f"fp8 matmuls: triton; {routes.problem or 'no routes were measured on this device'}"


def in_triton(a: Quantized, b: Quantized, dtype: torch.dtype, ends: Tensor | None = None) -> Tensor:
    """Launch the kernel of `multiply`, or with the ends of groups that of `multiply_experts`."""
    if a.recipe == "mxfp8":
        from megalite_kernels.fp8_mx_matmul_triton import fp8_mx_matmul

        return fp8_mx_matmul(*a, *b, dtype, ends)
    from megalite_kernels.fp8_matmul_triton import fp8_matmul

    return fp8_matmul(*a, *b, dtype, ends)


ROUTES = {"triton": in_triton, "scaled_mm": fp8_library.multiply}
"""By name, in default order. Each takes the operands and the dtype of `multiply`."""


def _named(a: Quantized) -> str | None:
    """Return the route that the device's file names."""
    routes = measured(a.codes.device)
    return routes.fp8_mxfp8 if a.recipe == "mxfp8" else routes.fp8_block


def _takes(a: Quantized, b: Quantized, dtype: torch.dtype) -> bool:
    """Return whether a Triton kernel multiplies them: that of `block` needs square blocks in `b`."""
    if a.recipe == "block" and b.codes.shape[-2] != BLOCK * b.scales.shape[-2]:
        return False
    if not backend.runs_triton(a.codes) or dtype == torch.float64 or a.codes.shape[0] == 0:
        return False
    return fp8_architecture(a.codes.device) in ARCHITECTURES[a.recipe]


def _converted(a: Quantized, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which the reference multiplies."""
    if a.recipe == "mxfp8" and a.codes.is_cuda and dtype == torch.bfloat16:
        return dtype
    return torch.promote_types(dtype, torch.float32)
