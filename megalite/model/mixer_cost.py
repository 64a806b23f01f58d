"""The description of a block with a state: projections, a recurrence or convolution, an output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megalite.model.cost.recomputed import Group, Operation, named
from megalite.model.cost.records import BlockCost, Buffer, Elementwise, Matmul, Step

if TYPE_CHECKING:
    from megalite.model.cost.units import Units

PROJECTED, MIXED, OUTPUT = "input of the mixer", "output of the recurrence", "output of the mixer"


def mixer_cost(
    units: Units,
    projections: Sequence[Step],
    mixing: Sequence[Step],
    out: Matmul,
    packed: int,
) -> BlockCost:
    """Return the description of the block.

    Args:
        projections: what computes the mixer's input.
        mixing: the steps of the mixer, which keep what it keeps besides its input.
        packed: the width of the mixer's input.
    """
    tokens = units.share.tokens
    (first, *_) = [step for step in projections if isinstance(step, Matmul)]
    kept = Buffer(PROJECTED, tokens * packed)
    y = (Buffer(OUTPUT, tokens * out.inputs),) if out.keeps_input else ()
    own = Elementwise(kept=(kept, *y))
    temporaries = (Buffer("gradients of the mixer", units.whole + tokens * (2 * packed + 3 * out.inputs)),)
    return BlockCost((*projections, *mixing, own, out), temporaries, keeps_input=first.keeps_input)


def recomputed(cost: BlockCost) -> list[Group]:
    """Return what the backward can compute again: the projection, and the mixer."""
    *steps, own, _out = cost.steps
    last = max(number for number, step in enumerate(steps) if isinstance(step, Matmul))
    projections, mixing = tuple(steps[: last + 1]), tuple(steps[last + 1 :])
    kept = tuple(buffer for step in mixing for buffer in step.kept)
    packed = (*named(own.kept, PROJECTED), *(buffer for step in projections for buffer in step.kept))
    return [
        (Operation(("mixer_in",), packed, projections),),
        (Operation(("mixer",), (*kept, *named(own.kept, OUTPUT)), mixing),),
    ]
