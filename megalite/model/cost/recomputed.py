"""The operations of a layer whose results backward can compute again, with what each frees.

Every tensor that a layer keeps is needed by its backward. An operation that is recomputed therefore runs once
more whatever else is kept, as its inputs are there by then: costs and bytes of operations add up. Where one
includes another (the residual sum its norm), they are alternatives of one `Group`. Names are those of
`config.recomputation`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from megalite.config.recompute import operations_of
from megalite.model.cost.records import (
    MODES,
    AttentionCost,
    BlockCost,
    Buffer,
    Elementwise,
    LatentUpProjection,
    Matmul,
    Step,
)
from megalite.model.cost.units import Units

STREAM, NORMED, STATISTICS, PROBABILITIES = (
    "residual stream",
    "output of the norm",
    "statistics of the norm",
    "probabilities",
)


class Operation(NamedTuple):
    """An alternative for recomputing part of a layer.

    Attributes:
        names: the operations of train.recompute that it stands for.
        buffers: what is not kept.
        steps: what backward computes again.
        dropped: number of values to which dropout applies again.
        scores: attention's backward computes its probabilities again besides `steps`, a block at a time, so
        that they never exist at once.
    """

    names: tuple[str, ...]
    buffers: tuple[Buffer, ...]
    steps: tuple[Step, ...]
    dropped: int = 0
    scores: bool = False

    @property
    def restored(self) -> tuple[Buffer, ...]:
        """Return the buffers that exist again while the layer's backward runs."""
        return tuple(each for each in self.buffers if not (self.scores and each.name == PROBABILITIES))


Group = tuple[Operation, ...]
"""Alternatives, each frees more than the one before: at most one is chosen."""


def groups(units: Units, index: int) -> list[Group]:
    """Return the groups of operations that a layer (0-based) can recompute. Each frees memory."""
    attention, transformation = units.layer(index).blocks
    parallel = units.model.parallel_block != "none"
    candidates = [
        *_attention(units, attention, parallel),
        *_between(units, attention, transformation, parallel),
    ]
    candidates += _experts(transformation) if units.model.is_mixture(index) else _feed_forward(transformation)
    kept = [
        tuple(each for each in group if sum(buffer.values for buffer in each.buffers)) for group in candidates
    ]
    return [group for group in kept if group]


def chosen(options: Iterable[Group], mode: str) -> list[Operation]:
    """Return the operations that a layer's mode of train.recompute names; of alternatives, the last one."""
    names, operations = operations_of(mode), []
    for group in options:
        named = [each for each in group if names.issuperset(each.names)]
        operations += named[-1:]
    return operations


def repeated(units: Units, index: int, mode: str) -> list[Step]:
    """Return the steps of a layer (0-based) that the backward recomputes under a mode of train.recompute."""
    if mode in MODES:
        return units.layer(index).steps if mode == "full" else []
    return [step for operation in chosen(groups(units, index), mode) for step in operation.steps]


def _named(buffers: Iterable[Buffer], *names: str) -> tuple[Buffer, ...]:
    return tuple(buffer for buffer in buffers if buffer.name in names)


def _norm(units: Units) -> Elementwise:
    """Return a standalone norm, which reads its input and writes its output."""
    return Elementwise((2 * units.own,))


def _attention(units: Units, block: BlockCost, parallel: bool) -> list[Group]:
    *projections, step, out = block.steps
    assert isinstance(step, AttentionCost) and isinstance(out, Matmul)
    expansion = (
        [projections.pop()] if isinstance(projections[-1], LatentUpProjection) else []
    )  # a part of attention
    norm = Operation(("attn_norm",), _named(block.before.kept, NORMED, STATISTICS), (_norm(units),))
    inputs = (
        *_named(step.kept, "queries, keys and values"),
        *(buffer for each in projections for buffer in each.kept),
    )
    scores, rest = (
        _named(step.kept, PROBABILITIES),
        tuple(each for each in step.kept if each not in inputs and each.name != PROBABILITIES),
    )
    projected: list[Group] = [(Operation(("qkv",), inputs, tuple(projections)),)]
    names, buffers, steps = ("attention",), rest, (*expansion, step)
    # it keeps what it has exchanged, not its inputs
    if units.share.cp > 1 and units.share.context == "ulysses":
        projected, names, buffers, steps = [], ("qkv", "attention"), (*inputs, *rest), (*projections, step)  # type: ignore[assignment]
    whole = Operation(names, (*buffers, *scores), steps)
    if scores:
        again: Group = (
            Operation(("scores",), scores, (), scores=True),
            whole,
            whole._replace(names=("scores", *names), scores=True),
        )
    else:
        again = (whole,)
    last = (
        [(Operation(("attn_out",), (*out.kept, *block.after.kept), (out, block.after)),)] if parallel else []
    )
    return [(norm,), *projected, again, *last]


def _between(units: Units, attention: BlockCost, transformation: BlockCost, parallel: bool) -> list[Group]:
    """Return the residual sum between attention and feed-forward, and its norm."""
    before = transformation.before.kept
    normed = _named(before, NORMED, STATISTICS)
    norm = Operation(("mlp_norm",), normed, (_norm(units),))
    if parallel:
        return [(norm,)]
    out = attention.matmuls[-1]
    buffers = (*_named(before, STREAM), *normed, *out.kept, *attention.after.kept)
    steps = (out, Elementwise(attention.after.forward), Elementwise(transformation.before.forward))
    only_output = norm._replace(buffers=_named(normed, NORMED))  # the statistics stay with the sum
    return [(only_output, Operation(("residual",), buffers, steps, dropped=attention.dropped))]


def _feed_forward(block: BlockCost) -> list[Group]:
    into, activation, down = block.steps
    assert isinstance(into, Matmul) and isinstance(activation, Elementwise) and isinstance(down, Matmul)
    return [
        (Operation(("mlp_in",), (*activation.kept, *into.kept), (into,)),),
        (Operation(("mlp_out",), (*down.kept, *block.after.kept), (activation, down, block.after)),),
    ]


def _experts(block: BlockCost) -> list[Group]:
    kept = tuple(buffer for step in (*block.steps, block.after) for buffer in step.kept)
    return [(Operation(("experts",), kept, (*block.steps, block.after)),)]
