"""The projection of Kimi delta attention, whose decay and gate are computed from latents.

    [q | k | v | b] = x W        f = (x Fᵃ) Fᵇ        g = (x Gᵃ) Gᵇ

All tp ranks compute the latents of their own tokens, and each its own heads. Communicates in the linears.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megalite.mesh.mesh import Mesh, MeshAxis
from megalite.model.layer_options import LayerOptions
from megalite.parallel.node import Node, Saved
from megalite.parallel.tensor.linear import ColumnParallelLinear
from megalite.parallel.weight import Weights


class LatentProjection(nn.Module):
    """Returns q, k, v, the gate g, the strength b and the decay f: [seq (/tp), batch, hidden] -> packed."""

    def __init__(
        self, into: ColumnParallelLinear, name: str, weights: Weights, mesh: Mesh, options: LayerOptions
    ):
        super().__init__()
        alone = MeshAxis("alone", 0, 1, (mesh.rank,))
        self.into = into
        self.low = ColumnParallelLinear(weights[f"{name}.low.weight"], None, alone, False)
        self.decay, self.gate = (
            ColumnParallelLinear(weights[f"{name}.{part}.weight"], None, mesh.tp, options.sequence_parallel)
            for part in ("f_b", "g_b")
        )
        self.strengths = weights[f"{name}.a_log"].tensor.numel()  # this rank's heads

    def forward(self, x: Tensor, mask: Any = None) -> Tensor:
        return Node.apply(x, self.into.weight.tensor, self, mask)

    def compute(self, x: Tensor, saved: Saved, mask: Any = None) -> Tensor:
        packed = self.into.compute(x, saved, mask)
        low = self.low.compute(x, saved)  # [seq (/tp), batch, 2 · width]
        of_decay, of_gate = (part.contiguous() for part in low.chunk(2, -1))
        f, g = self.decay.compute(of_decay, saved), self.gate.compute(of_gate, saved)
        qkv, b = packed.split((packed.shape[-1] - self.strengths, self.strengths), -1)
        return torch.cat((qkv, g, b, f), -1)

    def gradient(self, grad: Tensor, saved: Saved, mask: Any = None) -> Tensor:
        gates, decays = self.gate.weight.tensor.shape[0], self.decay.weight.tensor.shape[0]
        sizes = (grad.shape[-1] - gates - self.strengths - decays, gates, self.strengths, decays)
        dqkv, dg, db, df = (part.contiguous() for part in grad.split(sizes, -1))
        dlow_gate, dlow_decay = self.gate.gradient(dg, saved), self.decay.gradient(df, saved)
        dx = self.low.gradient(torch.cat((dlow_decay, dlow_gate), -1), saved)
        return self.into.gradient(torch.cat((dqkv, db), -1), saved, mask).add_(dx)
