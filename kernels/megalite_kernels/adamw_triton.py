"""AdamW in one pass over memory and one launch for all ranges: `adamw.adamw_`.

    g ← g / scale        m ← m + (1 − β1)·(g − m)        v ← v + (1 − β2)·(g² − v)
    p ← p − (decay·p + rate · m / (root·√v + eps))       weight ← p, rounded
    decay = lr·weight_decay        rate = lr / (1 − β1^t)        root = 1 / √(1 − β2^t)

For each parameter it reads p, g, m, v and writes p, m, v and the weight in compute precision: 30 bytes with
fp32 gradients and bf16 weights, 28 with bf16 gradients. Gradients are only read. Clipping and a loss scale
cost nothing: their product is one number on the device, NaN to skip the update.

Results are not bitwise torch's. Terms that depend only on the step are computed on the host in fp64 and
rounded once; torch's GPU kernel computes 1 − β^t in fp32, with a relative error of 1e-5 in the first steps
with β2 = 0.999. Decay is added to the update before the parameter is rounded; torch's CPU kernel multiplies
by 1 − lr·weight_decay in fp32, an error of some percent for a decay of 1e-6.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite_kernels.launch import Variant, operation
from megalite_kernels.ranges_triton import TYPE, address, aligned, cut, locate

TILE = 2048  # elements: with 4 warps four 128-bit loads per thread of each fp32 array


@triton.jit
def _adamw(
    owner, rows, scale, decay, rate, root, eps, weight1, weight2,
    GRADS: tl.constexpr, WEIGHTS: tl.constexpr, SCALED: tl.constexpr,
    ALIGNED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row, at, exists = locate(owner, rows, 5 if WEIGHTS is not None else 4, ALIGNED, TILE)
    params = address(row, 0, tl.float32, ALIGNED) + at
    grads = address(row, 1, GRADS, ALIGNED) + at
    exp_avgs = address(row, 2, tl.float32, ALIGNED) + at
    exp_avg_sqs = address(row, 3, tl.float32, ALIGNED) + at
    g = tl.load(grads, mask=exists).to(tl.float32)
    p, m, v = tl.load(params, mask=exists), tl.load(exp_avgs, mask=exists), tl.load(exp_avg_sqs, mask=exists)
    if SCALED:
        divisor = tl.load(scale)
        g = g / divisor
        # as an integer: the compiler then knows that the mask is one for all
        applied = tl.where(divisor == divisor, 1, 0)
        exists = exists & (tl.broadcast_to(applied, at.shape) == 1)
    m += weight1 * (g - m)
    v += weight2 * (g * g - v)
    update = rate * m / (root * tl.sqrt(v) + eps)
    p -= decay * p + update
    tl.store(params, p, mask=exists)
    tl.store(exp_avgs, m, mask=exists)
    tl.store(exp_avg_sqs, v, mask=exists)
    if WEIGHTS is not None:
        tl.store(address(row, 4, WEIGHTS, ALIGNED) + at, p.to(WEIGHTS), mask=exists)


@functools.cache
def _variant(grads: torch.dtype, weights: torch.dtype | None, scaled: bool, whole: bool = True) -> Variant:
    types = {"GRADS": TYPE[grads], "WEIGHTS": TYPE[weights] if weights else None}
    return Variant(_adamw, {**types, "SCALED": scaled, "ALIGNED": whole, "TILE": TILE}, warps=4)


@operation(mutates=("params", "exp_avgs", "exp_avg_sqs", "weights"))
def adamw(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    weights: list[Tensor],
    grad_scale: Tensor | None,
    decay: float,
    rate: float,
    root: float,
    eps: float,
    weight1: float,
    weight2: float,
) -> None:
    """Run one step; `weights` may be empty.

    The module describes the scalars; weight1 is 1 − β1, weight2 is 1 − β2.
    """
    arrays = [array for array in (params, grads, exp_avgs, exp_avg_sqs, weights) if array]
    whole = all(aligned(x) for array in arrays for x in array)
    variant = _variant(grads[0].dtype, weights[0].dtype if weights else None, grad_scale is not None, whole)
    tiles = cut(arrays, variant.constants["TILE"])
    if len(tiles.owner):
        scale = params[0] if grad_scale is None else grad_scale  # without a scale any pointer: it is not read
        variant.launch((len(tiles.owner),), *tiles, scale, decay, rate, root, eps, weight1, weight2)
        torch.autograd.graph.increment_version([*params, *exp_avgs, *exp_avg_sqs, *weights])
