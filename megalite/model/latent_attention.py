"""Multi-head latent attention (DeepSeek-V2, 2024): a narrow latent of each token gives the keys and values of all heads.

    [c | r] = x Wᵃ          c: latent, normalised      r: the part of a key that rotates, the same in all heads
    [k | v] = c Wᵇ          for each head;  its key is [k | rotated r], its query [q | rotated q′], from x or from a latent of their own

All tp ranks compute the latents, each the heads that it has. Communication, besides that of the linears that read latents:

                      without sequence parallelism       with it: latents are of each rank's own part of the sequence
    rotating key      backward: all-reduce               forward: all-gather along the sequence;  backward: reduce-scatter

Keys, values and what follows are those of ordinary attention with as many key-value heads as query heads, whose values have another width.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from megalite_kernels.dropout import dropout
from megalite_kernels.rotary import rotate
from torch import Tensor

from megalite.mesh import Mesh, MeshAxis
from megalite.model.attention import Attention
from megalite.model.forward_state import ForwardState, Site
from megalite.parallel.collectives import all_gather, all_reduce, reduce_scatter
from megalite.parallel.tensor.linear import ColumnParallelLinear
from megalite.parallel.tensor.lora import Mask
from megalite.parallel.tensor.norm import RMSNorm
from megalite.parallel.weight import Weight

EPS = 1e-6  # of the norms of latents, whatever rms_norm_eps is: that of the published code


class _SharedKey(torch.autograd.Function):
    """The rotating key, which each tp rank uses in its own heads: [seq (/tp), batch, dim] -> [seq, batch, dim].

    Forward: all-gather along the sequence under sequence parallelism.  Backward: its gradient is summed over tp.
    """

    @staticmethod
    def forward(ctx: Any, key: Tensor, tp: MeshAxis, sequence_parallel: bool) -> Tensor:
        ctx.tp, ctx.sequence_parallel = tp, sequence_parallel
        return all_gather(key.contiguous(), tp).wait() if sequence_parallel else key.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        grad = grads[0].contiguous()
        return (reduce_scatter(grad, ctx.tp) if ctx.sequence_parallel else all_reduce(grad, ctx.tp)).wait(), None, None


class _Heads(torch.autograd.Function):
    """Queries, keys and values of this rank's heads, from the projections and the shared key. No communication.

    [seq, batch, heads · (plain + rotating)], [seq, batch, heads · (plain + value)], [seq, batch, rotating]
    -> twice [seq, batch, heads, plain + rotating], and [seq, batch, heads, value]
    """

    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, packed: Tensor, key: Tensor, heads: int, plain: int, rotary: tuple[Tensor, Tensor] | None
    ) -> Any:
        ctx.plain = plain
        ctx.save_for_backward(*(rotary or ()))
        queries, packed = queries.unflatten(-1, (heads, -1)), packed.unflatten(-1, (heads, -1))
        keys = torch.empty_like(queries)
        keys[..., :plain], keys[..., plain:] = packed[..., :plain], _turned(key.unsqueeze(2), rotary)
        rotating = _turned(queries[..., plain:], rotary)
        return torch.cat((queries[..., :plain], rotating), -1), keys, packed[..., plain:].contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        (dq, dk, dv), plain, rotary = grads, ctx.plain, ctx.saved_tensors
        dqueries = torch.cat((dq[..., :plain], _turned(dq[..., plain:], rotary, inverse=True)), -1)
        dpacked = torch.cat((dk[..., :plain], dv), -1)
        dkey = dk[..., plain:].sum(2, keepdim=True, dtype=torch.promote_types(dk.dtype, torch.float32)).to(dk.dtype)
        return dqueries.flatten(2), dpacked.flatten(2), _turned(dkey, rotary, inverse=True).squeeze(2), None, None, None


def _turned(x: Tensor, rotary: tuple[Tensor, ...] | None, inverse: bool = False) -> Tensor:
    """x [seq, batch, heads, dim], rotated; as it is without tables."""
    return rotate(x, rotary[0], rotary[1], inverse=inverse) if rotary else x


class LatentAttention(Attention):
    """As `Attention`, with a latent from which keys and values are computed, and often one for queries."""

    def make_projections(self, name: str, weights: Mapping[str, Weight], mesh: Mesh) -> None:
        model, options, tp = self.model_config, self.options, mesh.tp
        self.kv_heads, self.tp, self.sequence_parallel = self.heads, tp, options.sequence_parallel

        def own(part: str) -> ColumnParallelLinear:  # of this rank's tokens, with the whole matrix
            return ColumnParallelLinear(weights[f"{name}.{part}.weight"], None, MeshAxis("alone", 0, 1, (mesh.rank,)), False)

        def column(part: str) -> ColumnParallelLinear:
            return ColumnParallelLinear(weights[f"{name}.{part}.weight"], None, tp, options.sequence_parallel)

        def norm(part: str) -> RMSNorm:
            return RMSNorm(weights[f"{name}.{part}_norm.weight"], EPS, model.norm_offset, options.ops)

        self.kv_down, self.kv_norm, self.kv_up = own("kv_a"), norm("kv_a"), column("kv_b")
        self.q_down = None if model.q_lora_rank is None else own("q_a")
        self.q_norm = None if model.q_lora_rank is None else norm("q_a")
        self.q_up = column("q" if model.q_lora_rank is None else "q_b")

    def project(self, x: Tensor, state: ForwardState) -> tuple[Tensor, Tensor, Tensor]:
        return self.heads_of(self.queries(x, state), *self.latent(x, state), state)

    def queries(self, x: Tensor, state: ForwardState) -> Tensor:
        """[seq, batch, heads · head_size] of this rank's heads, not rotated yet."""
        if self.q_down is not None and self.q_norm is not None:
            x = self.q_norm(self.q_down(x, self._own_mask(Site.Q_DOWN_ADAPTER, x, state)))  # [seq (/tp), batch, q_lora_rank]
        return self.q_up(x, state.adapter_mask(Site.QKV_ADAPTER, self.layer))

    def latent(self, x: Tensor, state: ForwardState) -> tuple[Tensor, Tensor]:
        """The normalised latent [seq (/tp), batch, kv_lora_rank], and the shared key [seq, batch, qk_rope_head_dim], not rotated yet."""
        both = self.kv_down(x, self._own_mask(Site.KV_DOWN_ADAPTER, x, state))
        latent, key = both.split((both.shape[-1] - self.model_config.qk_rope_head_dim, self.model_config.qk_rope_head_dim), dim=-1)
        if self.tp.size > 1:
            key = _SharedKey.apply(key, self.tp, self.sequence_parallel)
        return self.kv_norm(latent.contiguous()), key

    def heads_of(self, queries: Tensor, latent: Tensor, key: Tensor, state: ForwardState) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys, rotated, and values of this rank's heads."""
        packed = self.kv_up(latent, state.adapter_mask(Site.KV_UP_ADAPTER, self.layer))
        return _Heads.apply(queries, packed, key, self.heads, self.model_config.qk_nope_head_dim, self.rotary(state))

    def rotary(self, state: ForwardState) -> tuple[Tensor, Tensor] | None:
        return (state.local_rotary if self.local_rope else state.rotary) if self.uses_rope else None

    def _own_mask(self, site: Site, x: Tensor, state: ForwardState) -> Mask | None:
        """As `ForwardState.adapter_mask`, of this rank's part of the sequence."""
        if not state.lora_dropout or not state.training:
            return None
        positions = state.positions.narrow(0, x.shape[0] * self.tp.rank if self.sequence_parallel else 0, x.shape[0])
        return partial(dropout, key=state.dropout_key(site, self.layer), samples=state.samples, positions=positions, p=state.lora_dropout)
