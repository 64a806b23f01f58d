"""Fields of an exported config.json that inference engines read, and that transformers derives from others.

vLLM and SGLang read some families by the config.json of their first files, which has more fields than
transformers needs. Without one, an engine ends with an error, or computes another model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Config = dict[str, Any]


def engine_fields(config: Config) -> Config:
    """Return the further fields of a config.json that the engines read of its family."""
    rule = _FIELDS.get(config["model_type"])
    return rule(config) if rule else {}


def _sparse(config: Config) -> list[bool]:
    return [kind == "sparse" for kind in config["mlp_layer_types"]]


def _leading(config: Config) -> Config:
    """Return the number of dense layers before those with experts, if there are no others."""
    sparse = _sparse(config)
    dense = len(sparse) - sum(sparse)
    return {"first_k_dense_replace": dense} if all(sparse[dense:]) else {}


def _glm4_moe_lite(config: Config) -> Config:
    return {**_leading(config), "moe_layer_freq": 1}


def _hy_v3(config: Config) -> Config:
    width = config["moe_intermediate_size"]
    return {**_leading(config), "expert_hidden_dim": width, "route_norm": True, "qk_norm": True}


def _exaone_moe(config: Config) -> Config:
    return {**_leading(config), "is_moe_layer": _sparse(config)}


def _hunyuan_moe(config: Config) -> Config:
    shared = {"use_mixed_mlp_moe": True, "num_shared_expert": 1}
    return {"moe_intermediate_size": config["intermediate_size"], "use_qk_norm": True, **shared}


def _interval(config: Config) -> Config:
    """Return n if every nth layer alone has attention."""
    types = config["layer_types"]
    interval = types.index("full_attention") + 1 if "full_attention" in types else len(types)
    every = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(len(types))]
    return {"full_attention_interval": interval} if types == every else {}


def _lfm2(config: Config) -> Config:
    return {"block_dim": config["hidden_size"], "conv_dim": config["hidden_size"]}


_ROUTER_OF_MINIMAX = {"scoring_func": "sigmoid", "use_routing_bias": True}
_NORM_OF_MINIMAX = {"use_qk_norm": True, "qk_norm_type": "per_layer"}
_ROUTER_OF_AFMOE = {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1}
_FIELDS: dict[str, Callable[[Config], Config]] = {
    "gemma2": lambda config: {"hidden_act": config["hidden_activation"]},
    "glm4_moe_lite": _glm4_moe_lite,
    "hy_v3": _hy_v3,
    "exaone_moe": _exaone_moe,
    "hunyuan_v1_dense": lambda config: {"use_qk_norm": True},
    "hunyuan_v1_moe": _hunyuan_moe,
    "minimax_m2": lambda config: _ROUTER_OF_MINIMAX | _NORM_OF_MINIMAX,
    "afmoe": lambda config: _ROUTER_OF_AFMOE,
    "lfm2": _lfm2,
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _interval),
}
