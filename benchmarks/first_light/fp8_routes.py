"""Routes of matmuls in fp8, by recipe: Triton's kernels, and torch's `scaled_mm`.

Both are compared with float64, then the forward and the input gradient of a matrix of Llama 3 8B are timed,
and the fastest is written to the table of routes (`routes`). The same matmuls in bf16 are timed beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, get_args

import torch
import torch.nn.functional as F
from megalite_kernels import fp8, fp8_library, fp8_matmul
from megalite_kernels.fp8 import Quantized, Recipe
from torch import Tensor

from benchmarks.first_light.rows import Row, Scene, absent, guarded, row
from tests.kernels.accuracy import assert_as_accurate

Clock = Callable[[Callable[[], object], Scene], float]
"""Returns the milliseconds of a call."""


class MatmulSizes(NamedTuple):
    tokens: int
    outputs: int
    inputs: int

    @property
    def flops(self) -> float:
        """Return the FLOPs of the forward and the input gradient."""
        return 4.0 * self.tokens * self.outputs * self.inputs


FEW, LARGE = MatmulSizes(260, 384, 640), MatmulSizes(8192, 14336, 4096)


class Fp8Pair(NamedTuple):
    """The operands of the forward and of the input gradient."""

    x: Quantized
    weight: Quantized
    dy: Quantized
    transposed: Quantized

    @classmethod
    def of(cls, recipe: Recipe, x: Tensor, weight: Tensor, dy: Tensor) -> Fp8Pair:
        if recipe == "mxfp8":
            return cls(*(fp8.quantize_mx(each) for each in (x, weight, dy, weight.t())))
        codes = fp8.quantize(weight, (128, 128))
        return cls(fp8.quantize(x, (1, 128)), codes, fp8.quantize(dy, (1, 128)), codes.t)

    def matmuls(self, multiply: Callable[[Quantized, Quantized, torch.dtype], Tensor]) -> tuple[Tensor, ...]:
        dtype = torch.bfloat16
        return multiply(self.x, self.weight, dtype), multiply(self.dy, self.transposed, dtype)


def jobs(scene: Scene, times: dict[str, dict[str, float]], clock: Clock) -> list[Callable[[], Iterator[Row]]]:
    """Return functions that yield the rows of each route."""
    return [
        *(
            partial(_route, recipe, route, scene, times, clock)
            for recipe in get_args(Recipe)
            for route in fp8_matmul.ROUTES
        ),
        partial(_bf16, scene, clock),
    ]


def _route(
    recipe: Recipe, route: str, scene: Scene, times: dict[str, dict[str, float]], clock: Clock
) -> Iterator[Row]:
    name = f"fp8 {recipe}, {route}"
    if scene.rehearse:
        yield absent(name, "requires a GPU")
        return
    if (reason := _refusal(recipe, route, scene)) is not None:
        yield absent(name, reason)
        return
    proof = partial(_accurate, recipe, route, scene, f"{name}: values")
    yield (shown := guarded(f"{name}: values", "proof", proof))
    if shown["verdict"] == "passed":
        yield guarded(name, "measurement", partial(_timed, recipe, route, scene, times, clock, name))


def _refusal(recipe: Recipe, route: str, scene: Scene) -> str | None:
    if route == "triton":
        return fp8_matmul.missing(torch.device(scene.device), recipe)
    pair = Fp8Pair.of(recipe, *_inputs(FEW, scene))
    return fp8_library.refuses(pair.x, pair.weight, torch.bfloat16)


def _inputs(sizes: MatmulSizes, scene: Scene) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, the weight, and the gradient of the output."""
    tokens, outputs, inputs = sizes
    shapes = (tokens, inputs), (outputs, inputs), (tokens, outputs)
    x, weight, dy = (torch.randn(shape, device=scene.device).bfloat16() for shape in shapes)
    return x, weight, dy


def _reference(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    return F.linear(*(fp8.dequantize(each, torch.float32) for each in (a, b))).to(dtype)


def _exact(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    return F.linear(*(fp8.dequantize(each, torch.float64) for each in (a, b)))


def _accurate(recipe: Recipe, route: str, scene: Scene, name: str) -> Row:
    """Check that the error against float64 is close to that of fp32 matmuls, rounded to bf16."""
    pair = Fp8Pair.of(recipe, *_inputs(FEW, scene))
    results = (pair.matmuls(multiply) for multiply in (fp8_matmul.ROUTES[route], _exact, _reference))
    for got, exact, reference in zip(*results, strict=True):
        assert_as_accurate(got, exact, reference)
    return row(name, "passed")


def _timed(
    recipe: Recipe, route: str, scene: Scene, times: dict[str, dict[str, float]], clock: Clock, name: str
) -> Row:
    pair = Fp8Pair.of(recipe, *_inputs(LARGE, scene))
    ms = clock(lambda: pair.matmuls(fp8_matmul.ROUTES[route]), scene)
    times.setdefault(f"fp8_{recipe}", {})[route] = ms
    return _measured(name, ms)


def _bf16(scene: Scene, clock: Clock) -> Iterator[Row]:
    name = "the matmuls of fp8, in bf16"
    if scene.rehearse:
        yield absent(name, "requires a GPU")
        return

    def measure() -> Row:
        x, weight, dy = _inputs(LARGE, scene)
        return _measured(name, clock(lambda: (F.linear(x, weight), dy @ weight), scene))

    yield guarded(name, "measurement", measure)


def _measured(name: str, ms: float) -> Row:
    tflops = LARGE.flops / ms / 1e9
    return row(name, "measured", f"forward and input gradient {ms:.2f} ms, {tflops:,.0f} TFLOP/s", ms=ms)
