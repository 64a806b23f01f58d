"""The description of multi-head latent attention: latents, their norms, queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from megalite.model.block_kind import BlockSpec
from megalite.model.blocks.attention import context
from megalite.model.blocks.attention.context import Heads
from megalite.model.blocks.attention.cost import heads_of, scaled_queries, scores, workspace
from megalite.model.blocks.latent_attention.context import latent_width, latents_travel
from megalite.model.cost.records import (
    AttentionCost,
    BlockCost,
    Buffer,
    Elementwise,
    Matmul,
    SharedOutputsMatmul,
    Step,
    WholeRowsMatmul,
)

if TYPE_CHECKING:
    from megalite.model.cost.units import Units


def cost(units: Units, block: BlockSpec, matmuls: Mapping[str, Matmul]) -> BlockCost:
    """Return the description of the block, see `BlockKind.cost`."""
    heads = _heads(units, block.layer)
    return described(units, block, matmuls, heads, scores(units, block.layer, heads))


def described(
    units: Units, block: BlockSpec, matmuls: Mapping[str, Matmul], heads: Heads, attention: AttentionCost
) -> BlockCost:
    """Return the description, given that of attention between the projections."""
    model, share = units.model, units.share
    rotating = model.qk_rope_head_dim
    down, up = matmuls[f"{block.slot}.kv_a"], matmuls[f"{block.slot}.kv_b"]
    if heads.latent:
        up = WholeRowsMatmul.of(up, share, heads.latent)
    elif rotating:
        down = SharedOutputsMatmul(**vars(down), shared=rotating)
    queries: tuple[Step, ...]
    if model.q_lora_rank is None:
        q = first = matmuls[f"{block.slot}.q"]
        queries = (q,)
    else:
        q, first = matmuls[f"{block.slot}.q_b"], matmuls[f"{block.slot}.q_a"]
        queries = (first, _norm(units, "queries", model.q_lora_rank, q.keeps_input), q)
    projected = q.outputs + up.outputs
    rotated = 2 * (q.rows * q.outputs + up.rows * up.outputs) + up.rows * heads.query * rotating
    moved = (rotated, *scaled_queries(units, heads.query * heads.size))
    latent = _norm(units, "keys and values", model.kv_lora_rank or 0, up.keeps_input or heads.latent > 0)
    # Where latents travel, attention keeps them and the rotated keys of its own tokens instead of keys and
    # values.
    key = (Buffer("rotated keys", share.own_tokens * rotating),) if heads.latent else ()
    out = matmuls[f"{block.slot}.out"]
    gradients, copied = heads.query * model.value_size + 2 * projected, out.inputs + projected
    rotary = Elementwise(moved, moved, key)
    steps: tuple[Step, ...] = (
        (*queries, down, latent, rotary, up, attention, out)
        if heads.latent
        else (*queries, down, latent, up, rotary, attention, out)
    )
    temporaries = workspace(units, heads, gradients, copied)
    exchanges = context.exchanges(share, heads)
    keeps_input, readers = first.keeps_input or down.keeps_input, (first.name, down.name)
    return BlockCost(steps, temporaries, exchanges, keeps_input, keeps_last_input=True, readers=readers)


def _heads(units: Units, layer: int) -> Heads:
    """Return the heads of one tensor-parallel rank, with the width of latents if these travel over cp."""
    model, share = units.model, units.share
    method = share.context if share.context_inner == 1 else "ulysses"  # two levels exchange heads first
    travels = latents_travel(model, method, share.cp, share.tp, share.sequence_parallel)
    return heads_of(units, layer)._replace(latent=latent_width(model) if travels else 0)


def _norm(units: Units, of: str, width: int, keeps_output: bool) -> Elementwise:
    """Return the norm of a latent.

    It keeps its input and statistics, and its output if the next matmul needs it in backward.
    """
    values = units.share.own_tokens * width
    kept = (
        Buffer(f"latent of {of}", values),
        Buffer("statistics of its norm", units.share.own_tokens, "accumulate"),
    )
    output = (Buffer(f"normalised latent of {of}", values),) if keeps_output else ()
    return Elementwise((2 * values,), (3 * values,), (*kept, *output), width)
