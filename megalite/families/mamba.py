"""The fields of a config.json with Mamba-2 layers that are not one field of ModelConfig each, and the way
back. Imports no torch.

Those that read are given a config.json with its defaults, and raise ConfigError naming a field that would
change what the model computes.
"""

from __future__ import annotations

import math
from typing import Any

from megalite.families.refusal import refuse

_OLD_NAMES = {"mamba": "linear_attention", "attention": "full_attention"}
"""First names of types of layers."""
_BLOCKS = {"linear_attention": "mamba", "full_attention": "attention"}
_NEMOTRON_BLOCKS = {**_BLOCKS, "mlp": "feed_forward", "moe": "mixture"}
"""Type of a layer → its block, or the first one."""
_NEMOTRON_PATTERN = dict(zip("M*-E", _NEMOTRON_BLOCKS, strict=True))
_NEMOTRON_LAYERS = ["linear_attention", "moe", "full_attention", "mlp"]
"""Layers of a Nemotron-H file that lists none."""
FALCON_H1_LAYER = "mamba|attention+feed_forward"
NEMOTRON_NAMES = {
    "mamba_n_groups": ("mamba_n_groups", "n_groups"),
    "mamba_conv_kernel": ("mamba_d_conv", "conv_kernel"),
    "mamba_conv_bias": ("mamba_conv_bias", "use_conv_bias"),
}
"""Field of ModelConfig → its names in a Nemotron-H file: the older one, which goes first, and the other."""


def _number(value: Any) -> float:
    """A number of a config.json, in which transformers 5 writes infinity as an object."""
    return float(value["__float__"].lower() if isinstance(value, dict) else value)


# ---- the mixer


def head_dim(given: dict[str, Any]) -> int:
    """Width of a head: that of all heads is `mamba_d_ssm`, or `mamba_expand` times the model's."""
    heads, width = given["mamba_n_heads"], given["mamba_d_head"]
    inner = given.get("mamba_d_ssm")
    inner = int(given["mamba_expand"] * given["hidden_size"]) if inner is None else int(inner)
    head = inner // heads if width == "auto" else int(width)
    if head * heads != inner:
        raise refuse("mamba_d_head", width, f"does not make {inner} channels with mamba_n_heads = {heads}.")
    return head


def without_unused(shape: dict[str, Any]) -> dict[str, Any]:
    """The fields of a model without those of mamba blocks, if it has none."""
    if any("mamba" in entry for entry in shape.get("layer_blocks") or ()):
        return shape
    return {name: value for name, value in shape.items() if not name.startswith("mamba_")}


