"""Bytes that blocks with a state send over cp, by passing states and by exchanging heads."""

from __future__ import annotations

from megalite.config.dims import whole_heads
from megalite.config.schema import Config
from megalite.config.sections.model import ModelConfig
from megalite.model.cost.mixers import StateSizes, exchanged_heads, exchanges_heads, passed_states
from megalite.model.cost.records import ContextExchange, Share
from megalite.model.kinds import KINDS, blocks_of
from megalite.planner.memory.activations import Activations

MIB = 1 << 20


def describe_state_exchange(config: Config) -> list[str]:
    """Return a line for each kind of block with a state: what a layer sends of one microbatch, forward and
    backward, and what it would send the other way."""
    if config.parallel.cp == 1:
        return []
    model, activations = config.model, Activations(config)
    sizes = recurrences(model, activations.share)
    return [_line(kind, activations, each) for kind, each in sizes.items()]


def recurrences(model: ModelConfig, share: Share) -> dict[str, StateSizes]:
    """Return the sizes of each kind of block of a model that has a state."""
    kinds = dict.fromkeys(
        block.kind for layer in range(model.num_hidden_layers) for block in blocks_of(model, layer)
    )
    sizes = {kind: KINDS[kind].state_sizes(model, share) for kind in kinds}
    return {kind: each for kind, each in sizes.items() if each is not None}


def _line(kind: str, activations: Activations, sizes: StateSizes) -> str:
    share = activations.share

    def sent(exchange: ContextExchange) -> str:
        size: float = exchange.size_in_bytes(activations.width, activations.accumulate)
        size *= (share.cp - 1) / share.cp
        return f"{size / MIB:,.1f} MiB" if size >= MIB else f"{size / 1024:,.1f} KiB"

    assert sizes.states is not None
    states = sent(passed_states(share, sizes))
    if share.parts == "balanced" and share.context != "ulysses":
        states = f"at most {states}"  # documents are unknown
    heads = sent(exchanged_heads(share, sizes))
    if exchanges_heads(share, sizes):
        both = f"exchange heads, {heads}; passing states would be {states}"
    elif whole_heads(sizes.states[0], sizes.shared, share.cp):
        both = f"pass states, {states}; exchanging heads would be {heads}"
    else:
        both = f"pass states, {states}; they have no whole heads to exchange"
    return f"{kind} blocks {both}: sent per layer and microbatch by each rank of cp {share.cp}"
