"""What the experts of a configuration cost: bytes that their tokens travel, and for how long, and the memory
of the worst imbalance."""

from __future__ import annotations

from collections.abc import Iterable

from megalite.assembly import plan
from megalite.config.dims import ParallelDims, rows_per_expert
from megalite.config.recompute import operations_of
from megalite.config.schema import Config
from megalite.config.sections.model import ModelConfig
from megalite.model.cost.records import Share
from megalite.model.parameters import layers_in
from megalite.parallel.pipeline.schedule import ActionKind, Schedule
from megalite.planner.hardware.links import Fabric, group
from megalite.planner.memory.activations import Activations
from megalite.planner.memory.states import Widths

INDEX, COUNT = 8, 8  # bytes of a choice, and of a number of rows
WIDE = 4  # bytes of a weight with which an expert's output is summed


def sent(config: Config, units: Iterable[int], microbatches: int) -> float:
    """Bytes that a rank sends to the others of its expert group in a step, if all are equally loaded. See
    `parallel.expert.dispatch`."""
    model, ep, width = config.model, config.parallel.ep, Widths.of(config)
    layers = [layer for unit in units for layer in layers_in(model, unit) if model.is_mixture(layer)]
    tokens, k, experts = (
        Activations(config).share.own_tokens,
        model.num_experts_per_tok,
        model.num_experts or 0,
    )
    others = (ep - 1) / ep
    total = 0.0
    for layer in layers:
        mode = config.train.recompute_of(layer)
        again = mode == "full" or "experts" in operations_of(mode)
        if config.parallel.expert_dispatch == "all_to_all":
            rows = tokens * k * model.hidden_size * width.compute * others
            # there and back, in forward and backward; counts once
            total += (4 + 2 * again) * rows + experts * COUNT * (ep - 1)
        else:
            rows = tokens * ep * model.hidden_size * width.compute * others
            weights = tokens * ep * k * width.accumulate * others
            total += (4 + 2 * again) * rows + (2 + again) * weights + tokens * ep * k * INDEX * others
    return microbatches * total


def exposed(fabric: Fabric, model: ModelConfig, share: Share, width: int) -> tuple[float, float]:
    """Seconds of one mixture and microbatch in forward and in backward. Experts wait for their rows, so
    nothing runs beside them.

    width: bytes of an element of the rows.
    """
    ranks, k = group(fabric.device, share.ep, 1), model.num_experts_per_tok
    own = share.own_tokens * model.hidden_size * width
    if share.dispatch == "all_to_all":
        there = fabric.all_to_all(k * own, ranks)
        return fabric.half(share.ep * (model.num_experts or 0) * COUNT, ranks) + 2 * there, 2 * there
    chosen = share.ep * share.own_tokens * k
    rows, weights = fabric.half(share.ep * own, ranks), fabric.half(chosen * WIDE, ranks)
    return 2 * rows + weights + fabric.half(chosen * INDEX, ranks), 2 * rows + weights


def worst_rows(config: Config) -> float:
    """How many times the equal share of rows a rank computes if all tokens of its expert group choose its
    experts. A capacity limits what its experts keep of each sequence of which the group has tokens."""
    model, ep, experts = config.model, config.parallel.ep, config.model.num_experts or 0
    most = ep * min(model.num_experts_per_tok, experts // ep) / model.num_experts_per_tok
    if model.expert_capacity_factor is None:
        return most
    share, length = Activations(config).share, config.data.sequence_length
    kept = (
        rows_per_expert(model.expert_capacity_factor, length, model.num_experts_per_tok, experts)
        * experts
        // ep
    )
    dims = ParallelDims.of(config)
    ranks = dims.replica // dims.pp  # that share a sequence
    sequences = share.batch * (max(ep // ranks, 1) if ep % ranks == 0 or ranks % ep == 0 else ep // ranks + 2)
    return min(most, sequences * kept / (share.own_tokens * model.num_experts_per_tok))


def worst_bytes(config: Config) -> int:
    """Bytes that one mixture then keeps of one microbatch, in addition to those of an equal share: rows, and
    input of the activation."""
    model = config.model
    rows = Activations(config).share.own_tokens * model.num_experts_per_tok
    packed = (2 if model.gated_mlp else 1) * model.expert_width
    return round(
        max(worst_rows(config) - 1, 0.0) * rows * (model.hidden_size + packed) * Widths.of(config).compute
    )


def all_on_one_rank(config: Config) -> str:
    """The worst load in words: its condition, and the rows that a rank then computes."""
    factor = config.model.expert_capacity_factor
    limited = "" if factor is None else f", within model.expert_capacity_factor = {factor:g}"
    return (
        f"if all tokens choose the experts of one rank{limited}, it computes {worst_rows(config):.4g} times "
        "the rows"
    )


def worst_total(config: Config, schedule: Schedule) -> int:
    """Bytes that the fullest rank keeps in addition if that happens in all mixtures and microbatches in
    flight. The partition is set."""
    units = plan.units_of(config)
    kept = {
        stage: sum(_keeps(config, layer) for unit in numbers for layer in layers_in(config.model, unit))
        for stage, numbers in units.items()
    }
    return worst_bytes(config) * max(_most_kept(schedule, rank, kept) for rank in range(config.parallel.pp))


def _keeps(config: Config, layer: int) -> bool:
    """Whether a layer is a mixture that keeps its rows until its backward."""
    if not config.model.is_mixture(layer):
        return False
    mode = config.train.recompute_of(layer)
    return mode != "full" and "experts" not in operations_of(mode)


def _most_kept(schedule: Schedule, rank: int, kept: dict[int, int]) -> int:
    """The largest number of mixtures of microbatches whose rows a rank keeps at once; a recomputed one is
    kept alone."""
    ends = ActionKind.WEIGHT if ActionKind.WEIGHT in schedule.passes else ActionKind.BACKWARD
    now, most = 0, 1
    for action in schedule.compute(rank):
        now += kept[action.stage] * ((action.kind is ActionKind.FORWARD) - (action.kind is ends))
        most = max(most, now)
    return most
