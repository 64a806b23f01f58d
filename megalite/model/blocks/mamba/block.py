"""Mamba-2 (Dao, Gu 2024).

    z, x, B, C, dt = u W          x, B, C ← silu(conv(x, B, C))
    S ← exp(−Δ·exp(A_log)) S + Δ·B xᵀ;  y = Sᵀ C + D·x          Δ = softplus(dt + dt_bias)
    out(w ∘ rms(y ∘ silu(z)))     rms over the heads of a group; or the gate after the norm, or no norm

Column-parallel projection, the recurrence of this rank's heads, row-parallel output projection. Heads share
the B and C of their group. Communicates in the two projections, along rows under context parallelism
(`parallel.context`), and in the norm where a group has heads on several tp ranks.

Falcon-H1's multipliers scale what is computed, not the weights: that of the input and those of the parts of
the projection both scale its output.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from megalite_kernels.recurrence import Tokens
from torch import Tensor

from megalite.config.sections.model import ModelConfig
from megalite.mesh.mesh import Mesh
from megalite.model.block_kind import BlockSpec
from megalite.model.blocks.mamba.context import state_sizes
from megalite.model.blocks.mamba.parameters import group_replicas
from megalite.model.blocks.mamba.step import MambaStep
from megalite.model.cost.mixers import exchanges_heads
from megalite.model.forward_state import ForwardState
from megalite.model.layer_options import LayerOptions
from megalite.model.mixer_block import MixerBlock
from megalite.parallel.context.attend import across_rows
from megalite.parallel.context.whole_rows import AcrossRows, ConvInputs
from megalite.parallel.node import Saved
from megalite.parallel.tensor.gated_norm import GatedNorm
from megalite.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from megalite.parallel.weight import Weights


class MambaParts(NamedTuple):
    """The parts of the packed projection, [seq, batch, width] each.

    Attributes:
        z: the gate.
        convolved: x, B and C before the convolution.
        dt: the steps, before the softplus.
    """

    z: Tensor
    convolved: Tensor
    dt: Tensor


class GateAlone:
    """x · silu(z), in the place of a `GatedNorm`. No communication."""

    def forward(self, x: Tensor, z: Tensor) -> tuple[Tensor, Tensor | None]:
        dtype = torch.promote_types(x.dtype, torch.float32)
        return (x.to(dtype) * F.silu(z.to(dtype))).to(x.dtype), None

    def backward(self, dy: Tensor, x: Tensor, z: Tensor, summed: Tensor | None) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(x.dtype, torch.float32)
        grad, upcast = dy.to(dtype), z.to(dtype)
        sigmoid = torch.sigmoid(upcast)
        dz = grad * x.to(dtype) * sigmoid * (1 + upcast * (1 - sigmoid))
        return (grad * upcast * sigmoid).to(x.dtype), dz.to(z.dtype)


class MambaMixer:
    """Convolution, recurrence and gated norm of this rank's heads.

    Attributes:
        heads, groups: numbers of heads, and of groups of heads, on this rank.
        factors: of the packed projection, [width]; None: all are 1.
    """

    def __init__(self, model: ModelConfig, name: str, weights: Weights, mesh: Mesh, across: AcrossRows):
        tp = mesh.tp
        self.heads, self.width = model.mamba_num_heads // tp.size, model.mamba_head_dim
        self.groups = model.mamba_n_groups * group_replicas(model, tp.size) // tp.size
        self.limit, self.across = model.mamba_time_step_limit, across
        self.conv, self.a_log, self.d, self.dt_bias = (
            weights[f"{name}.{part}"] for part in ("conv.weight", "a_log", "d", "dt_bias")
        )
        self.conv_bias = weights.get(f"{name}.conv.bias")
        self.norm = self._norm(model, name, weights, mesh)
        inner, states = self.heads * self.width, self.groups * model.mamba_state_size
        self.xbc = (inner, states, states)
        self.widths = MambaParts(inner, sum(self.xbc), self.heads)  # type: ignore[arg-type]
        self.factors = self._factors(model, weights[f"{name}.in.weight"].tensor)

    def _norm(self, model: ModelConfig, name: str, weights: Weights, mesh: Mesh) -> GatedNorm | GateAlone:
        if model.mamba_norm == "none":
            return GateAlone()
        inner = model.mamba_num_heads * model.mamba_head_dim
        return GatedNorm(
            weights[f"{name}.norm.weight"],
            "gate_first" if model.mamba_norm == "gate_first" else "silu",
            model.rms_norm_eps,
            inner // model.mamba_n_groups,
            self.heads * self.width,
            mesh.tp,
            rounded=model.gated_norm_rounding == "normalized",
        )

    def _factors(self, model: ModelConfig, like: Tensor) -> Tensor | None:
        each = [model.mamba_in_multiplier * factor for factor in model.mamba_multipliers or [1.0] * 5]
        if all(factor == 1.0 for factor in each):
            return None
        widths = (self.widths.z, *self.xbc, self.widths.dt)
        return torch.cat([like.new_full((width,), own) for width, own in zip(widths, each, strict=True)])  # type: ignore[arg-type]

    def compute(self, packed: Tensor, saved: Saved, state: ForwardState) -> Tensor:
        parts = self.split(packed)
        halos = self.across.halos(parts.convolved, self.conv.tensor.shape[1], state)
        inputs = ConvInputs(parts.convolved, halos, self.conv.tensor, self._bias)
        convolved = self.across.convolve(inputs, state)
        x, b, c = self._heads(convolved)
        step = self._step(parts)
        out, kept = self.across.recur(self.tokens(x, b, c, step), state)
        skipped = self.d.tensor.to(step.size.dtype).unsqueeze(-1) * x
        y = (out + skipped).to(packed.dtype).flatten(-2)  # [seq, batch, heads · width]
        normed, summed = self.norm.forward(y, parts.z)
        saved.append((packed, y, summed, halos, *kept))
        return normed

    def gradient(self, grad: Tensor, saved: Saved, state: ForwardState) -> Tensor:
        packed, y, summed, halos, *kept = saved.pop()
        parts = self.split(packed)
        dy, dz = self.norm.backward(grad, y, parts.z, summed)
        inputs = ConvInputs(parts.convolved, halos, self.conv.tensor, self._bias)
        convolved = self.across.convolve(inputs, state)
        x, b, c = self._heads(convolved)
        step = self._step(parts)
        tokens = self.tokens(x, b, c, step)
        dout = dy.unflatten(-1, (self.heads, self.width))
        dtokens = self.across.recur_backward(dout, tokens, state, tuple(kept))
        upcast, dv = x.to(step.size.dtype), dtokens.v.to(step.size.dtype)
        self.d.accumulate((upcast * dout).sum((0, 1, 3)))
        dx = self.d.tensor.to(dv.dtype).unsqueeze(-1) * dout + step.size.unsqueeze(-1) * dv
        dstep = step.gradients((upcast * dv).sum(-1), dtokens.g)
        self.a_log.accumulate(dstep.a_log)
        self.dt_bias.accumulate(dstep.dt_bias)
        dconvolved = torch.cat(
            [part.flatten(2).to(packed.dtype) for part in (dx, dtokens.k, dtokens.q)],
            -1,
        )
        dconv = self.across.convolve_backward(dconvolved, inputs, state)
        self.conv.accumulate(dconv.weight)
        if self.conv_bias is not None:
            assert dconv.bias is not None
            self.conv_bias.accumulate(dconv.bias)
        dpacked = torch.cat((dz, dconv.x, dstep.dt), -1)
        return dpacked if self.factors is None else dpacked * self.factors

    def split(self, packed: Tensor) -> MambaParts:
        if self.factors is not None:
            packed = packed * self.factors
        return MambaParts(*packed.split(list(self.widths), dim=-1))

    def tokens(self, x: Tensor, b: Tensor, c: Tensor, step: MambaStep) -> Tokens:
        """Return the inputs of the recurrence, whose values are Δ·x."""
        return Tokens(c, b, (step.size.unsqueeze(-1) * x).to(x.dtype), step.log_decay)

    def _step(self, parts: MambaParts) -> MambaStep:
        return MambaStep(parts.dt, self.a_log.tensor, self.dt_bias.tensor, self.limit)

    def _heads(self, convolved: Tensor) -> list[Tensor]:
        """Return x, B and C, [seq, batch, heads or groups, width]."""
        numbers = (self.heads, self.groups, self.groups)
        parts = zip(convolved.split(self.xbc, dim=-1), numbers, strict=True)
        return [part.unflatten(-1, (number, -1)) for part, number in parts]

    @property
    def _bias(self) -> Tensor | None:
        return None if self.conv_bias is None else self.conv_bias.tensor


def make(
    model: ModelConfig, block: BlockSpec, weights: Weights, mesh: Mesh, options: LayerOptions
) -> MixerBlock:
    """Return the module of a block, see `BlockKind.make`."""
    name, tp, sequence_parallel = block.name, mesh.tp, options.sequence_parallel
    into = ColumnParallelLinear(
        weights[f"{name}.in.weight"], weights.get(f"{name}.in.bias"), tp, sequence_parallel
    )
    out = RowParallelLinear(
        weights[f"{name}.out.weight"], weights.get(f"{name}.out.bias"), tp, sequence_parallel
    )
    by_heads = exchanges_heads(options.share, state_sizes(model, options.share))
    mixer = MambaMixer(model, name, weights, mesh, across_rows(mesh.cp, by_heads))
    return MixerBlock(into, mixer, out, block, weights)
