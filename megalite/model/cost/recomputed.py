"""The operations of a layer whose results backward can compute again, with what each frees.

Every tensor that a layer keeps is needed by its backward. An operation that is recomputed therefore runs once
more whatever else is kept, as its inputs are there by then: costs and bytes of operations add up. Where one
includes another (the residual sum its norm), they are alternatives of one `Group`. Names are those of
`config.recompute`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from megalite.config.recompute import operations_of
from megalite.model.cost.records import MODES, BlockCost, Buffer, Elementwise, Step
from megalite.model.kinds import KINDS, blocks_of

if TYPE_CHECKING:
    from megalite.model.block_kind import BlockSpec
    from megalite.model.cost.units import Units

STREAM, NORMED, STATISTICS = "residual stream", "output of the norm", "statistics of the norm"
NORM_OPERATIONS = {"attention": "attn_norm", "mixer": "attn_norm", "mlp": "mlp_norm"}
"""Slot → the operation of `train.recompute` for the norm of the input of its block."""
SUM_OPERATION = "residual"  # the sum in front of a block that is not the first one, and its norm
OUTPUT_OPERATIONS = {"attention": "attn_out"}
"""Slot → the operation for the output of a block that another one stands beside; not of all slots."""


class Operation(NamedTuple):
    """An alternative for recomputing part of a layer.

    Attributes:
        names: the operations of train.recompute that it stands for.
        buffers: what is not kept.
        steps: what backward computes again.
        dropped: number of values to which dropout applies again.
        scores: attention's backward computes its probabilities again besides `steps`.
        streamed: those of `buffers` that never exist at once again.
    """

    names: tuple[str, ...]
    buffers: tuple[Buffer, ...]
    steps: tuple[Step, ...]
    dropped: int = 0
    scores: bool = False
    streamed: tuple[Buffer, ...] = ()

    @property
    def restored(self) -> tuple[Buffer, ...]:
        """Return the buffers that exist again while the layer's backward runs."""
        return tuple(each for each in self.buffers if each not in self.streamed)


Group = tuple[Operation, ...]
"""Alternatives, each frees more than the one before: at most one is chosen."""


def groups(units: Units, index: int) -> list[Group]:
    """Return the groups of operations that a layer (0-based) can recompute. Each frees memory."""
    blocks, costs = blocks_of(units.model, index), units.layer(index).blocks
    candidates: list[Group] = []
    for number, (block, cost) in enumerate(zip(blocks, costs, strict=True)):
        candidates.append(_input(units, block, cost, bool(number) and not block.beside))
        if number and not block.beside and joins_sum(blocks[number - 1]):
            candidates[-1] = (*candidates[-1], _sum(cost, costs[number - 1]))
        candidates += KINDS[block.kind].recomputed(units, cost)
        followed = number + 1 < len(blocks) and blocks[number + 1].beside
        if followed and KINDS[block.kind].joins_output and block.slot in OUTPUT_OPERATIONS:
            candidates.append(_output(block, cost))
    kept = [
        tuple(each for each in group if sum(buffer.values for buffer in each.buffers)) for group in candidates
    ]
    return [group for group in kept if group]


def joins_sum(block: BlockSpec) -> bool:
    """Return whether the operation `residual` repeats a block's output in the sum in front of the next one.

    Of blocks beside each other the sum with the outputs of the others would be kept for it.
    """
    return KINDS[block.kind].joins_output and not block.beside


def chosen(options: Iterable[Group], mode: str) -> list[Operation]:
    """Return the operations that a layer's mode of train.recompute names; of alternatives, the last one."""
    names, operations = operations_of(mode), []
    for group in options:
        named = [each for each in group if names.issuperset(each.names)]
        operations += named[-1:]
    return operations


def recorded_outputs(units: Units, index: int, mode: str) -> int:
    """Return the number of outputs of recomputed operations that nothing saves, each like the stream.

    The forward of a layer (0-based) holds them until its end with the tensors that it drops.
    """
    names, count = operations_of(mode), 0
    specs, costs = blocks_of(units.model, index), units.layer(index).blocks
    for spec, cost, following in zip(specs, costs, (*specs[1:], None), strict=True):
        kind = KINDS[spec.kind]
        beside = following is not None and following.beside
        repeats = kind.output_operation in names
        repeats |= beside and kind.joins_output and OUTPUT_OPERATIONS.get(spec.slot) in names
        summed = following is not None and not beside and SUM_OPERATION in names and joins_sum(spec)
        if repeats or summed:
            count += not cost.after.kept  # the norm of an output saves it
        if repeats:
            count += bool(cost.after.kept or cost.after.forward)  # what the norm or a factor returns
    return count


def repeated(units: Units, index: int, mode: str) -> list[Step]:
    """Return the steps of a layer (0-based) that the backward recomputes under a mode of train.recompute."""
    if mode in MODES:
        return units.layer(index).steps if mode == "full" else []
    return [step for operation in chosen(groups(units, index), mode) for step in operation.steps]


def named(buffers: Iterable[Buffer], *names: str) -> tuple[Buffer, ...]:
    """Return the buffers with these names."""
    return tuple(buffer for buffer in buffers if buffer.name in names)


def _input(units: Units, block: BlockSpec, cost: BlockCost, fused: bool) -> Group:
    """Return the norm of a block's input.

    Args:
        fused: whether it is computed with the residual sum in front of it, which keeps the statistics.
    """
    normed = named(cost.before.kept, NORMED, *(() if fused else (STATISTICS,)))
    # a standalone norm reads its input and writes its output
    return (Operation((NORM_OPERATIONS[block.slot],), normed, (Elementwise((2 * units.own,)),)),)


def _sum(cost: BlockCost, before: BlockCost) -> Operation:
    """Return the residual sum in front of a block with its norm, and the output of the block before it."""
    out = before.matmuls[-1]
    normed = named(cost.before.kept, NORMED, STATISTICS)
    buffers = (*named(cost.before.kept, STREAM), *normed, *out.kept, *before.after.kept)
    steps = (*before.output, out, Elementwise(before.after.forward), Elementwise(cost.before.forward))
    return Operation((SUM_OPERATION,), buffers, steps, dropped=before.dropped)


def _output(block: BlockSpec, cost: BlockCost) -> Group:
    """Return the output projection of a block that another one stands beside."""
    out = cost.matmuls[-1]
    buffers = (*out.kept, *cost.after.kept)
    return (Operation((OUTPUT_OPERATIONS[block.slot],), buffers, (*cost.output, out, cost.after)),)
