"""The fields of a config.json that list the kinds of layers (hybrids of attention with a gated delta rule or
short convolutions), and the way back. Imports no torch.

Those that read are given a config.json with its defaults, and raise ConfigError naming a field that would
change what the model computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megalite.config.errors import ConfigError
from megalite.families import layer_lists
from megalite.families.refusal import refuse

DELTA = {"linear_attention": "delta", "full_attention": "attention"}
LATENT_DELTA = {"linear_attention": "delta", "full_attention": "latent_attention"}
CONVOLUTION = {"conv": "convolution", "full_attention": "attention"}
"""Type of a layer → its first block."""
OLMO_WIDTHS = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
)


# ---- layers


def entries(
    given: Mapping[str, Any],
    types: list[Any] | None,
    blocks: Mapping[str, str],
    second: Callable[[int], str] = lambda layer: "feed_forward",
) -> list[str]:
    """model.layer_blocks of types of layers, and of the second block of each layer."""
    number = given["num_hidden_layers"]
    if types is None:
        raise ConfigError(f"config.json: layer_types is missing, but required for {given['model_type']}.")
    if len(types) != number:
        raise refuse("layer_types", types, f"must have {number} entries, as num_hidden_layers.")
    if unknown := [each for each in types if each not in blocks]:
        raise refuse("layer_types", unknown[0], f"is not supported. Legal values: {', '.join(blocks)}.")
    return [f"{blocks[each]}+{second(layer)}" for layer, each in enumerate(types)]


def types_of(values: Mapping[str, Any], blocks: Mapping[str, str]) -> list[str]:
    """The types of the layers of a model, from its `meaning`. A block that a family does not have is its own
    type, which reading refuses."""
    names = {block: layer for layer, block in blocks.items()}
    return [names.get(kinds[0], kinds[0]) for kinds in _kinds(values)]


def _kinds(values: Mapping[str, Any]) -> list[list[str]]:
    """The kinds of each layer's blocks, also where model.layer_blocks is null."""
    if values["layer_blocks"] is not None:
        return [[kind.strip() for kind in entry.split("+")] for entry in values["layer_blocks"]]
    attention = "attention" if values["kv_lora_rank"] is None else "latent_attention"
    dense = values["mlp_only_layers"] or ()
    return [
        [attention, "mixture" if values["num_experts"] and layer not in dense else "feed_forward"]
        for layer in range(values["num_hidden_layers"])
    ]


def _every(given: Mapping[str, Any]) -> list[str]:
    """Types of the layers where every n-th has attention."""
    interval = given["full_attention_interval"]
    return [
        "linear_attention" if (layer + 1) % interval else "full_attention"
        for layer in range(given["num_hidden_layers"])
    ]


def with_silu(given: Mapping[str, Any], layers: list[str]) -> list[str]:
    """Checks that the activation after the convolutions of delta blocks is SiLU."""
    has_delta = any(entry.startswith("delta") for entry in layers)
    if has_delta and given["hidden_act"] not in ("silu", "swish"):
        raise refuse(
            "hidden_act",
            given["hidden_act"],
            "is not supported with linear_attention layers, which have convolutions. Legal value: silu.",
        )
    return layers


def _mixture_of_step(given: Mapping[str, Any]) -> Callable[[int], str]:
    """The second block of Qwen3-Next's layers."""
    dense = given["mlp_only_layers"] or ()

    def second(layer: int) -> str:
        has_experts = layer not in dense and (layer + 1) % given["decoder_sparse_step"] == 0
        return "mixture" if has_experts else "feed_forward"

    return second


def qwen3_next(given: dict[str, Any]) -> list[str]:
    if not given["num_experts"]:
        raise refuse("num_experts", given["num_experts"], "is not supported. Legal values: 1 and above.")
    types = given["layer_types"] or _every(given)
    return with_silu(given, entries(given, types, DELTA, _mixture_of_step(given)))


def qwen3_5(second: str, given: dict[str, Any]) -> list[str]:
    types = given["layer_types"] or _every(given)
    return with_silu(given, entries(given, types, DELTA, lambda layer: second))


def type_fields(blocks: Mapping[str, str], values: dict[str, Any]) -> dict[str, Any]:
    return {"layer_types": types_of(values, blocks)}


# ---- olmo_hybrid


def _olmo_types(given: Mapping[str, Any]) -> list[str]:
    """Every fourth layer has attention, and the last one if there are fewer."""
    if given["layer_types"] is not None:
        return list(given["layer_types"])
    number = given["num_hidden_layers"]
    types = ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(number)]
    return types if "full_attention" in types else [*types[:-1], "full_attention"]


def olmo(given: dict[str, Any]) -> list[str]:
    types = _olmo_types(given)
    if len(set(types)) < 2:
        raise refuse("layer_types", types, "is not supported: the family requires both types of layers.")
    return with_silu(given, entries(given, types, DELTA))


def olmo_post_norm(given: dict[str, Any]) -> list[int]:
    """Attention layers have their norms after the blocks."""
    return [layer for layer, each in enumerate(_olmo_types(given)) if each == "full_attention"]


def olmo_width(name: str, given: dict[str, Any]) -> int:
    """Heads and widths of linear layers, which follow from those of attention where they are null."""
    heads, key = given["linear_num_key_heads"], given["linear_key_head_dim"]
    key = int(0.75 * given["hidden_size"] / (heads or given["num_attention_heads"])) if key is None else key
    derived = {"linear_key_head_dim": key, "linear_value_head_dim": 2 * key}
    value = given[name]
    return int(derived.get(name, given["num_attention_heads"]) if value is None else value)


def olmo_position(given: dict[str, Any]) -> str:
    """There are no rotary embeddings if their base is null."""
    parameters = given.get("rope_scaling") or given.get("rope_parameters") or {}
    return "rope" if parameters.get("rope_theta", given["rope_theta"]) is not None else "none"


