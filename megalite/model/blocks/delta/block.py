"""The gated delta rule (Yang, Kautz, Hatamizadeh 2024); Kimi delta attention has a decay for each channel.

    q, k, v ← silu(conv(x W)), q and k of length 1, q · dk^−½
    S ← exp(g) S;  S ← S + β k (v − Sᵀk)ᵀ;  o = Sᵀq
    out((w ∘ rms(o)) ∘ gate(z))          gate: SiLU; with a decay for each channel σ

Column-parallel projection, the recurrence of this rank's heads, row-parallel output projection. Communicates
in these two, along rows under context parallelism (`parallel.context`), and with a decay for each channel in
the projections from latents.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from megalite_kernels.recurrence import Tokens
from torch import Tensor

from megalite.config.sections.model import ModelConfig
from megalite.mesh.mesh import Mesh
from megalite.model.block_kind import BlockSpec
from megalite.model.blocks.delta import gates
from megalite.model.blocks.delta.context import state_sizes
from megalite.model.blocks.delta.latents import LatentProjection
from megalite.model.blocks.delta.parameters import key_replicas
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


class DeltaParts(NamedTuple):
    """The parts of the packed projection, [seq, batch, width] each.

    Attributes:
        convolved: queries, keys and values before the convolution.
        z: the gate.
        b: the strength, before the sigmoid.
        a: the decay, before the softplus.
    """

    convolved: Tensor
    z: Tensor
    b: Tensor
    a: Tensor


class DeltaMixer:
    """Convolution, delta rule and gated norm of this rank's heads.

    Attributes:
        heads, key_heads: numbers of heads of values and keys on this rank.
    """

    def __init__(self, model: ModelConfig, name: str, weights: Weights, mesh: Mesh, across: AcrossRows):
        tp = mesh.tp
        self.heads = model.linear_num_value_heads // tp.size
        self.key_heads = model.linear_num_key_heads * key_replicas(model, tp.size) // tp.size
        self.dk, self.dv = model.linear_key_head_dim, model.linear_value_head_dim
        self.by_channel = model.delta_decay == "channel"
        self.strongest = 2.0 if model.delta_negative_eigenvalues else 1.0
        self.across = across
        self.conv, self.a_log, self.dt_bias = (
            weights[f"{name}.{part}"] for part in ("conv.weight", "a_log", "dt_bias")
        )
        eps = model.rms_norm_eps if model.delta_norm_eps is None else model.delta_norm_eps
        self.norm = GatedNorm(
            weights[f"{name}.norm.weight"],
            "sigmoid" if self.by_channel else "silu",
            eps,
            self.dv,
            self.heads * self.dv,
            tp,
            rounded=model.gated_norm_rounding == "normalized",
        )
        keys, values = self.key_heads * self.dk, self.heads * self.dv
        self.qkv = (keys, keys, values)
        decays = self.heads * self.dk if self.by_channel else self.heads
        self.widths = DeltaParts(*(sum(self.qkv), values, self.heads, decays))  # type: ignore[arg-type]

    def compute(self, packed: Tensor, saved: Saved, state: ForwardState) -> Tensor:
        parts = self.split(packed)
        halos = self.across.halos(parts.convolved, self.conv.tensor.shape[1], state)
        convolved = self.across.convolve(ConvInputs(parts.convolved, halos, self.conv.tensor), state)
        out, kept = self.across.recur(self.tokens(convolved, parts), state)
        out = out.flatten(-2)  # [seq, batch, heads · dv]
        y, summed = self.norm.forward(out, parts.z)
        saved.append((packed, out, summed, halos, *kept))
        return y

    def gradient(self, grad: Tensor, saved: Saved, state: ForwardState) -> Tensor:
        packed, out, summed, halos, *kept = saved.pop()
        parts = self.split(packed)
        dout, dz = self.norm.backward(grad, out, parts.z, summed)
        inputs = ConvInputs(parts.convolved, halos, self.conv.tensor)
        convolved = self.across.convolve(inputs, state)
        tokens = self.tokens(convolved, parts)
        dtokens = self.across.recur_backward(dout.unflatten(-1, (self.heads, -1)), tokens, state, tuple(kept))
        q, k, _ = self._heads(convolved)
        dconvolved = torch.cat(
            (
                gates.unit_length_backward(dtokens.q * self.dk**-0.5, q).flatten(-2),
                gates.unit_length_backward(dtokens.k, k).flatten(-2),
                dtokens.v.flatten(-2),
            ),
            -1,
        )
        dconv = self.across.convolve_backward(dconvolved, inputs, state)
        self.conv.accumulate(dconv.weight)
        assert dtokens.beta is not None
        sigmoid = torch.sigmoid(parts.b.to(dtokens.beta.dtype))
        db = self.strongest * dtokens.beta * sigmoid * (1 - sigmoid)
        da, da_log, ddt_bias = gates.log_decay_backward(
            dtokens.g, self._decay(parts.a), self.a_log.tensor, self.dt_bias.tensor
        )
        self.a_log.accumulate(da_log)
        self.dt_bias.accumulate(ddt_bias)
        return torch.cat((dconv.x, dz, db.to(packed.dtype), da.flatten(2)), -1)

    def split(self, packed: Tensor) -> DeltaParts:
        return DeltaParts(*packed.split(list(self.widths), dim=-1))

    def tokens(self, convolved: Tensor, parts: DeltaParts) -> Tokens:
        """Return the inputs of the recurrence.

        Args:
            convolved: queries, keys and values after the convolution.
        """
        q, k, v = self._heads(convolved)
        dtype = torch.promote_types(q.dtype, torch.float32)
        beta = self.strongest * torch.sigmoid(parts.b.to(dtype))
        g = gates.log_decay(self._decay(parts.a), self.a_log.tensor, self.dt_bias.tensor)
        return Tokens(gates.unit_length(q) * self.dk**-0.5, gates.unit_length(k), v, g, beta)

    def _heads(self, convolved: Tensor) -> list[Tensor]:
        """Return queries, keys and values, [seq, batch, heads, width]."""
        sizes = (self.dk, self.dk, self.dv)
        parts = zip(convolved.split(self.qkv, dim=-1), sizes, strict=True)
        return [part.unflatten(-1, (-1, size)) for part, size in parts]

    def _decay(self, a: Tensor) -> Tensor:
        return a.unflatten(-1, (self.heads, -1)) if self.by_channel else a


def make(
    model: ModelConfig, block: BlockSpec, weights: Weights, mesh: Mesh, options: LayerOptions
) -> MixerBlock:
    """Return the module of a block, see `BlockKind.make`."""
    name, tp, sequence_parallel = block.name, mesh.tp, options.sequence_parallel
    into: Any = ColumnParallelLinear(weights[f"{name}.in.weight"], None, tp, sequence_parallel)
    masks = None
    if model.delta_decay == "channel":
        into = LatentProjection(into, block, weights, mesh, options)
        masks = into.masks
    by_heads = exchanges_heads(options.share, state_sizes(model, options.share))
    mixer = DeltaMixer(model, name, weights, mesh, across_rows(mesh.cp, by_heads))
    out = RowParallelLinear(weights[f"{name}.out.weight"], None, tp, sequence_parallel)
    return MixerBlock(into, mixer, out, block, weights, masks)
