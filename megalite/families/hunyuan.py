"""Fields of a config.json of Hunyuan's family with experts that are computed."""

from __future__ import annotations

from typing import Any

from megalite.families.refusal import refuse

_SAME = "is not supported. Legal value: a number, the same in every layer."


def experts_per_token(given: dict[str, Any]) -> int:
    """moe_topk, which may be a list with one number for each layer: they must be the same."""
    if isinstance(given["num_experts"], list):
        raise refuse("num_experts", given["num_experts"], _SAME)
    chosen = given["moe_topk"]
    if not isinstance(chosen, list):
        return int(chosen)
    own = chosen[: given["num_hidden_layers"]]
    if len(own) < given["num_hidden_layers"] or len(set(own)) > 1:
        raise refuse("moe_topk", chosen, _SAME)
    return int(own[0])


def expert_fields(values: dict[str, Any]) -> dict[str, Any]:
    """Return the field of an export.

    Args:
        values: a model's `meaning`.
    """
    return {"moe_topk": values["num_experts_per_tok"]}
