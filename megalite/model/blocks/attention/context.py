"""What attention keeps and exchanges under context parallelism, by method (`megalite.parallel.context`).

Each rank computes an equal part of the visible pairs: with ulysses those of some heads over whole rows, else
those of its positions. The exchanged values are those of the table in docs/context-parallel.md.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from megalite.model.cost.records import Buffer, ContextExchange, Share

FP32_COPIES = {"gather": 3, "ring": 4}
"""Gradients of keys and values that exist at once. gather: as computed, stacked, ordered by rank. ring: of
the rank's own part, of the part that is there, as computed, and on their way."""


class Heads(NamedTuple):
    """Query and key-value heads of one tensor-parallel rank.

    Attributes:
        latent: width of a token's latent and shared key, if these travel over cp; 0: keys and values do.
    """

    query: int
    kv: int
    size: int
    value_size: int
    latent: int = 0


def levels(share: Share, heads: Heads) -> tuple[tuple[Share, Heads], ...]:
    """Return the exchanges over cp, each with the share of its ranks.

    There is one, or with `context_inner` two: Ulysses inside and a ring around it.
    """
    inner = share.context_inner
    if inner == 1:
        return ((share, heads),)
    within = replace(share, cp=inner, context="ulysses", context_inner=1)
    between = replace(share, sequence=share.sequence * inner, cp=share.cp // inner, context_inner=1)
    return (within, heads), (
        between,
        heads._replace(query=heads.query // inner, kv=max(heads.kv, inner) // inner),
    )


def kept(share: Share, heads: Heads) -> tuple[Buffer, ...]:
    """Return the tensors that attention keeps for its backward: queries, keys, values and the output.

    Latents are kept by the steps that compute them.
    """
    share, heads = levels(share, heads)[0]
    by_heads = share.cp > 1 and share.context == "ulysses"
    packed = heads.query * heads.size
    if not heads.latent:
        packed = (heads.query + _kv_copies(share, heads)) * heads.size + _kv_copies(
            share, heads
        ) * heads.value_size
    output = share.tokens * heads.query * heads.value_size
    buffers = Buffer("queries, keys and values", share.tokens * packed), Buffer("output", output)
    return (*buffers, Buffer("output with whole rows", output)) if by_heads else buffers


def exchange(share: Share, heads: Heads) -> ContextExchange:
    """Return the exchange of one layer and microbatch at one level."""
    if share.cp == 1:
        return ContextExchange()
    if share.context == "ulysses":  # queries, keys and values there, the output back
        values = share.tokens * (heads.query + _kv_copies(share, heads)) * (heads.size + heads.value_size)
        return ContextExchange("ulysses", share.cp, values, values)
    if heads.latent:  # all-gathered by either method
        values = share.own_tokens * share.cp * heads.latent
        return ContextExchange("gather", share.cp, values, values, values)
    values, merged = _whole(share, heads), share.tokens * heads.query * heads.value_size
    return ContextExchange(share.context, share.cp, values, values, values, merged)


def exchanges(share: Share, heads: Heads) -> tuple[ContextExchange, ...]:
    """Return the exchange of each level, or none without context parallelism."""
    return () if share.cp == 1 else tuple(exchange(*level) for level in levels(share, heads))


def workspace(share: Share, heads: Heads) -> tuple[Buffer, ...]:
    """Return the temporaries of attention's backward for the keys and values of other ranks."""
    share, heads = levels(share, heads)[-1]
    if share.cp == 1 or share.context == "ulysses":
        return ()
    whole = _whole(share, heads)
    if heads.latent:
        at_once = whole if share.context == "gather" else whole // share.cp
        latents = 3 * share.tokens * share.cp * heads.latent  # as they arrive, in order, and their gradient
        return (
            # and their gradients at the compute dtype
            Buffer("keys and values of other ranks", 2 * at_once + latents),
            Buffer("gradients of keys and values", at_once, "accumulate"),
        )
    others, gradients = (
        (whole, whole) if share.context == "gather" else (2 * whole // share.cp, whole // share.cp)
    )
    return (
        Buffer("keys and values of other ranks", others),
        Buffer("gradients of keys and values", FP32_COPIES[share.context] * gradients, "accumulate"),
    )


def _kv_copies(share: Share, heads: Heads) -> int:
    """Return the number of key-value heads; Ulysses counts a head once for each rank that has it."""
    return max(heads.kv, share.cp) if share.cp > 1 and share.context == "ulysses" else heads.kv


def _whole(share: Share, heads: Heads) -> int:
    """Return the number of values in the keys and values of whole rows."""
    return share.tokens * share.cp * heads.kv * (heads.size + heads.value_size)
