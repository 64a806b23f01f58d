"""Cases of `megalite benchmark kernels` for matrices in few bits: matmuls beside the same matrix in bf16.

Shapes are those of gate and up of Llama 3 8B, with the tokens of a training step and of a prompt. The other
peer computes the values of the whole matrix first, as a run without the kernel does.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megalite_kernels import block_formats
from torch import Tensor

from benchmarks.kernel_cases import Contest, KernelCase, Sizes, Target

BLOCKS = {"nf4": 64, "int8": 0, "mxfp4": 32}  # elements of a row that share a scale; 0: all
BF16, IN_MEMORY = "bf16", "values in memory"


def cases(sizes: Sizes) -> Iterable[KernelCase]:
    outputs, inner = sizes.of(28672, 256), sizes.of(4096, 128)
    for form in BLOCKS:
        for tokens in (sizes.of(8192, 6), sizes.of(256, 5)):
            for name, gradient in (("matmul", False), ("input gradient", True)):
                yield KernelCase(
                    f"quantized, {form} {name}",
                    f"{tokens} × {outputs} × {inner}",
                    partial(_contest, sizes, form, (tokens, outputs, inner), gradient),
                    flops=2.0 * tokens * outputs * inner,
                    targets=(Target("time / bf16", _times_bf16, 1.3),),
                    module="block_matmul_triton",
                    tuned=("_transposed_matmul" if gradient else "_matmul",),
                )


def _times_bf16(row: dict[str, Any]) -> float | None:
    ratio = row["peers"].get(BF16, {}).get("ratio")
    return 1 / ratio if ratio else None


def _contest(sizes: Sizes, form: str, shape: tuple[int, int, int], gradient: bool) -> Contest:
    from megalite_kernels.block_matmul_triton import block_matmul, block_transposed_matmul

    tokens, outputs, inner = shape
    matrix, kind = sizes.randn(outputs, inner), block_formats.FORMATS[form]
    x = sizes.randn(tokens, outputs if gradient else inner)
    block = BLOCKS[form] or inner
    codes, scales = block_formats.quantize(matrix, form, block)
    packed, in_fp32 = kind.pack(codes), kind.scales(scales).view(outputs, -1)
    read = packed, in_fp32, block_formats.code_values(form, x.device), form, BLOCKS[form]
    kernel = block_transposed_matmul if gradient else block_matmul

    def multiplied(wide: Tensor) -> Tensor:
        return torch.matmul(x, wide) if gradient else F.linear(x, wide)

    def in_memory() -> Tensor:
        values = kind.values(packed, 0, matrix.numel()).view(-1, block) * in_fp32.view(-1, 1)
        return multiplied(values.view_as(matrix).to(x.dtype))

    return Contest(
        lambda: kernel(x, *read), {BF16: lambda: lambda: multiplied(matrix), IN_MEMORY: lambda: in_memory}
    )
