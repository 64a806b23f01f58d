"""config.json ↔ ModelConfig, against what the installed transformers writes and reads."""

import copy
import json
import math
from typing import Any

import pytest
import torch

from megalite.config.errors import ConfigError
from megalite.config.sections.model import ModelConfig
from megalite.families.model_config import from_hf_config, loader_of
from megalite.families.presets import preset
from megalite.huggingface.config_json import to_hf_config
from megalite.model.parameters import active_parameters, model_specs
from megalite.parallel.spec import parameter_count
from tests.huggingface.hf_models import ROUTER_BIAS

SIZES = {
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
}
GROUPED = SIZES | {"num_key_value_heads": 2, "max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [3.0, 4.0]}
ALL_HEADS = SIZES | {"max_position_embeddings": 64}
FALCON = {key: value for key, value in ALL_HEADS.items() if key != "intermediate_size"}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32, "beta_slow": 1}
YARN["attention_factor"] = 0.1 * math.log(4) + 1

LATENT = ALL_HEADS | {
    "num_key_value_heads": 6,
    "n_routed_experts": 8,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
}
ALPHA = {"rope_type": "dynamic", "factor": 1.0, "alpha": 1e3}
DEFAULT = {"rope_type": "default", "rope_theta": 5e5}
MSCALE = {
    "rope_type": "yarn",
    "factor": 40.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.5,
    "mscale_all_dim": 0.707,
}
LINEAR = ["linear_attention", "full_attention", "linear_attention"]
QWEN_DELTA = GROUPED | {"head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 80}
KIMI = {
    "num_key_value_heads": 6,
    "num_local_experts": 8,
    "moe_intermediate_size": 24,
    "linear_attn_config": {"kda_layers": [1, 2], "full_attn_layers": [3], "num_heads": 4, "head_dim": 8}
    | {"short_conv_kernel_size": 3},
}
HYBRID = {"model_type": "qwen3_next"} | EXPERTS
DEEPSEEK = {"model_type": "deepseek_v3", "num_key_value_heads": 6}
MIMO, LAGUNA = {"model_type": "mimo_v2_flash", "head_dim": 8}, {"model_type": "laguna"}
LOCAL_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}

