"""Torch's matmul of quantized matrices (`scaled_mm`), as a route of `fp8_matmul.multiply` on a GPU.

    block    on Hopper, with CUDA 12.9 or newer
    mxfp8    on Blackwell, with CUDA 12.8 or newer

cuBLAS reads scales in layouts of its own, which are made here:

    1 × 128      [n, k / 128], the scales of one column next to each other (`by_column`)
    128 × 128    [k / 128, m / 128], again by column, and k / 128 padded to a multiple of 4 (`padded`)
    1 × 32       padded tiles of 128 rows and 4 scales of each; in a tile, the scales of the rows r, r + 32,
                 r + 64 and r + 96 follow each other, for r < 32 (`in_tiles`)

Both operands must lie along the contracted dimension: the transposed view of a weight is copied. The route
runs only where the device's file names it (`device_routes`), and where it supports the call; else the Triton
kernels run. It has no matmul of groups.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite_kernels.fp8 import BLOCK, Quantized
from megalite_kernels.launch import fp8_architecture

ARCHITECTURES = {"block": ("sm_90",), "mxfp8": ("sm_100", "sm_120")}
CUDA = {"block": (12, 9), "mxfp8": (12, 8)}
"""Recipe → the oldest version of CUDA whose cuBLAS multiplies it."""


def refuses(a: Quantized, b: Quantized, dtype: torch.dtype) -> str | None:
    """Return why `multiply` does not support a call, or None if it does."""
    recipe, device = a.recipe, a.codes.device
    version = tuple(int(part) for part in (torch.version.cuda or "0").split("."))
    architecture, rows = fp8_architecture(device), a.codes.shape[0]
    square = b.codes.shape[0] == BLOCK * b.scales.shape[0]
    checks = (
        (architecture in ARCHITECTURES[recipe], f"{recipe} on {architecture or device.type}"),
        (version >= CUDA[recipe], f"CUDA {torch.version.cuda}"),
        (dtype == torch.bfloat16, f"results in {dtype}"),
        (rows > 0, "no rows"),
        (recipe != "block" or square, "a weight with scales of 1 x 128"),
        # a column of scales starts on 16 bytes
        (recipe != "block" or rows % 4 == 0, f"{rows} rows are no multiple of 4"),
    )
    return next((reason for supported, reason in checks if not supported), None)


def multiply(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    """Return a bᵀ: [n, k], [m, k] -> [n, m]."""
    if a.recipe == "mxfp8":
        kinds = (F.ScalingType.BlockWise1x32,) * 2
        scales, swizzle = (in_tiles(a.scales), in_tiles(b.scales)), F.SwizzleType.SWIZZLE_32_4_4
    else:
        kinds = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
        scales, swizzle = (by_column(a.scales), padded(b.scales)), F.SwizzleType.NO_SWIZZLE
    return F.scaled_mm(
        a.codes.contiguous(),
        b.codes.contiguous().t(),
        *(scales[0], kinds[0], scales[1], kinds[1]),
        swizzle_a=swizzle,
        swizzle_b=swizzle,
        output_dtype=dtype,
    )


def by_column(scales: Tensor) -> Tensor:
    """Return the same matrix with each column contiguous."""
    return scales.t().contiguous().t()


def padded(scales: Tensor) -> Tensor:
    """Return scales [m / 128, k / 128] as [k / 128 rounded up to 4, m / 128], with each column contiguous."""
    outputs, inner = scales.shape
    whole = scales.new_zeros(outputs, -(-inner // 4) * 4)
    whole[:, :inner] = scales
    return whole.t()


def in_tiles(scales: Tensor) -> Tensor:
    """Return scales [rows, k / 32] flat, in padded tiles of 128 × 4."""
    rows, inner = scales.shape
    down, across = -(-rows // 128), -(-inner // 4)
    whole = torch.zeros(128 * down, 4 * across, dtype=torch.uint8, device=scales.device)
    whole[:rows, :inner] = scales.view(torch.uint8)
    tiles = whole.view(down, 4, 32, across, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1).view(scales.dtype)
