"""RMSNorm and LayerNorm over the last dimension, of size H.

RMSNorm (Zhang & Sennrich 2019), with g = weight + offset and x̂ = x · rstd:

    rstd = (mean(x²) + eps)^-½        y = g · x̂
    dx = rstd · (g·dy − x̂ · mean(g·dy · x̂))        dweight = Σ_rows dy · x̂

The residual addition before a norm is fused with it: s = x + branch, y = norm(s), and dx = dbranch = dnorm +
ds. LayerNorm (Ba et al. 2016) subtracts the mean first and may add a bias; its dx also subtracts mean(g·dy).
A norm without a weight has g = 1, whatever the offset is, and no dweight.
Like transformers' Llama, RMSNorm normalizes in at least fp32, casts to x's dtype, and multiplies by the
weight in that dtype. With an offset (Gemma), or without `rounded` (OLMo-2), it multiplies first. Statistics
and weight gradients are at least fp32.
"""

import functools

import torch
from torch import Tensor

from megalite_kernels.backend import takes_triton

_ROW_BYTES = 32768  # largest row that a kernel holds in registers: 16,384 values of bf16
# largest hidden size of its LayerNorm: the gradients of weight and bias need registers, too
_LAYER_NORM = 8192


def _at_least_fp32(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


@functools.lru_cache(maxsize=16)
def _kept_scalar(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((), value, dtype=dtype, device=device)


def _scalar(value: float, like: Tensor) -> Tensor:
    """Return a tensor [] with this value, made once; a compiled graph makes its own."""
    if torch.compiler.is_compiling():
        return torch.full((), value, dtype=like.dtype, device=like.device)
    return _kept_scalar(value, like.dtype, like.device)


def _gain(weight: Tensor, offset: float) -> Tensor:
    return weight + offset if offset else weight


def _exact_gain(weight: Tensor | None, offset: float) -> Tensor | None:
    return None if weight is None else _gain(_at_least_fp32(weight), offset)


def _takes_row(x: Tensor) -> bool:
    return takes_triton(x) and x.shape[-1] * x.element_size() <= _ROW_BYTES


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0, rounded: bool = True
) -> tuple[Tensor, Tensor]:
    """Return y [..., H] in x's dtype and rstd [..., 1] in at least fp32.

    Args:
        rounded: whether x · rstd is rounded to x's dtype before it is multiplied; never with an offset.
    """
    if _takes_row(x):
        from megalite_kernels import norm_triton

        _, y, _, rstd = norm_triton.norm_forward(x, None, weight, None, eps, offset, rounded)
        return y, rstd
    upcast = _at_least_fp32(x)
    # one pass without a temporary, unlike mean(x * x)
    norm = torch.linalg.vector_norm(upcast, dim=-1, keepdim=True)
    rstd = torch.addcmul(_scalar(eps, norm), norm, norm, value=1 / x.shape[-1]).rsqrt_()
    if weight is None:
        return (upcast * rstd).to(x.dtype), rstd
    if upcast is x:
        return (x * rstd).mul_(_gain(weight, offset)), rstd
    # 1 + w must not be rounded to bf16 before the multiplication
    if offset or not rounded:
        return (upcast * rstd).mul_(_at_least_fp32(weight) + offset).to(x.dtype), rstd
    return (upcast * rstd).to(x.dtype).mul_(weight), rstd


def add_rms_norm(
    x: Tensor, branch: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0, rounded: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x + branch [..., H], and `rms_norm` of it.

    Backward is `rms_norm_backward` at the sum; its dx is the gradient of x and of branch.
    """
    if _takes_row(x):
        from megalite_kernels import norm_triton

        total, y, _, rstd = norm_triton.norm_forward(x, branch, weight, None, eps, offset, rounded)
        return total, y, rstd
    total = x + branch
    return total, *rms_norm(total, weight, eps, offset, rounded)


def rms_norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float = 0.0,
    dtotal: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return dx [..., H] in x's dtype and dweight [H] in at least fp32, summed over all rows.

    Args:
        dtotal: the gradient of x besides the norm's, added to dx.
    """
    if _takes_row(x):
        from megalite_kernels import norm_triton

        dx, summed, _ = norm_triton.norm_backward(dy, dtotal, x, weight, None, rstd, offset)
        return dx, None if weight is None else summed
    hidden = x.shape[-1]
    gain, upcast = _exact_gain(weight, offset), _at_least_fp32(x)
    scaled = _at_least_fp32(dy) * rstd
    dweight: Tensor | None = None
    product = (scaled * upcast).reshape(-1, hidden)  # dy · x̂, [rows, H]
    if gain is None:
        along = product.sum(-1)
    else:
        # not a matmul with a vector of ones: BLAS adds rows sequentially, 14 times the error at 8,192 rows
        dweight, along = product.sum(0), product.mv(gain)
        scaled.mul_(gain)
    projection = along.view(rstd.shape).mul_(rstd).mul_(rstd)  # rstd² · Σ g·dy·x̂
    dx = scaled.addcmul_(upcast, projection, value=-1 / hidden)
    if upcast is not x:
        dx = dx.to(x.dtype)
    return dx if dtotal is None else dx.add_(dtotal), dweight


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y [..., H] in x's dtype, mean and rstd [..., 1] in at least fp32."""
    # to the kernel, a norm without bias is an RMSNorm
    if bias is not None and _takes_row(x) and x.shape[-1] <= _LAYER_NORM:
        from megalite_kernels import norm_triton

        return norm_triton.norm_forward(x, None, weight, bias, eps, offset, False)[1:]
    gain, addend = _exact_gain(weight, offset), None if bias is None else _at_least_fp32(bias)
    y, mean, rstd = torch.native_layer_norm(_at_least_fp32(x), [x.shape[-1]], gain, addend, eps)
    return y.to(x.dtype), mean, rstd


def layer_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, offset: float = 0.0
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return dx [..., H] in x's dtype; dweight and dbias [H] in at least fp32, summed over all rows.

    Without a weight both are None.
    """
    if weight is not None and _takes_row(x) and x.shape[-1] <= _LAYER_NORM:
        from megalite_kernels import norm_triton

        return norm_triton.norm_backward(dy, None, x, weight, mean, rstd, offset)
    gain, has_weight = _exact_gain(weight, offset), weight is not None
    # any tensor in place of the bias makes the operation compute its gradient
    gradients = [True, has_weight, has_weight]
    dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
        _at_least_fp32(dy), _at_least_fp32(x), [x.shape[-1]], mean, rstd, gain, gain, gradients
    )
    return dx.to(x.dtype), dweight, dbias
