"""Normalization layers, which accumulate their weight gradients directly in gradient buckets.

A norm over the hidden dimension has whole rows on every tp rank: no communication in forward or backward.
Under sequence parallelism its weight gradient is partial (each rank has a part of the sequence) and is summed
over tp at the end of the step. A norm over the width of all heads (query and key norms of OLMo-2) spans the
tp ranks: all-reduce of one number per token in forward and in backward.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megalite.mesh.mesh import MeshAxis
from megalite.parallel.collectives import all_reduce
from megalite.parallel.compiled_ops import CompiledOps
from megalite.parallel.node import Node, Saved
from megalite.parallel.weight import Weight


class Norm(nn.Module, ABC):
    """Base class of norms over the last dimension: [seq (/tp), batch, width] -> the same shape."""

    def __init__(self, weight: Weight, eps: float):
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x: Tensor) -> Tensor:
        return Node.apply(x, self.weight.tensor, self)

    @abstractmethod
    def compute(self, x: Tensor, saved: Saved) -> Tensor:
        """Return the normalized x, and save x and its statistics."""

    @abstractmethod
    def gradient(self, dy: Tensor, saved: Saved) -> Tensor:
        """Return the gradient of x, and accumulate those of the weights."""


class RMSNorm(Norm):
    """x / rms(x) · (weight + offset) (Zhang and Sennrich 2019). No communication."""

    def __init__(self, weight: Weight, eps: float, offset: float, ops: CompiledOps):
        super().__init__(weight, eps)
        self.offset, self.ops = offset, ops

    def compute(self, x: Tensor, saved: Saved) -> Tensor:
        y, rstd = self.ops.rms_norm(x, self.weight.tensor, self.eps, self.offset)
        saved.append((x, rstd))
        return y

    def gradient(self, dy: Tensor, saved: Saved, dtotal: Tensor | None = None) -> Tensor:
        """Compute `Norm.gradient`; `dtotal`, the gradient of x from another path, is added."""
        x, rstd = saved.pop()
        dx, dweight = self.ops.rms_norm_backward(dy, x, self.weight.tensor, rstd, self.offset, dtotal)
        self.weight.accumulate(dweight)
        return dx


class _AddRMSNorm(torch.autograd.Function):
    """Forward: x + branch and its norm, fused. Backward: one gradient for both inputs. No communication."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, branch: Tensor, weight: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor]:
        total, y, rstd = norm.ops.add_rms_norm(x, branch, weight, norm.eps, norm.offset)
        ctx.save_for_backward(total, rstd)
        ctx.norm = norm
        return total, y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        dx = ctx.norm.gradient(grads[1], [ctx.saved_tensors], dtotal=grads[0])
        return dx, dx, None, None


def add_and_norm(x: Tensor, branch: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Return x + branch and its norm, all [seq (/tp), batch, hidden].

    With an RMSNorm this takes one pass over memory.
    """
    if isinstance(norm, RMSNorm):
        return _AddRMSNorm.apply(x, branch, norm.weight.tensor, norm)
    total = x + branch
    return total, norm(total)


class LayerNorm(Norm):
    """(x − mean) / std · (weight + offset), plus the bias if present. No communication."""

    def __init__(self, weight: Weight, bias: Weight | None, eps: float, offset: float, ops: CompiledOps):
        super().__init__(weight, eps)
        self.bias, self.offset, self.ops = bias, offset, ops

    def compute(self, x: Tensor, saved: Saved) -> Tensor:
        bias = None if self.bias is None else self.bias.tensor
        y, mean, rstd = self.ops.layer_norm(x, self.weight.tensor, bias, self.eps, self.offset)
        saved.append((x, mean, rstd))
        return y

    def gradient(self, dy: Tensor, saved: Saved, dtotal: Tensor | None = None) -> Tensor:
        """Compute `Norm.gradient`; `dtotal`, the gradient of x from another path, is added."""
        x, mean, rstd = saved.pop()
        dx, dweight, dbias = self.ops.layer_norm_backward(dy, x, self.weight.tensor, mean, rstd, self.offset)
        self.weight.accumulate(dweight)
        if self.bias is not None:
            self.bias.accumulate(dbias)
        return dx if dtotal is None else dx.add_(dtotal)


class EachHeadLayerNorm(Norm):
    """LayerNorm of each head of [seq, batch, heads/tp, head_dim], without bias.

    Each head has its own weights. No communication.
    """

    def __init__(self, weight: Weight, eps: float, offset: float):
        super().__init__(weight, eps)
        self.offset = offset

    def compute(self, x: Tensor, saved: Saved) -> Tensor:
        upcast = x.to(torch.promote_types(x.dtype, torch.float32))
        normed, mean, rstd = torch.native_layer_norm(upcast, x.shape[-1:], None, None, self.eps)
        saved.append((x, mean, rstd))
        return (normed * (self.weight.tensor.view(x.shape[-2:]) + self.offset)).to(x.dtype)

    def gradient(self, dy: Tensor, saved: Saved) -> Tensor:
        x, mean, rstd = saved.pop()
        upcast, grad = x.to(rstd.dtype), dy.to(rstd.dtype)
        self.weight.accumulate((grad * (upcast - mean) * rstd).sum((0, 1)).flatten())  # [heads/tp · head_dim]
        grad = grad * (self.weight.tensor.view(x.shape[-2:]) + self.offset)
        only_input = (True, False, False)
        dx, _, _ = torch.ops.aten.native_layer_norm_backward(
            grad, upcast, x.shape[-1:], mean, rstd, None, None, only_input
        )
        return dx.to(x.dtype)


class FullWidthRMSNorm(Norm):
    """RMSNorm over the width of all heads, with [seq, batch, width · replicas / tp] on this rank.

    Forward: all-reduce of one number per token over tp, because the mean spans the heads of all ranks.
    Backward: the same.
    """

    def __init__(self, weight: Weight, eps: float, offset: float, tp: MeshAxis):
        super().__init__(weight, eps)
        segment = weight.spec.segments[0]
        self.offset, self.tp, self.width, self.replicas = offset, tp, segment.shape[0], segment.replicas

    def compute(self, x: Tensor, saved: Saved) -> Tensor:
        upcast = x.to(torch.promote_types(x.dtype, torch.float32))
        # [seq, batch, 1]; each head is summed by `replicas` ranks
        squares = upcast.square().sum(-1, keepdim=True) / self.replicas
        rstd = torch.rsqrt(all_reduce(squares, self.tp).wait() / self.width + self.eps)
        saved.append((x, rstd))
        return (upcast * rstd).to(x.dtype) * (self.weight.tensor + self.offset)

    def gradient(self, dy: Tensor, saved: Saved) -> Tensor:
        x, rstd = saved.pop()
        normed = x.to(rstd.dtype) * rstd
        grad = dy.to(rstd.dtype)
        self.weight.accumulate((grad * normed).flatten(0, -2).sum(0))  # [width · replicas / tp]
        grad = grad * (self.weight.tensor.detach() + self.offset)
        # A replicated head's gradient is spread over its replicas: the sum over tp is the whole, of which
        # each replica takes its part.
        projection = all_reduce((grad * normed).sum(-1, keepdim=True), self.tp).wait() / (
            self.width * self.replicas
        )
        return (rstd * (grad - normed * projection)).to(x.dtype)
