"""The description of a block with a state: projections, a recurrence or convolution, an output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from megalite.config.dims import block_length, whole_heads
from megalite.model.cost.recomputed import Group, Operation, named
from megalite.model.cost.records import BlockCost, Buffer, ContextExchange, Elementwise, Matmul, Share, Step

if TYPE_CHECKING:
    from megalite.model.cost.units import Units

NARROW, WIDE = 2, 4  # bytes
PROJECTED, MIXED, OUTPUT = "input of the mixer", "output of the recurrence", "output of the mixer"


def mixer_cost(
    units: Units,
    projections: Sequence[Step],
    mixing: Sequence[Step],
    out: Matmul,
    packed: int,
    exchange: ContextExchange | None = None,
    readers: tuple[str, ...] = (),
) -> BlockCost:
    """Return the description of the block.

    Args:
        projections: what computes the mixer's input.
        mixing: the steps of the mixer, which keep what it keeps besides its input.
        packed: the width of the mixer's input.
        exchange: over cp.
        readers: as in `BlockCost`.
    """
    tokens = units.share.tokens
    (first, *others) = [step for step in projections if isinstance(step, Matmul)]
    keeps_input = any(each.keeps_input for each in (first, *others) if each is first or each.name in readers)
    kept = Buffer(PROJECTED, tokens * packed)
    y = (Buffer(OUTPUT, tokens * out.inputs),) if out.keeps_input else ()
    own = Elementwise(kept=(kept, *y))
    temporaries = (Buffer("gradients of the mixer", units.whole + tokens * (2 * packed + 3 * out.inputs)),)
    exchanges = () if exchange is None else (exchange,)
    steps = (*projections, *mixing, own, out)
    return BlockCost(
        steps,
        temporaries,
        exchanges,
        keeps_input,
        keeps_last_input=out.keeps_input,
        readers=readers,
    )


class StateSizes(NamedTuple):
    """What crosses from one part of a row to another, of one tp rank.

    Attributes:
        channels, taps: those of the convolution.
        states: heads, and the sizes of keys and values; None: there is only a convolution.
        shared: key heads or groups, which heads have in common.
        diagonal: the number of factors of a head if the state decays without a delta rule; 0: a matrix.
        exchanged: values of a token that heads exchange, at the compute dtype; as many as the values of the
            output come back.
        wide: the same in fp32: decays and strengths.
    """

    channels: int
    taps: int
    states: tuple[int, int, int] | None = None
    shared: int = 1
    diagonal: int = 0
    exchanged: int = 0
    wide: int = 0


def segments_of(share: Share) -> int:
    """Return the number of segments of positions that a cp rank has, with balanced parts at most: documents
    are unknown."""
    if share.context == "ulysses":
        return 1
    return share.sequence // block_length(share.sequence) if share.parts == "balanced" else 2


def exchanges_heads(share: Share, sizes: StateSizes) -> bool:
    """Return whether a recurrence exchanges heads over cp; otherwise it passes states.

    Under `parallel.context: auto` it does what sends fewer bytes in forward and backward, counted as in a run
    in 16 bits, so that a proof in more bits communicates in the same way.
    """
    if share.cp == 1 or sizes.states is None or not share.by_bytes:
        return share.context == "ulysses"
    if not whole_heads(sizes.states[0], sizes.shared, share.cp):
        return False
    by_heads, by_states = exchanged_heads(share, sizes), passed_states(share, sizes)
    return by_heads.size_in_bytes(NARROW, WIDE) < by_states.size_in_bytes(NARROW, WIDE)


def exchange_of(share: Share, sizes: StateSizes) -> ContextExchange | None:
    """Return the exchange of a block over cp."""
    if share.cp == 1:
        return None
    by_heads = sizes.states is not None and exchanges_heads(share, sizes)
    return exchanged_heads(share, sizes) if by_heads else passed_states(share, sizes)


def exchanged_heads(share: Share, sizes: StateSizes) -> ContextExchange:
    """Return the exchange of `parallel.context.exchanged_heads`.

    The inputs go there, and the output comes back; in backward the same again, and the inputs' gradients.
    """
    assert sizes.states is not None
    heads, _, dv = sizes.states
    there, wide, back = (share.tokens * values for values in (sizes.exchanged, sizes.wide, heads * dv))
    halos = _halos(share, sizes)
    return ContextExchange(
        "ulysses", share.cp, halos + there + back, halos + 2 * there + back, 2 * wide, states=wide
    )


def passed_states(share: Share, sizes: StateSizes) -> ContextExchange:
    """Return the exchange of `parallel.context.passed_states`.

    These are the effects of segments, and the gradients of the states before them.
    """
    halos = _halos(share, sizes)
    if sizes.states is None:
        return ContextExchange("states", share.cp, halos, halos)
    heads, dk, dv = sizes.states
    segments = share.cp * segments_of(share) * share.batch
    added = segments * heads * dk * dv
    factors = segments * heads * _factors(sizes)
    return ContextExchange("states", share.cp, halos, halos, added, states=factors + added)


def kept_states(share: Share, sizes: StateSizes) -> tuple[Buffer, ...]:
    """Return what the mixer keeps of other ranks: halos, states before segments, and all factors."""
    if share.cp == 1:
        return ()
    halos = Buffer("halos", _halos(share, sizes) // share.cp)
    if sizes.states is None or exchanges_heads(share, sizes):
        return (halos,)
    heads, dk, dv = sizes.states
    every = share.batch * heads * segments_of(share)
    return halos, Buffer("states of segments", every * (dk * dv + share.cp * _factors(sizes)), "accumulate")


def _halos(share: Share, sizes: StateSizes) -> int:
    """Return the values of the ends of the segments of all ranks."""
    return share.cp * segments_of(share) * share.batch * (sizes.taps - 1) * sizes.channels


def _factors(sizes: StateSizes) -> int:
    """Return the number of factors of a head's state."""
    assert sizes.states is not None
    return sizes.diagonal or sizes.states[1] ** 2


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
