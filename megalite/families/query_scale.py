"""The factor on queries by position in Mistral's rotary fields (llama_4_scaling_beta), and the way back.
Imports no torch.

transformers reads it, and the number of positions (original_max_position_embeddings), from the same object as
the rotary frequencies, of any type, and has no defaults for them.
"""

from __future__ import annotations

from typing import Any

from megalite.config.sections.model import ModelConfig
from megalite.families.refusal import refuse

BETA, POSITIONS = "llama_4_scaling_beta", "original_max_position_embeddings"
_MOVED = ("llama3", "yarn", "longrope")
"""Types for which transformers completes the number of positions from the fields of the model."""


def query_scale(given: dict[str, Any]) -> dict[str, Any]:
    name = "rope_scaling" if given.get("rope_scaling") else "rope_parameters"  # in transformers' order
    parameters = given.get(name) or {}
    positions: Any = parameters.get(POSITIONS)
    if parameters.get("rope_type", parameters.get("type")) in _MOVED:
        positions = given.get(POSITIONS) or positions or given["max_position_embeddings"]
    beta = parameters.get(BETA)
    if beta is None or positions is None:
        field = BETA if beta is None else POSITIONS
        family = f"the {given['model_type']} family"
        raise refuse(f"{name}.{field}", None, f"is not supported by {family}. It needs a number.")
    if not beta:
        return {}
    return {"query_scale_beta": float(beta), "query_scale_positions": int(positions)}


def query_scale_entries(model: ModelConfig) -> dict[str, Any]:
    """The entries of the rotary fields."""
    positions = model.query_scale_positions or model.max_position_embeddings
    return {POSITIONS: positions, BETA: model.query_scale_beta or 0.0}
