"""What attention keeps and exchanges under context parallelism, by method (`megalite.parallel.context`).

Each rank computes an equal part of the visible pairs: with ulysses those of some heads over whole rows, else
those of its positions. The exchanged values are those of the table in docs/context-parallel.md.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from megalite.model.cost.records import Buffer, Share

if TYPE_CHECKING:
    from megalite.config.sections.model import ModelConfig

FP32_COPIES = {"gather": 3, "ring": 4}
"""Gradients of keys and values that exist at once. gather: as computed, stacked, ordered by rank. ring: of
the rank's own part, of the part that is there, as computed, and on their way."""


class ContextExchange(NamedTuple):
    """Number of values of the tensors that travel over cp; a rank sends (cp − 1) / cp of them.

    Attributes:
        forward: at the compute dtype, again wherever the forward is recomputed.
        backward: at the compute dtype.
        summed: gradients, in at least fp32, in backward.
    """

    forward: int = 0
    backward: int = 0
    summed: int = 0


class Heads(NamedTuple):
    """The query and key-value heads of one tensor-parallel rank.

    Attributes:
        latent: width of a token's latent and shared key, if these travel over cp; 0: keys and values do.
    """

    query: int
    kv: int
    size: int
    value_size: int
    latent: int = 0


def latents_travel(model: ModelConfig, method: str, cp: int, tp: int, sequence_parallel: bool) -> bool:
    """Whether attention over cp exchanges latents, from which each rank computes keys and values, instead of
    keys and values.

    It does where a rank sends fewer bytes so. The products that are added take about kv_lora_rank operations
    per byte that is saved, and a GPU computes more than those while a byte passes its links (an H100 over
    NVLink about 1,300).
    """
    if model.kv_lora_rank is None or cp == 1 or method == "ulysses":
        return False
    keys_and_values = model.num_attention_heads // tp * (model.head_size + model.value_size)
    # each has the latents of a part of the tokens, but keys and values of all
    senders = tp if sequence_parallel else 1
    return model.kv_lora_rank + model.qk_rope_head_dim < keys_and_values * senders


def levels(share: Share, heads: Heads) -> tuple[tuple[Share, Heads], ...]:
    """What exchanges over cp: one method, or with `context_inner` ulysses and around it a ring, each with the
    share of its own ranks."""
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
    """Queries, keys, values and the output, for the backward of attention; latents are kept by the steps that
    compute them."""
    share, heads = levels(share, heads)[0]
    by_heads = share.cp > 1 and share.context == "ulysses"
    packed = heads.query * heads.size
    if not heads.latent:
        packed = (heads.query + _kv_copies(share, heads)) * heads.size + _kv_copies(
            share, heads
        ) * heads.value_size
    output = share.tokens * heads.query * heads.value_size
    found = Buffer("queries, keys and values", share.tokens * packed), Buffer("output", output)
    return (*found, Buffer("output with whole rows", output)) if by_heads else found


def exchange(share: Share, heads: Heads) -> ContextExchange:
    """What travels for one layer and microbatch, of one level."""
    if share.cp == 1:
        return ContextExchange()
    if share.context == "ulysses":  # queries, keys and values there, the output back
        values = share.tokens * (heads.query + _kv_copies(share, heads)) * (heads.size + heads.value_size)
        return ContextExchange(values, values)
    values = share.own_tokens * share.cp * heads.latent if heads.latent else _whole(share, heads)
    return ContextExchange(values, values, values)


def workspace(share: Share, heads: Heads) -> tuple[Buffer, ...]:
    """Temporaries of attention's backward in addition to those of one rank: others' keys and values, and
    gradients of them."""
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
    """Key-value heads, those that go to several ranks counted for each (ulysses)."""
    return max(heads.kv, share.cp) if share.cp > 1 and share.context == "ulysses" else heads.kv


def _whole(share: Share, heads: Heads) -> int:
    """Values of the keys and values of whole rows."""
    return share.tokens * share.cp * heads.kv * (heads.size + heads.value_size)
