"""A model at another width, and the base of a model under maximal update parametrization (`model.mup`)."""

from __future__ import annotations

from dataclasses import fields, replace
from fractions import Fraction
from typing import Any

from megalite.config.sections.model import ModelConfig

OWN_KEYS = ("base_width", "base_depth")
WIDTHS = (
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "moe_latent_size",
)
"""Fields that are in proportion to the width, rounded."""
HEADS = (
    "num_attention_heads",
    "num_key_value_heads",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "mamba_num_heads",
)
"""Fields that are in proportion to the width, and must be whole: a head keeps its size."""
NAMED = (*WIDTHS, *HEADS, "q_lora_rank", "kv_lora_rank", "mamba_n_groups", "mamba_state_size")
"""Fields that `model.mup` may give the base."""


def at_width(model: ModelConfig, width: int) -> ModelConfig:
    """Return the model at another width: inner widths and numbers of heads are in proportion to it.

    Fields to which `model.mup` gives the value that they have in the model are equal at every width. Numbers
    of heads that are not whole are rounded (`broken_heads`).
    """
    ratio, fixed = Fraction(width, model.hidden_size), model.mup or {}

    def scaled(value: int) -> int:
        return max(1, round(value * ratio))

    sizes: dict[str, Any] = {"hidden_size": width}
    for name in (*WIDTHS, *HEADS):
        value = getattr(model, name)
        if value is not None and fixed.get(name) != value:
            sizes[name] = scaled(value)
    if model.layer_heads is not None:
        sizes["layer_heads"] = [scaled(heads) for heads in model.layer_heads]
    if model.local_attention is not None:
        local = model.local_attention
        sizes["local_attention"] = local | {name: scaled(local[name]) for name in HEADS if name in local}
    return replace(model, **sizes)


def base_model(model: ModelConfig) -> ModelConfig:
    """Return the base of a model, with as many layers as the model, whose blocks it shares."""
    mup = model.mup or {}
    named = {name: value for name, value in mup.items() if name not in OWN_KEYS}
    return replace(at_width(model, mup["base_width"]), **named, mup=None)


def unknown_keys(model: ModelConfig) -> list[str]:
    """Return keys of `model.mup` that are neither its own nor sizes of a model."""
    return [name for name in model.mup or {} if name not in (*OWN_KEYS, *NAMED)]


def broken_heads(model: ModelConfig, width: int) -> str | None:
    """Return a field whose number of heads would not be whole at another width, or None.

    Only fields count that a block of the model reads, and that `model.mup` does not name.
    """
    ratio, named = Fraction(width, model.hidden_size), model.mup or {}
    used = {kind for layer in range(model.num_hidden_layers) for kind in model.block_names(layer)}
    kinds = {each.name: each.metadata.get("kinds", ()) for each in fields(ModelConfig)}
    for name in HEADS:
        heads = getattr(model, name)
        if name not in named and heads is not None and used & set(kinds[name]) and (heads * ratio) % 1:
            return name
    return None
