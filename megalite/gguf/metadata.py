"""The keys of a GGUF file that describe the model."""

from __future__ import annotations

from math import log, pi, sqrt
from typing import Any

import torch
from torch import Tensor

from megalite.config.sections.model import ModelConfig
from megalite.gguf.architectures import Architecture

SOFTMAX, SIGMOID = 1, 2  # expert_gating_func


def metadata(model: ModelConfig, architecture: Architecture) -> dict[str, Any]:
    """Return the keys of an architecture, without its name, and their values; what is None is not written."""
    layers = range(model.num_hidden_layers)
    shapes = [model.attention_shape(layer) for layer in layers]
    keys: dict[str, Any] = {
        "vocab_size": model.vocabulary,
        "context_length": context_length(model, architecture),
        "embedding_length": model.hidden_size,
        "block_count": model.num_hidden_layers,
        "feed_forward_length": _feed_forward(model, architecture),
        "attention.head_count": _one([shape.heads for shape in shapes]),
        "attention.head_count_kv": _kv_heads(model, architecture),
        "attention.key_length": shapes[0].head_size,
        "attention.value_length": shapes[0].value_size,
        "attention.layer_norm_rms_epsilon": model.rms_norm_eps,
        "attention.layer_norm_epsilon": model.rms_norm_eps,
        "attn_logit_softcapping": model.attention_softcap,
        "final_logit_softcapping": model.logit_softcap,
        "use_parallel_residual": model.parallel_block != "none",
    }
    if architecture.scale:
        keys["attention.scale"] = model.attention_scale
    if architecture.embedding_scale == "key":
        keys |= {"embedding_scale": model.embedding_scale, "residual_scale": model.residual_multiplier}
    if architecture.logit_scale != "weights":
        scale = model.logit_scale or 1.0
        keys["logit_scale"] = scale if architecture.logit_scale == "factor" else 1.0 / scale
    if model.query_scale_beta is not None:
        keys["attention.temperature_scale"] = model.query_scale_beta
        keys["attention.temperature_length"] = model.query_scale_positions
        keys["rope.scaling.original_context_length"] = model.query_scale_positions
    keys |= _windows(model, architecture) | _rotation(model, architecture)
    if model.kv_lora_rank is not None:
        keys |= _latents(model)
    if model.has_mixtures or model.kv_lora_rank is not None:
        keys |= _mixture(model)
    keys |= _mixers(model)
    return {key: float(value) if _is_float(key, value) else value for key, value in keys.items()}


def _is_float(key: str, value: Any) -> bool:
    """Return whether llama.cpp reads a number as a float: a configuration may have an integer for it."""
    endings = ("scale", "softcapping", "epsilon", "freq_base", "freq_base_swa", "factor", "multiplier")
    return type(value) is int and key.endswith(endings)


def context_length(model: ModelConfig, architecture: Architecture) -> int:
    """Return the length up to which llama.cpp computes what we do: the window, where it has no windows."""
    length = model.max_position_embeddings
    if architecture.windows is None and any(model.window(layer) for layer in range(model.num_hidden_layers)):
        return min(length, model.sliding_window or length)
    return length


def _one(values: list[Any]) -> Any:
    """Return the value that all layers have, or those of each layer."""
    return values[0] if len({*values}) == 1 else values


def _kinds(model: ModelConfig) -> list[tuple[str, ...]]:
    return [model.block_names(layer) for layer in range(model.num_hidden_layers)]


def _kv_heads(model: ModelConfig, architecture: Architecture) -> Any:
    heads = [
        1
        if "latent_attention" in kind
        else model.attention_shape(layer).kv_heads
        if "attention" in kind
        else 0
        for layer, kind in enumerate(_kinds(model))
    ]
    if architecture.recurrent == "interval":
        return model.kv_heads
    return _one(heads)


