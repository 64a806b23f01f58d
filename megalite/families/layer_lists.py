"""The fields of a config.json that say of each layer whether it has a window, rotary embeddings or experts,
and those of shared experts; and the way back. Imports no torch.

Those that read are given a config.json with its defaults, and raise ConfigError naming a field that would
change what the model computes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megalite.families.refusal import refuse

_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
_KINDS = ("dense", "sparse")


def _windows(layers: Iterable[int], interval: int) -> list[str]:
    """Every n-th layer attends to all positions, the others have a window."""
    return [_LOCAL if (layer + 1) % interval else _GLOBAL for layer in layers]


# ---- lists that a configuration class derives from other fields


def afmoe_types(given: dict[str, Any]) -> list[str]:
    return _windows(range(given["num_hidden_layers"]), given["global_attn_every_n_layers"])


def cohere2_moe_types(given: dict[str, Any]) -> list[str]:
    """The dense layers, which come first, have an interval of their own, and the count begins again after
    them."""
    dense = given["first_k_dense_replace"]
    others = range(given["num_hidden_layers"] - dense)
    first = _windows(range(dense), given["prefix_dense_sliding_window_pattern"])
    return first + _windows(others, given["sliding_window_pattern"])


def dense_first(dense: int, given: dict[str, Any]) -> list[str]:
    return ["dense" if layer < dense else "sparse" for layer in range(given["num_hidden_layers"])]


def first_dense_kinds(given: dict[str, Any]) -> list[str]:
    return dense_first(given["first_k_dense_replace"] or 0, given)


# ---- layers without experts


def dense_layers(given: dict[str, Any]) -> list[int]:
    """Those that mlp_layer_types lists as dense."""
    kinds, number = given["mlp_layer_types"], given["num_hidden_layers"]
    if len(kinds) < number or not {*_KINDS} >= {*kinds}:
        raise refuse("mlp_layer_types", kinds, f"must have {number} entries, each dense or sparse.")
    return [layer for layer, kind in enumerate(kinds[:number]) if kind == "dense"]


def dense_fields(values: dict[str, Any]) -> dict[str, Any]:
    dense = values["mlp_only_layers"] or ()
    kinds = [_KINDS[layer not in dense] for layer in range(values["num_hidden_layers"])]
    return {"mlp_layer_types": kinds}


def first_dense_layers(given: dict[str, Any]) -> list[int]:
    return list(range(min(given["first_k_dense_replace"] or 0, given["num_hidden_layers"])))


def first_dense_fields(values: dict[str, Any]) -> dict[str, Any]:
    return {"first_k_dense_replace": len(values["mlp_only_layers"] or ())}


def afmoe_dense_layers(given: dict[str, Any]) -> list[int]:
    return list(range(min(given["num_dense_layers"], given["num_hidden_layers"])))


def afmoe_dense_fields(values: dict[str, Any]) -> dict[str, Any]:
    return {"num_dense_layers": len(values["mlp_only_layers"] or ())}


def interval_dense_layers(given: dict[str, Any]) -> list[int]:
    """Every n-th layer between two layers has experts (ERNIE 4.5)."""
    number, last = given["num_hidden_layers"], given["moe_layer_end_index"]
    first, interval = given["moe_layer_start_index"], given["moe_layer_interval"]
    sparse = _interval(number, first, number - 1 if last == -1 else last, interval)
    return [layer for layer in range(number) if layer not in sparse]


def _interval(number: int, first: int, last: int, interval: int) -> list[int]:
    return [layer for layer in range(number) if first <= layer <= last and (layer + 1) % interval == 0]


def interval_fields(values: dict[str, Any]) -> dict[str, Any]:
    """The first interval that gives these layers; 1 if there is none, which reading then finds."""
    number, dense = values["num_hidden_layers"], values["mlp_only_layers"] or ()
    sparse = [layer for layer in range(number) if layer not in dense]
    if not sparse:
        return {}
    first, last = sparse[0], sparse[-1]
    fitting = (each for each in range(1, number + 1) if _interval(number, first, last, each) == sparse)
    return {
        "moe_layer_start_index": first,
        "moe_layer_end_index": last,
        "moe_layer_interval": next(fitting, 1),
    }


# ---- shared experts, which are one expert of their total width


def granite_shared(given: dict[str, Any]) -> int | None:
    return given["shared_intermediate_size"] or None


def granite_shared_fields(values: dict[str, Any]) -> dict[str, Any]:
    return {"shared_intermediate_size": values["shared_expert_intermediate_size"] or 0}


def ernie_shared(given: dict[str, Any]) -> int | None:
    return given["moe_num_shared_experts"] * given["moe_intermediate_size"] or None


def ernie_shared_fields(values: dict[str, Any]) -> dict[str, Any]:
    width = values["shared_expert_intermediate_size"] or 0
    return {"moe_num_shared_experts": width // (values["moe_intermediate_size"] or 1)}


# ---- cohere2_moe


def cohere2_moe_without_rope(given: dict[str, Any]) -> list[int]:
    """Layers with a window rotate, and dense layers if their interval is 1."""
    types, dense = given["layer_types"], dense_layers(given)
    rotate_dense = given["prefix_dense_sliding_window_pattern"] == 1
    return [
        layer
        for layer in range(given["num_hidden_layers"])
        if types[layer] != _LOCAL and not (rotate_dense and layer in dense)
    ]


def cohere2_moe_rope_fields(values: dict[str, Any]) -> dict[str, Any]:
    """Dense layers without rotary embeddings have an interval other than 1; layer_types lists the windows."""
    without = {*values["no_rope_layers"]} & {*(values["mlp_only_layers"] or ())}
    return {"prefix_dense_sliding_window_pattern": 2 if without else 1}


def cohere2_moe_norm(given: dict[str, Any]) -> dict[str, Any]:
    """RMSNorm if its epsilon is given, else LayerNorm without bias."""
    if given["rms_norm_eps"] is not None:
        return {"norm": "rms", "rms_norm_eps": given["rms_norm_eps"]}
    return {"norm": "layer", "norm_bias": False, "rms_norm_eps": given["layer_norm_eps"]}


def cohere2_moe_norm_fields(values: dict[str, Any]) -> dict[str, Any]:
    epsilon = values["rms_norm_eps"]
    return {"rms_norm_eps": epsilon} if values["norm"] == "rms" else {"layer_norm_eps": epsilon}


def cohere2_moe_experts(given: dict[str, Any]) -> dict[str, Any]:
    """The router and the shared experts. Softmax is over the chosen experts, which is always renormalized."""
    scores, combination = given["expert_selection_fn"], given["shared_expert_combination_strategy"]
    shared, width, dense = (
        given["num_shared_experts"],
        given["intermediate_size"],
        given["prefix_dense_intermediate_size"],
    )
    if scores not in ("softmax", "sigmoid"):
        raise refuse("expert_selection_fn", scores, "is not supported. Legal values: softmax, sigmoid.")
    if shared and combination not in ("average", "sum"):
        raise refuse(
            "shared_expert_combination_strategy",
            combination,
            "is not supported. Legal values: average, sum.",
        )
    return {
        "intermediate_size": width if dense is None else dense,
        "router_scores": scores,
        "norm_topk_prob": scores == "softmax" or given["norm_topk_prob"],
        "shared_expert_intermediate_size": shared * width or None,
        "mixture_out_multiplier": 0.5 if shared and combination == "average" else 1.0,
    }


def cohere2_moe_expert_fields(values: dict[str, Any]) -> dict[str, Any]:
    width, shared = values["moe_intermediate_size"] or 1, values["shared_expert_intermediate_size"] or 0
    dense = values["intermediate_size"]
    added = shared and values["mixture_out_multiplier"] == 1.0
    return {
        "prefix_dense_intermediate_size": None if dense == width else dense,
        "expert_selection_fn": values["router_scores"],
        "norm_topk_prob": values["norm_topk_prob"],
        "num_shared_experts": shared // width,
        "shared_expert_combination_strategy": "sum" if added else "average",
    }
