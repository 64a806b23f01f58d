"""Attention with sinks (gpt-oss).

Each head has a learned score that joins the softmax over the keys and has no value.

So a head may attend to nothing, and its output is then nearly zero. Each tp rank has the sinks of its own
heads and their complete gradient; over dp and cp it is summed like any other. Communicates as `Attention`.
"""

from __future__ import annotations

from typing import Any

import torch
from megalite_kernels.attention_sinks import attention_with_sinks, attention_with_sinks_backward
from torch import Tensor

from megalite.config.sections.model import ModelConfig
from megalite.mesh.mesh import Mesh
from megalite.model.block_kind import BlockSpec
from megalite.model.blocks.attention.block import Attention, attention_over
from megalite.model.forward_state import ForwardState
from megalite.model.layer_options import LayerOptions
from megalite.parallel.weight import Weights


class _AttentionWithSinks(torch.autograd.Function):
    """Attention with sinks over this rank's heads, [seq, batch, heads, head_dim].

    Backward adds the sinks' gradient to its bucket. No communication.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        ctx.options = {name: value for name, value in options.items() if name != "sinks"}
        ctx.sinks = options["sinks"]
        out, lse = attention_with_sinks(q, k, v, ctx.sinks.tensor, **ctx.options)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv, dsinks = attention_with_sinks_backward(
            grads[0], q, k, v, out, lse, ctx.sinks.tensor, **ctx.options
        )
        ctx.sinks.accumulate(dsinks)
        return dq, dk, dv, None


class SinkAttention(Attention):
    """`Attention` with a sink in each head."""

    has_gradient = False

    def __init__(
        self, model: ModelConfig, block: BlockSpec, weights: Weights, mesh: Mesh, options: LayerOptions
    ):
        super().__init__(model, block, weights, mesh, options)
        self.sinks = weights[f"{block.name}.sinks.weight"]  # [heads/tp]
        self.attend = attention_over(options, mesh) or _AttentionWithSinks.apply

    def attention_options(self, state: ForwardState, recompute: bool = True) -> dict[str, Any]:
        return {**super().attention_options(state, recompute), "sinks": self.sinks}
