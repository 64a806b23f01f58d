"""Partition of layers into pipeline stages.

It is the contiguous split that minimizes the cost of the slowest stage. The embedding belongs to the first
stage and the head to the last, and their costs are included: with a large vocabulary the head alone costs as
much as several layers, and with an even split all other stages would wait for the last one. `balanced` takes
plain costs; `assembly.plan.partition` selects configured, measured or estimated costs.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from itertools import accumulate


def balanced(
    costs: Sequence[float],
    stages: int,
    first_extra: float = 0,
    last_extra: float = 0,
    starts: Sequence[int] | None = None,
) -> list[int]:
    """Return the number of layers of each stage, first to last, at least one each.

    The split is optimal: it minimizes the largest stage cost. Among such splits it is the most even one
    (least sum of squared costs), and among those the one with fewer layers on earlier stages, which keep more
    activations.

    Args:
        costs: cost of each layer.
        first_extra, last_extra: cost of the embedding on the first and of the head on the last stage.
        starts: the layers with which a stage may begin, the first one included; None: all.

    Raises:
        ValueError: there are fewer layers than stages, or fewer with which one may begin.
    """
    begins = range(len(costs)) if starts is None else starts
    if len(costs) < stages:
        raise ValueError(
            f"parallel.pp={stages} is larger than model.num_hidden_layers={len(costs)}, but every "
            f"stage needs at least one layer. Use parallel.pp <= {len(costs)}."
        )
    if len(begins) < stages:
        raise ValueError(
            f"parallel.pp={stages} makes {stages} stages or more, but only {len(begins)} of the layers may "
            f"begin a stage: the others use what the layer before has computed."
        )
    before = list(accumulate(costs, initial=0.0))

    def cost(stage: int, start: int, stop: int) -> float:
        return (
            before[stop]
            - before[start]
            + (first_extra if stage == 0 else 0)
            + (last_extra if stage == stages - 1 else 0)
        )

    slowest, _ = _best_split(len(costs), stages, begins, cost, max)
    infinite = float("inf")
    _, sizes = _best_split(
        len(costs), stages, begins, cost, lambda total, one: total + one**2 if one <= slowest else infinite
    )
    return sizes


def _best_split(
    layers: int,
    stages: int,
    begins: Container[int],
    cost: Callable[[int, int, int], float],
    combine: Callable[[float, float], float],
) -> tuple[float, list[int]]:
    """Return the least combined cost and its split, by dynamic programming over stages and layers."""
    # Layers used → least cost of the stages so far, and their sizes.
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for stage in range(stages):
        following: dict[int, tuple[float, list[int]]] = {}
        for stop in range(stage + 1, layers - (stages - stage - 1) + 1):
            starts = [start for start in best if start < stop and start in begins]
            if not starts:
                continue
            values = [combine(best[start][0], cost(stage, start, stop)) for start in starts]
            start = starts[values.index(min(values))]  # the earliest of equals
            following[stop] = min(values), [*best[start][1], stop - start]
        best = following
    return best[layers]
