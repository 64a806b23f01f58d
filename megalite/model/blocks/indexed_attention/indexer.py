"""The indexer (DeepSeek-V3.2, 2025): a score of each earlier token for each query, from few narrow heads.

    q = W_q c   for each head       c: the latent of queries
    k = LayerNorm(W_k h)            h: the layer's input, normalized; one key for all heads
    w = W_w h · heads^−½ · dim^−½
    I(t, s) = Σ_heads w(t) · relu(q(t) · k(s))

The first `qk_rope_head_dim` channels of q and k rotate. Its inputs are detached: its own loss is all that
trains it, and trains nothing else. Every tp rank has the whole indexer and scores the queries of its own
tokens, of which it has a part under sequence parallelism.

Communicates in `WholeKeys`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megalite_kernels.rotary import rotate
from torch import Tensor, nn

from megalite.config.sections.model import ModelConfig
from megalite.parallel.compiled_ops import CompiledOps
from megalite.parallel.context.gathered import by_rank, in_order
from megalite.parallel.context.latents import Spread
from megalite.parallel.context.parts import SequencePart
from megalite.parallel.tensor.norm import LayerNorm
from megalite.parallel.weight import Weight, Weights

EPS = 1e-6  # of the norm of keys, whatever rms_norm_eps is, as in the published code


class IndexInputs(NamedTuple):
    """What scores are computed from.

    Attributes:
        queries: [seq/cp (/tp), batch, heads, dim], of this rank's own tokens.
        keys: [seq, batch, dim], of whole rows.
        weights: [seq/cp (/tp), batch, heads] in at least fp32, of this rank's own tokens, with all factors.
    """

    queries: Tensor
    keys: Tensor
    weights: Tensor


class _Projection(torch.autograd.Function):
    """x Wᵀ of a detached x, in the dtype of the weight. The weight gradient is accumulated in its bucket."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tensor: Tensor, weight: Weight) -> Tensor:
        ctx.weight = weight
        ctx.save_for_backward(x)
        return F.linear(x.to(tensor.dtype), tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        (x,), grad = ctx.saved_tensors, grads[0]
        ctx.weight.accumulate_matmul(grad.flatten(0, 1), x.flatten(0, 1).to(grad.dtype))
        return None, None, None


class _RotateFirst(torch.autograd.Function):
    """Rotates the first channels, as many as the tables have: [seq, batch, heads, dim]. No communication."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, inverse=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grads[0], cos, sin, inverse=True), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    rotating = cos.shape[-1]
    return torch.cat((rotate(x[..., :rotating], cos, sin, inverse=inverse), x[..., rotating:]), -1)


class WholeKeys(torch.autograd.Function):
    """Gathers the keys of whole rows: [seq/cp (/tp), batch, dim] -> [seq, batch, dim].

    Forward: all-gather over cp, and over tp under sequence parallelism. Backward: reduce-scatter over the
    same axes, over cp in at least fp32. Without sequence parallelism every tp rank has the same queries, and
    the complete gradient.
    """

    @staticmethod
    def forward(ctx: Any, keys: Tensor, way: Spread, part: SequencePart | None) -> Tensor:
        ctx.way, ctx.part = way, part
        if part is None and not way.split:
            return keys.view_as(keys)
        rows = way.spread(keys.contiguous())
        return rows if part is None else in_order(rows, part.segments)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        grad = grads[0] if ctx.part is None else by_rank(grads[0], ctx.part.segments)
        if ctx.part is not None or ctx.way.split:
            grad = ctx.way.collect(grad.contiguous())
        return grad, None, None


class Indexer(nn.Module):
    """Queries, keys and weights of a layer's indexer.

    Args:
        way: how keys of whole rows are gathered.
    """

    def __init__(self, model: ModelConfig, name: str, weights: Weights, way: Spread, ops: CompiledOps):
        super().__init__()
        self.heads, self.way = model.index_n_heads, way
        self.factor = (model.index_n_heads * model.index_head_dim) ** -0.5
        self.q, self.k, self.weights = (weights[f"{name}.{part}.weight"] for part in ("q", "k", "weights"))
        norm = weights[f"{name}.k_norm.weight"], weights[f"{name}.k_norm.bias"]
        self.k_norm = LayerNorm(*norm, EPS, 0.0, ops)

    @property
    def trained(self) -> bool:
        return self.q.trainable

    def forward(
        self,
        x: Tensor,
        latent: Tensor,
        tables: tuple[Tensor, Tensor] | None,
        part: SequencePart | None,
    ) -> IndexInputs:
        """Return what scores are computed from.

        Args:
            x, latent: [seq/cp (/tp), batch, hidden or q_lora_rank] of this rank's own tokens.
            tables: cos and sin of their positions.
        """
        queries, keys, weights = self.of_own_tokens(x, latent, tables)
        return IndexInputs(queries, WholeKeys.apply(keys, self.way, part), weights)

    def of_own_tokens(
        self, x: Tensor, latent: Tensor, tables: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and weights of this rank's own tokens."""
        x, latent = x.detach(), latent.detach()
        # [seq/cp (/tp), batch, heads, dim]
        queries = _project(latent, self.q).unflatten(-1, (self.heads, -1))
        keys = self.k_norm(_project(x, self.k))  # [seq/cp (/tp), batch, dim]
        weights = _project(x, self.weights) * self.factor
        if tables is not None:
            queries = _RotateFirst.apply(queries, *tables)
            keys = _RotateFirst.apply(keys.unsqueeze(2), *tables).squeeze(2)
        return queries, keys, weights


def _project(x: Tensor, weight: Weight) -> Tensor:
    out: Tensor = _Projection.apply(x, weight.tensor, weight)
    return out
