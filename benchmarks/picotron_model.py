"""A Llama split over tensor-parallel ranks and pipeline stages in the way of picotron, for
`benchmarks.picotron_peer`.

q, k, v, gate and up are linears of their own, each of which sums its input's gradient over the tp ranks; o
and down sum their outputs; the head gathers the logits of the whole vocabulary. Norms and rotary embedding
are plain torch operations, attention is torch's. With one rank on an axis nothing of that is communicated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.config.sections.model import ModelConfig


@dataclass(frozen=True)
class Axis:
    """This rank's place among the ranks of one axis, in the world's numbers."""

    ranks: list[int]
    rank: int
    group: Any = None  # None with one rank

    @property
    def size(self) -> int:
        return len(self.ranks)


class _InputGradientSummed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.axis.group)
        return grad, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.mark_dirty(x)
        dist.all_reduce(x, group=axis.group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        parts = [torch.empty_like(x) for _ in axis.ranks]
        dist.all_gather(parts, x.contiguous(), group=axis.group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.chunk(ctx.axis.size, -1)[ctx.axis.rank].contiguous(), None


class Column(nn.Linear):
    """Has a part of the outputs."""

    def __init__(self, inputs: int, outputs: int, tp: Axis, gathered: bool = False):
        super().__init__(inputs, outputs // tp.size, bias=False)
        self.tp, self.gathered = tp, gathered

    def forward(self, x: Tensor) -> Tensor:
        if self.tp.size == 1:
            return super().forward(x)
        out = super().forward(_InputGradientSummed.apply(x, self.tp))
        return _Gathered.apply(out, self.tp) if self.gathered else out


class PicotronRowParallel(nn.Linear):
    """Has a part of the inputs."""

    def __init__(self, inputs: int, outputs: int, tp: Axis):
        super().__init__(inputs // tp.size, outputs, bias=False)
        self.tp = tp

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out if self.tp.size == 1 else _Summed.apply(out, self.tp)


class Embedding(nn.Embedding):
    """Has a part of the vocabulary; tokens outside it give zeros, and the ranks' outputs are added."""

    def __init__(self, vocabulary: int, width: int, tp: Axis):
        super().__init__(vocabulary // tp.size, width)
        self.tp, self.first = tp, tp.rank * (vocabulary // tp.size)

    def forward(self, tokens: Tensor) -> Tensor:
        if self.tp.size == 1:
            return super().forward(tokens)
        outside = (tokens < self.first) | (tokens >= self.first + self.num_embeddings)
        out = super().forward((tokens - self.first).masked_fill(outside, 0))
        out[outside] = 0.0
        return _Summed.apply(out, self.tp)


class PicotronNorm(nn.Module):
    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class PicotronLayer(nn.Module):
    def __init__(self, model: ModelConfig, tp: Axis):
        super().__init__()
        width, inner, self.head = model.hidden_size, model.intermediate_size, model.head_size
        self.repeats = model.num_attention_heads // model.kv_heads
        self.before, self.between = (
            PicotronNorm(width, model.rms_norm_eps),
            PicotronNorm(width, model.rms_norm_eps),
        )
        heads, kv_heads = model.num_attention_heads * self.head, model.kv_heads * self.head
        self.q, self.k, self.v = (
            Column(width, heads, tp),
            Column(width, kv_heads, tp),
            Column(width, kv_heads, tp),
        )
        self.gate, self.up = Column(width, inner, tp), Column(width, inner, tp)
        self.out, self.down = PicotronRowParallel(heads, width, tp), PicotronRowParallel(inner, width, tp)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # [batch, seq, hidden]
        normed = self.before(x)
        q, k, v = (
            linear(normed).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for linear in (self.q, self.k, self.v)
        )
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        k, v = (each.repeat_interleave(self.repeats, dim=1) for each in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        normed = self.between(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding; x [batch, heads, seq, head]."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class PicotronStage(nn.Module):
    """A pipeline rank's layers: with the embedding on the first rank, with norm and head on the last."""

    def __init__(self, model: ModelConfig, length: int, tp: Axis, pp: Axis):
        super().__init__()
        layers, more = divmod(model.num_hidden_layers, pp.size)
        self.first, self.last = pp.rank == 0, pp.rank == pp.size - 1
        self.blocks = nn.ModuleList(PicotronLayer(model, tp) for _ in range(layers + (pp.rank < more)))
        if self.first:
            self.tokens = Embedding(model.vocabulary, model.hidden_size, tp)
        if self.last:
            self.norm = PicotronNorm(model.hidden_size, model.rms_norm_eps)
            self.head = Column(model.hidden_size, model.vocabulary, tp, gathered=True)
        angles = torch.outer(
            torch.arange(length).float(),
            model.rope_theta ** -(torch.arange(0, model.head_size, 2) / model.head_size),
        )
        self.cos, self.sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)  # [seq, head]

    def forward(self, x: Tensor) -> Tensor:
        """Tokens on the first rank, hidden states elsewhere; logits on the last."""
        if self.first:
            x = self.tokens(x)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x)) if self.last else x
