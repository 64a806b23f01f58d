"""The description of a delta block for one rank and microbatch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from megalite.model.block_kind import BlockSpec
from megalite.model.blocks.delta.context import state_sizes
from megalite.model.cost.mixers import MIXED, exchange_of, kept_states, mixer_cost
from megalite.model.cost.records import BlockCost, Buffer, Elementwise, Matmul, RecurrenceCost, Step

if TYPE_CHECKING:
    from megalite.model.cost.units import Units

CHUNK = 64  # tokens, by which FLOPs are counted whatever a kernel's chunk is


def cost(units: Units, block: BlockSpec, matmuls: Mapping[str, Matmul]) -> BlockCost:
    """Return the description of the block, see `BlockKind.cost`."""
    model, tp, tokens = units.model, units.share.tp, units.share.tokens
    heads, dk, dv = model.linear_num_value_heads // tp, model.linear_key_head_dim, model.linear_value_head_dim
    sizes = state_sizes(model, units.share)
    into, out = matmuls[f"{block.slot}.in"], matmuls[f"{block.slot}.out"]
    by_channel = model.delta_decay == "channel"
    decays = heads * dk if by_channel else heads
    convolved = sizes.channels
    packed = convolved + heads * dv + heads + decays
    projections: list[Step] = [into]
    readers: tuple[str, ...] = ()
    if by_channel:
        low, f_b, g_b = (matmuls[f"{block.slot}.{name}"] for name in ("low", "f_b", "g_b"))
        latents = Buffer("latents of decay and gate", units.share.own_tokens * low.outputs)
        kept = (latents,) if f_b.keeps_input else ()
        readers = (into.name, low.name)
        projections += [low, Elementwise((3 * latents.values,), (3 * latents.values,), kept), f_b, g_b]
    mixed = (
        Buffer(MIXED, tokens * heads * dv),
        *kept_states(units.share, sizes),
    )
    mixing = (
        Elementwise((2 * tokens * convolved,), (4 * tokens * convolved,)),
        RecurrenceCost(
            tokens * heads * (CHUNK * (6 * dk + 4 * dv) + 6 * dk * dv + CHUNK**2),
            tokens * heads * (CHUNK * (16 * dk + 10 * dv) + 16 * dk * dv + 4 * CHUNK**2),
            (tokens * (2 * convolved + decays),),
            (3 * tokens * (2 * convolved + decays),),
            CHUNK,
            dk,
            dv,
            mixed,
        ),
        Elementwise((3 * tokens * heads * dv,), (5 * tokens * heads * dv,)),
    )
    return mixer_cost(units, projections, mixing, out, packed, exchange_of(units.share, sizes), readers)
