"""Multi-head latent attention (DeepSeek-V2, 2024).

Keys and values of all heads are computed from a narrow latent of each token.

    [c | r] = x Wᵃ    c: latent, normalized      r: the rotated part of a key, shared by all heads
    [k | v] = c Wᵇ    for each head: its key is [k | rotated r]
    [q | q′]          for each head, from x or from a latent of queries: its query is [q | rotated q′]

All tp ranks compute the latents, and each computes its own heads. Communicates in the linears that read
latents, and for the rotated key, which all heads share:

    without sequence parallelism   backward: all-reduce
    with sequence parallelism      forward: all-gather along the sequence, backward: reduce-scatter

The rest is ordinary attention with as many key-value heads as query heads, whose values have another width.
Under context parallelism by gather or ring, latents are exchanged instead of keys and values where they are
smaller (`parallel.context.latents`): then `project` returns queries, latents and rotated keys, and attention
itself computes the keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megalite_kernels.attention import backward_of_kept, forward_keeping
from megalite_kernels.dropout import dropout
from megalite_kernels.rotary import rotate
from torch import Tensor

from megalite.config.sections.model import ModelConfig
from megalite.mesh.mesh import Mesh, MeshAxis
from megalite.model.block_kind import BlockSpec
from megalite.model.blocks.attention.block import Attention
from megalite.model.blocks.attention.operations import Rotate
from megalite.model.blocks.latent_attention.context import latents_travel
from megalite.model.forward_state import ForwardState, Site
from megalite.model.layer_options import LayerOptions
from megalite.parallel.collectives import all_gather, all_reduce, reduce_scatter
from megalite.parallel.context.parts import PositionSegments
from megalite.parallel.microbatch import positions_of
from megalite.parallel.node import Saved
from megalite.parallel.tensor.linear import ColumnParallelLinear
from megalite.parallel.tensor.lora import Mask
from megalite.parallel.tensor.norm import RMSNorm
from megalite.parallel.weight import Weights

if TYPE_CHECKING:
    from megalite.parallel.context.latents import Latents

EPS = 1e-6  # of the norms of latents, whatever rms_norm_eps is, as in the published code


def _shared_key(key: Tensor, tp: MeshAxis, sequence_parallel: bool) -> Tensor:
    """Return the rotated key of the whole sequence: [seq (/tp), batch, dim] -> [seq, batch, dim].

    All heads use the same key.
    """
    return all_gather(key.contiguous(), tp).wait() if sequence_parallel else key


def _shared_key_gradient(grad: Tensor, tp: MeshAxis, sequence_parallel: bool) -> Tensor:
    """Return the gradient of this rank's keys, summed over tp, of which each rank has other heads."""
    grad = grad.contiguous()
    return (reduce_scatter(grad, tp) if sequence_parallel else all_reduce(grad, tp)).wait()


class _SharedKey(torch.autograd.Function):
    """Computes `_shared_key`."""

    @staticmethod
    def forward(ctx: Any, key: Tensor, tp: MeshAxis, sequence_parallel: bool) -> Tensor:
        ctx.tp, ctx.sequence_parallel = tp, sequence_parallel
        shared = _shared_key(key, tp, sequence_parallel)
        return shared if sequence_parallel else shared.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _shared_key_gradient(grads[0], ctx.tp, ctx.sequence_parallel), None, None


