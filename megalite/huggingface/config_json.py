"""ModelConfig → Hugging Face config.json, for the families in `megalite.families.model_config`."""

import math
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from megalite.config.attention_shapes import LOCAL_SIZES, ROTATED_SHARE
from megalite.config.errors import ConfigError
from megalite.config.sections.model import ModelConfig
from megalite.families import deepseek, hunyuan, layer_lists, layer_shapes, layer_types, mamba
from megalite.families.classifiers import fields_of
from megalite.families.model_config import Family, families, from_hf_config
from megalite.families.module_names import FAMILY_NAMES
from megalite.families.query_scale import query_scale_entries

TRAINING_ONLY = (
    *("embedding_dropout", "attention_dropout", "residual_dropout"),
    *("router_aux_loss_coef", "router_z_loss_coef", "expert_capacity_factor", "mtp_layers"),
    "index_loss_coef",
)
_MIXTURE = (
    *(
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "norm_topk_prob",
        "norm_topk_eps",
        "shared_expert_intermediate_size",
    ),
    *("shared_expert_gate", "decoder_sparse_step", "mlp_only_layers", "router_balance", "router_bias_rate"),
    *("router_scores", "routed_scaling_factor", "n_group", "topk_group", "group_score"),
    *("norm_topk_min", "mixture_out_multiplier"),
)


def to_hf_config(model: ModelConfig, family: str | None = None) -> dict[str, Any]:
    """Return the config.json of a model, which every version of transformers can read.

    Dropouts and auxiliary losses that a family does not have are left out: they do not change what the
    trained model computes.

    Args:
        family: the architecture; by default the first one that supports the model.

    Raises:
        ConfigError: naming the first field that the family cannot express.
    """
    if family is None:
        reasons = {name: misfit(model, row) for name, row in families().rows.items()}
        family = next((name for name, reason in reasons.items() if reason is None), None)
        if family is None:
            raise ConfigError(
                "The model is not supported by any Hugging Face family:\n"
                + "\n".join(f"  {n}: {r}" for n, r in reasons.items())
            )
    row = families().rows[family]
    reason = misfit(model, row)
    if reason:
        raise ConfigError(f"{reason}; the {family} family does not support this value.")
    return _write(model, row)


def misfit(model: ModelConfig, row: Family) -> str | None:
    """Return the reason why a family does not support a model, or None if it does.

    The reason is the first field that does not survive the round trip through config.json.
    """
    if model.num_experts and model.router_balance == "bias" and not FAMILY_NAMES[row.model_type].router_bias:
        return f"model.router_balance = 'bias', but files of {row.model_type} models have none"
    mapped = {ours for names in row.fields.values() for ours in names}
    try:
        again = ModelConfig(**from_hf_config(_write(model, row)))
    except ConfigError as error:
        return str(error).removeprefix("config.json: ").rstrip(".")
    actual, expected = meaning(model), meaning(again)
    for name, value in actual.items():
        if not _equal(value, expected[name]) and (name not in TRAINING_ONLY or name in mapped):
            return f"model.{name} = {value!r} where {row.model_type} has {expected[name]!r}"
    return None


def _equal(one: Any, other: Any) -> bool:
    """Return whether two values are equal, floats but for the rounding of a field and its inverse."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-14)
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return all(_equal(value, other[name]) for name, value in one.items())
    return bool(one == other)


def meaning(model: ModelConfig) -> dict[str, Any]:
    """Return all fields with their defaults resolved.

    Models with equal results compute the same function.
    """
    layers = range(model.num_hidden_layers)
    local = [layer for layer in layers if model.window(layer) is not None]
    has_delta = any("delta" in model.block_names(layer) for layer in layers)
    values = asdict(model) | {
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_size,
        "attention_scale": model.attention_scale or model.head_size**-0.5,
        "embedding_scale": model.embedding_scale or 1.0,
        "logit_scale": model.logit_factor or 1.0,
        "residual_multiplier": model.residual_factor,
        "no_rope_layers": [layer for layer in layers if not model.uses_rope(layer)],
        "delta_norm_eps": model.delta_norm_eps or (model.rms_norm_eps if has_delta else None),
        "layer_blocks": model.layer_blocks and ["".join(entry.split()) for entry in model.layer_blocks],
        "post_norm_layers": sorted(model.post_norm_layers or ()) or None,
        "rope_local_theta": (model.rope_local_theta or model.rope_theta)
        if any(map(model.local_rope, layers))
        else None,
        "attention_sinks": any(map(model.has_sinks, layers)),
        "sink_layers": [layer for layer in layers if model.has_sinks(layer)],
        **_shapes_meaning(model, local),
        "sliding_window": model.sliding_window if local else None,
        "sliding_window_layers": local,
    }
    values |= _mixture_meaning(model)
    if all(each == "full" for each in model.indexer_types or ()):
        values["indexer_types"] = None
    derived = replace(model, layer_blocks=None)
    if all(model.block_groups(layer) == derived.block_groups(layer) for layer in layers):
        values["layer_blocks"] = None
    return {
        name: value
        for name, value in values.items()
        if name not in ("preset", "from_hf", "init_from", "resize_embeddings", "mup")
    }


def _shapes_meaning(model: ModelConfig, local: list[int]) -> dict[str, Any]:
    """Return the fields of the shape of attention: what single layers, or those with a window, have instead
    of the model's own."""
    if model.kv_lora_rank is not None:
        return {}
    shapes = [model.attention_shape(layer) for layer in range(model.num_hidden_layers)]
    heads = [shape.heads for shape in shapes]
    own, factor = (model.kv_heads, model.head_size, model.value_size), model.partial_rotary_factor
    entries: dict[str, Any] = {}
    if local:
        (_, *sizes, _), given = shapes[local[0]], (model.local_attention or {}).get(ROTATED_SHARE, factor)
        entries = dict(zip(LOCAL_SIZES[1:], sizes, strict=True)) | {ROTATED_SHARE: given}
    return {
        "value_head_dim": model.value_size,
        "layer_heads": None if set(heads) == {model.num_attention_heads} else heads,
        "local_attention": None if (*entries.values(),) in ((), (*own, factor)) else entries,
    }


