"""The base of a model under maximal update parametrization (`model.mup`): the model for which learning rates
were chosen."""

from __future__ import annotations

from dataclasses import fields, replace
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


def base_model(model: ModelConfig) -> ModelConfig:
    """Return the base of a model, with as many layers as the model, whose blocks it shares."""
    mup, growth = model.mup or {}, model.width_growth
    sizes: dict[str, Any] = {"hidden_size": mup["base_width"]}
    for name in WIDTHS:
        if getattr(model, name) is not None:
            sizes[name] = max(1, round(getattr(model, name) / growth))
    for name in HEADS:
        if getattr(model, name) is not None:
            sizes[name] = max(1, int(getattr(model, name) / growth))
    if model.layer_heads is not None:
        sizes["layer_heads"] = [max(1, int(heads / growth)) for heads in model.layer_heads]
    if model.local_attention is not None:
        local = model.local_attention
        heads = {name: max(1, int(local[name] / growth)) for name in HEADS if name in local}
        sizes["local_attention"] = local | heads
    named = {name: value for name, value in mup.items() if name not in OWN_KEYS}
    return replace(model, **(sizes | named), mup=None)


def unknown_keys(model: ModelConfig) -> list[str]:
    """Return keys of `model.mup` that are neither its own nor sizes of a model."""
    return [name for name in model.mup or {} if name not in (*OWN_KEYS, *NAMED)]


def broken_heads(model: ModelConfig) -> str | None:
    """Return a field whose number of heads would not be whole in the base, or None.

    Only fields are considered that a block of the model reads.
    """
    growth, mup = model.width_growth, model.mup or {}
    used = {kind for layer in range(model.num_hidden_layers) for kind in model.block_names(layer)}
    kinds = {each.name: each.metadata.get("kinds", ()) for each in fields(ModelConfig)}
    for name in HEADS:
        heads = getattr(model, name)
        if name not in mup and heads is not None and used & set(kinds[name]) and heads % growth:
            return name
    return None