def _rotate_after(plain: int, x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    """Rotate the channels of each head after the first `plain`: [seq, batch, heads, head_size]."""
    return torch.cat((x[..., :plain], rotate(x[..., plain:], cos, sin, inverse=inverse)), -1)


class _RotateQueries(torch.autograd.Function):
    """Computes `_rotate_after` of queries. No communication."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, plain: int, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.plain = plain
        ctx.save_for_backward(cos, sin)
        return _rotate_after(plain, queries, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate_after(ctx.plain, grads[0], cos, sin, inverse=True), None, None, None


def _keys_and_values(packed: Tensor, key: Tensor, heads: int, plain: int) -> tuple[Tensor, Tensor]:
    """Return keys and values of this rank's heads, from the projection and the shared key.

    Projection [seq, batch, heads · (plain + value)], shared key [seq, batch, rotating] -> keys
    [seq, batch, heads, plain + rotating], values [seq, batch, heads, value].
    """
    packed = packed.unflatten(-1, (heads, -1))
    keys = packed.new_empty(*packed.shape[:3], plain + key.shape[-1])
    keys[..., :plain], keys[..., plain:] = packed[..., :plain], key.unsqueeze(2)
    return keys, packed[..., plain:].contiguous()


def _keys_and_values_gradient(dk: Tensor, dv: Tensor, plain: int) -> tuple[Tensor, Tensor]:
    """Return the gradients of the projection and of the shared key."""
    dkey = dk[..., plain:].sum(2, dtype=torch.promote_types(dk.dtype, torch.float32)).to(dk.dtype)
    return torch.cat((dk[..., :plain], dv), -1).flatten(2), dkey


class _KeysAndValues(torch.autograd.Function):
    """Computes `_keys_and_values`. No communication."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, key: Tensor, heads: int, plain: int) -> Any:
        ctx.plain = plain
        return _keys_and_values(packed, key, heads, plain)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        return *_keys_and_values_gradient(grads[0], grads[1], ctx.plain), None, None


class LatentAttention(Attention):
    """`Attention` with a latent for keys and values, and often another one for queries."""

    def make_projections(self, name: str, weights: Weights, mesh: Mesh) -> None:
        model, options, tp = self.model_config, self.options, mesh.tp
        self.kv_heads, self.tp, self.sequence_parallel = self.heads, tp, options.sequence_parallel
        self.norms_qk = self.norms_first = False

        def own(part: str) -> ColumnParallelLinear:  # whole on each rank: no communication
            alone = MeshAxis("alone", 0, 1, (mesh.rank,))
            return ColumnParallelLinear(weights[f"{name}.{part}.weight"], None, alone, False)

        def column(part: str) -> ColumnParallelLinear:
            return ColumnParallelLinear(weights[f"{name}.{part}.weight"], None, tp, options.sequence_parallel)

        def norm(part: str) -> RMSNorm:
            weight = weights[f"{name}.{part}_norm.weight"]
            return RMSNorm(weight, EPS, model.norm_offset, model.rounds_normalized, options.ops)

        # two levels exchange heads first
        context = "ulysses" if mesh.cp_levels is not None else options.share.context
        self.latents_travel = self.sends_latents(context, mesh)
        self.way: Latents | None = None
        self.kv_down, self.kv_norm = own("kv_a"), norm("kv_a")
        self.kv_up = own("kv_b") if self.latents_travel else column("kv_b")
        if self.latents_travel:
            from megalite.parallel.context.latents import Latents, expanding

            ring, split = context == "ring", options.sequence_parallel
            self.way = Latents(mesh.cp, tp, split, ring, self.kv_up.weight)
            self.attend = expanding(self.way)
        has_q_latent = model.q_lora_rank is not None
        self.q_down = own("q_a") if has_q_latent else None
        self.q_norm = norm("q_a") if has_q_latent else None
        self.q_up = column("q_b" if has_q_latent else "q")

    def sends_latents(self, context: str, mesh: Mesh) -> bool:
        """Return whether latents are exchanged over cp in place of keys and values."""
        split = self.options.sequence_parallel
        return latents_travel(self.model_config, context, mesh.cp.size, mesh.tp.size, split)

    def compute(self, x: Tensor, saved: Saved, state: ForwardState, residual: Tensor | None = None) -> Tensor:
        """Compute the block; each rank has whole rows, and keys and values are not computed by attention."""
        tables, plain = self.rotary_tables(state), self.model_config.qk_nope_head_dim
        latent = x
        if self.q_down is not None and self.q_norm is not None:
            latent = self.q_norm.compute(
                self.q_down.compute(x, saved), saved
            )  # [seq (/tp), batch, q_lora_rank]
        q = self.q_up.compute(latent, saved).unflatten(-1, (self.heads, -1))
        if tables is not None:
            q = _rotate_after(plain, q, *tables)
            q = q if state.query_factors is None else q.mul_(state.query_factors)
        latent, key = self._split_latent(self.kv_down.compute(x, saved))
        if tables is not None:
            key = rotate(key.unsqueeze(2), self._own(tables[0]), self._own(tables[1])).squeeze(2)
        latent = self.kv_norm.compute(latent.contiguous(), saved)  # [seq (/tp), batch, kv_lora_rank]
        if self.tp.size > 1:
            key = _shared_key(key, self.tp, self.sequence_parallel)  # [seq, batch, qk_rope_head_dim]
        k, v = _keys_and_values(self.kv_up.compute(latent, saved), key, self.heads, plain)
        out, kept = forward_keeping(q, k, v, **self.attention_options(state, self.recomputes_scores))
        saved.append((*(tables or (None, None)), state.query_factors, *kept))
        return self.out.compute(out.flatten(-2), saved, residual=residual)

    def gradient(self, grad: Tensor, saved: Saved, state: ForwardState) -> Tensor:
        dq, dx = self._attention_gradient(self.out.gradient(grad, saved), saved, state)
        dq = self.q_up.gradient(dq.flatten(2), saved)
        if self.q_down is not None and self.q_norm is not None:
            dq = self.q_down.gradient(self.q_norm.gradient(dq, saved), saved)
        return dx.add_(dq)

    def _attention_gradient(self, dout: Tensor, saved: Saved, state: ForwardState) -> tuple[Tensor, Tensor]:
        """Return the gradients of the projected queries, and of x through keys and values."""
        (cos, sin, factors, *kept), plain = saved.pop(), self.model_config.qk_nope_head_dim
        options = self.attention_options(state, self.recomputes_scores)
        dq, dk, dv = backward_of_kept(dout.unflatten(-1, (self.heads, -1)), tuple(kept), **options)
        dpacked, dkey = _keys_and_values_gradient(dk, dv, plain)
        del kept, dk, dv
        dlatent = self.kv_up.gradient(dpacked, saved)
        if self.tp.size > 1:
            dkey = _shared_key_gradient(dkey, self.tp, self.sequence_parallel)
        dlatent = self.kv_norm.gradient(dlatent, saved)
        if cos is not None:
            dkey = rotate(dkey.unsqueeze(2), self._own(cos), self._own(sin), inverse=True).squeeze(2)
            dq = dq if factors is None else dq * factors
            dq = _rotate_after(plain, dq, cos, sin, inverse=True)
        return dq, self.kv_down.gradient(torch.cat((dlatent, dkey), -1), saved)

    def _split_latent(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        """Return the latent of keys and values, not normalized, and the shared key, not rotated."""
        rotating = self.model_config.qk_rope_head_dim
        latent, key = packed.split((packed.shape[-1] - rotating, rotating), dim=-1)
        return latent, key

    def project(self, x: Tensor, state: ForwardState) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of this rank's heads.

        If latents are exchanged over cp, return queries, and the latents and rotated keys of this rank's
        tokens.
        """
        return self.project_from(x, self.query_latent(x, state), state)

    def project_from(
        self, x: Tensor, query_latent: Tensor, state: ForwardState
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the same as `project`, given `query_latent`."""
        queries, (latent, key) = self.queries(query_latent, state), self.latent(x, state)
        if self.latents_travel:
            return queries, latent, key
        if self.tp.size > 1:
            key = _SharedKey.apply(key, self.tp, self.sequence_parallel)
        return queries, *self.keys_and_values(latent, key, state.adapter_mask(Site.KV_UP_ADAPTER, self.layer))

    def query_latent(self, x: Tensor, state: ForwardState) -> Tensor:
        """Return the normalized latent of queries, [seq (/tp), batch, q_lora_rank], or x without one."""
        if self.q_down is None or self.q_norm is None:
            return x
        latent: Tensor = self.q_norm(self.q_down(x, self._own_mask(Site.Q_DOWN_ADAPTER, state)))
        return latent

    def queries(self, latent: Tensor, state: ForwardState) -> Tensor:
        """Return the rotated queries of this rank's heads, [seq, batch, heads, head_size].

        Args:
            latent: `query_latent`.
        """
        packed = self.q_up(latent, state.adapter_mask(Site.QKV_ADAPTER, self.layer))
        queries = packed.unflatten(-1, (self.heads, -1))
        tables = self.rotary_tables(state)
        if tables is None:
            return queries
        queries = _RotateQueries.apply(queries, self.model_config.qk_nope_head_dim, *tables)
        return queries if state.query_factors is None else queries * state.query_factors

    def latent(self, x: Tensor, state: ForwardState) -> tuple[Tensor, Tensor]:
        """Return the normalized latent and the rotated shared key.

        Their shapes are [seq (/tp), batch, kv_lora_rank] and [seq (/tp), batch, qk_rope_head_dim].
        """
        latent, key = self._split_latent(self.kv_down(x, self._own_mask(Site.KV_DOWN_ADAPTER, state)))
        tables = self.rotary_tables(state)
        if tables is not None:
            cos, sin = (self._own(table) for table in tables)
            key = Rotate.apply(key.unsqueeze(2), cos, sin).squeeze(2)
        return self.kv_norm(latent.contiguous()), key

    def keys_and_values(self, latent: Tensor, key: Tensor, mask: Mask | None) -> tuple[Tensor, Tensor]:
        """Return keys and values of this rank's heads.

        Their shapes are [seq, batch, heads, head_size] and [seq, batch, heads, value_size].

        Args:
            key: the shared key of the whole sequence.
        """
        plain = self.model_config.qk_nope_head_dim
        keys, values = _KeysAndValues.apply(self.kv_up(latent, mask), key, self.heads, plain)
        return keys, values

    def attention_options(self, state: ForwardState, recompute: bool = True) -> dict[str, Any]:
        options = super().attention_options(state, recompute)
        if self.latents_travel and state.part is not None:
            options["expand"] = partial(self._expand, state)
        return options

    def _expand(
        self, state: ForwardState, latent: Tensor, key: Tensor, segments: PositionSegments
    ) -> tuple[Tensor, Tensor]:
        """Return `keys_and_values` of other ranks' positions."""
        mask = self._mask(Site.KV_UP_ADAPTER, state, lambda: positions_of(segments, latent.device))
        return self.keys_and_values(latent, key, mask)

    def _own(self, x: Tensor) -> Tensor:
        """Return this rank's part of the sequence: [seq, …] -> [seq (/tp), …]."""
        if not self.sequence_parallel:
            return x
        length = len(x) // self.tp.size
        return x.narrow(0, length * self.tp.rank, length)

    def _own_mask(self, site: Site, state: ForwardState) -> Mask | None:
        """`ForwardState.adapter_mask` for this rank's part of the sequence."""
        return self._mask(site, state, lambda: self._own(state.positions))

    def _mask(self, site: Site, state: ForwardState, positions: Callable[[], Tensor]) -> Mask | None:
        if not state.lora_dropout or not state.training:
            return None
        key = state.dropout_key(site, self.layer)
        return partial(dropout, key=key, samples=state.samples, positions=positions(), p=state.lora_dropout)


def make(
    model: ModelConfig, block: BlockSpec, weights: Weights, mesh: Mesh, options: LayerOptions
) -> LatentAttention:
    """Return the module of a block, see `BlockKind.make`."""
    return LatentAttention(model, block, weights, mesh, options)