def _mixture_meaning(model: ModelConfig) -> dict[str, Any]:
    """Return the fields of mixtures of experts.

    They are null without experts. Dense layers are listed, and the balance contains only what affects a
    trained model.
    """
    if not model.num_experts:
        return dict.fromkeys(_MIXTURE)
    dense = [layer for layer in range(model.num_hidden_layers) if not model.is_mixture(layer)]
    return {
        "moe_intermediate_size": model.expert_width,
        "intermediate_size": model.intermediate_size if dense else model.expert_width,
        "shared_expert_gate": model.shared_expert_gate if model.shared_expert_intermediate_size else None,
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
        "router_balance": "bias" if model.biased_choice else None,
        "topk_group": model.topk_group if model.n_group else 1,
        "group_score": model.counted_in_group if model.n_group else None,
        "router_bias_rate": None,
    }


def _write(model: ModelConfig, row: Family) -> dict[str, Any]:
    values = meaning(model) | {"vocab_size": model.vocabulary}
    config: dict[str, Any] = {"model_type": row.model_type, "architectures": [row.architecture]}
    config |= fields_of(row.classifier, row.model_type) if model.output_head == "reward" else {}
    config |= {theirs: values[ours[0]] for theirs, ours in row.fields.items()}
    if model.head_dim is None and "head_dim" not in row.defaults:
        config.pop("head_dim", None)  # transformers derives the same value; its Qwen2 does not have the field
    for name in row.computed:
        config |= _COMPUTED[name](values)
    return (
        config
        | (_write_rope(model, row, values) if model.position == "rope" and row.rope else {})
        | _write_window(values, row)
    )


def _reciprocal(value: float) -> float:
    """Return 1 / value, without the last digits if they are only rounding errors."""
    rounded = round(1 / value, 9)
    return rounded if 1 / rounded == value else 1 / value