# config class, its arguments, what our model must then be
FAMILIES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (
        "LlamaConfig",
        GROUPED,
        {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "rope_scaling": None, "tie_word_embeddings": False},
    ),
    ("LlamaConfig", GROUPED | {"rope_theta": 5e5, "rope_scaling": LLAMA3}, {"rope_theta": 5e5, "rope_scaling": LLAMA3}),
    (
        "LlamaConfig",
        GROUPED | {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ),
    (
        "LlamaConfig",
        GROUPED | {"head_dim": 16, "tie_word_embeddings": True},
        {"head_dim": 16, "tie_word_embeddings": True},
    ),
    (
        "LlamaConfig",
        GROUPED | {"attention_bias": True, "mlp_bias": True},
        {"attention_bias": True, "attention_out_bias": True, "mlp_bias": True},
    ),
    ("MistralConfig", GROUPED, {"sliding_window": 4096, "sliding_window_layers": None}),
    ("MistralConfig", GROUPED | {"sliding_window": None}, {"sliding_window": None}),
    (
        "Qwen2Config",
        GROUPED,
        {"attention_bias": True, "attention_out_bias": False, "sliding_window": None, "qk_norm": "none"},
    ),
    (
        "Qwen2Config",
        GROUPED | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        {"sliding_window": 8, "sliding_window_layers": [1, 2]},
    ),
    (
        "Qwen3Config",
        GROUPED | {"head_dim": 16},
        {"qk_norm": "head", "head_dim": 16, "attention_bias": False, "sliding_window": None},
    ),
    (
        "LlamaConfig",
        GROUPED | {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
        {"rope_scaling": YARN},
    ),
    ("Olmo2Config", GROUPED, {"qk_norm": "full", "norm_placement": "post", "rms_norm_eps": 1e-5}),
    ("Phi3Config", GROUPED | {"sliding_window": 8}, {"sliding_window": 8, "residual_dropout": 0.0}),
    (
        "GemmaConfig",
        GROUPED | {"head_dim": 16},
        {
            "norm_offset": 1.0,
            "embedding_scale": 48**0.5,
            "hidden_act": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
        },
    ),
    ("GemmaConfig", GROUPED | {"head_dim": 16, "hidden_act": "gelu"}, {"hidden_act": "gelu_pytorch_tanh"}),
    (
        "Gemma2Config",
        GROUPED | {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 8, "final_logit_softcapping": 20.0},
        {
            "norm_placement": "both",
            "attention_scale": 24**-0.5,
            "sliding_window": 8,
            "sliding_window_layers": [0, 2],
            "logit_softcap": 20.0,
            "attention_softcap": 50.0,
        },
    ),
    ("SmolLM3Config", GROUPED, {"no_rope_layers": [], "rope_theta": 2e6, "tie_word_embeddings": True}),
    (
        "SmolLM3Config",
        GROUPED | {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 8},
        {"no_rope_layers": [1], "sliding_window": 8, "sliding_window_layers": [1]},
    ),
    (
        "Phi3Config",
        GROUPED | {"partial_rotary_factor": 0.5, "original_max_position_embeddings": 16, "rope_scaling": LONGROPE},
        {
            "partial_rotary_factor": 0.5,
            "rope_scaling": LONGROPE | {"original_max_position_embeddings": 16, "attention_factor": 1.5**0.5},
        },
    ),
    (
        "Starcoder2Config",
        GROUPED | {"sliding_window": 8},
        {
            "norm": "layer",
            "gated_mlp": False,
            "mlp_bias": True,
            "attention_out_bias": True,
            "sliding_window": 8,
            "tie_word_embeddings": True,
        },
    ),
    (
        "GraniteConfig",
        GROUPED
        | {
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.0078125,
            "residual_multiplier": 0.22,
            "logits_scaling": 49.0,
        },
        {"embedding_scale": 12.0, "attention_scale": 0.0078125, "residual_multiplier": 0.22, "logit_scale": 1 / 49},
    ),
    (
        "NemotronConfig",
        GROUPED,
        {"norm": "layer", "norm_offset": 1.0, "hidden_act": "relu2", "gated_mlp": False, "partial_rotary_factor": 0.5},
    ),
    ("StableLmConfig", GROUPED, {"partial_rotary_factor": 0.25, "parallel_block": "none", "norm": "layer"}),
    (
        "StableLmConfig",
        GROUPED
        | {"use_parallel_residual": True, "use_qkv_bias": True, "partial_rotary_factor": 0.5, "rope_theta": 1e5},
        {"parallel_block": "shared_norm", "attention_bias": True, "attention_out_bias": False, "rope_theta": 1e5},
    ),
    (
        "GPTNeoXConfig",
        ALL_HEADS | {"rotary_pct": 0.5, "rotary_emb_base": 5e4},
        {
            "parallel_block": "two_norms",
            "partial_rotary_factor": 0.5,
            "rope_theta": 5e4,
            "hidden_act": "gelu",
            "attention_bias": True,
        },
    ),
    (
        "GPTNeoXConfig",
        ALL_HEADS | {"use_parallel_residual": False},
        {"parallel_block": "none", "partial_rotary_factor": 0.25},
    ),
    (
        "Olmo3Config",
        GROUPED | {"sliding_window": 8, "num_hidden_layers": 4},
        {"sliding_window_layers": [0, 1, 2], "rope_local_theta": None, "rope_theta": 5e5, "norm_placement": "post"},
    ),
    (
        "Olmo3Config",
        GROUPED | {"sliding_window": 8, "num_hidden_layers": 4, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_local_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ),
    (
        "Gemma3TextConfig",
        GROUPED | {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 8},
        {
            "rope_theta": 1e6,
            "rope_local_theta": 1e4,
            "qk_norm": "head",
            "sliding_window_layers": [0, 1, 2],
            "logit_softcap": None,
        },
    ),
    (
        "GlmConfig",
        GROUPED | {"head_dim": 16},
        {"partial_rotary_factor": 0.5, "attention_bias": True, "attention_out_bias": False},
    ),
    ("Glm4Config", GROUPED | {"head_dim": 16}, {"norm_placement": "both", "partial_rotary_factor": 0.5}),
    (
        "CohereConfig",
        GROUPED,
        {
            "norm_bias": False,
            "parallel_block": "shared_norm",
            "logit_scale": 0.0625,
            "rope_theta": 5e5,
            "tie_word_embeddings": True,
        },
    ),
    (
        "Cohere2Config",
        GROUPED | {"num_hidden_layers": 5, "sliding_window": 8},
        {"sliding_window_layers": [0, 1, 2, 4], "no_rope_layers": [3], "rope_theta": 1e4},
    ),
    (
        "FalconConfig",
        FALCON,
        {"num_key_value_heads": 1, "parallel_block": "shared_norm", "intermediate_size": 192, "mlp_bias": False},
    ),
    (
        "FalconConfig",
        FALCON
        | {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 80, "num_ln_in_parallel_attn": 2},
        {"num_key_value_heads": 2, "parallel_block": "two_norms", "intermediate_size": 80},
    ),
    (
        "FalconConfig",
        FALCON | {"multi_query": False, "parallel_attn": False, "bias": True},
        {"num_key_value_heads": 6, "parallel_block": "none", "attention_out_bias": True},
    ),
    (
        "SeedOssConfig",
        GROUPED,
        {"head_dim": 128, "attention_bias": True, "attention_out_bias": False, "residual_dropout": 0.1}
        | {"attention_dropout": 0.1, "mlp_bias": False},
    ),
    (
        "Ernie4_5Config",
        GROUPED | {"use_bias": True},
        {"head_dim": 128, "rope_theta": 5e5, "tie_word_embeddings": True, "mlp_bias": True, "attention_out_bias": True},
    ),
    ("Jais2Config", GROUPED, {"norm": "layer", "hidden_act": "relu2", "gated_mlp": False, "mlp_bias": True}),
    (
        "HunYuanDenseV1Config",
        GROUPED | {"head_dim": 8, "rope_scaling": ALPHA},
        {"qk_norm": "head", "qk_norm_after_rope": True, "rope_scaling": {"rope_type": "dynamic", "alpha": 1e3}},
    ),
    (
        "HunYuanMoEV1Config",
        GROUPED | {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
        {"num_experts_per_tok": 2, "shared_expert_intermediate_size": 80, "shared_expert_gate": False},
    ),
    (
        "NanoChatConfig",
        GROUPED,
        {"norm_weight": False, "qk_norm_weight": False, "embedding_norm": True, "logit_softcap": 15.0},
    ),
    (
        "ApertusConfig",
        GROUPED,
        {"hidden_act": "xielu", "gated_mlp": False, "qk_norm": "head", "rope_theta": 1.2e7}
        | {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 8192}},
    ),
    ("ApertusConfig", GROUPED | {"hidden_act": "relu2", "rope_parameters": DEFAULT}, {"rope_scaling": None}),
    ("ArceeConfig", GROUPED, {"gated_mlp": False, "hidden_act": "relu2", "rms_norm_eps": 1e-5}),
    (
        "MinistralConfig",
        GROUPED
        | {
            "head_dim": 8,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        },
        {"sliding_window_layers": [0]},
    ),
    (
        "GPT2Config",
        {"vocab_size": 100, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 64, "attn_pdrop": 0.0},
        {
            "hidden_size": 48,
            "intermediate_size": 192,
            "num_hidden_layers": 3,
            "num_attention_heads": 6,
            "max_position_embeddings": 64,
            "position": "learned",
            "norm": "layer",
            "gated_mlp": False,
            "hidden_act": "gelu_new",
            "tie_word_embeddings": True,
            "attention_bias": True,
            "attention_out_bias": True,
            "mlp_bias": True,
            "rms_norm_eps": 1e-5,
            "attention_dropout": 0.0,
            "embedding_dropout": 0.1,
            "residual_dropout": 0.1,
        },
    ),
    (
        "DeepseekV2Config",
        LATENT
        | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "topk_method": "greedy", "scoring_func": "softmax"},
        {
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "n_group": None,
            "norm_topk_prob": False,
            "attention_scale": None,
            "mlp_only_layers": [0],
        },
    ),
    (
        "DeepseekV3Config",
        LATENT
        | {"n_group": 4, "topk_group": 2, "rope_scaling": MSCALE, "num_nextn_predict_layers": 0}
        | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
        {"attention_scale": 0.1147213867929261, "shared_expert_intermediate_size": 24, "shared_expert_gate": False}
        | {
            "n_group": 4,
            "topk_group": 2,
            "router_scores": "sigmoid",
            "router_balance": "bias",
            "routed_scaling_factor": 2.5,
        },
    ),
]

MAMBA = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 6}
LINEAR = ["linear_attention", "full_attention", "linear_attention"]
NEMOTRON = {key: value for key, value in GROUPED.items() if key != "num_hidden_layers"} | {
    **{"head_dim": 8, "mamba_num_heads": 8, "mamba_head_dim": 4, "ssm_state_size": 6, "n_groups": 2},
}
NEMOTRON_EXPERTS = {"n_routed_experts": 8, "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 32}
NEMOTRON_EXPERTS |= {"moe_latent_size": 16, "n_group": 2, "topk_group": 1}
FAMILIES += [
    (
        "BambaConfig",
        GROUPED | MAMBA | {"attn_layer_indices": [1]},
        {
            "layer_blocks": ["mamba+feed_forward", "attention+feed_forward", "mamba+feed_forward"],
            "partial_rotary_factor": 0.5,
            "mamba_num_heads": 8,
            "mamba_head_dim": 12,
            "mamba_state_size": 6,
            "mamba_time_step_limit": None,
            "mamba_norm": "gate_first",
        },
    ),
    (
        "GraniteMoeHybridConfig",
        GROUPED
        | MAMBA
        | {"layer_types": LINEAR, "num_local_experts": 4, "shared_intermediate_size": 24, "logits_scaling": 8.0}
        | {"time_step_limit": [0.01, 0.5]},
        {
            "layer_blocks": ["mamba+mixture", "attention+mixture", "mamba+mixture"],
            "position": "none",
            "moe_intermediate_size": 80,
            "shared_expert_intermediate_size": 24,
            "shared_expert_gate": False,
            "logit_scale": 0.125,
            "mamba_time_step_limit": [0.01, 0.5],
        },
    ),
    (
        "GraniteMoeHybridConfig",
        GROUPED
        | MAMBA
        | {"layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 0, "shared_intermediate_size": 80}
        | {"position_embedding_type": "rope", "rope_theta": 5e5},
        {
            "layer_blocks": ["mamba+feed_forward", "attention+feed_forward", "mamba+feed_forward"],
            "position": "rope",
            "rope_theta": 5e5,
            "num_experts": None,
        },
    ),
    (
        "FalconH1Config",
        GROUPED
        | MAMBA
        | {"mamba_d_ssm": 32, "mamba_rms_norm": True, "mamba_norm_before_gate": False, "key_multiplier": 0.5}
        | {"ssm_multipliers": [0.5, 1.5, 0.7, 1.2, 0.8], "mlp_multipliers": [1.0, 1.0], "lm_head_multiplier": 0.25},
        {
            "layer_blocks": ["mamba|attention+feed_forward"] * 3,
            "mamba_head_dim": 4,
            "mamba_norm": "gate_first",
            "mamba_multipliers": [0.5, 1.5, 0.7, 1.2, 0.8],
            "mlp_multipliers": None,
            "key_multiplier": 0.5,
            "logit_scale": 0.25,
        },
    ),
    (
        "FalconH1Config",
        GROUPED | MAMBA | {"mamba_d_ssm": 96, "mamba_n_heads": 4},
        {"mamba_norm": "none", "mamba_head_dim": 24, "mamba_multipliers": None},
    ),
    (
        "NemotronHConfig",
        NEMOTRON | NEMOTRON_EXPERTS | {"hybrid_override_pattern": "M-*E"},
        {
            "layer_blocks": ["mamba", "feed_forward", "attention", "mixture"],
            "num_hidden_layers": 4,
            "position": "none",
            "hidden_act": "relu2",
            "gated_mlp": False,
            "moe_latent_size": 16,
            "n_group": 2,
            "router_scores": "sigmoid",
            "shared_expert_intermediate_size": 32,
            "mamba_n_groups": 2,
            "mamba_conv_kernel": 4,
        },
    ),
    (
        "NemotronHConfig",
        NEMOTRON | {"layers_block_type": ["linear_attention", "mlp"], "mlp_bias": True, "use_bias": True},
        {"layer_blocks": ["mamba", "feed_forward"], "num_experts": None, "mlp_bias": True, "mamba_proj_bias": True},
    ),
]


FAMILIES += [
    (
        "Qwen3NextConfig",
        QWEN_DELTA | EXPERTS | {"num_hidden_layers": 4, "mlp_only_layers": [1], "shared_expert_intermediate_size": 24},
        {
            "layer_blocks": ["delta+mixture", "delta+feed_forward", "delta+mixture", "attention+mixture"],
            "attention_gate": True,
            "norm_offset": 1.0,
            "partial_rotary_factor": 0.25,
            "linear_key_head_dim": 128,
            "linear_num_value_heads": 4,
        },
    ),
    (
        "Qwen3_5TextConfig",
        QWEN_DELTA | {"layer_types": LINEAR, "rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}},
        {
            "layer_blocks": ["delta+feed_forward", "attention+feed_forward", "delta+feed_forward"],
            "rope_theta": 1e6,
            "partial_rotary_factor": 0.5,
        },
    ),
    (
        "Qwen3_5MoeTextConfig",
        {key: value for key, value in QWEN_DELTA.items() if key != "intermediate_size"} | EXPERTS,
        {"layer_blocks": ["delta+mixture"] * 3, "norm_topk_prob": True, "shared_expert_intermediate_size": 512},
    ),
    (
        "OlmoHybridConfig",
        GROUPED | {"num_hidden_layers": 3, "rope_theta": None},
        {
            "layer_blocks": ["delta+feed_forward", "delta+feed_forward", "attention+feed_forward"],
            "post_norm_layers": [2],
            "position": "none",
            "linear_num_value_heads": 6,
            "linear_key_head_dim": 6,
            "linear_value_head_dim": 12,
            "delta_negative_eigenvalues": True,
            "delta_norm_eps": 1e-5,
        },
    ),
    ("OlmoHybridConfig", GROUPED | {"layer_types": LINEAR, "rms_norm_eps": 1e-5}, {"position": "rope"}),
    (
        "KimiLinearConfig",
        ALL_HEADS | KIMI,
        {
            "layer_blocks": ["delta+feed_forward", "delta+mixture", "latent_attention+mixture"],
            "delta_decay": "channel",
            "linear_num_key_heads": 4,
            "linear_value_head_dim": 8,
            "linear_conv_kernel_dim": 3,
            "position": "none",
            "num_experts": 8,
            "routed_scaling_factor": 2.446,
            "n_group": None,
        },
    ),
    (
        "Lfm2Config",
        GROUPED | {"full_attn_idxs": [1], "block_multiple_of": 32},
        {
            "layer_blocks": ["convolution+feed_forward", "attention+feed_forward", "convolution+feed_forward"],
            "intermediate_size": 64,
            "rope_theta": 1e6,
            "qk_norm": "head",
        },
    ),
    (
        "Lfm2MoeConfig",
        GROUPED | EXPERTS | {"layer_types": ["conv", "conv", "full_attention"], "conv_bias": True},
        {
            "layer_blocks": ["convolution+feed_forward", "convolution+feed_forward", "attention+mixture"],
            "norm_topk_eps": 1e-6,
            "router_scores": "sigmoid",
            "conv_bias": True,
        },
    ),
]


GROWN, LONGER = 0.1 * 0.707 * math.log(40) + 1, 0.1 * math.log(128) + 1
SCALED = MSCALE | {"llama_4_scaling_beta": 0.1}
ROUTED = {"n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
FAMILIES += [
    (
        "Dots1Config",
        GROUPED | ROUTED | {"sliding_window": 8, "max_window_layers": 1, "first_k_dense_replace": 2, "n_group": 2},
        {
            "sliding_window": 8,
            "sliding_window_layers": [1, 2],
            "mlp_only_layers": [0, 1],
            "norm_topk_prob": False,
            "qk_norm": "head",
            "shared_expert_intermediate_size": 48,
            "n_group": 2,
            "router_scores": "sigmoid",
        },
    ),
    (
        "SolarOpenConfig",
        {key: value for key, value in GROUPED.items() if key != "intermediate_size"} | {"attention_bias": True},
        {
            "num_experts": 128,
            "expert_width": 1280,
            "head_dim": 128,
            "rope_theta": 1e6,
            "attention_bias": True,
            "attention_out_bias": False,
            "shared_expert_intermediate_size": 1280,
        },
    ),
    (
        "Exaone4Config",
        GROUPED | {"num_hidden_layers": 4},
        {
            "sliding_window": 4096,
            "sliding_window_layers": [0, 1, 2],
            "no_rope_layers": [3],
            "norm_placement": "post",
            "qk_norm": "head",
        },
    ),
    (
        "Exaone4Config",
        GROUPED | {"sliding_window": None, "layer_types": ["full_attention"] * 3},
        {"sliding_window": None, "no_rope_layers": []},
    ),
    ("Exaone4Config", GROUPED | {"layer_types": ["full_attention"] * 3}, {"no_rope_layers": [0, 1, 2]}),
    (
        "ExaoneMoeConfig",
        GROUPED | {"mlp_layer_types": ["sparse", "dense", "sparse"], "num_shared_experts": 2},
        {
            "no_rope_layers": [],
            "sliding_window_layers": [0, 1, 2],
            "mlp_only_layers": [1],
            "routed_scaling_factor": 2.5,
            "shared_expert_intermediate_size": 2048,
            "norm_placement": "pre",
        },
    ),
    (
        "Ministral3Config",
        GROUPED,
        {"query_scale_beta": 0.1, "query_scale_positions": 16384, "head_dim": 128, "rope_theta": 1e6}
        | {"rope_scaling": YARN | {"factor": 16.0, "original_max_position_embeddings": 16384, "attention_factor": 1.0}},
    ),
    (
        "Ministral3Config",
        GROUPED
        | {"rope_parameters": {"rope_theta": 1e4, "original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.5}},
        {"query_scale_beta": 0.5, "query_scale_positions": 8, "rope_scaling": None},
    ),
    (
        "Glm4MoeLiteConfig",
        LATENT | {"mlp_layer_types": ["sparse", "dense", "sparse"], "num_nextn_predict_layers": 1},
        {
            "mlp_only_layers": [1],
            "mtp_layers": 1,
            "kv_lora_rank": 512,
            "v_head_dim": 256,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.8,
            "attention_scale": None,
        },
    ),
    (
        "YoutuConfig",
        ALL_HEADS | {"num_key_value_heads": 6, "rope_parameters": MSCALE | {"rope_theta": 1e4}},
        {
            "initializer_range": 2 / 240**0.5,
            "tie_word_embeddings": True,
            "num_experts": None,
            "q_lora_rank": 1536,
            "attention_scale": 192**-0.5 * GROWN * GROWN,
        },
    ),
    (
        "Mistral4Config",
        {key: value for key, value in LATENT.items() if key != "moe_layer_freq"} | {"n_group": 2, "topk_group": 1},
        {
            "query_scale_beta": 0.1,
            "query_scale_positions": 8192,
            "attention_scale": 128**-0.5 * LONGER * LONGER,
            "group_score": "two_largest",
            "router_scores": "softmax",
            "mlp_only_layers": [0],
            "kv_lora_rank": 256,
        },
    ),
]


FAMILIES += [
    (
        "GraniteMoeConfig",
        GROUPED
        | {"num_local_experts": 4, "attention_multiplier": 0.1, "logits_scaling": 8.0, "residual_multiplier": 0.5},
        {"num_experts": 4, "moe_intermediate_size": 80, "attention_scale": 0.1, "logit_scale": 0.125}
        | {"norm_topk_prob": True, "shared_expert_intermediate_size": None},
    ),
    (
        "GraniteMoeSharedConfig",
        GROUPED | {"num_experts_per_tok": 3, "shared_intermediate_size": 24},
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "shared_expert_intermediate_size": 24,
            "shared_expert_gate": False,
        },
    ),
    (
        "FlexOlmoConfig",
        GROUPED | {"num_experts": 4, "num_experts_per_tok": 2},
        {"norm_placement": "post", "qk_norm": "full", "norm_topk_prob": False, "moe_intermediate_size": 80}
        | {"rope_theta": 5e5, "router_aux_loss_coef": 0.01},
    ),
    (
        "MiniMaxM2Config",
        GROUPED | {"head_dim": 16, "rotary_dim": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
        {"partial_rotary_factor": 0.25, "rope_theta": 5e6, "qk_norm": "full", "router_scores": "sigmoid"}
        | {"router_balance": "bias", "num_experts": 4},
    ),
    (
        "Ernie4_5_MoeConfig",
        GROUPED | {"num_hidden_layers": 6, "moe_layer_interval": 2, "moe_layer_start_index": 3, "moe_norm_min": 1e-6},
        {"mlp_only_layers": [0, 1, 2, 4], "norm_topk_min": 1e-6, "shared_expert_intermediate_size": 3072}
        | {"router_scores": "softmax", "router_balance": "bias", "num_experts": 64, "rope_theta": 5e5},
    ),
    (
        "HYV3Config",
        GROUPED | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_shared_experts": 2},
        {"mlp_only_layers": [0], "shared_expert_intermediate_size": 48, "routed_scaling_factor": 2.826}
        | {"qk_norm": "head", "router_balance": "bias"},
    ),
    (
        "AfmoeConfig",
        GROUPED | {"head_dim": 16, "global_attn_every_n_layers": 2, "sliding_window": 8, "mup_enabled": True},
        {"sliding_window_layers": [0, 2], "no_rope_layers": [1], "embedding_scale": 48**0.5, "attention_gate": True}
        | {"mlp_only_layers": [0], "shared_expert_intermediate_size": 2816, "norm_placement": "both"},
    ),
    (
        "Cohere2MoeConfig",
        GROUPED | {"head_dim": 16, "num_hidden_layers": 6, "first_k_dense_replace": 2, "sliding_window_pattern": 2},
        {"mlp_only_layers": [0, 1], "sliding_window_layers": [2, 4], "no_rope_layers": [3, 5], "norm": "layer"}
        | {"norm_bias": False, "parallel_block": "shared_norm", "mixture_out_multiplier": 1.0, "norm_topk_prob": True},
    ),
    (
        "Cohere2MoeConfig",
        GROUPED
        | {"num_hidden_layers": 4, "first_k_dense_replace": 2, "prefix_dense_sliding_window_pattern": 2}
        | {"rms_norm_eps": 1e-6, "expert_selection_fn": "sigmoid", "norm_topk_prob": False, "num_shared_experts": 1}
        | {"prefix_dense_intermediate_size": 96},
        {"sliding_window_layers": [0, 2, 3], "no_rope_layers": [1], "norm": "rms", "rms_norm_eps": 1e-6}
        | {"intermediate_size": 96, "moe_intermediate_size": 80, "mixture_out_multiplier": 0.5}
        | {"router_scores": "sigmoid", "norm_topk_prob": False, "shared_expert_intermediate_size": 80},
    ),
]

COMPUTED = (
    "sliding_window",
    "sliding_window_pattern",
    "_sliding_window_pattern",
    "layer_types",
    "no_rope_layer_interval",
    *("linear_attn_config", "full_attention_interval", "first_k_dense_replace", "moe_layer_freq"),
    *("block_auto_adjust_ff_dim", "block_multiple_of", "full_attn_idxs"),
    *("global_attn_every_n_layers", "sliding_window_pattern", "prefix_dense_sliding_window_pattern"),
)  # compared as our fields, which the file must give back
PUBLISHED = {
    "SmolLM2": {
        "model_type": "llama",
        "is_llama_config": True,
        "rope_interleaved": False,
        "transformers.js_config": {"dtype": "q4"},
    },
    "Qwen2.5": {
        "model_type": "qwen2",
        "use_mrope": False,
        "use_sliding_window": False,
        "sliding_window": 131072,
        "max_window_layers": 28,
    },
    "Phi-3-mini": {
        "model_type": "phi3",
        "attention_bias": False,
        "original_max_position_embeddings": 4096,
        "rope_scaling": None,
    },
    "Phi-4-mini": {
        "model_type": "phi3",
        "full_attn_mod": 1,
        "interpolate_factor": 1,
        "lm_head_bias": False,
        "mlp_bias": False,
    },
    "nemotron-4-mini": {"model_type": "nemotron", "kv_channels": 128},
    "gemma-2b": {"model_type": "gemma", "hidden_act": "gelu", "hidden_activation": None, "attention_bias": False},
    "gemma-2-2b": {"model_type": "gemma2", "hidden_act": "gelu_pytorch_tanh", "cache_implementation": "hybrid"},
    "gemma-3-1b": {
        "model_type": "gemma3_text",
        "cache_implementation": "hybrid",
        "rope_local_base_freq": 10000,
        "sliding_window_pattern": 6,
    },
    "command-r": {"model_type": "cohere", "model_max_length": 131072, "use_qk_norm": False},
    "command-r7b": {
        "model_type": "cohere2",
        "layer_switch": 4,
        "use_parallel_block": True,
        "position_embedding_type": "rope_gptj",
    },
    "pythia": {"model_type": "gpt_neox", "classifier_dropout": 0.1, "num_key_value_heads": None},
    "SmolLM3": {"model_type": "smollm3", "pretraining_tp": 2, "no_rope_layer_interval": 4, "max_window_layers": 28},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_published_files_also_contain_is_accepted(name):
    """Fields without influence, or at the one value that means off, as they stand in the files of these models."""
    fields = GROUPED | PUBLISHED[name]
    plain = {key: fields[key] for key in (*GROUPED, "model_type")}
    assert from_hf_config(fields) == from_hf_config(plain)


def named(row: Any) -> str:
    return row if isinstance(row, str) else ""


@pytest.mark.parametrize("name, arguments, expected", FAMILIES, ids=named)
def test_reads_what_transformers_writes_and_writes_what_it_reads(name, arguments, expected):
    import transformers

    theirs = getattr(transformers, name)(**copy.deepcopy(arguments))  # it writes into rope_scaling
    shape = from_hf_config(json.loads(theirs.to_json_string(use_diff=False)))
    assert from_hf_config(json.loads(theirs.to_json_string(use_diff=True))) == shape
    model = ModelConfig(**shape)
    assert {key: getattr(model, key) for key in expected} == expected
    assert all(getattr(model, key) == arguments[key] for key in GROUPED if key in arguments and key not in expected)

    written = to_hf_config(model, theirs.model_type)
    again = type(theirs).from_dict(json.loads(json.dumps(written)))
    ours, reference = again.to_dict(), theirs.to_dict()
    for config in (ours, reference):
        parameters = (config.get("rope_parameters") or {}).items()
        # written out, or left out
        neutral = {"type", "beta_fast", "beta_slow", "attention_factor", "max_position_embeddings"}
        neutral |= {"mscale", "mscale_all_dim"} if name == "Ministral3Config" else set()
        whole = ("partial_rotary_factor", 1.0)
        config["rope_parameters"] = {
            key: value for key, value in parameters if key not in neutral and (key, value) != whole
        }
        for computed_alike in (
            "architectures",
            "use_sliding_window",
            "max_window_layers",
            "rope_scaling",
            "rope_theta",
            "n_inner",
            *("partial_rotary_factor", "rope_local_base_freq", "rotary_pct", "rotary_emb_base"),  # in rope_parameters
            *("num_kv_heads", "num_ln_in_parallel_attn"),  # without effect in Falcon's first architecture
            *COMPUTED,
            *(("intermediate_size",) if name == "Lfm2Config" else ()),
        ):
            config.pop(computed_alike, None)
    assert ours == reference
    assert from_hf_config(written) == shape


def test_older_files_leave_fields_out():
    llama_1 = {
        "model_type": "llama",
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
    }
    model = ModelConfig(**from_hf_config(llama_1))
    assert (model.kv_heads, model.head_size, model.rope_theta, model.rms_norm_eps, model.vocab_size) == (
        6,
        8,
        10000.0,
        1e-6,
        None,
    )
    gpt2 = {
        "model_type": "gpt2",
        "n_embd": 48,
        "n_layer": 2,
        "n_head": 6,
        "n_positions": 64,
        "n_ctx": 64,
        "n_inner": 96,
    }
    assert ModelConfig(**from_hf_config(gpt2)).tie_word_embeddings and from_hf_config(gpt2)["intermediate_size"] == 96
    qwen = GROUPED | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    assert from_hf_config(qwen)["sliding_window_layers"] == [1, 2]
    assert from_hf_config(GROUPED | {"model_type": "qwen3"})["head_dim"] == 128


def test_an_activation_of_another_name_is_the_same():
    """Each of transformers' names that is not ours computes what ours computes."""
    from transformers.activations import ACT2FN

    values = torch.linspace(-4, 4, 33, dtype=torch.float64)
    for theirs in ("swish", "gelu_python", "gelu_accurate", "gelu_python_tanh"):
        ours = from_hf_config(GROUPED | {"model_type": "llama", "hidden_act": theirs})["hidden_act"]
        torch.testing.assert_close(ACT2FN[ours](values), ACT2FN[theirs](values))


@pytest.mark.parametrize(
    "change, says",
    [
        ({"model_type": "mamba"}, "model_type = 'mamba' is not supported. Legal values: llama"),
        (
            {"model_type": "gemma4", "text_config": {"model_type": "gemma4_text"}},
            "model_type = 'gemma4' is not supported. It would need embeddings for each layer",
        ),
        (MIMO | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "Write rope_parameters."),
        (
            MIMO | {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
            "has no rope_theta in an entry sliding_attention.",
        ),
        (
            MIMO | {"rope_parameters": {"full_attention": {"rope_theta": 1e4}, "sliding_attention": LOCAL_YARN}},
            "layers with a window have no rotary scaling.",
        ),
        (MIMO | {"mlp_layer_types": ["dense"]}, "must have 3 entries, each dense or sparse."),
        (LAGUNA | {"gating": False}, "gating = False is not supported. Legal values: True, per-head, per-element."),
        (LAGUNA | {"num_attention_heads_per_layer": [6]}, "must have 3 entries."),
        (
            LAGUNA | {"moe_router_logit_softcapping": 30.0},
            "moe_router_logit_softcapping = 30.0 is not supported by the laguna family. Legal value: 0.0.",
        ),
        (LAGUNA | {"attention_bias": True}, "attention_bias = True is not supported by the laguna family."),
        ({"hidden_act": "xielu"}, "hidden_act = 'xielu' is not supported. Legal values: silu"),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "rope_scaling.rope_type = 'dynamic' is not supported. Legal values: default, linear, llama3, yarn.",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor = 0.5 is not supported",
        ),
        (
            {"model_type": "hunyuan_v1_dense", "head_dim": 8, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rope_scaling.alpha = None is not supported with rope_type dynamic",
        ),
        (
            {"model_type": "hunyuan_v1_moe", "head_dim": 8, "moe_topk": [1, 2, 2], "num_experts": 4},
            "moe_topk = [1, 2, 2] is not supported. Legal value: a number, the same in every layer.",
        ),
        ({"model_type": "jais2", "hidden_act": "xielu"}, "hidden_act = 'xielu' is not supported. Legal values: silu"),
        ({"quantization_config": {"bits": 4}}, "quantization_config = {'bits': 4} is not supported"),
        (
            {"model_type": "falcon", "intermediate_size": ..., "num_key_value_heads": ..., "alibi": True},
            "alibi = True is not supported by the falcon family. Legal value: False.",
        ),
        (
            {"model_type": "falcon", "num_ln_in_parallel_attn": 2},
            "num_ln_in_parallel_attn = 2 is incompatible with new_decoder_architecture = False",
        ),
        (
            {"model_type": "falcon", "new_decoder_architecture": True, "parallel_attn": False},
            "parallel_attn = False is incompatible with new_decoder_architecture = True",
        ),
        (
            {"model_type": "gemma3_text", "attn_logit_softcapping": 50.0},
            "attn_logit_softcapping = 50.0 is not supported by the gemma3_text family",
        ),
        (
            {"model_type": "olmo3", "rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "rope_parameters.sliding_attention = {'rope_type': 'linear', 'factor': 2.0} is not supported",
        ),
        ({"sliding_window": 128}, "sliding_window = 128 is not supported by the llama family"),
        ({"layer_types": ["sliding_attention"] * 3}, "layer_types"),
        (
            {"model_type": "phi3", "rope_scaling": {"type": "yarn"}},
            "rope_type = 'yarn' is not supported. Legal values: default, longrope.",
        ),
        ({"partial_rotary_factor": 0.75}, "partial_rotary_factor = 0.75 is not supported by the llama family"),
        ({"model_type": "gemma2", "query_pre_attn_scalar": "16"}, "a value has the wrong type or length"),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "a value has the wrong type or length"),
        ({"num_attention_heads": ...}, "num_attention_heads is missing"),
        (
            DEEPSEEK | {"rope_interleave": False},
            "rope_interleave = False is not supported by the deepseek_v3 family. Legal value: True.",
        ),
        (
            DEEPSEEK | {"scoring_func": "softmax"},
            "scoring_func = 'softmax' is not supported by the deepseek_v3 family. Legal value: 'sigmoid'.",
        ),
        (DEEPSEEK | {"topk_method": "greedy"}, "topk_method = 'greedy' is not supported. Legal values: noaux_tc."),
        (DEEPSEEK | {"model_type": "deepseek_v2", "norm_topk_prob": True}, "norm_topk_prob = True is not supported"),
        (DEEPSEEK | {"num_key_value_heads": 2}, "num_key_value_heads = 2 is not num_attention_heads = 6"),
        (DEEPSEEK | {"moe_layer_freq": 2}, "moe_layer_freq = 2 is not supported. Legal value: 1."),
        (DEEPSEEK | {"n_shared_experts": None}, "n_shared_experts = None is not supported. Legal values: 1 and above."),
        (
            DEEPSEEK | {"kv_lora_rank": None},
            "kv_lora_rank = None is not supported by the deepseek_v3 family. It needs a number.",
        ),
        (
            HYBRID | {"layer_types": ["linear_attention", "sliding_attention", "full_attention"]},
            "layer_types = 'sliding_attention' is not supported. Legal values: linear_attention, full_attention.",
        ),
        (HYBRID | {"layer_types": LINEAR[:2]}, "must have 3 entries, as num_hidden_layers."),
        (HYBRID | {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported with linear_attention layers"),
        (HYBRID | {"num_experts": 0}, "num_experts = 0 is not supported. Legal values: 1 and above."),
        (
            {"model_type": "olmo_hybrid", "layer_types": ["linear_attention"] * 3},
            "is not supported: the family requires both types of layers.",
        ),
        (
            {"model_type": "kimi_linear", "num_key_value_heads": 6, "tie_word_embeddings": True},
            "tie_word_embeddings = True is not supported by the kimi_linear family. Legal value: False.",
        ),
        (
            {"model_type": "kimi_linear"} | KIMI | {"linear_head_dim": 16},
            "linear_attn_config.head_dim = 8 contradicts linear_head_dim = 16",
        ),
        (
            {"model_type": "kimi_linear"}
            | KIMI
            | {"linear_attn_config": {"kda_layers": [1, 2], "full_attn_layers": []}},
            "must name each layer from 1 to 3 once.",
        ),
        (
            {"model_type": "kimi_linear"} | KIMI | {"num_shared_experts": 0},
            "num_shared_experts = 0 is not supported. Legal values: 1 and above.",
        ),
        ({"model_type": "lfm2_moe"} | EXPERTS, "layer_types is missing, but required for lfm2_moe."),
        (
            {"model_type": "lfm2_moe", "layer_types": ["conv"] * 3, "use_expert_bias": False},
            "use_expert_bias = False is not supported by the lfm2_moe family. Legal value: True.",
        ),
        (
            {"model_type": "ministral3", "rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.1}},
            "rope_parameters.original_max_position_embeddings = None is not supported by the ministral3 family.",
        ),
        (
            {"model_type": "ministral3", "rope_scaling": {"type": "yarn", "factor": 4.0}},
            "rope_scaling.llama_4_scaling_beta = None is not supported by the ministral3 family.",
        ),
        (
            DEEPSEEK | {"model_type": "mistral4", "rope_parameters": SCALED | {"partial_rotary_factor": 0.25}},
            "partial_rotary_factor = 0.25 is not supported by the mistral4 family.",
        ),
        (
            DEEPSEEK | {"model_type": "mistral4", "rope_parameters": SCALED | {"rope_type": "default"}},
            "rope_type = 'default' is not supported. Legal values: yarn.",
        ),
        ({"model_type": "dots1"}, "n_routed_experts = None is not supported. Legal values: 1 and above."),
        (
            {"model_type": "exaone4", "sliding_window_pattern": "LLLG"},
            "sliding_window_pattern = 'LLLG' is not supported without layer_types.",
        ),
        ({"model_type": "exaone_moe", "sliding_window": None}, "is not supported by the exaone_moe family. It needs"),
        ({"model_type": "exaone_moe", "mlp_layer_types": ["dense"]}, "must have 3 entries, each dense or sparse."),
        (
            {"model_type": "ernie4_5_moe", "use_bias": True},
            "use_bias = True is not supported by the ernie4_5_moe family. Legal value: False.",
        ),
        (
            {"model_type": "hy_v3", "mlp_bias": True},
            "mlp_bias = True is not supported by the hy_v3 family. Legal value: False.",
        ),
        (
            {"model_type": "hy_v3", "mlp_layer_types": ["dense", "sparse"]},
            "mlp_layer_types = ['dense', 'sparse'] must have 3 entries, each dense or sparse.",
        ),
        (
            {"model_type": "hy_v3", "num_shared_experts": 0},
            "num_shared_experts = 0 is not supported. Legal values: 1 and above.",
        ),
        (
            {"model_type": "afmoe", "attention_bias": True},
            "attention_bias = True is not supported by the afmoe family. Legal value: False.",
        ),
        (
            {"model_type": "cohere2_moe", "expert_selection_fn": "top_k"},
            "expert_selection_fn = 'top_k' is not supported. Legal values: softmax, sigmoid.",
        ),
        (
            {"model_type": "cohere2_moe", "num_shared_experts": 1, "shared_expert_combination_strategy": "max"},
            "shared_expert_combination_strategy = 'max' is not supported. Legal values: average, sum.",
        ),
        (
            {"model_type": "cohere2_moe", "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            "is not read by transformers in this family. Write it as rope_parameters.",
        ),
        (
            DEEPSEEK | {"attention_bias": True},
            "attention_bias = True is not supported by the deepseek_v3 family. Legal value: False.",
        ),
    ],
)
def test_what_is_not_handled_is_refused_by_name(change, says):
    config = {key: value for key, value in ({"model_type": "llama"} | GROUPED | change).items() if value is not ...}
    with pytest.raises(ConfigError) as refused:
        from_hf_config(config)
    assert says in str(refused.value)


def test_a_field_without_influence_or_at_its_neutral_value_is_accepted():
    plain = {"model_type": "llama"} | GROUPED
    extra = {
        "torch_dtype": "bfloat16",
        "use_cache": False,
        "eos_token_id": [1, 2],
        "pretraining_tp": 1,
        "quantization_config": None,
    }
    assert from_hf_config(plain | extra) == from_hf_config(plain)


def test_the_language_model_of_a_multimodal_file_has_transformers_defaults():
    """The fields of google/gemma-3-4b-it's text_config."""
    import transformers

    inner = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    }
    file = {
        "model_type": "gemma3",
        "text_config": inner | {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
        "vision_config": {},
    }
    theirs = transformers.Gemma3Config(
        **{key: copy.deepcopy(value) for key, value in file.items() if key != "model_type"}
    )
    whole = json.loads(theirs.text_config.to_json_string(use_diff=False))
    assert ModelConfig(**from_hf_config(file)) == ModelConfig(**from_hf_config(whole))
    with pytest.raises(ConfigError, match="model_type = 'llava' is not supported"):
        from_hf_config(file | {"model_type": "llava"})


def test_export_finds_the_family_and_refuses_what_none_expresses():
    shape = SIZES | {"vocab_size": 100}
    assert to_hf_config(ModelConfig(**shape))["model_type"] == "llama"
    assert to_hf_config(ModelConfig(**shape, qk_norm="head"))["model_type"] == "qwen3"
    assert to_hf_config(ModelConfig(**shape, attention_bias=True))["model_type"] == "qwen2"
    assert to_hf_config(ModelConfig(**preset("gpt2-124m")))["model_type"] == "gpt2"
    narrow = ModelConfig(**preset("deepseek-v3.2") | {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8})
    again = ModelConfig(**from_hf_config(to_hf_config(narrow, "deepseek_v32")))
    assert again.attention_scale == pytest.approx(narrow.attention_scale, rel=1e-14)
    delta = {"linear_num_value_heads": 16, "qk_norm": "head", "norm_offset": 1.0, "attention_gate": True}
    blocks = ["delta + feed_forward", "attention+feed_forward", "delta+feed_forward"]
    assert to_hf_config(ModelConfig(**shape, **delta, layer_blocks=blocks))["model_type"] == "qwen3_5_text"
    with pytest.raises(
        ConfigError, match="model.qk_norm = 'head' where llama has 'none'; the llama family does not support this value"
    ):
        to_hf_config(ModelConfig(**shape, qk_norm="head"), "llama")
    with pytest.raises(ConfigError, match="not supported by any Hugging Face family"):
        to_hf_config(ModelConfig(**shape, logit_softcap=30.0))
    sigmoid = from_hf_config(GROUPED | {"model_type": "cohere2_moe", "expert_selection_fn": "sigmoid"})
    assert to_hf_config(ModelConfig(**sigmoid))["model_type"] == "cohere2_moe"
    with pytest.raises(ConfigError, match="router_balance = 'bias', but files of cohere2_moe models have none"):
        to_hf_config(ModelConfig(**sigmoid | {"router_balance": "bias"}), "cohere2_moe")


@pytest.mark.parametrize(
    "name, parameters",
    [
        *[
            ("gpt2-124m", 124_439_808),
            ("llama-3.2-1b", 1_235_814_400),
            ("llama-3-8b", 8_030_261_248),
            ("llama-3-70b", 70_553_706_496),
        ],
        # the latter without the biases of its routers
        *[("deepseek-v2-lite", 15_706_484_224), ("deepseek-v3", 671_026_404_352)],
        *[("deepseek-v3.2", 671_877_929_216), ("glm-5", 743_911_199_232)],
        *[("gpt-oss-20b", 20_914_757_184), ("gpt-oss-120b", 116_829_156_672)],
        *[
            ("qwen3-next-80b-a3b", 79_674_391_296),
            ("qwen3.5-9b", 8_953_803_264),
            ("qwen3.5-27b", 26_895_998_464),
            ("qwen3.5-35b-a3b", 34_660_610_688),
            ("olmo-hybrid-7b", 7_430_870_688),
            ("kimi-linear-48b-a3b", 49_133_074_464),
            ("lfm2-8b-a1b", 8_339_929_856),
            ("nemotron-3-nano-30b-a3b", 31_577_937_344),
            ("nemotron-h-56b", 56_324_350_464),
            ("falcon-h1-0.5b", 521_411_104),
        ],
    ],
)
def test_presets_have_the_published_parameter_counts(name, parameters):
    """Counted by the transformers model of the exported shape, without memory."""
    import torch
    import transformers

    config = to_hf_config(ModelConfig(**preset(name)))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    assert model.num_parameters() == parameters == parameter_count(model_specs(ModelConfig(**preset(name))))


@pytest.mark.parametrize(
    "name, fields",
    [
        ("Qwen3NextConfig", {}),
        ("Qwen3_5TextConfig", {}),
        ("Qwen3_5MoeTextConfig", {}),
        ("OlmoHybridConfig", {}),
        ("KimiLinearConfig", {}),
        ("Ernie4_5Config", {}),
        ("Jais2Config", {}),
        ("SmolLM3Config", {}),
        *((name, {}) for name in ("SolarOpenConfig", "Ministral3Config", "Glm4MoeLiteConfig", "YoutuConfig")),
        ("Mistral4Config", {}),
        ("DeepseekV32Config", {}),
        ("GlmMoeDsaConfig", {"index_topk_pattern": "FFSSF" * 15 + "FFS"}),
        ("Lfm2MoeConfig", {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8}),
        # FlexOlmo-7x7B-1T, MiniMax-M2 (229 billion), ERNIE-4.5-21B-A3B-PT and Hy3-preview (295 billion)
        *[("FlexOlmoConfig", {}), ("MiniMaxM2Config", {}), ("Ernie4_5_MoeConfig", {}), ("HYV3Config", {})],
        *[("MiMoV2FlashConfig", {}), ("LagunaConfig", {"num_attention_heads_per_layer": [48, 64] * 20})],
        # of no published model
        *[("GraniteMoeConfig", {}), ("GraniteMoeSharedConfig", {"shared_intermediate_size": 1024})],
        *[("AfmoeConfig", {}), ("Cohere2MoeConfig", {"num_shared_experts": 1, "first_k_dense_replace": 1})],
    ],
)
def test_models_have_as_many_parameters_as_those_of_transformers(name: str, fields: dict[str, Any]):
    """At the defaults of transformers, most of them those of a published model, on the meta device."""
    import transformers

    theirs = getattr(transformers, name)(**fields)
    with torch.device("meta"):
        loader = getattr(transformers, loader_of({"model_type": theirs.model_type}))
        whole = getattr(loader, "from_config", loader)(theirs)
    # biases of routers, which are parameters in some families, are a state here
    expected = sum(value.numel() for name, value in whole.named_parameters() if not name.endswith(ROUTER_BIAS))
    model = ModelConfig(**from_hf_config(json.loads(theirs.to_json_string(use_diff=False))))
    assert parameter_count(model_specs(model)) == expected


@pytest.mark.parametrize(
    "name, billions", [("deepseek-v2-lite", 2.4), ("deepseek-v3", 37), ("gpt-oss-20b", 3.61), ("gpt-oss-120b", 5.13)]
)
def test_presets_have_the_published_active_parameters(name, billions):
    """As their authors count them: those of all matrices that a token is multiplied with, and not of the table that it
    is looked up in."""
    model = ModelConfig(**preset(name))
    active = active_parameters(model) - model.vocabulary * model.hidden_size
    assert active == pytest.approx(billions * 1e9, rel=0.025)  # V2-Lite has 2.45 billion, V3 36.6
