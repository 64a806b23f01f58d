"""The description of a convolution block for one rank and microbatch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from megalite.model.block_kind import BlockSpec
from megalite.model.cost.mixers import StateSizes, exchange_of, kept_states, mixer_cost
from megalite.model.cost.records import BlockCost, Matmul, RecurrenceCost

if TYPE_CHECKING:
    from megalite.model.cost.units import Units


def cost(units: Units, block: BlockSpec, matmuls: Mapping[str, Matmul]) -> BlockCost:
    """Return the description of the block, see `BlockKind.cost`."""
    into, out = matmuls[f"{block.slot}.in"], matmuls[f"{block.slot}.out"]
    values = units.share.tokens * out.inputs
    # B ∘ x, the convolution, and its product with C; the backward repeats them
    moved = (3 * values, 2 * values, 3 * values), (8 * values, 4 * values, 8 * values)
    sizes = StateSizes(out.inputs, units.model.conv_kernel)
    mixing = RecurrenceCost(0, 0, *moved, 1, 1, 1, kept_states(units.share, sizes))
    return mixer_cost(units, [into], [mixing], out, into.outputs, exchange_of(units.share, sizes))
