"""Which layers each pipeline stage holds: a contiguous split that makes the slowest stage as fast as possible. Imports no torch.

The embedding belongs to the first stage and the head to the last, so their costs are counted there: with a large vocabulary the head alone
costs as much as several layers, and an even split would leave every other stage waiting for the last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

from megalite.config.schema import ModelConfig


class LayerCosts(NamedTuple):
    """FLOPs of one sequence's forward pass; backward takes twice as many everywhere, so the proportions hold for training."""

    layers: list[int]
    embedding: int
    head: int


def layer_costs(model: ModelConfig, sequence_length: int) -> LayerCosts:
    """Costs from the configuration alone: matrix products, and the attended pairs of positions (causal, within the layer's window).

    Norms, activations and other elementwise work are left out; a lookup counts one operation for each element it copies.
    """
    hidden = model.hidden_size
    query, key_value = model.num_attention_heads * model.head_size, model.kv_heads * model.head_size
    projections = hidden * (2 * query + 2 * key_value)
    feed_forward = hidden * model.intermediate_size * (3 if model.gated_mlp else 2)

    def layer(index: int) -> int:
        window = min(model.window(index) or sequence_length, sequence_length)
        pairs = window * (window + 1) // 2 + (sequence_length - window) * window
        return 2 * sequence_length * (projections + feed_forward) + 4 * pairs * query

    layers = [layer(index) for index in range(model.num_hidden_layers)]
    return LayerCosts(layers, sequence_length * hidden, 2 * sequence_length * hidden * model.vocabulary)


def balanced(costs: Sequence[float], stages: int, first_extra: float = 0, last_extra: float = 0) -> list[int]:
    """Number of layers of each stage, first to last, at least one each.

    Exact: the smallest possible maximum of the stages' costs; among those splits the most even one (least sum of squared costs);
    among those, fewer layers on earlier stages, which hold more activations.

    Args:
        costs: cost of each layer.
        first_extra, last_extra: cost of what the first and the last stage hold besides layers (embedding, head).

    Raises:
        ValueError: there are fewer layers than stages.
    """
    if len(costs) < stages:
        raise ValueError(
            f"parallel.pp = {stages} for model.num_hidden_layers = {len(costs)}: a stage needs a layer. Use parallel.pp <= {len(costs)}."
        )
    before = list(accumulate(costs, initial=0.0))

    def cost(stage: int, start: int, stop: int) -> float:
        return before[stop] - before[start] + (first_extra if stage == 0 else 0) + (last_extra if stage == stages - 1 else 0)

    slowest, _ = _best_split(len(costs), stages, cost, max)
    infinite = float("inf")
    _, sizes = _best_split(len(costs), stages, cost, lambda total, one: total + one**2 if one <= slowest else infinite)
    return sizes


def _best_split(
    layers: int, stages: int, cost: Callable[[int, int, int], float], combine: Callable[[float, float], float]
) -> tuple[float, list[int]]:
    """Dynamic programming over (stages used, layers used): the least combined cost, and its split."""
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for stage in range(stages):
        following: dict[int, tuple[float, list[int]]] = {}
        for stop in range(stage + 1, layers - (stages - stage - 1) + 1):
            starts = [start for start in best if start < stop]
            values = [combine(best[start][0], cost(stage, start, stop)) for start in starts]
            start = starts[values.index(min(values))]  # the earliest of equals
            following[stop] = min(values), [*best[start][1], stop - start]
        best = following
    return best[layers]
