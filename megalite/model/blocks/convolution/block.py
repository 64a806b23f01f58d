"""A gated short convolution (LFM2): [B | C | x] = u W; out(C ∘ conv(B ∘ x)).

Column-parallel projection, the convolution of this rank's channels, row-parallel output projection.
Communicates in these two, and along rows under context parallelism (`parallel.context`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalite.config.sections.model import ModelConfig
from megalite.mesh.mesh import Mesh
from megalite.model.block_kind import BlockSpec
from megalite.model.forward_state import ForwardState
from megalite.model.layer_options import LayerOptions
from megalite.model.mixer_block import MixerBlock
from megalite.parallel.context.attend import across_rows
from megalite.parallel.context.whole_rows import AcrossRows, ConvInputs
from megalite.parallel.node import Saved
from megalite.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from megalite.parallel.weight import Weight, Weights


class ConvolutionMixer:
    """C ∘ conv(B ∘ x): [seq, batch, 3 · channels/tp] -> [seq, batch, channels/tp]."""

    def __init__(self, weight: Weight, bias: Weight | None, across: AcrossRows):
        self.weight, self.bias, self.across = weight, bias, across

    def compute(self, packed: Tensor, saved: Saved, state: ForwardState) -> Tensor:
        _, c, values = self.split(packed)
        halos = self.across.halos(values, self.weight.tensor.shape[1], state)
        saved.append((packed, halos))
        return c * self.across.convolve(self.inputs(values, halos), state)

    def gradient(self, grad: Tensor, saved: Saved, state: ForwardState) -> Tensor:
        packed, halos = saved.pop()
        b, c, values = self.split(packed)
        inputs = self.inputs(values, halos)
        convolved = self.across.convolve(inputs, state)
        gradients = self.across.convolve_backward(grad * c, inputs, state)
        self.weight.accumulate(gradients.weight)
        if self.bias is not None and gradients.bias is not None:
            self.bias.accumulate(gradients.bias)
        x = packed[..., 2 * c.shape[-1] :]
        return torch.cat((gradients.x * x, grad * convolved, gradients.x * b), -1)

    def inputs(self, values: Tensor, halos: Tensor | None) -> ConvInputs:
        bias = None if self.bias is None else self.bias.tensor
        return ConvInputs(values, halos, self.weight.tensor, bias, silu=False)

    def split(self, packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gates B and C, and the values B ∘ x that the convolution reads."""
        b, c, x = packed.chunk(3, -1)
        return b, c, b * x


def make(
    model: ModelConfig, block: BlockSpec, weights: Weights, mesh: Mesh, options: LayerOptions
) -> MixerBlock:
    """Return the module of a block, see `BlockKind.make`."""
    name, tp, sequence_parallel = block.name, mesh.tp, options.sequence_parallel
    into, conv, out = (
        (weights[f"{name}.{part}.weight"], weights.get(f"{name}.{part}.bias"))
        for part in ("in", "conv", "out")
    )
    mixer = ConvolutionMixer(*conv, across_rows(mesh.cp, by_heads=False))
    return MixerBlock(
        ColumnParallelLinear(*into, tp, sequence_parallel),
        mixer,
        RowParallelLinear(*out, tp, sequence_parallel),
        block,
        weights,
    )
