"""RMSNorm and LayerNorm over the last dimension, of size H.

RMSNorm (Zhang & Sennrich 2019), with g = weight + offset and x̂ = x · rstd:

    rstd = (mean(x²) + eps)^-½        y = g · x̂
    dx = rstd · (g·dy − x̂ · mean(g·dy · x̂))        dweight = Σ_rows dy · x̂

LayerNorm (Ba et al. 2016) subtracts the mean first and adds a bias; its dx also subtracts mean(g·dy).
Like transformers' Llama, RMSNorm normalises in at least fp32, casts to x's dtype and multiplies with the weight there.
Statistics and weight gradients are at least fp32.
"""

import torch
from torch import Tensor


def _at_least_fp32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _gain(weight: Tensor, offset: float) -> Tensor:
    return weight + offset if offset else weight


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """y [..., H] in x's dtype and rstd [..., 1] in at least fp32."""
    wide = _at_least_fp32(x)
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)  # one pass without a temporary, unlike mean(x * x)
    rstd = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    if x.dtype == wide.dtype:
        return (x * rstd).mul_(_gain(weight, offset)), rstd
    if offset:  # 1 + w must not be rounded to bf16 before the product
        return (wide * rstd).mul_(_at_least_fp32(weight) + offset).to(x.dtype), rstd
    return (wide * rstd).to(x.dtype).mul_(weight), rstd


def rms_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """dx [..., H] in x's dtype and dweight [H] in at least fp32, summed over all rows."""
    hidden = x.shape[-1]
    grad, rows = _at_least_fp32(dy).reshape(-1, hidden), _at_least_fp32(x).reshape(-1, hidden)
    scale = rstd.reshape(-1, 1)  # [rows, 1]
    gain = _gain(_at_least_fp32(weight), offset)
    product = (grad * rows).mul_(scale)  # dy · x̂
    dweight = product.sum(0)  # not a product with a vector of ones: BLAS adds rows one by one, 14 times the error at 8,192 rows
    coefficient = product.mv(gain).view(-1, 1).mul_(scale.square()).div_(hidden)
    dx = torch.mul(grad, gain, out=product).mul_(scale).addcmul_(rows, coefficient, value=-1)
    return dx.to(x.dtype).view(x.shape), dweight


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """y [..., H] in x's dtype, mean and rstd [..., 1] in at least fp32."""
    y, mean, rstd = torch.native_layer_norm(_at_least_fp32(x), [x.shape[-1]], _at_least_fp32(weight), _at_least_fp32(bias), eps)
    return y.to(x.dtype), mean, rstd


def layer_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dx [..., H] in x's dtype; dweight and dbias [H] in at least fp32, summed over all rows."""
    gain = _at_least_fp32(weight)
    dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
        _at_least_fp32(dy), _at_least_fp32(x), [x.shape[-1]], mean, rstd, gain, gain, [True, True, True]
    )  # the bias only says that its gradient is wanted
    return dx.to(x.dtype), dweight, dbias
