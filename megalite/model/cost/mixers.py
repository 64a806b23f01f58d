"""The description of a block with a state: projections, a recurrence or convolution, an output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from megalite.model.cost.recomputed import Group, Operation, named
from megalite.model.cost.records import BlockCost, Buffer, ContextExchange, Elementwise, Matmul, Share, Step

if TYPE_CHECKING:
    from megalite.model.cost.units import Units

PROJECTED, MIXED, OUTPUT = "input of the mixer", "output of the recurrence", "output of the mixer"


def mixer_cost(
    units: Units,
    projections: Sequence[Step],
    mixing: Sequence[Step],
    out: Matmul,
    packed: int,
    exchange: ContextExchange | None = None,
) -> BlockCost:
    """Return the description of the block.

    Args:
        projections: what computes the mixer's input.
        mixing: the steps of the mixer, which keep what it keeps besides its input.
        packed: the width of the mixer's input.
        exchange: over cp.
    """
    tokens = units.share.tokens
    (first, *_) = [step for step in projections if isinstance(step, Matmul)]
    kept = Buffer(PROJECTED, tokens * packed)
    y = (Buffer(OUTPUT, tokens * out.inputs),) if out.keeps_input else ()
    own = Elementwise(kept=(kept, *y))
    temporaries = (Buffer("gradients of the mixer", units.whole + tokens * (2 * packed + 3 * out.inputs)),)
    exchanges = () if exchange is None else (exchange,)
    steps = (*projections, *mixing, own, out)
    return BlockCost(steps, temporaries, exchanges, first.keeps_input, keeps_last_input=out.keeps_input)


class StateSizes(NamedTuple):
    """What crosses from one part of a row to another, of one tp rank.

    Attributes:
        channels, taps: those of the convolution.
        states: heads, and the sizes of keys and values; None: there is only a convolution.
        diagonal: the number of factors of a head if the state decays without a delta rule; 0: a matrix.
        exchanged: values of a token that heads exchange, at the compute dtype.
        wide: the same in fp32: decays and strengths.
        back: values of a token that come back.
    """

    channels: int
    taps: int
    states: tuple[int, int, int] | None = None
    diagonal: int = 0
    exchanged: int = 0
    wide: int = 0
    back: int = 0


def segments_of(share: Share) -> int:
    """Return the number of segments of positions that a cp rank has (with balanced parts at least)."""
    return 1 if share.context == "ulysses" else 2


def exchange_of(share: Share, sizes: StateSizes) -> ContextExchange | None:
    """Return the exchange of a block over cp (`parallel.context.passed_states`, `exchanged_heads`)."""
    if share.cp == 1:
        return None
    segments = segments_of(share)
    everywhere = share.cp * segments * share.batch  # all-gathered
    halos = everywhere * (sizes.taps - 1) * sizes.channels
    if sizes.states is None:
        return ContextExchange("states", share.cp, halos, halos)
    heads, dk, dv = sizes.states
    if share.context == "ulysses":
        tokens = share.tokens
        there, wide = tokens * sizes.exchanged, tokens * sizes.wide
        back = tokens * sizes.back
        # inputs there, the output back; in backward the same again, and the gradients of inputs
        return ContextExchange(
            "ulysses", share.cp, halos + there + back, halos + 2 * there + back, 2 * wide, states=wide
        )
    factor = dk * dk if not sizes.diagonal else sizes.diagonal
    added = everywhere * heads * dk * dv
    return ContextExchange(
        "states", share.cp, halos, halos, added, states=everywhere * heads * factor + added
    )


def kept_states(share: Share, sizes: StateSizes) -> tuple[Buffer, ...]:
    """Return what the mixer keeps of other ranks: halos, states before segments, and all factors."""
    if share.cp == 1:
        return ()
    segments = segments_of(share)
    halos = Buffer("halos", segments * share.batch * (sizes.taps - 1) * sizes.channels)
    if sizes.states is None or share.context == "ulysses":
        return (halos,)
    heads, dk, dv = sizes.states
    factor = dk * dk if not sizes.diagonal else sizes.diagonal
    every = share.batch * heads * segments
    return halos, Buffer("states of segments", every * (dk * dv + share.cp * factor), "accumulate")


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