def _feed_forward(model: ModelConfig, architecture: Architecture) -> Any:
    """Return the inner width; of layers of one block each, 0 where that is not a feed-forward."""
    if architecture.name.startswith("nemotron_h"):
        widths = {"feed_forward": model.intermediate_size, "mixture": model.expert_width}
        return [widths.get(model.block_names(layer)[0], 0) for layer in range(model.num_hidden_layers)]
    dense = any("feed_forward" in model.block_names(layer) for layer in range(model.num_hidden_layers))
    return model.intermediate_size if dense or not model.has_mixtures else model.expert_width


# ---- windows and rotary embeddings


def _windows(model: ModelConfig, architecture: Architecture) -> dict[str, Any]:
    local = [model.window(layer) is not None for layer in range(model.num_hidden_layers)]
    if architecture.windows is None or not any(local):
        return {}
    keys: dict[str, Any] = {"attention.sliding_window": model.sliding_window}
    if architecture.windows == "array":
        return keys | {"attention.sliding_window_pattern": local}
    if isinstance(architecture.windows, int):
        return keys
    return keys | {"attention.sliding_window_pattern": period_of(local)}


def period_of(marked: list[bool]) -> int | None:
    """Return n if all layers but each n-th one are marked, otherwise None."""
    return next((n for n in range(1, len(marked) + 2) if marked == _periodic(len(marked), n)), None)


def _periodic(layers: int, period: int) -> list[bool]:
    return [(layer + 1) % period != 0 for layer in range(layers)]


