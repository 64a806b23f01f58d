"""The description of indexed attention: that of latent attention over the selected rows, and the indexer's.

In a warm-up attention is dense, and nothing but the indexers is trained: plans describe the sparse phase.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from megalite.model.block_kind import BlockSpec
from megalite.model.blocks.attention import context
from megalite.model.blocks.attention.cost import heads_of, scores, workspace
from megalite.model.blocks.attention.cost import recomputed as attention_recomputed
from megalite.model.blocks.indexed_attention.context import with_indexer
from megalite.model.blocks.latent_attention import cost as latent
from megalite.model.blocks.latent_attention.context import latent_width
from megalite.model.cost.recomputed import Group, Operation
from megalite.model.cost.records import (
    AttentionCost,
    BlockCost,
    Buffer,
    DetachedMatmul,
    Elementwise,
    Matmul,
    SelectionCost,
    Step,
)

if TYPE_CHECKING:
    from megalite.model.cost.units import Units

SELECTED = "selected rows"


def cost(units: Units, block: BlockSpec, matmuls: Mapping[str, Matmul]) -> BlockCost:
    """Return the description of the block, see `BlockKind.cost`."""
    model, share = units.model, units.share
    heads = heads_of(units, block.layer)
    if share.cp > 1 and share.context != "ulysses":
        heads = heads._replace(latent=latent_width(model))
    top, selecting = model.index_topk or 0, model.selecting_layer(block.layer) == block.layer
    selects, trained = share.row > top, model.index_loss_coef > 0 and not units.lora.rank
    kept: tuple[Buffer, ...] = context.kept(share, heads)
    if selects:
        kept = (*kept, Buffer("log-sum-exp", share.tokens * heads.query, "accumulate"))
        by_heads = share.cp > 1 and share.context == "ulysses"
        queries = share.tokens * (share.cp if by_heads else 1)
        if selecting:
            kept = (*kept, Buffer(SELECTED, queries * top, "row", "full"))
    else:
        kept = scores(units, block.layer, heads).kept
    attention = AttentionCost(
        share.batch, share.row, heads.query, heads.size, heads.value_size, top, kept, share.cp, selected=True
    )
    plain = latent.described(units, block, matmuls, heads, attention)
    if selects:  # no copies of whole queries, keys and values
        plain = replace(plain, workspace=workspace(units, heads, _gradients(plain), 0))
    # FLOPs of a token are counted on a row of one, before its length is known
    if not selecting or not (selects or trained or share.row == 1):
        return plain
    steps = list(plain.steps)
    place = steps.index(attention)
    steps[place:place] = _indexer(units, block, selects, trained)
    return replace(
        plain,
        steps=tuple(steps),
        exchanges=with_indexer(plain.exchanges, model, share, selects, trained),
        keeps_input=plain.keeps_input or trained,
    )


def _gradients(plain: BlockCost) -> int:
    out, others = plain.matmuls[-1], plain.matmuls
    projected = sum(each.outputs for each in others if each.name.endswith(("q_b", "kv_b")))
    return out.inputs + 2 * projected


def _indexer(units: Units, block: BlockSpec, selects: bool, trained: bool) -> tuple[Step, ...]:
    """Return the indexer's projections, the norm of its keys, and its scores with the loss."""
    model, share = units.model, units.share
    own, heads, dim = share.own_tokens, model.index_n_heads, model.index_head_dim

    def matmul(part: str, outputs: int, inputs: int, spread: int = 0) -> DetachedMatmul:
        return DetachedMatmul(
            f"{block.slot}.indexer.{part}",
            own,
            outputs,
            inputs,
            outputs * inputs,
            "outputs",
            frozen=not trained,
            ranks=share.tokens // own,
            at_least_fp32=part == "weights",
            spread=spread,
            cp=share.cp,
            input_of=f"{block.slot}.q_b" if part == "q" else "",
        )

    normed = (
        Buffer("keys of the indexer", own * dim),
        Buffer("statistics of their norm", 2 * own, "accumulate"),
    )
    norm = Elementwise((2 * own * dim,), (3 * own * dim,), normed if trained else (), 2 * dim)
    values = own * heads * dim + share.tokens * share.cp * dim
    gradients = (
        Buffer("gradients of the indexer's queries and keys", values),
        Buffer("gradients of its weights", own * heads, "accumulate"),
    )
    scoring = SelectionCost(
        share.batch,
        share.row,
        heads,
        dim,
        model.index_topk or 0,
        gradients if trained else (),
        share.cp * (share.tokens // own),
        trained,
        share.tokens if trained and selects else 0,
        share.tokens // own,
    )
    return (
        matmul("q", heads * dim, model.q_lora_rank or 0),
        matmul("k", dim, model.hidden_size, dim),
        norm,
        matmul("weights", heads, model.hidden_size),
        scoring,
    )


def recomputed(units: Units, cost: BlockCost) -> list[Group]:
    """Return what the backward can compute again: as latent attention. What the indexer keeps stays, and so
    does the selection."""
    own = [step for step in cost.steps if isinstance(step, SelectionCost | DetachedMatmul)]
    if own:
        first, last = cost.steps.index(own[0]), cost.steps.index(own[-1])
        cost = replace(cost, steps=(*cost.steps[:first], *cost.steps[last + 1 :]))
    return [tuple(map(_with_selection, group)) for group in attention_recomputed(units, cost)]


def _with_selection(operation: Operation) -> Operation:
    """Return an operation that frees all but the selection."""
    return operation._replace(buffers=tuple(each for each in operation.buffers if each.name != SELECTED))