def expanded(values: dict[str, Any]) -> dict[str, Any]:
    """The fields of the width, as a multiple of the model's."""
    if not any("mamba" in entry for entry in _entries(values)):
        return {"mamba_n_heads": 1, "mamba_d_head": "auto", "mamba_expand": 1}
    inner = values["mamba_num_heads"] * values["mamba_head_dim"]
    return {"mamba_d_head": values["mamba_head_dim"], "mamba_expand": inner // values["hidden_size"]}


def own_width(values: dict[str, Any]) -> dict[str, Any]:
    """The fields of the width by itself (Falcon-H1)."""
    inner = values["mamba_num_heads"] * values["mamba_head_dim"]
    return {"mamba_d_head": values["mamba_head_dim"], "mamba_d_ssm": inner}


def time_step_limit(given: dict[str, Any]) -> list[float] | None:
    """Limits of the step; None if they never act: it is never negative."""
    given_limit = given.get("mamba_dt_limit") or given["time_step_limit"]
    low, high = map(_number, given_limit or (0.0, math.inf))
    return None if low <= 0 and high == math.inf else [max(low, 0.0), high]


def time_step_fields(values: dict[str, Any]) -> dict[str, Any]:
    limit = values["mamba_time_step_limit"]
    return {} if limit is None else {"time_step_limit": limit}


def activation(name: str, given: dict[str, Any]) -> str:
    """Checks that the activation after the convolution is SiLU."""
    if given[name] not in ("silu", "swish"):
        raise refuse(name, given[name], "is not supported after a convolution. Legal value: silu.")
    return "silu"


# ---- layers


def bamba_layers(given: dict[str, Any]) -> list[str]:
    attention = given["attn_layer_indices"] or ()
    layers = ["attention" if layer in attention else "mamba" for layer in range(given["num_hidden_layers"])]
    types = _types(given.get("layers_block_type"))
    if types is not None and types != [_type(layer) for layer in layers]:
        raise refuse("layers_block_type", types, "contradicts attn_layer_indices. Remove it.")
    return [f"{layer}+feed_forward" for layer in layers]


def bamba_fields(values: dict[str, Any]) -> dict[str, Any]:
    blocks = _blocks(values, "feed_forward")
    return {"attn_layer_indices": [layer for layer, block in enumerate(blocks) if block == "attention"]}


def granite_layers(given: dict[str, Any]) -> list[str]:
    types = _types(given["layer_types"]) or ["linear_attention"] * given["num_hidden_layers"]
    second = "mixture" if given["num_local_experts"] else "feed_forward"
    return [f"{block}+{second}" for block in _known("layer_types", types, _BLOCKS)]


def granite_fields(values: dict[str, Any]) -> dict[str, Any]:
    second = "mixture" if values["num_experts"] else "feed_forward"
    return {"layer_types": [_type(block) for block in _blocks(values, second)]}


def nemotron_layers(given: dict[str, Any]) -> list[str]:
    types, pattern = given["layers_block_type"], given["hybrid_override_pattern"]
    if types is None and pattern is not None:
        types = [_NEMOTRON_PATTERN.get(letter, letter) for letter in pattern]
    return _known("layers_block_type", _types(types) or _NEMOTRON_LAYERS, _NEMOTRON_BLOCKS)


def nemotron_fields(values: dict[str, Any]) -> dict[str, Any]:
    """The first files' spelling of the layers: vLLM and SGLang do not read transformers 5's."""
    letters = {_NEMOTRON_BLOCKS[layer]: letter for letter, layer in _NEMOTRON_PATTERN.items()}
    pattern = "".join(letters.get(entry, entry) for entry in _entries(values))
    return {"hybrid_override_pattern": pattern, "num_hidden_layers": values["num_hidden_layers"]}


def _known(name: str, types: list[str], blocks: dict[str, str]) -> list[str]:
    """The blocks of types of layers."""
    if unknown := [each for each in types if each not in blocks]:
        raise refuse(name, unknown[0], f"is not supported. Legal values: {', '.join(blocks)}.")
    return [blocks[each] for each in types]


def _types(types: list[str] | None) -> list[str] | None:
    return None if types is None else [_OLD_NAMES.get(each, each) for each in types]


def _type(block: str) -> str:
    return next((layer for layer, own in _BLOCKS.items() if own == block), block)


def _entries(values: dict[str, Any]) -> list[str]:
    """model.layer_blocks of a model, also where it is null."""
    if values["layer_blocks"] is not None:
        return ["".join(entry.split()) for entry in values["layer_blocks"]]
    dense = values["mlp_only_layers"] or ()
    layers = range(values["num_hidden_layers"])
    mixed = [bool(values["num_experts"]) and layer not in dense for layer in layers]
    return [f"attention+{'mixture' if mixture else 'feed_forward'}" for mixture in mixed]


def _blocks(values: dict[str, Any], second: str) -> list[str]:
    """The first block of each layer, of which `second` is the other."""
    return [entry.removesuffix(f"+{second}") for entry in _entries(values)]


# ---- feed-forward and experts


def granite_experts(given: dict[str, Any]) -> dict[str, Any]:
    """Without experts the shared expert is the feed-forward block."""
    shared = given["shared_intermediate_size"]
    if not shared:
        raise refuse("shared_intermediate_size", shared, "is not supported. Legal values: 1 and above.")
    if not given["num_local_experts"]:
        return {"intermediate_size": shared}
    return {
        "num_experts": given["num_local_experts"],
        "num_experts_per_tok": given["num_experts_per_tok"],
        "moe_intermediate_size": given["intermediate_size"],
        "shared_expert_intermediate_size": shared,
        "shared_expert_gate": False,
        "router_aux_loss_coef": given["router_aux_loss_coef"],
    }


def granite_expert_fields(values: dict[str, Any]) -> dict[str, Any]:
    if not values["num_experts"]:
        width = values["intermediate_size"]
        return {"num_local_experts": 0, "intermediate_size": width, "shared_intermediate_size": width}
    return {
        "num_local_experts": values["num_experts"],
        "num_experts_per_tok": values["num_experts_per_tok"],
        "intermediate_size": values["moe_intermediate_size"],
        "shared_intermediate_size": values["shared_expert_intermediate_size"],
        "router_aux_loss_coef": values["router_aux_loss_coef"],
    }


_NEMOTRON_EXPERTS = {
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "moe_intermediate_size": "moe_intermediate_size",
    "moe_shared_expert_intermediate_size": "shared_expert_intermediate_size",
    "moe_latent_size": "moe_latent_size",
    "norm_topk_prob": "norm_topk_prob",
    "routed_scaling_factor": "routed_scaling_factor",
}


def nemotron_experts(given: dict[str, Any]) -> dict[str, Any]:
    """Fields of the router and its experts, if a layer has some."""
    if "mixture" not in nemotron_layers(given):
        return {}
    if given["mlp_bias"]:
        raise refuse("mlp_bias", True, "is not supported with experts, which have no biases in this family.")
    values = {ours: given[theirs] for theirs, ours in _NEMOTRON_EXPERTS.items()}
    values |= {"router_scores": "sigmoid", "router_balance": "bias", "shared_expert_gate": False}
    groups = given["n_group"] if given["n_group"] > 1 else None
    return values | {"n_group": groups, "topk_group": given["topk_group"] if groups else 1}


def nemotron_expert_fields(values: dict[str, Any]) -> dict[str, Any]:
    if not values["num_experts"]:
        return {}
    fields = {theirs: values[ours] for theirs, ours in _NEMOTRON_EXPERTS.items()}
    return fields | {"n_group": values["n_group"] or 1, "topk_group": values["topk_group"] or 1}


def nemotron_value(option: str, given: dict[str, Any]) -> Any:
    older, newer = NEMOTRON_NAMES[option]
    return given[older] if given.get(older) is not None else given[newer]


def nemotron_field(option: str, values: dict[str, Any]) -> dict[str, Any]:
    return {NEMOTRON_NAMES[option][1]: values[option]}


def never_tied(given: dict[str, Any]) -> bool:
    if given["tie_word_embeddings"]:
        raise refuse(
            "tie_word_embeddings",
            True,
            "is not supported: transformers never ties the head in this family. Legal value: False.",
        )
    return False


def position(given: dict[str, Any]) -> str:
    return "rope" if given["position_embedding_type"] == "rope" else "none"


def position_fields(values: dict[str, Any]) -> dict[str, Any]:
    return {"position_embedding_type": "rope" if values["position"] == "rope" else None}


# ---- falcon_h1


def one_bias(given: dict[str, Any]) -> bool:
    """Both projections of the mixer have a bias, or none."""
    if given["projectors_bias"] != given["mamba_proj_bias"]:
        raise refuse(
            "projectors_bias",
            given["projectors_bias"],
            f"is not supported with mamba_proj_bias = {given['mamba_proj_bias']}. They must be equal.",
        )
    return bool(given["mamba_proj_bias"])


def bias_fields(values: dict[str, Any]) -> dict[str, Any]:
    return {"mamba_proj_bias": values["mamba_proj_bias"], "projectors_bias": values["mamba_proj_bias"]}


def norm(given: dict[str, Any]) -> str:
    if not given["mamba_rms_norm"]:
        return "none"
    return "norm_first" if given["mamba_norm_before_gate"] else "gate_first"


def norm_fields(values: dict[str, Any]) -> dict[str, Any]:
    kind = values["mamba_norm"]
    return {"mamba_rms_norm": kind != "none", "mamba_norm_before_gate": kind != "gate_first"}


def multipliers(name: str, number: int, given: dict[str, Any]) -> list[float] | None:
    """A list of factors; None if all are 1."""
    factors = given[name]
    if factors is None or all(factor == 1 for factor in factors):
        return None
    if len(factors) != number:
        raise refuse(name, factors, f"has {len(factors)} numbers, but must have {number}.")
    return [float(factor) for factor in factors]
