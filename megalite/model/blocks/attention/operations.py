"""Attention with a node of autograd's graph for each of its operations.

Where recomputation drops the tensors of some operations, rows are split over cp ranks, or a kind has other
projections, each operation stands alone; without a graph, as in evaluation, it makes no difference.
Communicates as `block.Attention`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from megalite_kernels.attention import attention, attention_backward
from megalite_kernels.rotary import rotate
from torch import Tensor

from megalite.model.block_module import BlockModule, Operation
from megalite.model.forward_state import ForwardState, Site

if TYPE_CHECKING:
    from megalite.config.sections.model import ModelConfig
    from megalite.model.layer_options import LayerOptions
    from megalite.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear


def in_own_memory(gate: Tensor, kept: Iterable[Tensor | None]) -> Tensor:
    """Return a gate, a view of the packed projection; a copy if no kept tensor is a view of it, too.

    The whole projection would otherwise stay in memory for the gate.
    """
    memory = gate.untyped_storage().data_ptr()
    shared = any(each is not None and each.untyped_storage().data_ptr() == memory for each in kept)
    return gate if shared else gate.clone(memory_format=torch.contiguous_format)


class _Split(torch.autograd.Function):
    """Splits a packed projection into queries, keys and values, rotates queries and keys, and scales queries.

    Backward returns one packed gradient.

    [seq, batch, before_gate] -> queries [seq, batch, heads, head_dim], keys [seq, batch, kv_heads, head_dim],
    values [seq, batch, kv_heads, value_dim]. `turn` has cos, sin and factors on queries; without tables
    nothing is rotated. What the projection has besides is returned last: the gate of the output. No
    communication.
    """

    @staticmethod
    def forward(ctx: Any, packed: Tensor, layer: AttentionByOperation, turn: Sequence[Tensor | None]) -> Any:
        cos, sin, factors = turn
        ctx.save_for_backward(cos, sin, factors)
        ctx.ops = layer.options.ops
        sizes = layer.heads, layer.kv_heads, layer.head_dim
        q, k, v = ctx.ops.split_rotary(packed, *sizes, cos, sin, value_dim=layer.value_dim)
        if factors is not None:
            q.mul_(factors)  # rotated: a view of a new buffer
        gate = packed[..., layer.before_gate :]
        if not gate.shape[-1]:
            return q, k, v
        return q, k, v, in_own_memory(gate, (q,) if layer.keeps_projection else ())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin, factors = ctx.saved_tensors
        dq, dk, dv, *dgate = grads
        if factors is not None:
            dq = dq * factors
        return ctx.ops.split_rotary_backward(dq, dk, dv, cos, sin, *dgate), None, None


class Rotate(torch.autograd.Function):
    """Applies the rotary embedding to [seq, batch, heads, head_dim].

    Backward rotates the gradient by the opposite angle. No communication.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return rotate(grads[0], cos, sin, inverse=True), None, None


class WholeRowAttention(torch.autograd.Function):
    """Computes softmax(q kᵀ · scale + mask) v over this rank's heads: [seq, batch, heads, head_dim].

    No communication.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        out, saved = attention(q, k, v, **options)
        ctx.options = options
        ctx.save_for_backward(q, k, v, out, *saved)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, *saved = ctx.saved_tensors
        return (*attention_backward(grads[0], q, k, v, out, tuple(saved), **ctx.options), None)


class AttentionByOperation(BlockModule):
    """Computes attention operation by operation; `Attention` has its modules."""

    layer: int
    model_config: ModelConfig
    options: LayerOptions
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    before_gate: int
    recomputes_scores: bool
    keeps_projection: bool
    norms_first: bool
    qkv: ColumnParallelLinear
    out: RowParallelLinear
    attend: Callable[..., Tensor]
    q_norm: Any
    k_norm: Any

    def forward(self, x: Tensor, state: ForwardState) -> Tensor:
        # [seq, batch, heads/tp, head_dim]; k and v with this rank's key-value heads
        q, k, v, *gates = self.call(self.project, x, state)
        # [seq, batch, heads/tp, value_dim]
        recompute = self.recomputes_scores or not torch.is_grad_enabled()
        out = self.call(self.attend, q, k, v, self.attention_options(state, recompute))
        # row-parallel: summed over tp
        mask = state.adapter_mask(Site.OUT_ADAPTER, self.layer)
        return self.call(self.last, out.flatten(-2), *gates, mask)

    def operations(self) -> Mapping[str, Operation]:
        return {"qkv": self.project, "attention": self.attend}

    @property
    def last(self) -> Operation:
        return self.out

    def project(self, x: Tensor, state: ForwardState) -> tuple[Tensor, ...]:
        """Return queries, keys and values of this rank's heads, normalized and rotated.

        Each is [seq, batch, heads, head_dim], values value_dim wide. If the output has a gate, it is the last
        one.
        """
        rotary, factors = self.rotary_tables(state), state.query_factors
        # [seq, batch, before_gate], and the gate
        packed = self.qkv(x, state.adapter_mask(Site.QKV_ADAPTER, self.layer))
        if self.q_norm is None or self.k_norm is None:
            # split and rotation in one pass over memory
            return _Split.apply(packed, self, (*(rotary or (None, None)), factors))
        # unless norms are applied between them
        tables = None if self.norms_first else rotary
        q, k, v, *gates = _Split.apply(packed, self, (*(tables or (None, None)), None))
        q, k = self.q_norm(q), self.k_norm(k)
        if self.norms_first and rotary is not None:
            q, k = Rotate.apply(q, *rotary), Rotate.apply(k, *rotary)
        if factors is not None:
            q = q * factors
        return q, k, v, *gates

    def rotary_tables(self, state: ForwardState) -> tuple[Tensor, Tensor] | None:
        raise NotImplementedError

    def attention_options(self, state: ForwardState, recompute: bool = True) -> dict[str, Any]:
        raise NotImplementedError
