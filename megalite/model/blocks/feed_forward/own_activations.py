"""Activations of a feed-forward that have numbers of their own: a factor on the gate, or trained ones."""

from __future__ import annotations

from megalite.config.sections.model import ModelConfig
from megalite.model.blocks.feed_forward.scaled_gate import ScaledGate
from megalite.model.blocks.feed_forward.xielu import XIELU
from megalite.parallel.compiled_ops import CompiledOps
from megalite.parallel.tensor.linear import Activation
from megalite.parallel.weight import Weights


def own_activation(model: ModelConfig, name: str, weights: Weights, ops: CompiledOps) -> Activation:
    """Return the activation of a feed-forward.

    Args:
        name: the prefix of the stored names of its parameters.
    """
    if model.mlp_multipliers is not None:
        return ScaledGate(model.hidden_act, model.mlp_multipliers[0], ops)
    return XIELU(weights[f"{name}.alpha_p.weight"], weights[f"{name}.alpha_n.weight"], ops)