def _rotation(model: ModelConfig, architecture: Architecture) -> dict[str, Any]:
    if model.position != "rope":
        return {"rope.scaling.finetuned": False} if architecture.no_rope == "finetuned" else {}
    keys: dict[str, Any] = {
        "rope.dimension_count": model.rotary_dim,
        "rope.freq_base": model.rope_theta,
        "rope.freq_base_swa": model.rope_local_theta,
    }
    if architecture.no_rope == "finetuned":
        keys["rope.scaling.finetuned"] = True
    if architecture.name.startswith("qwen35"):
        pairs = model.rotary_dim // 2
        keys["rope.dimension_sections"] = [-(-(pairs - i) // 3) for i in range(3)] + [0]
    scaling = model.rope_scaling or {}
    kind = scaling.get("rope_type", "default")
    if kind == "linear":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(scaling["factor"])}
    elif kind == "yarn":
        keys |= _yarn(model, architecture, scaling)
    elif kind == "longrope":
        keys |= {
            "rope.scaling.type": "longrope",
            "rope.scaling.original_context_length": scaling["original_max_position_embeddings"],
            "rope.scaling.attn_factor": float(scaling["attention_factor"]),
        }
    elif kind == "dynamic":  # Hunyuan's, which changes the base alone
        width = model.rotary_dim
        keys["rope.freq_base"] = model.rope_theta * scaling["alpha"] ** (width / (width - 2))
    return keys


def _yarn(model: ModelConfig, architecture: Architecture, scaling: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of yarn, with those factors that give llama.cpp's formulas the model's factor on
    rotated channels and, in latent attention, the model's scale of the scores, too."""
    factor, attention = float(scaling["factor"]), float(scaling["attention_factor"])
    keys: dict[str, Any] = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": factor,
        "rope.scaling.original_context_length": scaling["original_max_position_embeddings"],
        "rope.scaling.yarn_beta_fast": float(scaling["beta_fast"]),
        "rope.scaling.yarn_beta_slow": float(scaling["beta_slow"]),
    }
    own = 1.0 + 0.1 * log(factor)
    if model.kv_lora_rank is None:
        return keys | {"rope.scaling.attn_factor": attention / own}
    scale = (model.attention_scale or 1.0 / sqrt(model.head_size)) * sqrt(model.head_size)
    multiplier = (sqrt(scale) / attention - 1.0) / (0.1 * log(factor))
    # deepseek2 takes mscale for equal to mscale_all_dim, and other architectures take it for 1
    shown = attention if architecture.name == "deepseek2" and multiplier else sqrt(scale) / own
    return keys | {"rope.scaling.attn_factor": shown, "rope.scaling.yarn_log_multiplier": 0.1 * multiplier}


def rope_tensors(model: ModelConfig) -> dict[str, Tensor]:
    """Return the tensors by which frequencies of rotary embeddings are divided, in fp32."""
    scaling = model.rope_scaling or {}
    if model.position != "rope":
        return {}
    if scaling.get("rope_type") == "longrope":
        return {
            f"rope_factors_{part}.weight": torch.tensor(scaling[f"{part}_factor"], dtype=torch.float32)
            for part in ("long", "short")
        }
    if scaling.get("rope_type") != "llama3":
        return {}
    width, length = model.rotary_dim, scaling["original_max_position_embeddings"]
    exponents = torch.arange(0, width, 2, dtype=torch.float64) / width
    turns = length / (2 * pi * model.rope_theta**exponents)  # within the original context
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    share = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return {"rope_freqs.weight": (1.0 / ((1.0 - share) / scaling["factor"] + share)).float()}


# ---- kinds of blocks


def _latents(model: ModelConfig) -> dict[str, Any]:
    """Return the keys of latent attention, which llama.cpp computes with one key-value head, the latent."""
    rank = model.kv_lora_rank or 0
    return {
        "attention.q_lora_rank": model.q_lora_rank,
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + model.qk_rope_head_dim,
        "attention.value_length": rank,
        "attention.key_length_mla": model.head_size,
        "attention.value_length_mla": model.v_head_dim,
        "rope.dimension_count": model.qk_rope_head_dim,
    }


def _mixture(model: ModelConfig) -> dict[str, Any]:
    layers = range(model.num_hidden_layers)
    shared = model.shared_expert_intermediate_size or 0
    dense = next((layer for layer in layers if model.is_mixture(layer)), model.num_hidden_layers)
    return {
        "expert_count": model.num_experts,
        "expert_used_count": model.num_experts_per_tok if model.num_experts else None,
        "expert_feed_forward_length": model.expert_width,
        "expert_shared_feed_forward_length": shared or None,
        "expert_shared_count": -(-shared // model.expert_width),
        "expert_weights_norm": model.norm_topk_prob,
        "expert_weights_scale": model.routed_scaling_factor,
        "expert_gating_func": SIGMOID if model.router_scores == "sigmoid" else SOFTMAX,
        "expert_group_count": model.n_group,
        "expert_group_used_count": model.topk_group if model.n_group else None,
        "leading_dense_block_count": dense,
        "interleave_moe_layer_step": 1,
        "moe_latent_size": model.moe_latent_size,
    }


def _mixers(model: ModelConfig) -> dict[str, Any]:
    kinds = {kind for names in _kinds(model) for kind in names}
    keys: dict[str, Any] = {}
    if "mamba" in kinds:
        keys |= {
            "ssm.conv_kernel": model.mamba_conv_kernel,
            "ssm.state_size": model.mamba_state_size,
            "ssm.group_count": model.mamba_n_groups,
            "ssm.inner_size": model.mamba_num_heads * model.mamba_head_dim,
            "ssm.time_step_rank": model.mamba_num_heads,
        }
    if "delta" in kinds and model.delta_decay == "head":
        keys |= {
            "ssm.conv_kernel": model.linear_conv_kernel_dim,
            "ssm.state_size": model.linear_key_head_dim,
            "ssm.group_count": model.linear_num_key_heads,
            "ssm.time_step_rank": model.linear_num_value_heads,
            "ssm.inner_size": model.linear_num_value_heads * model.linear_value_head_dim,
            "full_attention_interval": period_of(["delta" in kinds for kinds in _kinds(model)]),
        }
    elif "delta" in kinds:
        keys |= {"ssm.conv_kernel": model.linear_conv_kernel_dim, "kda.head_dim": model.linear_key_head_dim}
    if "convolution" in kinds:
        keys["shortconv.l_cache"] = model.conv_kernel
    return keys
