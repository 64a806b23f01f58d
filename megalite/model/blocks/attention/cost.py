"""The description of attention for one rank and microbatch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from megalite.config.sections.model import ModelConfig
from megalite.model.block_kind import BlockSpec
from megalite.model.blocks.attention import context
from megalite.model.blocks.attention.context import Heads
from megalite.model.blocks.attention.parameters import on_one_rank
from megalite.model.cost.recomputed import Group, Operation, named
from megalite.model.cost.records import (
    AttentionCost,
    BlockCost,
    Buffer,
    Elementwise,
    Kernels,
    Matmul,
    Step,
    WholeRowsMatmul,
)

if TYPE_CHECKING:
    from megalite.model.cost.units import Units

WIDEST_HEAD = 256  # largest head size that the Triton kernels of `megalite_kernels.attention` support
REFERENCE_BLOCK = 64  # queries per block of the reference in `megalite_kernels.attention`
INPUTS, PROBABILITIES = "queries, keys and values", "probabilities"


def cost(units: Units, block: BlockSpec, matmuls: Mapping[str, Matmul]) -> BlockCost:
    """Return the description of the block, see `BlockKind.cost`."""
    model, tokens, heads = units.model, units.share.tokens, heads_of(units, block.layer)
    qkv, out = matmuls[f"{block.slot}.qkv"], matmuls[f"{block.slot}.out"]
    output = heads.query * heads.value_size
    packed = (heads.query + heads.kv) * heads.size + heads.kv * heads.value_size
    gate = qkv.outputs - packed  # of a token's output
    normed: tuple[Buffer, ...] = ()
    if model.qk_norm != "none":
        both = heads.query + heads.kv
        statistics = {"full": 2, "head": both, "each_head": 2 * both}[model.qk_norm]
        normed = (
            Buffer("normed queries and keys", tokens * both * heads.size),
            Buffer("their statistics", tokens * statistics, "accumulate"),
        )
    scaled = scaled_queries(units, heads.query * heads.size)
    moved = (2 * tokens * packed,) * (2 if normed else 1) + scaled
    gates = (Buffer("gate of the output", tokens * gate),) if gate else ()
    summed = 2 * tokens if model.qk_norm == "full" else 0
    rotary = Elementwise(moved, moved, (*normed, *gates), summed=summed)
    attention = scores(units, block.layer, heads)
    # the output's backward computes the gated output again
    gating: tuple[Step, ...] = (
        (Elementwise((tokens * (2 * output + gate),), (tokens * (5 * output + 3 * gate),)),) if gate else ()
    )
    steps: tuple[Step, ...] = (qkv, rotary, attention, *gating, out)
    temporaries = workspace(units, heads, output + 2 * packed + 2 * gate, output + packed)
    exchanges = context.exchanges(units.share, heads)
    return BlockCost(
        steps, temporaries, exchanges, qkv.keeps_input, output=gating, keeps_last_input=not gating
    )


def heads_of(units: Units, layer: int) -> Heads:
    """Return the heads of one tensor-parallel rank in a layer."""
    shape = on_one_rank(units.model.attention_shape(layer), units.share.tp)
    return Heads(shape.heads, shape.kv_heads, shape.head_size, shape.value_size)


def scaled_queries(units: Units, query: int) -> tuple[int, ...]:
    """Return the values that factors on queries move; none where all factors are 1.

    Args:
        query: values of a token's queries.
    """
    acts = units.share.row > (units.model.query_scale_positions or units.share.row)
    return (2 * units.share.tokens * query,) if acts else ()


def workspace(units: Units, heads: Heads, gradients: int, copied: int) -> tuple[Buffer, ...]:
    """Return the temporaries of the backward.

    Args:
        gradients: values of a token's gradients around attention.
        copied: values of a token's queries, keys, values and output.
    """
    tokens = units.share.tokens
    buffers = (
        Buffer("gradients of attention", tokens * gradients),
        *context.workspace(units.share, heads),
    )
    if units.flash:
        return buffers
    # the reference works on copies of at least fp32
    return (*buffers, Buffer("copies of the reference", tokens * 2 * copied, "accumulate"))


def scores(units: Units, layer: int, heads: Heads) -> AttentionCost:
    """Return the attention of a layer, between its projections."""
    model, share = units.model, units.share
    kept = (*context.kept(share, heads), *_probabilities(units, layer, heads.query))
    return AttentionCost(
        share.batch,
        share.row,
        heads.query,
        heads.size,
        heads.value_size,
        model.window(layer),
        kept,
        share.cp,
        model.attention_dropout > 0,
    )


def _probabilities(units: Units, layer: int, heads: int) -> tuple[Buffer, ...]:
    """Return what attention keeps of its scores.

    This is the log-sum-exp, or the reference's probabilities, block by block of queries, of the keys that a
    block sees.
    """
    model, share = units.model, units.share
    by_positions = share.cp > 1 and share.context != "ulysses"  # never keeps probabilities
    if units.flash or by_positions or model.has_sinks(layer):
        return (Buffer("log-sum-exp", share.tokens * heads, "accumulate"),)
    if model.attention_softcap is not None:
        return ()
    window, seen = model.window(layer) or share.row, 0
    for first in range(0, share.row, REFERENCE_BLOCK):
        stop = min(first + REFERENCE_BLOCK, share.row)
        seen += (stop - first) * (stop - max(first - window + 1, 0))
    return (Buffer(PROBABILITIES, share.batch * heads * seen // share.cp, "accumulate", "none"),)


def keeps_scores(model: ModelConfig, kernels: Kernels) -> bool:
    """Return whether attention in 16 bits on a GPU keeps probabilities, and not one number per query."""
    options = (
        model.sliding_window,
        model.attention_softcap,
        model.attention_dropout or None,
        kernels.documents or None,
    )
    sizes = [max(shape.head_size, shape.value_size) for shape in model.attention_shapes]
    multiples = all(size % 8 == 0 for size in sizes)
    plain = all(option is None for option in options) and not kernels.deterministic and multiples
    return max(sizes) > WIDEST_HEAD or not (plain or kernels.kernels != "torch")


def recomputed(units: Units, cost: BlockCost) -> list[Group]:
    """Return what the backward can compute again: projections, scores and attention."""
    (step,) = cost.attentions
    projections = list(cost.steps[: cost.steps.index(step)])
    expansion: list[Step] = (
        [projections.pop()] if isinstance(projections[-1], WholeRowsMatmul) else []
    )  # a part of attention
    inputs = (*named(step.kept, INPUTS), *(buffer for each in projections for buffer in each.kept))
    probabilities = named(step.kept, PROBABILITIES)
    rest = tuple(each for each in step.kept if each not in inputs and each.name != PROBABILITIES)
    projected: list[Group] = [(Operation(("qkv",), inputs, tuple(projections)),)]
    names: tuple[str, ...] = ("attention",)
    buffers, steps = rest, (*expansion, step)
    # it keeps what it has exchanged, not its inputs
    if units.share.cp > 1 and units.share.context == "ulysses":
        projected, names, buffers = [], ("qkv", "attention"), (*inputs, *rest)
        steps = (*projections, step)
    whole = Operation(names, (*buffers, *probabilities), steps)
    if not probabilities:
        return [*projected, (whole,)]
    # a block at a time, so that the probabilities never exist at once
    once = Operation(("scores",), probabilities, (), scores=True, streamed=probabilities)
    both = whole._replace(names=("scores", *names), scores=True, streamed=probabilities)
    return [*projected, (once, whole, both)]
