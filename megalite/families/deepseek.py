"""The fields of DeepSeek's config.json that are not one field of ModelConfig each, and the way back. Imports
no torch.

Those that read are given a config.json with its defaults, and raise ConfigError naming a field that would
change what the model computes.
"""

from __future__ import annotations

import math
from typing import Any

from megalite.config.errors import ConfigError

METHODS = {"softmax": ("greedy", "group_limited_greedy"), "sigmoid": ("noaux_tc",)}
"""Scores of a router → the values of topk_method: without and with groups, or one for both."""


def _refuse(name: str, value: Any, why: str) -> ConfigError:
    return ConfigError(f"config.json: {name} = {value!r} {why}")


def grown(factor: float, mscale: float) -> float:
    """YaRN's factor on scores for a context that is `factor` times as long."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def attention_scale(given: dict[str, Any]) -> float | None:
    """YaRN's mscale_all_dim multiplies the scores by its factor's square; without it the scale is that of the
    head."""
    for name in ("kv_lora_rank", "n_routed_experts"):
        if name in given and given[name] is None:
            raise _refuse(
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
    values = scaling["attention_factor"] * of_scores, of_scores
    mscale, all_dim = (round((value - 1) / (0.1 * math.log(factor)), 9) for value in values)
    return {"mscale": mscale, "mscale_all_dim": all_dim}


def kv_heads(given: dict[str, Any]) -> int:
    """Every query head has a key and a value of its own."""
    if given["num_key_value_heads"] not in (None, given["num_attention_heads"]):
        heads = (
            f"is not num_attention_heads = {given['num_attention_heads']}: with latents every head has its "
            "own key and value."
        )
        raise _refuse("num_key_value_heads", given["num_key_value_heads"], heads)
    return int(given["num_attention_heads"])


def dense_layers(given: dict[str, Any]) -> list[int]:
    if given["moe_layer_freq"] != 1:
        raise _refuse("moe_layer_freq", given["moe_layer_freq"], "is not supported. Legal value: 1.")
    return list(range(given["first_k_dense_replace"]))


def shared_width(given: dict[str, Any]) -> int:
    """The shared experts are one expert of their total width."""
    if not given["n_shared_experts"]:
        raise _refuse(
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
    if groups(given) is None:
        return 1
    if given["topk_group"] is None:
        raise _refuse(
            "topk_group", None, f"is incompatible with n_group = {given['n_group']}. It needs a number."
        )
    return int(given["topk_group"])


def scores(kind: str, given: dict[str, Any]) -> str:
    """Checks that the router is the one that its family computes."""
    if given["scoring_func"] != kind:
        raise _refuse(
            "scoring_func",
            given["scoring_func"],
            f"is not supported by the {given['model_type']} family. Legal value: {kind!r}.",
        )
    if given["topk_method"] not in METHODS[kind]:
        raise _refuse(
            "topk_method",
            given["topk_method"],
            f"is not supported. Legal values: {', '.join(METHODS[kind])}.",
        )
    if kind == "softmax" and given["norm_topk_prob"]:
        raise _refuse(
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
