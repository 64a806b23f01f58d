"""What the experts of a configuration cost: bytes that their tokens travel, and the memory of the worst imbalance. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable

from megalite.config.recomputation import operations_of
from megalite.config.schema import Config
from megalite.planning.activations import Activations
from megalite.planning.states import Widths

INDEX, COUNT = 8, 8  # bytes of a choice, and of a number of rows


def sent(config: Config, units: Iterable[int], microbatches: int) -> float:
    """Bytes that a rank sends to the others of its expert group in a step, if all are equally loaded. See `parallel.expert.dispatch`."""
    model, ep, width = config.model, config.parallel.ep, Widths.of(config)
    layers = [unit - 1 for unit in units if 0 < unit <= model.num_hidden_layers and model.is_mixture(unit - 1)]
    tokens, k, experts = Activations(config).share.own_tokens, model.num_experts_per_tok, model.num_experts or 0
    others = (ep - 1) / ep
    total = 0.0
    for layer in layers:
        mode = config.train.recompute_of(layer)
        again = mode == "full" or "experts" in operations_of(mode)
        if config.parallel.expert_dispatch == "all_to_all":
            rows = tokens * k * model.hidden_size * width.compute * others
            total += (4 + 2 * again) * rows + experts * COUNT * (ep - 1)  # there and back, in forward and backward; counts once
        else:
            rows = tokens * ep * model.hidden_size * width.compute * others
            weights = tokens * ep * k * width.accumulate * others
            total += (4 + 2 * again) * rows + (2 + again) * weights + tokens * ep * k * INDEX * others
    return microbatches * total


def worst_rows(config: Config) -> float:
    """How many times the equal share of rows a rank computes if all tokens of its expert group choose its experts."""
    model, ep = config.model, config.parallel.ep
    return ep * min(model.num_experts_per_tok, (model.num_experts or 0) // ep) / model.num_experts_per_tok


def worst_bytes(config: Config) -> int:
    """Bytes that one mixture then keeps of one microbatch, in addition to those of an equal share: rows, and input of the activation."""
    model = config.model
    rows = Activations(config).share.own_tokens * model.num_experts_per_tok
    packed = (2 if model.gated_mlp else 1) * model.expert_width
    return round((worst_rows(config) - 1) * rows * (model.hidden_size + packed) * Widths.of(config).compute)
