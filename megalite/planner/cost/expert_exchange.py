"""What the experts of a configuration cost: bytes that their tokens travel, and for how long, and the memory
of the worst imbalance."""

from __future__ import annotations

from collections.abc import Iterable

from megalite.assembly import plan
from megalite.config.dims import ParallelDims, rows_per_expert
from megalite.config.schema import Config
from megalite.model.cost.records import Dispatch, Share
from megalite.model.kinds import dispatch_of, dispatches_of
from megalite.model.unit_numbers import layers_in
from megalite.parallel.pipeline.schedule import ActionKind, Schedule
from megalite.planner.hardware.links import Fabric, group
from megalite.planner.memory.activations import Activations
from megalite.planner.memory.states import Widths

INDEX, COUNT = 8, 8  # bytes of a choice, and of a number of rows
WIDE = 4  # bytes of a weight with which an expert's output is summed


def sent(config: Config, units: Iterable[int], microbatches: int, forward_only: bool = False) -> float:
    """Return the bytes that a rank sends to the rest of its expert group in a step under equal load.

    See `parallel.expert.dispatch`.

    Args:
        forward_only: of a forward pass alone.
    """
    model, ep, width = config.model, config.parallel.ep, Widths.of(config)
    dispatches = [
        (layer, dispatch)
        for unit in units
        for layer in layers_in(model, unit)
        for dispatch in dispatches_of(model, layer)
    ]
    tokens = Activations(config).share.own_tokens
    others = (ep - 1) / ep
    total = 0.0
    for layer, dispatch in dispatches:
        # exchanges of rows, each there and back, and of their weights: in forward, backward and recomputation
        again, k = dispatch.repeated(config.train.recompute_of(layer)), dispatch.choices
        times = 1 if forward_only else 2 + again
        if config.parallel.expert_dispatch == "all_to_all":
            rows = tokens * k * dispatch.width * width.compute * others
            total += 2 * times * rows + dispatch.experts * COUNT * (ep - 1)
        else:
            rows = tokens * ep * dispatch.width * width.compute * others
            weights = tokens * ep * k * width.accumulate * others
            total += 2 * times * rows + times * weights + tokens * ep * k * INDEX * others
    return microbatches * total


def exposed(fabric: Fabric, dispatch: Dispatch, share: Share, width: int) -> tuple[float, float]:
    """Return the exposed seconds of one dispatch and microbatch in forward and in backward.

    Experts wait for their rows, so nothing overlaps with the exchange.

    Args:
        width: bytes of an element of the rows.
    """
    ranks, k = group(fabric.device, share.ep, 1), dispatch.choices
    own = share.own_tokens * dispatch.width * width
    if share.dispatch == "all_to_all":
        there = fabric.all_to_all(k * own, ranks)
        return fabric.half(share.ep * dispatch.experts * COUNT, ranks) + 2 * there, 2 * there
    chosen = share.ep * share.own_tokens * k
    rows, weights = fabric.half(share.ep * own, ranks), fabric.half(chosen * WIDE, ranks)
    return 2 * rows + weights + fabric.half(chosen * INDEX, ranks), 2 * rows + weights


def worst_rows(config: Config) -> float:
    """Return the ratio of the most rows that a rank can compute to an equal share of rows.

    The maximum occurs if all tokens of an expert group choose the experts of one rank. A capacity limits the
    rows that these experts keep from each sequence with tokens in the group.
    """
    dispatch, ep = _dispatch(config), config.parallel.ep
    experts, choices, factor = dispatch.experts, dispatch.choices, dispatch.capacity_factor
    most = ep * min(choices, experts // ep) / choices
    if factor is None:
        return most
    share, length = Activations(config).share, config.data.sequence_length
    kept = rows_per_expert(factor, length, choices, experts) * experts // ep
    dims = ParallelDims.of(config)
    ranks = dims.replica // dims.pp  # that share a sequence
    sequences = share.batch * (max(ep // ranks, 1) if ep % ranks == 0 or ranks % ep == 0 else ep // ranks + 2)
    return min(most, sequences * kept / (share.own_tokens * choices))


def worst_expert_bytes(config: Config) -> int:
    """Return the bytes per mixture and microbatch that the worst load keeps in addition to an equal load.

    These are rows, and the input of the activation.
    """
    dispatch = _dispatch(config)
    rows = Activations(config).share.own_tokens * dispatch.choices
    return round(max(worst_rows(config) - 1, 0.0) * rows * dispatch.kept * Widths.of(config).compute)


def _dispatch(config: Config) -> Dispatch:
    """Return the dispatch of a configuration with experts."""
    dispatch = dispatch_of(config.model)
    assert dispatch is not None, "the worst load is of a model with experts"
    return dispatch


def describe_worst_load(config: Config) -> str:
    """Describe the worst load: its condition, and the number of rows that a rank then computes."""
    factor = _dispatch(config).capacity_factor
    limited = "" if factor is None else f", within model.expert_capacity_factor = {factor:g}"
    return (
        f"if all tokens choose the experts of one rank{limited}, it computes {worst_rows(config):.4g} times "
        "the rows"
    )


def worst_total(config: Config, schedule: Schedule) -> int:
    """Return the additional bytes on the fullest rank under the worst load.

    It occurs in all mixtures and microbatches in flight. The partition must be set.
    """
    units = plan.units_of(config)
    kept = {
        stage: sum(_kept(config, layer) for unit in numbers for layer in layers_in(config.model, unit))
        for stage, numbers in units.items()
    }
    return worst_expert_bytes(config) * max(
        _most_kept(schedule, rank, kept) for rank in range(config.parallel.pp)
    )


def _kept(config: Config, layer: int) -> int:
    """Return the number of a layer's dispatches that keep their rows until the backward."""
    mode = config.train.recompute_of(layer)
    return sum(not dispatch.repeated(mode) for dispatch in dispatches_of(config.model, layer))


def _most_kept(schedule: Schedule, rank: int, kept: dict[int, int]) -> int:
    """Return the largest number of (mixture, microbatch) pairs whose rows a rank keeps at once.

    A recomputed mixture keeps one.
    """
    ends = ActionKind.WEIGHT if ActionKind.WEIGHT in schedule.passes else ActionKind.BACKWARD
    now, most = 0, 1
    for action in schedule.compute(rank):
        now += kept[action.stage] * ((action.kind is ActionKind.FORWARD) - (action.kind is ends))
        most = max(most, now)
    return most
