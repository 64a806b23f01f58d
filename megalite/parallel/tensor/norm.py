"""Normalisation layers whose weight gradients go straight to their buckets.

A norm over the hidden width sees whole rows on every tp rank and needs no communication; under sequence parallelism its weight gradient
is partial (each rank sees its part of the sequence) and is summed over tp at the end of the step. A norm over the width of all
heads (OLMo-2's query and key norms) spans the tp ranks: one small all-reduce each way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megalite.mesh import MeshAxis
from megalite.parallel.collectives import all_reduce
from megalite.parallel.regions import Regions
from megalite.parallel.weight import Weight


class _RMSNorm(torch.autograd.Function):
    """No communication."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, norm: RMSNorm) -> Tensor:
        y: Tensor
        y, rstd = norm.regions.rms_norm(x, weight, norm.eps, norm.offset)
        ctx.save_for_backward(x, rstd)
        ctx.norm = norm
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        x, rstd = ctx.saved_tensors
        norm = ctx.norm
        dx, dweight = norm.regions.rms_norm_backward(grads[0], x, norm.weight.tensor, rstd, norm.offset)
        norm.weight.accumulate(dweight)
        return dx, None, None


class _AddRMSNorm(torch.autograd.Function):
    """x + branch, and the norm of it. Backward has one gradient for both inputs. No communication."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, branch: Tensor, weight: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor]:
        total, y, rstd = norm.regions.add_rms_norm(x, branch, weight, norm.eps, norm.offset)
        ctx.save_for_backward(total, rstd)
        ctx.norm = norm
        return total, y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        total, rstd = ctx.saved_tensors
        norm = ctx.norm
        dx, dweight = norm.regions.rms_norm_backward(grads[1], total, norm.weight.tensor, rstd, norm.offset, grads[0])
        norm.weight.accumulate(dweight)
        return dx, dx, None, None


def add_and_norm(x: Tensor, branch: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """x + branch, and the norm of it: in one pass over memory where that is an RMSNorm."""
    if isinstance(norm, RMSNorm):
        return _AddRMSNorm.apply(x, branch, norm.weight.tensor, norm)
    total = x + branch
    return total, norm(total)


class RMSNorm(nn.Module):
    """x / rms(x) · (weight + offset) over the last dimension (Zhang and Sennrich 2019)."""

    def __init__(self, weight: Weight, eps: float, offset: float, regions: Regions):
        super().__init__()
        self.weight, self.eps, self.offset, self.regions = weight, eps, offset, regions

    def forward(self, x: Tensor) -> Tensor:
        return _RMSNorm.apply(x, self.weight.tensor, self)


class _LayerNorm(torch.autograd.Function):
    """No communication."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, norm: LayerNorm) -> Tensor:
        y: Tensor
        y, mean, rstd = norm.regions.layer_norm(x, weight, norm.bias.tensor, norm.eps)
        ctx.save_for_backward(x, mean, rstd)
        ctx.norm = norm
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        x, mean, rstd = ctx.saved_tensors
        norm = ctx.norm
        dx, dweight, dbias = norm.regions.layer_norm_backward(grads[0], x, norm.weight.tensor, mean, rstd)
        norm.weight.accumulate(dweight)
        norm.bias.accumulate(dbias)
        return dx, None, None


class LayerNorm(nn.Module):
    """(x − mean) / std · weight + bias over the last dimension."""

    def __init__(self, weight: Weight, bias: Weight, eps: float, regions: Regions):
        super().__init__()
        self.weight, self.bias, self.eps, self.regions = weight, bias, eps, regions

    def forward(self, x: Tensor) -> Tensor:
        return _LayerNorm.apply(x, self.weight.tensor, self)


class _FullWidthRMSNorm(torch.autograd.Function):
    """Forward and backward: all-reduce of one number a token over tp, since the mean spans every rank's heads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, norm: FullWidthRMSNorm) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        squares = wide.square().sum(-1, keepdim=True) / norm.replicas
        rstd = torch.rsqrt(all_reduce(squares, norm.tp).wait() / norm.width + norm.eps)
        ctx.save_for_backward(x, rstd)
        ctx.norm = norm
        return (wide * rstd).to(x.dtype) * (weight + norm.offset)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        x, rstd = ctx.saved_tensors
        norm = ctx.norm
        normed = x.to(rstd.dtype) * rstd
        grad = grads[0].to(rstd.dtype)
        norm.weight.accumulate((grad * normed).flatten(0, -2).sum(0))
        grad = grad * (norm.weight.tensor.detach() + norm.offset)
        # A replicated head's gradient is spread over its replicas: the sum over tp is whole, and each replica takes its part of it.
        projection = all_reduce((grad * normed).sum(-1, keepdim=True), norm.tp).wait() / (norm.width * norm.replicas)
        return (rstd * (grad - normed * projection)).to(x.dtype), None, None


class FullWidthRMSNorm(nn.Module):
    """RMSNorm over the width of all heads, of which this rank holds [seq, batch, width · replicas / tp]."""

    def __init__(self, weight: Weight, eps: float, offset: float, tp: MeshAxis):
        super().__init__()
        segment = weight.spec.segments[0]
        self.weight, self.eps, self.offset, self.tp = weight, eps, offset, tp
        self.width, self.replicas = segment.shape[0], segment.replicas

    def forward(self, x: Tensor) -> Tensor:
        return _FullWidthRMSNorm.apply(x, self.weight.tensor, self)
