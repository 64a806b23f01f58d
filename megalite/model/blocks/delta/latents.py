"""The projection of Kimi delta attention, whose decay and gate are computed from latents.

    [q | k | v | b] = x W        f = (x Fᵃ) Fᵇ        g = (x Gᵃ) Gᵇ

All tp ranks compute the latents of their own tokens, and each its own heads. Communicates in the linears.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from megalite.mesh.mesh import Mesh, MeshAxis
from megalite.model.block_kind import BlockSpec
from megalite.model.forward_state import ForwardState, Site
from megalite.model.layer_options import LayerOptions
from megalite.parallel.node import Node, Saved
from megalite.parallel.tensor.linear import ColumnParallelLinear
from megalite.parallel.weight import Weights

if TYPE_CHECKING:
    from megalite.parallel.tensor.lora import Mask


class LatentMasks(NamedTuple):
    """The dropout of the inputs of adapters; `low` is of this rank's own tokens."""

    into: Mask | None = None
    low: Mask | None = None
    decay: Mask | None = None
    gate: Mask | None = None


class LatentProjection(nn.Module):
    """Returns q, k, v, the gate g, the strength b and the decay f: [seq (/tp), batch, hidden] -> packed."""

    def __init__(
        self,
        into: ColumnParallelLinear,
        block: BlockSpec,
        weights: Weights,
        mesh: Mesh,
        options: LayerOptions,
    ):
        super().__init__()
        name, layer = block.name, block.layer
        alone = MeshAxis("alone", 0, 1, (mesh.rank,))
        self.into = into
        self.low = ColumnParallelLinear(weights[f"{name}.low.weight"], None, alone, False)
        self.decay, self.gate = (
            ColumnParallelLinear(weights[f"{name}.{part}.weight"], None, mesh.tp, options.sequence_parallel)
            for part in ("f_b", "g_b")
        )
        self.layer, self.tp, self.split = layer, mesh.tp, options.sequence_parallel
        self.strengths = weights[f"{name}.a_log"].tensor.numel()  # this rank's heads

    def masks(self, state: ForwardState) -> LatentMasks | None:
        """Return the dropout of the inputs of adapters."""
        if not state.lora_dropout or not state.training:
            return None
        own = state
        if self.split:
            length = len(state.positions) // self.tp.size
            own = replace(state, positions=state.positions.narrow(0, length * self.tp.rank, length))
        sites = (Site.MIXER_IN_ADAPTER, Site.DECAY_ADAPTER, Site.GATE_ADAPTER)
        into, decay, gate = (state.adapter_mask(site, self.layer) for site in sites)
        return LatentMasks(into, own.adapter_mask(Site.LOW_ADAPTER, self.layer), decay, gate)

    def forward(self, x: Tensor, masks: LatentMasks | None = None) -> Tensor:
        return Node.apply(x, self.into.weight.tensor, self, masks)

    def compute(self, x: Tensor, saved: Saved, masks: LatentMasks | None = None) -> Tensor:
        masks = masks or LatentMasks()
        packed = self.into.compute(x, saved, masks.into)
        low = self.low.compute(x, saved, masks.low)  # [seq (/tp), batch, 2 · width]
        of_decay, of_gate = (part.contiguous() for part in low.chunk(2, -1))
        f, g = self.decay.compute(of_decay, saved, masks.decay), self.gate.compute(of_gate, saved, masks.gate)
        qkv, b = packed.split((packed.shape[-1] - self.strengths, self.strengths), -1)
        return torch.cat((qkv, g, b, f), -1)

    def gradient(self, grad: Tensor, saved: Saved, masks: LatentMasks | None = None) -> Tensor:
        masks = masks or LatentMasks()
        gates, decays = self.gate.weight.tensor.shape[0], self.decay.weight.tensor.shape[0]
        sizes = (grad.shape[-1] - gates - self.strengths - decays, gates, self.strengths, decays)
        dqkv, dg, db, df = (part.contiguous() for part in grad.split(sizes, -1))
        dlow_gate, dlow_decay = (
            self.gate.gradient(dg, saved, masks.gate),
            self.decay.gradient(df, saved, masks.decay),
        )
        dx = self.low.gradient(torch.cat((dlow_decay, dlow_gate), -1), saved, masks.low)
        return self.into.gradient(torch.cat((dqkv, db), -1), saved, masks.into).add_(dx)
