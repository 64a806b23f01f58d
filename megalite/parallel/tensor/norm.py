"""Normalisation layers whose weight gradients go straight to their buckets.

A norm over the hidden width sees whole rows on every tp rank and needs no communication; under sequence parallelism its weight gradient
is partial (each rank sees its part of the sequence) and is summed over tp at the end of the step. A norm over the width of all
heads (OLMo-2's query and key norms) spans the tp ranks: one small all-reduce each way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megalite.mesh import MeshAxis
from megalite.parallel.collectives import all_reduce
from megalite.parallel.compiled_ops import CompiledOps
from megalite.parallel.weight import Weight


class _Apply(torch.autograd.Function):
    """A norm as its `compute` and `gradient` define it. Communication: theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, norm: Norm) -> Tensor:
        y, *statistics = norm.compute(x)
        ctx.save_for_backward(x, *statistics)
        ctx.norm = norm
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.norm.gradient(grads[0], *ctx.saved_tensors), None, None


class Norm(nn.Module, ABC):
    """A norm over the last dimension."""

    def __init__(self, weight: Weight, eps: float):
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x: Tensor) -> Tensor:
        return _Apply.apply(x, self.weight.tensor, self)

    @abstractmethod
    def compute(self, x: Tensor) -> tuple[Tensor, ...]:
        """The normed x, and what the gradient needs besides x."""

    @abstractmethod
    def gradient(self, dy: Tensor, x: Tensor, *statistics: Tensor) -> Tensor:
        """The gradient of x; those of the weights go to their buckets."""


class RMSNorm(Norm):
    """x / rms(x) · (weight + offset) (Zhang and Sennrich 2019). No communication."""

    def __init__(self, weight: Weight, eps: float, offset: float, ops: CompiledOps):
        super().__init__(weight, eps)
        self.offset, self.ops = offset, ops

    def compute(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.ops.rms_norm(x, self.weight.tensor, self.eps, self.offset)

    def gradient(self, dy: Tensor, x: Tensor, *statistics: Tensor, dtotal: Tensor | None = None) -> Tensor:
        """`dtotal` is added: the gradient that x has from elsewhere."""
        dx, dweight = self.ops.rms_norm_backward(dy, x, self.weight.tensor, *statistics, self.offset, dtotal)
        self.weight.accumulate(dweight)
        return dx


class _AddRMSNorm(torch.autograd.Function):
    """x + branch, and the norm of it. Backward has one gradient for both inputs. No communication."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, branch: Tensor, weight: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor]:
        total, y, rstd = norm.ops.add_rms_norm(x, branch, weight, norm.eps, norm.offset)
        ctx.save_for_backward(total, rstd)
        ctx.norm = norm
        return total, y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        dx = ctx.norm.gradient(grads[1], *ctx.saved_tensors, dtotal=grads[0])
        return dx, dx, None, None


def add_and_norm(x: Tensor, branch: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """x + branch, and the norm of it: in one pass over memory where that is an RMSNorm."""
    if isinstance(norm, RMSNorm):
        return _AddRMSNorm.apply(x, branch, norm.weight.tensor, norm)
    total = x + branch
    return total, norm(total)


class LayerNorm(Norm):
    """(x − mean) / std · weight + bias. No communication."""

    def __init__(self, weight: Weight, bias: Weight, eps: float, ops: CompiledOps):
        super().__init__(weight, eps)
        self.bias, self.ops = bias, ops

    def compute(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.ops.layer_norm(x, self.weight.tensor, self.bias.tensor, self.eps)

    def gradient(self, dy: Tensor, x: Tensor, *statistics: Tensor) -> Tensor:
        dx, dweight, dbias = self.ops.layer_norm_backward(dy, x, self.weight.tensor, *statistics)
        self.weight.accumulate(dweight)
        self.bias.accumulate(dbias)
        return dx


class FullWidthRMSNorm(Norm):
    """RMSNorm over the width of all heads, of which this rank holds [seq, batch, width · replicas / tp].

    Forward and backward: all-reduce of one number a token over tp, since the mean spans every rank's heads.
    """

    def __init__(self, weight: Weight, eps: float, offset: float, tp: MeshAxis):
        super().__init__(weight, eps)
        segment = weight.spec.segments[0]
        self.offset, self.tp, self.width, self.replicas = offset, tp, segment.shape[0], segment.replicas

    def compute(self, x: Tensor) -> tuple[Tensor, ...]:
        upcast = x.to(torch.promote_types(x.dtype, torch.float32))
        squares = upcast.square().sum(-1, keepdim=True) / self.replicas
        rstd = torch.rsqrt(all_reduce(squares, self.tp).wait() / self.width + self.eps)
        return (upcast * rstd).to(x.dtype) * (self.weight.tensor + self.offset), rstd

    def gradient(self, dy: Tensor, x: Tensor, *statistics: Tensor) -> Tensor:
        (rstd,) = statistics
        normed = x.to(rstd.dtype) * rstd
        grad = dy.to(rstd.dtype)
        self.weight.accumulate((grad * normed).flatten(0, -2).sum(0))
        grad = grad * (self.weight.tensor.detach() + self.offset)
        # A replicated head's gradient is spread over its replicas: the sum over tp is whole, and each replica takes its part of it.
        projection = all_reduce((grad * normed).sum(-1, keepdim=True), self.tp).wait() / (self.width * self.replicas)
        return (rstd * (grad - normed * projection)).to(x.dtype)
