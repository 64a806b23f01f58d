"""The description of a dense feed-forward for one rank and microbatch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from megalite.model.block_kind import BlockSpec
from megalite.model.cost.recomputed import Group, Operation
from megalite.model.cost.records import BlockCost, Buffer, Elementwise, Matmul

if TYPE_CHECKING:
    from megalite.model.cost.units import Units


def cost(units: Units, block: BlockSpec, matmuls: Mapping[str, Matmul]) -> BlockCost:
    """Return the description of the block, see `BlockKind.cost`."""
    return feed_forward(units, matmuls[f"{block.slot}.in"], matmuls[f"{block.slot}.down"])


def feed_forward(units: Units, into: Matmul, down: Matmul) -> BlockCost:
    """Return the description of a feed-forward with these matmuls."""
    tokens = units.share.tokens
    inner = tokens * down.inputs
    forward, backward = (3, 6) if units.model.gated_mlp else (2, 4)
    if units.model.mlp_multipliers is not None:  # a copy with the scaled gate
        forward, backward = forward + 6, backward + 8
    curves: tuple[Buffer, ...] = ()
    if units.model.hidden_act == "xielu":  # one operation after another, in at least fp32
        forward, backward = forward + 22, backward + 44
        curves = (Buffer("parts of the activation", 3 * inner, "accumulate"),)
    # The activation's input is kept; its output is recomputed.
    kept = (Buffer("input of the activation", tokens * into.outputs),)
    activation = Elementwise((forward * inner,), (backward * inner,), kept)
    workspace = Buffer("gradients of the feed-forward", units.whole + 2 * inner + tokens * into.outputs)
    return BlockCost((into, activation, down), (workspace, *curves), keeps_input=into.keeps_input)


def recomputed(cost: BlockCost) -> list[Group]:
    """Return what the backward can compute again: the input of the activation, and the output."""
    into, activation, down = cost.steps
    assert isinstance(into, Matmul) and isinstance(activation, Elementwise) and isinstance(down, Matmul)
    return [
        (Operation(("mlp_in",), (*activation.kept, *into.kept), (into,)),),
        (Operation(("mlp_out",), (*down.kept, *cost.after.kept), (activation, down, cost.after)),),
    ]