def _falcon_block(values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of Falcon's layout.

    Its first architecture has one key-value head or no parallel block. All others are the new one.
    """
    block, kv_heads = values["parallel_block"], values["num_key_value_heads"]
    new = block == "two_norms" or (block == "shared_norm" and kv_heads > 1)
    norms = {"num_ln_in_parallel_attn": 2 if block == "two_norms" else 1} if new else {}
    return {
        "new_decoder_architecture": new,
        "multi_query": new or kv_heads == 1,
        "parallel_attn": block != "none",
        **norms,
    }


def _parallel(values: dict[str, Any]) -> dict[str, Any]:
    return {"use_parallel_residual": values["parallel_block"] != "none"}


_COMPUTED: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "embedding_scale": lambda values: {},
    "attention_scale": lambda values: {"query_pre_attn_scalar": round(values["attention_scale"] ** -2)},
    "logit_scale": lambda values: {"logits_scaling": _reciprocal(values["logit_scale"])},
    "no_rope_layers": lambda values: {
        "no_rope_layers": [
            int(layer not in values["no_rope_layers"]) for layer in range(values["num_hidden_layers"])
        ]
    },
    "no_rope_layers=global": lambda values: {},
    "no_rope_layers=beside_windows": lambda values: {},  # with the window
    "num_key_value_heads": lambda values: {"num_kv_heads": values["num_key_value_heads"]},
    "qk_norm=qk_layernorm": lambda values: {"qk_layernorm": values["qk_norm"] == "each_head"},
    "qk_norm=use_qk_norm": lambda values: {"use_qk_norm": values["qk_norm"] == "each_head"},
    "qk_norm=heads": lambda values: {"use_qk_norm": values["qk_norm"] == "head"},
    "attention_scale=latents": lambda values: {},  # with rope_scaling
    "num_key_value_heads=all": lambda values: {"num_key_value_heads": values["num_key_value_heads"]},
    "mlp_only_layers=first": deepseek.dense_fields,
    "mlp_only_layers=first_or_types": deepseek.type_fields,
    "layer_blocks=indexed": lambda values: {},
    "indexer_types": deepseek.indexer_fields,
    "shared_expert_intermediate_size": deepseek.shared_fields,
    "n_group": lambda values: {"n_group": values["n_group"] or 1},
    "topk_group": lambda values: {"topk_group": values["topk_group"] or 1},
    "mtp_layers": lambda values: {"num_nextn_predict_layers": values["mtp_layers"]},
    "num_experts=routed": lambda values: {},
    "group_score": lambda values: {},
    "initializer_range=youtu": lambda values: {"initializer_range": values["initializer_range"]},
    "query_scale": lambda values: {},  # with rope_scaling
    "n_group=alone": lambda values: {"n_group": values["n_group"] or 1},
    "topk_group=alone": lambda values: {"topk_group": values["topk_group"] or 1},
    "router_scores=softmax": partial(deepseek.router_fields, "softmax"),
    "router_scores=sigmoid": partial(deepseek.router_fields, "sigmoid"),
    "num_experts_per_tok=hunyuan": hunyuan.expert_fields,
    "hidden_act=clamped_swiglu": lambda values: {
        "hidden_act": "silu",
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
    **dict.fromkeys(
        ("layer_blocks=qwen3_next", "layer_blocks=qwen3_5", "layer_blocks=qwen3_5_moe", "layer_blocks=olmo"),
        partial(layer_types.type_fields, layer_types.DELTA),
    ),
    "post_norm_layers": lambda values: {},
    "position=olmo": layer_types.olmo_position_fields,
    **dict.fromkeys(layer_types.OLMO_WIDTHS, lambda values: {}),
    "layer_blocks=kimi": layer_types.kimi_fields,
    "tie_word_embeddings=untied": lambda values: {"tie_word_embeddings": values["tie_word_embeddings"]},
    "shared_expert_intermediate_size=kimi": layer_types.kimi_shared_fields,
    "n_group=kimi": lambda values: {"num_expert_group": values["n_group"] or 1},
    "topk_group=kimi": lambda values: {"topk_group": values["topk_group"] or 1},
    "layer_blocks=lfm2": partial(layer_types.type_fields, layer_types.CONVOLUTION),
    "intermediate_size=lfm2": layer_types.lfm2_width_fields,
    "layer_blocks=lfm2_moe": layer_types.lfm2_moe_fields,
    "partial_rotary_factor=rotary_dim": lambda values: {
        "rotary_dim": int(values["head_dim"] * values["partial_rotary_factor"])
    },
    "embedding_scale=mup": lambda values: {"mup_enabled": values["embedding_scale"] != 1.0},
    "mlp_only_layers=types": layer_lists.dense_fields,
    "mlp_only_layers=first_dense": layer_lists.first_dense_fields,
    "mlp_only_layers=afmoe": layer_lists.afmoe_dense_fields,
    "mlp_only_layers=interval": layer_lists.interval_fields,
    "shared_expert_intermediate_size=granite": layer_lists.granite_shared_fields,
    "shared_expert_intermediate_size=ernie": layer_lists.ernie_shared_fields,
    "no_rope_layers=cohere2_moe": layer_lists.cohere2_moe_rope_fields,
    "parallel_block": _falcon_block,
    "parallel_block=shared_norm": _parallel,
    "parallel_block=two_norms": _parallel,
    "local_attention=mimo": lambda values: {},
    "sink_layers=local": lambda values: {},
    "attention_out_multiplier=values": lambda values: {
        "attention_value_scale": values["attention_out_multiplier"]
    },
    "routed_scaling_factor=or_one": lambda values: {"routed_scaling_factor": values["routed_scaling_factor"]},
    "layer_heads": layer_shapes.layer_heads_fields,
    "attention_gate_width": layer_shapes.gate_fields,
    "layer_blocks=bamba": mamba.bamba_fields,
    "layer_blocks=granite": mamba.granite_fields,
    "layer_blocks=nemotron": mamba.nemotron_fields,
    "layer_blocks=falcon_h1": lambda values: {},
    "num_hidden_layers=nemotron": lambda values: {},
    "mamba_head_dim=expanded": mamba.expanded,
    "mamba_head_dim=own_width": mamba.own_width,
    "mamba_time_step_limit": mamba.time_step_fields,
    "hidden_act=convolution": lambda values: {"hidden_act": values["hidden_act"]},
    "position": mamba.position_fields,
    "tie_word_embeddings=never": lambda values: {"tie_word_embeddings": values["tie_word_embeddings"]},
    "mamba_proj_bias=one": mamba.bias_fields,
    "mamba_norm": mamba.norm_fields,
    "mamba_multipliers": lambda values: {"ssm_multipliers": values["mamba_multipliers"] or [1.0] * 5},
    "mlp_multipliers": lambda values: {"mlp_multipliers": values["mlp_multipliers"] or [1.0] * 2},
    **{f"{name}=nemotron": partial(mamba.nemotron_field, name) for name in mamba.NEMOTRON_NAMES},
    "experts=granite": mamba.granite_expert_fields,
    "experts=nemotron": mamba.nemotron_expert_fields,
    "norm=cohere2_moe": layer_lists.cohere2_moe_norm_fields,
    "experts=cohere2_moe": layer_lists.cohere2_moe_expert_fields,
}
"""Functions for fields of config.json that are computed.

They are the inverse of the table in `megalite.families.model_config`.
"""


def _write_rope(model: ModelConfig, row: Family, values: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary fields of transformers 4, which most other readers support, and of transformers 5.

    Args:
        values: a model's `meaning`.
    """
    if row.layer_ropes:
        return layer_shapes.rope_fields(values)
    parameters = {**(model.rope_scaling or {"rope_type": "default"}), "rope_theta": model.rope_theta}
    names = {*row.constants, *(name for ours in row.fields.values() for name in ours)}
    if "partial_rotary_factor" in names:
        parameters |= {"partial_rotary_factor": model.partial_rotary_factor}
    scaling = model.rope_scaling
    if "kv_lora_rank" in row.fields and scaling is not None:
        own = deepseek.mscales(model.attention_scale or model.head_size**-0.5, model.head_size, scaling)
        parameters, scaling = parameters | own, scaling | own
    if scaling is not None and scaling["rope_type"] == "dynamic":
        required = {"factor": 1.0}  # by transformers, which does not use it
        parameters, scaling = parameters | required, scaling | required
    if "query_scale" in row.computed:
        scaled = query_scale_entries(model)
        if "partial_rotary_factor" in row.rope_entries.split():
            scaled |= {"partial_rotary_factor": model.rotary_width / model.head_size}
        parameters, scaling = scaled | parameters, scaling and scaled | scaling
    older: dict[str, Any] = {"rope_theta": model.rope_theta, "rope_scaling": scaling}
    if "original_max_position_embeddings" in row.own.split() and model.longrope_context is not None:
        older |= {
            "original_max_position_embeddings": model.longrope_context,
            "rope_scaling": {"type": "longrope", **parameters},
        }
        del older["rope_scaling"]["rope_theta"]
    if row.local_rope_theta is None:
        return older | {"rope_parameters": parameters}
    local = model.rope_local_theta or model.rope_theta
    older |= {"rope_local_base_freq": local} if "rope_local_base_freq" in row.own.split() else {}
    return older | {
        "rope_parameters": {
            "full_attention": parameters,
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        }
    }


def _write_window(values: dict[str, Any], row: Family) -> dict[str, Any]:
    """Return the sliding-window fields.

    Args:
        values: a model's `meaning`.
    """
    window, local = values["sliding_window"], values["sliding_window_layers"]
    if row.window == "every_layer":
        return {"sliding_window": window}
    types = [
        "sliding_attention" if layer in local else "full_attention"
        for layer in range(values["num_hidden_layers"])
    ]
    if row.window in ("last_layers", "pattern_or_none"):
        # with a window that no layer has, layers of the latter do not rotate
        unused = 4096 if row.window == "pattern_or_none" and values["no_rope_layers"] else None
        return {"sliding_window": window or unused, "layer_types": types}
    if row.window is None or (window is None and row.window != "pattern"):
        return {}
    if row.window == "every_layer_if_switched":
        return {"use_sliding_window": True, "sliding_window": window}
    switch = {} if row.window == "pattern" else {"use_sliding_window": True, "max_window_layers": 0}
    return {**switch, "sliding_window": window or 4096, "layer_types": types}


def without_training_options(model: ModelConfig) -> ModelConfig:
    """Return the model without dropout, losses besides cross-entropy, limits on the tokens of experts, and
    biases of routers that steps move: its training then follows from its logits."""
    neutral = ModelConfig()
    values = {name: getattr(neutral, name) for name in TRAINING_ONLY}
    return replace(model, router_balance="global", **values)
