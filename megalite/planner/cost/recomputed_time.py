"""The time of the operations that a layer's backward computes again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megalite.config.recompute import operations_of
from megalite.model.cost.recomputed import Operation, chosen, groups
from megalite.model.cost.records import AttentionCost, Matmul, Share, Step
from megalite.planner.hardware.kernels import DROPOUT, stream
from megalite.planner.hardware.links import group

if TYPE_CHECKING:
    from megalite.planner.cost.operations import Operations


def seconds(operations: Operations, share: Share, index: int, mode: str) -> tuple[float, float]:
    """Return the kernel time and exposed communication that a layer (0-based) recomputes under a mode."""
    again = operations.attention_again(share, index) if "scores" in operations_of(mode) else 0.0
    times = [
        of_operation(operations, share, index, each)
        for each in chosen(groups(operations.units(share), index), mode)
    ]
    return again + sum(kernels for kernels, _ in times), sum(waits for _, waits in times)


def of_operation(
    operations: Operations, share: Share, index: int, operation: Operation
) -> tuple[float, float]:
    """Return the kernel time and exposed communication of one operation."""
    kernels = sum(operations.forward(step) for step in operation.steps)
    kernels += (
        stream(operations.device, DROPOUT * operation.dropped * operations.size) if operation.dropped else 0.0
    )
    kernels += operations.attention_again(share, index) if operation.scores else 0.0
    wait = operations.dispatch(share, index)[0] if "experts" in operation.names else 0.0
    return kernels, wait + sum(_wait(operations, share, index, step) for step in operation.steps)


def _wait(operations: Operations, share: Share, index: int, step: Step) -> float:
    """Return the exposed communication of a step's forward over tp and cp."""
    if isinstance(step, AttentionCost):
        return operations.exchange(share, index)[0] if share.cp > 1 else 0.0
    if share.tp == 1 or not isinstance(step, Matmul):
        return 0.0
    ranks, passes = group(operations.device, share.tp, 1), step.collectives(share.sequence_parallel).forward
    size, _ = step.sent_over_tp(share.sequence_parallel, operations.size)
    collective = operations.tensor.half if passes == 1 else operations.tensor.all_reduce
    return collective(size / passes, ranks) if passes else 0.0
