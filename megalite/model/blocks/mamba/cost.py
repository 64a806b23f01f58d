"""The description of a mamba block for one rank and microbatch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from megalite.model.block_kind import BlockSpec
from megalite.model.blocks.mamba.context import state_sizes
from megalite.model.cost.mixers import MIXED, exchange_of, kept_states, mixer_cost
from megalite.model.cost.records import BlockCost, Buffer, Elementwise, Matmul, RecurrenceCost

if TYPE_CHECKING:
    from megalite.model.cost.units import Units

CHUNK = 128  # tokens, by which FLOPs are counted whatever a kernel's chunk is


def cost(units: Units, block: BlockSpec, matmuls: Mapping[str, Matmul]) -> BlockCost:
    """Return the description of the block, see `BlockKind.cost`."""
    model, tp, tokens = units.model, units.share.tp, units.share.tokens
    heads, width, size = model.mamba_num_heads // tp, model.mamba_head_dim, model.mamba_state_size
    sizes = state_sizes(model, units.share)
    into, out = matmuls[f"{block.slot}.in"], matmuls[f"{block.slot}.out"]
    inner, convolved, groups = heads * width, sizes.channels, sizes.shared
    packed = inner + convolved + heads
    mixed = [Buffer(MIXED, tokens * inner)]
    if model.mamba_norm != "none" and model.mamba_n_groups < tp:  # a group has heads on several ranks
        mixed.append(Buffer("its squares", tokens * groups, "accumulate"))
    mixed += kept_states(units.share, sizes)
    # products of C and B are those of a group, all others those of a head
    products, states = 2 * CHUNK * groups * size, 2 * heads * size * width
    forward = heads * 2 * CHUNK * width + products + 2 * states
    mixing = (
        Elementwise((2 * tokens * convolved,), (4 * tokens * convolved,)),
        RecurrenceCost(
            tokens * forward,
            tokens * (2 * forward + states + products),
            (tokens * (2 * convolved + heads),),
            (3 * tokens * (2 * convolved + heads),),
            CHUNK,
            size,
            width,
            tuple(mixed),
        ),
        Elementwise((4 * tokens * inner,), (7 * tokens * inner,)),
    )
    return mixer_cost(units, [into], mixing, out, packed, exchange_of(units.share, sizes))
