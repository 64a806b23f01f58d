"""Norms of queries and keys with weights of their own for each head.

A norm over the width of all heads (OLMo-2) spans the tp ranks: all-reduce of one number per token in forward
and in backward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalite.mesh.mesh import MeshAxis
from megalite.parallel.collectives import all_reduce
from megalite.parallel.node import Saved
from megalite.parallel.tensor.norm import Norm
from megalite.parallel.weight import Weight


class EachHeadLayerNorm(Norm):
    """LayerNorm of each head of [seq, batch, heads/tp, head_dim], without bias.

    Each head has its own weights. No communication.
    """

    weight: Weight

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
    """RMSNorm over the width of all heads, with [seq, batch, heads · replicas / tp, head_dim] on this rank.

    Forward: all-reduce of one number per token over tp, because the mean spans the heads of all ranks.
    Backward: the same.
    """

    weight: Weight

    def __init__(self, weight: Weight, eps: float, offset: float, rounded: bool, tp: MeshAxis):
        super().__init__(weight, eps)
        segment = weight.spec.segments[0]
        self.offset, self.rounded, self.tp = offset, rounded, tp
        self.width, self.replicas = segment.shape[0], segment.replicas

    def compute(self, x: Tensor, saved: Saved) -> Tensor:
        upcast = x.flatten(-2).to(torch.promote_types(x.dtype, torch.float32))
        # [seq, batch, 1]; each head is summed by `replicas` ranks
        squares = upcast.square().sum(-1, keepdim=True) / self.replicas
        rstd = torch.rsqrt(all_reduce(squares, self.tp).wait() / self.width + self.eps)
        saved.append((x, rstd))
        normed = upcast * rstd
        if self.rounded and not self.offset:
            return (normed.to(x.dtype) * self.weight.tensor).view_as(x)
        return (normed * (self.weight.tensor.to(normed.dtype) + self.offset)).to(x.dtype).view_as(x)

    def gradient(self, dy: Tensor, saved: Saved) -> Tensor:
        x, rstd = saved.pop()
        normed = x.flatten(-2).to(rstd.dtype) * rstd
        grad = dy.flatten(-2).to(rstd.dtype)
        self.weight.accumulate((grad * normed).flatten(0, -2).sum(0))  # [width · replicas / tp]
        grad = grad * (self.weight.tensor.detach() + self.offset)
        # A replicated head's gradient is spread over its replicas: the sum over tp is the whole, of which
        # each replica takes its part.
        projection = all_reduce((grad * normed).sum(-1, keepdim=True), self.tp).wait() / (
            self.width * self.replicas
        )
        return (rstd * (grad - normed * projection)).to(x.dtype).view_as(x)
