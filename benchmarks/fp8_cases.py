"""fp8 cases of `tools/benchmark.py kernels`: quantization, and matmuls beside those in bf16.

Shapes are those of a rank with one layer of Llama 3 8B (gate and up, 8,192 tokens), and of eight of its
experts. "quantized" includes the quantization of the rows, as in a step; weights are quantized once for many
microbatches. The input gradient reads the transposed view of a weight in `block`, and its own codes in
`mxfp8`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, get_args

import torch
import torch.nn.functional as F
from megalite_kernels import fp8, fp8_library, fp8_matmul
from megalite_kernels.fp8 import Quantized, Recipe
from megalite_kernels.groups import Groups
from torch import Tensor

from benchmarks.hybrid_cases import by_torch
from benchmarks.kernel_cases import EAGER, Contest, Function, KernelCase, Sizes, Target, times_limit

BF16 = "bf16"
MODULES = {"block": ("fp8_matmul_triton", "_matmul"), "mxfp8": ("fp8_mx_matmul_triton", "_mx_matmul")}
"""Recipe → module and kernel of its matmul."""


def cases(sizes: Sizes) -> Iterable[KernelCase]:
    tokens, outputs, inner = sizes.of(8192, 6), sizes.of(28672, 256), sizes.of(4096, 128)
    yield from _quantization(sizes, tokens, outputs, inner)
    for recipe in get_args(Recipe):
        yield from _matmuls(sizes, recipe, tokens, outputs, inner)
        yield _experts(sizes, recipe, sizes.of(8, 2), sizes.of(2048, 3), outputs, inner)


def _quantization(sizes: Sizes, tokens: int, outputs: int, inner: int) -> Iterable[KernelCase]:
    for name, rows, scales, quantize in (
        ("1 x 128", tokens, 4 / 128, partial(fp8.quantize, block=(1, 128))),
        ("128 x 128", outputs, 4 / 128**2, partial(fp8.quantize, block=(128, 128))),
        ("1 x 32", tokens, 1 / 32, fp8.quantize_mx),
    ):

        def make(rows: int = rows, quantize: Callable[[Tensor], Quantized] = quantize) -> Contest:
            x = sizes.randn(rows, inner)
            return Contest(lambda: quantize(x), {EAGER: lambda: by_torch(lambda: quantize(x))})

        yield KernelCase(
            f"fp8, quantize {name}",
            f"{rows} × {inner} bf16",
            make,
            bytes=rows * inner * (3 + scales),
            targets=(times_limit(1.25),),
            module="fp8_triton",
            tuned=("_quantize_mx" if name == "1 x 32" else "_quantize",),
        )


def _weight(recipe: Recipe, matrix: Tensor, gradient: bool) -> Quantized:
    """Return the codes of the forward, or of the input gradient."""
    if recipe == "mxfp8":
        return fp8.quantize_mx(matrix.mT if gradient else matrix)
    codes = fp8.quantize(matrix, (128, 128))
    return codes.t if gradient else codes


def _rows(recipe: Recipe, x: Tensor) -> Quantized:
    return fp8.quantize_mx(x) if recipe == "mxfp8" else fp8.quantize(x, (1, 128))


def _matmuls(sizes: Sizes, recipe: Recipe, tokens: int, outputs: int, inner: int) -> Iterable[KernelCase]:
    def make(gradient: bool, quantized: bool) -> Contest:
        _require(sizes, recipe)
        matrix, x = sizes.randn(outputs, inner), sizes.randn(tokens, outputs if gradient else inner)
        weight, wide = _weight(recipe, matrix, gradient), matrix.t() if gradient else matrix
        operand = _rows(recipe, x)

        def ours() -> Tensor:
            return fp8_matmul.multiply(_rows(recipe, x) if quantized else operand, weight, x.dtype)

        peers: dict[str, Callable[[], Function]] = {BF16: lambda: lambda: F.linear(x, wide)}
        if not sizes.smoke and not quantized and fp8_library.refuses(operand, weight, x.dtype) is None:
            peers["scaled_mm"] = lambda: lambda: fp8_library.multiply(operand, weight, x.dtype)
        return Contest(ours, peers)

    for name, gradient, quantized in (
        ("matmul", False, False),
        ("matmul, quantized", False, True),
        ("input gradient", True, False),
    ):
        yield _case(
            recipe,
            name,
            f"{tokens} × {outputs} × {inner}",
            partial(make, gradient, quantized),
            2.0 * tokens * outputs * inner,
        )


def _experts(sizes: Sizes, recipe: Recipe, experts: int, rows: int, outputs: int, inner: int) -> KernelCase:
    def make() -> Contest:
        _require(sizes, recipe)
        matrices, x = sizes.randn(experts, outputs, inner), sizes.randn(experts * rows, inner)
        groups = Groups(torch.tensor([rows] * experts, device=sizes.device))
        operand, weight = _rows(recipe, x), _weight(recipe, matrices, False)
        return Contest(
            lambda: fp8_matmul.multiply_experts(operand, weight, groups, x.dtype),
            {BF16: lambda: lambda: F.grouped_mm(x, matrices.mT, offs=groups.ends)},
        )

    shape = f"{experts} experts, {rows} rows each, {outputs} × {inner}"
    return _case(recipe, "matmul of experts", shape, make, 2.0 * experts * rows * outputs * inner)


def _require(sizes: Sizes, recipe: Recipe) -> None:
    if (reason := fp8_matmul.missing(torch.device(sizes.device), recipe)) is not None:
        raise RuntimeError(f"{recipe} {reason}")


def _case(recipe: Recipe, name: str, shape: str, make: Callable[[], Contest], flops: float) -> KernelCase:
    def times_bf16(row: dict[str, Any]) -> float | None:
        ratio = row["peers"].get(BF16, {}).get("ratio")
        return 1 / ratio if ratio else None

    module, kernel = MODULES[recipe]
    return KernelCase(
        f"fp8, {recipe} {name}",
        shape,
        make,
        flops=flops,
        targets=(Target("time / bf16", times_bf16, 0.95),),
        module=module,
        tuned=(kernel,),
    )
