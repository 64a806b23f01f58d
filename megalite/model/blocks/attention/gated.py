"""Attention with a gate on its output: out(attention · f(gate)).

f is σ (Qwen3-Next) or softplus (Laguna), and the gate has a value for each channel of each query head, or for
each head. It comes from the same projection as queries, keys and values: its rows are the last of the packed
weight. Each tp rank has the gates of its own heads, and each cp rank those of its own tokens, which multiply
the output when that is back. Communicates as `Attention`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megalite.config.sections.model import ModelConfig
from megalite.mesh.mesh import Mesh
from megalite.model.block_kind import BlockSpec
from megalite.model.block_module import Operation
from megalite.model.blocks.attention.block import Attention
from megalite.model.blocks.attention.operations import in_own_memory
from megalite.model.forward_state import ForwardState
from megalite.model.layer_options import LayerOptions
from megalite.parallel.compiled_ops import CompiledOps
from megalite.parallel.node import Saved
from megalite.parallel.tensor.linear import RowParallelLinear
from megalite.parallel.tensor.lora import Mask
from megalite.parallel.weight import Weights


class GatedOutput(nn.Module):
    """Row-parallel linear of x · f(gate): x is [seq, batch, heads/tp · value_size], and so is gate, or it is
    [seq, batch, heads/tp].

    It keeps x, which attention keeps, too, and the gate; backward computes the product again.
    """

    def __init__(self, out: RowParallelLinear, ops: CompiledOps, softplus: bool):
        super().__init__()
        self.out, self.ops, self.softplus = out, ops, softplus

    def forward(self, x: Tensor, gate: Tensor, mask: Mask | None = None) -> Tensor:
        return _GatedNode.apply(x, gate, self.out.weight.tensor, self, mask)

    def compute(
        self, x: Tensor, gate: Tensor, saved: Saved, mask: Mask | None = None, residual: Tensor | None = None
    ) -> Tensor:
        out = self.out.compute(self.ops.gate_output(x, gate, self.softplus), saved, mask, residual)
        _product, *adapter = saved.pop()
        saved.append((x, gate, *adapter))
        return out

    def gradient(self, grad: Tensor, saved: Saved, mask: Mask | None = None) -> tuple[Tensor, Tensor]:
        """Return the gradients of x and gate."""
        x, gate, *adapter = saved.pop()
        saved.append((self.ops.gate_output(x, gate, self.softplus), *adapter))
        dproduct = self.out.gradient(grad, saved, mask)
        return self.ops.gate_output_backward(dproduct, x, gate, self.softplus)


class _GatedNode(torch.autograd.Function):
    """Computes `GatedOutput`. Communication is that of the linear.

    `anchor` is a weight: see `parallel.node.Node`.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate: Tensor, anchor: Tensor, output: GatedOutput, mask: Mask | None
    ) -> Tensor:
        saved: Saved = []
        out = output.compute(x.detach(), gate.detach(), saved, mask)
        ctx.output, ctx.mask = output, mask
        ctx.save_for_backward(*saved[0])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        saved: Saved = [ctx.saved_tensors]
        ctx.maybe_clear_saved_tensors()
        return *ctx.output.gradient(grads[0], saved, ctx.mask), None, None, None


class GatedAttention(Attention):
    """`Attention` with a gate on its output."""

    def __init__(
        self, model: ModelConfig, block: BlockSpec, weights: Weights, mesh: Mesh, options: LayerOptions
    ):
        super().__init__(model, block, weights, mesh, options)
        self.gated = GatedOutput(self.out, options.ops, model.attention_gate_act == "softplus")

    @property
    def last(self) -> Operation:
        return self.gated

    def compute(self, x: Tensor, saved: Saved, state: ForwardState, residual: Tensor | None = None) -> Tensor:
        packed = self.qkv.compute(x, saved)  # queries, keys, values and gate
        out = self._attention(packed, saved, state).flatten(-2)  # [seq, batch, heads · value_size]
        gate = packed[..., self.before_gate :]
        if not self.norms_first:  # norms of what is not rotated yet keep the projection
            gate = in_own_memory(gate, saved[-1])
        return self.gated.compute(out, gate, saved, residual=residual)

    def gradient(self, grad: Tensor, saved: Saved, state: ForwardState) -> Tensor:
        dout, dgate = self.gated.gradient(grad, saved)
        return self.qkv.gradient(self._projection_gradient(dout, saved, state, dgate), saved)