def olmo_position_fields(values: dict[str, Any]) -> dict[str, Any]:
    if values["position"] != "none":
        return {}
    return {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": None}}


# ---- kimi_linear


def _kimi_types(given: Mapping[str, Any]) -> list[Any]:
    """layer_types, or the 1-based lists of the published files, or attention in every fourth layer."""
    number = given["num_hidden_layers"]
    lists = given.get("linear_attn_config") or {}
    if given["layer_types"] is not None:
        return list(given["layer_types"])
    if "full_attn_layers" not in lists or "kda_layers" not in lists:
        return [
            "full_attention" if layer and layer % 4 == 0 else "linear_attention" for layer in range(number)
        ]
    full, linear = lists["full_attn_layers"], lists["kda_layers"]
    if sorted([*full, *linear]) != list(range(1, number + 1)):
        raise refuse(
            "linear_attn_config",
            {"full_attn_layers": full, "kda_layers": linear},
            f"must name each layer from 1 to {number} once.",
        )
    return ["full_attention" if layer + 1 in full else "linear_attention" for layer in range(number)]


def kimi(given: dict[str, Any]) -> list[str]:
    if given["kv_lora_rank"] is None:
        raise refuse("kv_lora_rank", None, f"is not supported by the {given['model_type']} family.")
    kinds = given["mlp_layer_types"] or layer_lists.first_dense_kinds(given)
    dense = layer_lists.dense_layers({**given, "mlp_layer_types": kinds})
    second = {True: "feed_forward", False: "mixture"}
    layers = entries(given, _kimi_types(given), LATENT_DELTA, lambda layer: second[layer in dense])
    return with_silu(given, layers)


def kimi_fields(values: dict[str, Any]) -> dict[str, Any]:
    """The fields of transformers, and those of the published files, which other readers need."""
    names, number = {"feed_forward": "dense", "mixture": "sparse"}, values["num_hidden_layers"]
    second = [names.get(kinds[-1], kinds[-1]) for kinds in _kinds(values)]
    types, dense = types_of(values, LATENT_DELTA), second.count("dense")
    lists = {
        "kda_layers": [layer + 1 for layer, each in enumerate(types) if each == "linear_attention"],
        "full_attn_layers": [layer + 1 for layer, each in enumerate(types) if each == "full_attention"],
        "num_heads": values["linear_num_value_heads"],
        "head_dim": values["linear_value_head_dim"],
        "short_conv_kernel_size": values["linear_conv_kernel_dim"],
    }
    fields = {"layer_types": types, "mlp_layer_types": second, "linear_attn_config": lists}
    first = second == ["dense"] * dense + ["sparse"] * (number - dense)
    return fields | ({"first_k_dense_replace": dense, "moe_layer_freq": 1} if first else {})


def untied(given: dict[str, Any]) -> bool:
    """transformers has a head of its own whatever the field says."""
    if given["tie_word_embeddings"]:
        raise refuse(
            "tie_word_embeddings",
            True,
            f"is not supported by the {given['model_type']} family. Legal value: False.",
        )
    return False


def kimi_groups(given: dict[str, Any]) -> int | None:
    return None if given["num_expert_group"] == 1 else int(given["num_expert_group"])


def kimi_topk_group(given: dict[str, Any]) -> int:
    return 1 if kimi_groups(given) is None else int(given["topk_group"])


def kimi_shared(given: dict[str, Any]) -> int:
    """The shared experts are one expert of their total width."""
    if not given["num_shared_experts"]:
        raise refuse(
            "num_shared_experts",
            given["num_shared_experts"],
            "is not supported. Legal values: 1 and above.",
        )
    return int(given["num_shared_experts"] * given["moe_intermediate_size"])


def kimi_shared_fields(values: dict[str, Any]) -> dict[str, Any]:
    width = values["shared_expert_intermediate_size"] or 0
    return {"num_shared_experts": width // (values["moe_intermediate_size"] or 1)}


# ---- lfm2


def lfm2(given: dict[str, Any]) -> list[str]:
    types, number = given["layer_types"], given["num_hidden_layers"]
    if types is None:
        attention = given["full_attn_idxs"]
        attention = range(number) if attention is None else attention
        types = ["full_attention" if layer in attention else "conv" for layer in range(number)]
    return entries(given, types, CONVOLUTION)


def lfm2_width(given: dict[str, Any]) -> int:
    """Width of a feed-forward block, two thirds of the field's by default."""
    width = int(given["intermediate_size"])
    if not given["block_auto_adjust_ff_dim"]:
        return width
    width = int(2 * width / 3)
    if given["block_ffn_dim_multiplier"] is None:
        return width
    of = given["block_multiple_of"]
    return int(-(-int(given["block_ffn_dim_multiplier"] * width) // of) * of)


def lfm2_width_fields(values: dict[str, Any]) -> dict[str, Any]:
    return {"intermediate_size": values["intermediate_size"], "block_auto_adjust_ff_dim": False}


def lfm2_moe(given: dict[str, Any]) -> list[str]:
    if not given["use_expert_bias"]:
        raise refuse("use_expert_bias", False, "is not supported by the lfm2_moe family. Legal value: True.")
    dense = given["num_dense_layers"]
    return entries(
        given,
        given["layer_types"],
        CONVOLUTION,
        lambda layer: "feed_forward" if layer < dense else "mixture",
    )


def lfm2_moe_fields(values: dict[str, Any]) -> dict[str, Any]:
    return {
        "layer_types": types_of(values, CONVOLUTION),
        "num_dense_layers": len(values["mlp_only_layers"] or ()) if values["num_experts"] else 0,
        "use_expert_bias": True,
    }
