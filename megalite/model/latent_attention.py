"""Multi-head latent attention (DeepSeek-V2, 2024): a narrow latent of each token gives the keys and values of
all heads.

    [c | r] = x Wᵃ          c: latent, normalised      r: the part of a key that rotates, the same in all
    heads
    [k | v] = c Wᵇ          for each head;  its key is [k | rotated r], its query [q | rotated q′], from x or
    from a latent of their own

All tp ranks compute the latents, each the heads that it has. Communication, besides that of the linears that
read latents:

                      without sequence parallelism       with it: latents are of each rank's own part of the
                      sequence
    rotated key       backward: all-reduce               forward: all-gather along the sequence;  backward:
    reduce-scatter

Keys, values and what follows are those of ordinary attention with as many key-value heads as query heads,
whose values have another width. Under context parallelism by gather or ring latents travel instead, where
they are fewer (`parallel.context.latents`): then the projections give queries, latents and rotated keys, and
attention itself computes the keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from megalite_kernels.dropout import dropout
from megalite_kernels.rotary import rotate
from torch import Tensor

from megalite.mesh.mesh import Mesh, MeshAxis
from megalite.model.attention import Attention, _Rotate
from megalite.model.cost.context_parallel import latents_travel
from megalite.model.forward_state import ForwardState, Site
from megalite.parallel.collectives import all_gather, all_reduce, reduce_scatter
from megalite.parallel.context.parts import PositionSegments
from megalite.parallel.microbatch import positions_of
from megalite.parallel.tensor.linear import ColumnParallelLinear
from megalite.parallel.tensor.lora import Mask
from megalite.parallel.tensor.norm import RMSNorm
from megalite.parallel.weight import Weight

EPS = 1e-6  # of the norms of latents, whatever rms_norm_eps is: that of the published code


class _SharedKey(torch.autograd.Function):
    """The rotated key, which each tp rank uses in its own heads: [seq (/tp), batch, dim] -> [seq, batch,
    dim].

    Forward: all-gather along the sequence under sequence parallelism.  Backward: its gradient is summed over
    tp.
    """

    @staticmethod
    def forward(ctx: Any, key: Tensor, tp: MeshAxis, sequence_parallel: bool) -> Tensor:
        ctx.tp, ctx.sequence_parallel = tp, sequence_parallel
        return all_gather(key.contiguous(), tp).wait() if sequence_parallel else key.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        grad = grads[0].contiguous()
        return (
            (reduce_scatter(grad, ctx.tp) if ctx.sequence_parallel else all_reduce(grad, ctx.tp)).wait(),
            None,
            None,
        )


class _Queries(torch.autograd.Function):
    """Rotates the last channels of each head, those after `plain`: [seq, batch, heads, head_size]. No
    communication."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, plain: int, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.plain = plain
        ctx.save_for_backward(cos, sin)
        return torch.cat((queries[..., :plain], rotate(queries[..., plain:], cos, sin)), -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (grad,), plain = grads, ctx.plain
        cos, sin = ctx.saved_tensors
        return (
            torch.cat((grad[..., :plain], rotate(grad[..., plain:], cos, sin, inverse=True)), -1),
            None,
            None,
            None,
        )


class _KeysAndValues(torch.autograd.Function):
    """Keys and values of this rank's heads, from the projection and the shared key. No communication.

    [seq, batch, heads · (plain + value)], [seq, batch, rotating] -> [seq, batch, heads, plain + rotating],
    [seq, batch, heads, value]
    """

    @staticmethod
    def forward(ctx: Any, packed: Tensor, key: Tensor, heads: int, plain: int) -> Any:
        ctx.plain = plain
        packed = packed.unflatten(-1, (heads, -1))
        keys = packed.new_empty(*packed.shape[:3], plain + key.shape[-1])
        keys[..., :plain], keys[..., plain:] = packed[..., :plain], key.unsqueeze(2)
        return keys, packed[..., plain:].contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (dk, dv), plain = grads, ctx.plain
        dkey = dk[..., plain:].sum(2, dtype=torch.promote_types(dk.dtype, torch.float32)).to(dk.dtype)
        return torch.cat((dk[..., :plain], dv), -1).flatten(2), dkey, None, None


class LatentAttention(Attention):
    """As `Attention`, with a latent from which keys and values are computed, and often one for queries."""

    def make_projections(self, name: str, weights: Mapping[str, Weight], mesh: Mesh) -> None:
        model, options, tp = self.model_config, self.options, mesh.tp
        self.kv_heads, self.tp, self.sequence_parallel = self.heads, tp, options.sequence_parallel

        def own(part: str) -> ColumnParallelLinear:  # of the tokens that it is given, without communication
            return ColumnParallelLinear(
                weights[f"{name}.{part}.weight"], None, MeshAxis("alone", 0, 1, (mesh.rank,)), False
            )

        def column(part: str) -> ColumnParallelLinear:
            return ColumnParallelLinear(weights[f"{name}.{part}.weight"], None, tp, options.sequence_parallel)

        def norm(part: str) -> RMSNorm:
            return RMSNorm(weights[f"{name}.{part}_norm.weight"], EPS, model.norm_offset, options.ops)

        # two levels exchange heads first
        context = "ulysses" if mesh.cp_levels is not None else options.context
        self.latents_travel = latents_travel(model, context, mesh.cp.size, tp.size, options.sequence_parallel)
        self.kv_down, self.kv_norm, self.kv_up = (
            own("kv_a"),
            norm("kv_a"),
            (own if self.latents_travel else column)("kv_b"),
        )
        if self.latents_travel:
            from megalite.parallel.context.latents import Latents, expanding

            self.attend = expanding(
                Latents(mesh.cp, tp, options.sequence_parallel, context == "ring", self.kv_up.weight)
            )
        self.q_down = None if model.q_lora_rank is None else own("q_a")
        self.q_norm = None if model.q_lora_rank is None else norm("q_a")
        self.q_up = column("q" if model.q_lora_rank is None else "q_b")

    def project(self, x: Tensor, state: ForwardState) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of this rank's heads; or queries, and latents and rotated keys of this
        rank's tokens."""
        queries, (latent, key) = self.queries(x, state), self.latent(x, state)
        if self.latents_travel:
            return queries, latent, key
        if self.tp.size > 1:
            key = _SharedKey.apply(key, self.tp, self.sequence_parallel)
        return queries, *self.keys_and_values(latent, key, state.adapter_mask(Site.KV_UP_ADAPTER, self.layer))

    def queries(self, x: Tensor, state: ForwardState) -> Tensor:
        """[seq, batch, heads, head_size] of this rank's heads, rotated."""
        if self.q_down is not None and self.q_norm is not None:
            # [seq (/tp), batch, q_lora_rank]
            x = self.q_norm(self.q_down(x, self._own_mask(Site.Q_DOWN_ADAPTER, state)))
        found = self.q_up(x, state.adapter_mask(Site.QKV_ADAPTER, self.layer)).unflatten(-1, (self.heads, -1))
        tables = self._tables(state)
        return found if tables is None else _Queries.apply(found, self.model_config.qk_nope_head_dim, *tables)

    def latent(self, x: Tensor, state: ForwardState) -> tuple[Tensor, Tensor]:
        """The normalised latent and the rotated shared key, [seq (/tp), batch, kv_lora_rank] and [seq (/tp),
        batch, qk_rope_head_dim]."""
        both = self.kv_down(x, self._own_mask(Site.KV_DOWN_ADAPTER, state))
        latent, key = both.split(
            (both.shape[-1] - self.model_config.qk_rope_head_dim, self.model_config.qk_rope_head_dim), dim=-1
        )
        if (tables := self._tables(state)) is not None:
            key = _Rotate.apply(key.unsqueeze(2), *(self._own(table) for table in tables)).squeeze(2)
        return self.kv_norm(latent.contiguous()), key

    def keys_and_values(self, latent: Tensor, key: Tensor, mask: Mask | None) -> tuple[Tensor, Tensor]:
        """Those of this rank's heads, [seq, batch, heads, head_size] and [seq, batch, heads, value_size];
        `key` of the whole sequence."""
        found: tuple[Tensor, Tensor] = _KeysAndValues.apply(
            self.kv_up(latent, mask), key, self.heads, self.model_config.qk_nope_head_dim
        )
        return found

    def operation(self, state: ForwardState) -> dict[str, Any]:
        made = super().operation(state)
        return (
            {**made, "expand": partial(self._expand, state)}
            if self.latents_travel and state.part is not None
            else made
        )

    def _expand(
        self, state: ForwardState, latent: Tensor, key: Tensor, segments: PositionSegments
    ) -> tuple[Tensor, Tensor]:
        """`keys_and_values` of other ranks' positions."""
        return self.keys_and_values(
            latent, key, self._mask(Site.KV_UP_ADAPTER, state, lambda: positions_of(segments, latent.device))
        )

    def _tables(self, state: ForwardState) -> tuple[Tensor, Tensor] | None:
        """cos and sin of the positions of the whole sequence, under context parallelism of the cp rank's."""
        return (state.local_rotary if self.local_rope else state.rotary) if self.uses_rope else None

    def _own(self, x: Tensor) -> Tensor:
        """Of [seq, …] this rank's part of the sequence."""
        if not self.sequence_parallel:
            return x
        length = len(x) // self.tp.size
        return x.narrow(0, length * self.tp.rank, length)

    def _own_mask(self, site: Site, state: ForwardState) -> Mask | None:
        """As `ForwardState.adapter_mask`, of this rank's part of the sequence."""
        return self._mask(site, state, lambda: self._own(state.positions))

    def _mask(self, site: Site, state: ForwardState, positions: Callable[[], Tensor]) -> Mask | None:
        if not state.lora_dropout or not state.training:
            return None
        key = state.dropout_key(site, self.layer)
        return partial(dropout, key=key, samples=state.samples, positions=positions(), p=state.lora_dropout)
