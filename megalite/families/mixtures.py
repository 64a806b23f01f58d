"""The fields of mixtures in families whose code is DeepSeek-V3's with fewer fields, and the way back. Imports
no torch.

Those that read are given a config.json with its defaults, and raise ConfigError naming a field whose value
transformers cannot compute.
"""

from __future__ import annotations

from typing import Any

from megalite.families.layer_types import refuse


def routed(given: dict[str, Any]) -> int:
    """The number of experts, which has no default, as that of a token's experts."""
    for name in ("n_routed_experts", "num_experts_per_tok"):
        if not given[name]:
            raise refuse(name, given[name], "is not supported. Legal values: 1 and above.")
    return int(given["n_routed_experts"])


def groups(given: dict[str, Any]) -> int | None:
    return None if given["n_group"] in (None, 1) else int(given["n_group"])


def topk_group(given: dict[str, Any]) -> int:
    if groups(given) is None:
        return 1
    if given["topk_group"] is None:
        raise refuse(
            "topk_group", None, f"is incompatible with n_group = {given['n_group']}. It needs a number."
        )
    return int(given["topk_group"])


def group_score(given: dict[str, Any]) -> str:
    """Mistral 4 has DeepSeek-V3's score of a group with DeepSeek-V2's probabilities."""
    return "auto" if groups(given) is None else "two_largest"


def first_dense(given: dict[str, Any]) -> list[int]:
    return list(range(min(given["first_k_dense_replace"] or 0, given["num_hidden_layers"])))


def first_dense_fields(values: dict[str, Any]) -> dict[str, Any]:
    return {"first_k_dense_replace": len(values["mlp_only_layers"] or ())}


def listed_dense(given: dict[str, Any]) -> list[int]:
    """The dense layers that mlp_layer_types lists; without it, the first ones, of which there is one where
    the family has no number of them."""
    types, number = given["mlp_layer_types"], given["num_hidden_layers"]
    if types is None:
        return [0] if given["model_type"] == "glm4_moe_lite" else first_dense(given)
    if len(types) < number or not {"dense", "sparse"} >= {*types}:
        raise refuse("mlp_layer_types", types, f"must have {number} entries, dense or sparse.")
    return [layer for layer, each in enumerate(types[:number]) if each == "dense"]


def listed_fields(values: dict[str, Any]) -> dict[str, Any]:
    dense = values["mlp_only_layers"] or ()
    layers = range(values["num_hidden_layers"])
    return {"mlp_layer_types": ["dense" if layer in dense else "sparse" for layer in layers]}
