"""The description of multi-head latent attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megalite.model.cost import context_parallel
from megalite.model.cost.records import BlockCost, Buffer, Elementwise, LatentUpProjection, Matmul, Step

if TYPE_CHECKING:
    from megalite.model.cost.units import Units


def latent_block(units: Units, index: int, matmuls: dict[str, Matmul]) -> BlockCost:
    """Return the description of latent attention: latents, their norms, queries, keys and values."""
    model, share, heads = units.model, units.share, units.heads
    down, up = matmuls["attention.kv_a"], matmuls["attention.kv_b"]
    if heads.latent:
        up = LatentUpProjection.of(up, share, heads.latent)
    queries: tuple[Step, ...]
    if model.q_lora_rank is None:
        q, queries = matmuls["attention.q"], (matmuls["attention.q"],)
    else:
        q, first = matmuls["attention.q_b"], matmuls["attention.q_a"]
        queries = (first, _norm(units, "queries", model.q_lora_rank, q.keeps_input), q)
    projected = q.outputs + up.outputs
    moved = (
        2 * (q.rows * q.outputs + up.rows * up.outputs) + up.rows * heads.query * model.qk_rope_head_dim,
    )
    latent = _norm(units, "keys and values", model.kv_lora_rank or 0, up.keeps_input or heads.latent > 0)
    # Where latents travel, attention keeps them and the rotated keys of its own tokens instead of keys and
    # values.
    key = (Buffer("rotated keys", share.own_tokens * model.qk_rope_head_dim),) if heads.latent else ()
    out = matmuls["attention.out"]
    workspace = [
        Buffer("gradients of attention", share.tokens * (heads.query * model.value_size + 2 * projected)),
        *context_parallel.workspace(share, heads),
    ]
    if not units.flash:  # the reference works on copies of at least fp32
        workspace.append(
            Buffer("copies of the reference", share.tokens * 2 * (out.inputs + projected), "accumulate")
        )
    before, after = units.around(down, is_first=True)
    rotary = Elementwise(moved, moved, key)
    attention = (up, units.attention(index)) if heads.latent else (units.attention(index),)
    projections = (*queries, down, latent, rotary) if heads.latent else (*queries, down, latent, up, rotary)
    return BlockCost(before, (*projections, *attention, out), after, units.dropped, tuple(workspace))


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
