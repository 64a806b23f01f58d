"""The fields of DeepSeek's config.json that are not one field of ModelConfig each, and the way back. Imports
no torch.

Those that read are given a config.json with its defaults, and raise ConfigError naming a field that would
change what the model computes.
"""

from __future__ import annotations

import math
from typing import Any

from megalite.families import layer_lists, mixtures
from megalite.families.refusal import refuse

METHODS = {"softmax": ("greedy", "group_limited_greedy"), "sigmoid": ("noaux_tc",)}
"""Scores of a router → the values of topk_method: without and with groups, or one for both."""


def grown(factor: float, mscale: float) -> float:
    """YaRN's factor on scores for a context that is `factor` times as long."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def attention_scale(given: dict[str, Any]) -> float | None:
    """YaRN's mscale_all_dim multiplies the scores by its factor's square; without it the scale is that of the
    head."""
    for name in ("kv_lora_rank", "n_routed_experts"):
        if name in given and given[name] is None:
            raise refuse(
                name, None, f"is not supported by the {given['model_type']} family. It needs a number."
            )
    parameters = given.get("rope_scaling") or given.get("rope_parameters") or {}
    kind, all_dim = (
        parameters.get("rope_type") or parameters.get("type", "default"),
        parameters.get("mscale_all_dim"),
    )
    if kind == "default" or not all_dim:
        return None
    factor = grown(parameters["factor"], all_dim)
    return float((given["qk_nope_head_dim"] + given["qk_rope_head_dim"]) ** -0.5 * factor * factor)


def mscales(scale: float, head_size: int, scaling: dict[str, Any] | None) -> dict[str, float]:
    """The reverse: mscale and mscale_all_dim with which a file gives this scale and rope_scaling."""
    scaling = scaling or {}
    factor = scaling.get("factor", 1.0)
    if scaling.get("rope_type") != "yarn" or factor <= 1 or scale == head_size**-0.5:
        return {}
    of_scores = math.sqrt(scale * head_size**0.5)
    mscale, all_dim = (
        _ungrown(factor, value) for value in (scaling["attention_factor"] * of_scores, of_scores)
    )
    return {"mscale": mscale, "mscale_all_dim": all_dim}


def _ungrown(factor: float, value: float) -> float:
    """The inverse of `grown`, in few digits where these give the same value."""
    exact = (value - 1) / (0.1 * math.log(factor))
    short = round(exact, 9)
    return short if math.isclose(grown(factor, short), value, rel_tol=1e-14) else exact


def kv_heads(given: dict[str, Any]) -> int:
    """Every query head has a key and a value of its own."""
    if given["num_key_value_heads"] not in (None, given["num_attention_heads"]):
        heads = (
            f"is not num_attention_heads = {given['num_attention_heads']}: with latents every head has its "
            "own key and value."
        )
        raise refuse("num_key_value_heads", given["num_key_value_heads"], heads)
    return int(given["num_attention_heads"])


def dense_layers(given: dict[str, Any]) -> list[int]:
    if given["moe_layer_freq"] != 1:
        raise refuse("moe_layer_freq", given["moe_layer_freq"], "is not supported. Legal value: 1.")
    return list(range(given["first_k_dense_replace"]))


def dense_layers_of_types(given: dict[str, Any]) -> list[int]:
    """The same where mlp_layer_types may list the layers."""
    if given["mlp_layer_types"] is None:
        return [layer for layer in dense_layers(given) if layer < given["num_hidden_layers"]]
    return layer_lists.dense_layers(given)


def indexed_layers(given: dict[str, Any]) -> None:
    """Checks that every layer has an indexer or shares a selection: then model.layer_blocks is null."""
    if given["q_lora_rank"] is None:
        raise refuse("q_lora_rank", None, f"is not supported by the {given['model_type']} family.")
    types = given["layer_types"]
    if types is not None and set(types) != {"indexed_attention"}:
        raise refuse("layer_types", types, "is not supported. Legal value: indexed_attention in each layer.")


def indexer_types(given: dict[str, Any]) -> list[str] | None:
    """Which layers have an indexer (full), as listed, by a pattern of F and S, or every n-th after an offset.

    None: all.
    """
    types, pattern, number = given["indexer_types"], given["index_topk_pattern"], given["num_hidden_layers"]
    if types is None and isinstance(pattern, str):
        if set(pattern) - set("FS"):
            raise refuse("index_topk_pattern", pattern, "is not supported. Legal letters: F and S.")
        types = [{"F": "full", "S": "shared"}[letter] for letter in pattern]
    elif types is None:
        frequency, offset = max(given["index_topk_freq"], 1), given["index_skip_topk_offset"]
        every = [max(layer - offset + 1, 0) % frequency == 0 for layer in range(number)]
        types = list(pattern) if pattern else ["full" if full else "shared" for full in every]
    return None if set(types) == {"full"} else list(types)


def shared_width(given: dict[str, Any]) -> int:
    """The shared experts are one expert of their total width."""
    if not given["n_shared_experts"]:
        raise refuse(
            "n_shared_experts", given["n_shared_experts"], "is not supported. Legal values: 1 and above."
        )
    return int(given["n_shared_experts"] * given["moe_intermediate_size"])


def mtp_layers(given: dict[str, Any]) -> int:
    """Return the number of MTP modules, under either of transformers' names."""
    return int(given.get("num_nextn_predict_layers") or given.get("num_mtp_layers") or 0)


def groups(given: dict[str, Any]) -> int | None:
    number = given["n_group"]
    return None if given["topk_method"] == "greedy" or number in (None, 1) else int(number)


def topk_group(given: dict[str, Any]) -> int:
    return mixtures.chosen_groups(given, groups(given))


def scores(kind: str, given: dict[str, Any]) -> str:
    """Checks that the router is the one that its family computes."""
    if given["scoring_func"] != kind:
        raise refuse(
            "scoring_func",
            given["scoring_func"],
            f"is not supported by the {given['model_type']} family. Legal value: {kind!r}.",
        )
    if given["topk_method"] not in METHODS[kind]:
        raise refuse(
            "topk_method",
            given["topk_method"],
            f"is not supported. Legal values: {', '.join(METHODS[kind])}.",
        )
    if kind == "softmax" and given["norm_topk_prob"]:
        raise refuse(
            "norm_topk_prob",
            True,
            "is not supported: transformers never renormalises in this family. Legal value: False.",
        )
    return kind


def router_fields(kind: str, values: dict[str, Any]) -> dict[str, Any]:
    """The fields of a router, from those of a ModelConfig."""
    method = METHODS[kind][-1 if values["n_group"] else 0]
    normalised = {} if kind == "sigmoid" else {"norm_topk_prob": False}
    return {"scoring_func": kind, "topk_method": method, **normalised}


def shared_fields(values: dict[str, Any]) -> dict[str, Any]:
    return {
        "n_shared_experts": (values["shared_expert_intermediate_size"] or 0)
        // (values["moe_intermediate_size"] or 1)
    }


def dense_fields(values: dict[str, Any]) -> dict[str, Any]:
    return {"first_k_dense_replace": len(values["mlp_only_layers"] or ()), "moe_layer_freq": 1}


def type_fields(values: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `dense_layers_of_types`."""
    dense = values["mlp_only_layers"] or ()
    first = list(dense) == list(range(len(dense)))
    return layer_lists.dense_fields(values) | (dense_fields(values) if first else {})


def indexer_fields(values: dict[str, Any]) -> dict[str, Any]:
    return {"indexer_types": values["indexer_types"] or ["full"] * values["num_hidden_layers"]}
