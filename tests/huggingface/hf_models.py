"""Random-weight Hugging Face models of every family that is converted, in tiny shapes, as directories that transformers
has written."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from megalite.families.model_config import hf_config, loader_of

ROUTER_BIAS = ("e_score_correction_bias", "expert_bias")
CONSTANTS = ("act_fn.beta", "act_fn.eps")  # of xIELU, in files
VOCAB = 101  # odd, so that it is padded under every tp size
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
# No pad_token_id: transformers would not train its row of the embedding.
SIZES |= {
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
GPT2 = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
BF16 = torch.bfloat16
LONGROPE = {"type": "longrope", "short_factor": [1.0, 1.5, 2.0], "long_factor": [1.0, 3.0, 9.0]}
LONG = {"max_position_embeddings": 64, "original_max_position_embeddings": 16}
ALL_HEADS = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
NO_DROPOUT = {"attention_dropout": 0.0, "residual_dropout": 0.0}
ALPHA = {"rope_type": "dynamic", "factor": 1.0, "alpha": 50.0, "rope_theta": 100.0}
GRANITE = {"embedding_multiplier": 6.0, "attention_multiplier": 0.2, "residual_multiplier": 0.3, "logits_scaling": 4.0}
FALCON = {key: value for key, value in ALL_HEADS.items() if key != "intermediate_size"} | {"ffn_hidden_size": 56}


# The auxiliary loss is off: transformers pools it over layers.
EXPERTS = {"num_experts_per_tok": 2, "router_aux_loss_coef": 0.0}
NARROW = EXPERTS | {"num_experts": 6, "moe_intermediate_size": 24}
SHARED = {"shared_expert_intermediate_size": 40}
LATENT = ALL_HEADS | {
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 6,
    "first_k_dense_replace": 1,
}
LATENT |= {
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
}
OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 12, "sliding_window": 5}
OSS |= {"rope_parameters": YARN | {"beta_fast": 4, "beta_slow": 1, "truncate": False, "rope_theta": 1e3}}
GLM_MOE = {
    "head_dim": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 1.5,
}
DOTS = GLM_MOE | {"n_shared_experts": 2, "first_k_dense_replace": 1, "sliding_window": 5}
EXAONE_MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "num_shared_experts": 2}
MSCALE = YARN | {"mscale": 0.7, "mscale_all_dim": 0.9, "beta_fast": 4, "beta_slow": 1, "rope_theta": 1e3}
GROUPS = {"n_group": 4, "topk_group": 2}
# query factors change within the 24 positions of a row
SCALED_QUERIES = YARN | {"original_max_position_embeddings": 8, "beta_fast": 4, "rope_theta": 1e3}
SCALED_QUERIES |= {"mscale": 1.0, "mscale_all_dim": 0.9, "llama_4_scaling_beta": 0.6}
FROM_LATENTS = {key: value for key, value in LATENT.items() if key != "first_k_dense_replace"}
YOUTU = {key: value for key, value in FROM_LATENTS.items() if not key.startswith(("n_", "num_experts", "moe_"))}
# With few heads relu makes many scores of an indexer equal, and transformers' choice among them is not defined.
INDEXER = {"q_lora_rank": 12, "index_topk": 5, "index_n_heads": 16, "index_head_dim": 12}


LINEAR = ["linear_attention", "full_attention", "linear_attention"]
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
MROPE |= {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
NO_ROPE = {"rope_type": "default", "rope_theta": None}
KIMI = {key: value for key, value in LATENT.items() if key not in ("n_routed_experts", "first_k_dense_replace")}
KIMI |= {"num_local_experts": 8, "linear_num_heads": 4, "linear_head_dim": 8, "layer_types": LINEAR}
KIMI |= {"mlp_layer_types": ["dense", "sparse", "sparse"]}
SHORT = {"layer_types": ["conv", "full_attention", "conv"]}
SHORT_EXPERTS = {"num_dense_layers": 1, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


MAMBA = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 6, "mamba_chunk_size": 8}
BAMBA = MAMBA | {"attn_layer_indices": [1]}
FALCON_H1 = MAMBA | {"mamba_n_heads": 4, "mamba_d_ssm": 32}
FALCON_H1_FACTORS = {"attention_in": 0.7, "key": 1.3, "attention_out": 0.6, "ssm_in": 1.2, "ssm_out": 0.8}
FALCON_H1_FACTORS |= {"embedding": 1.4, "lm_head": 0.9}
NEMOTRON = {key: value for key, value in SIZES.items() if key != "num_hidden_layers"} | {
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe", "linear_attention"],
    "head_dim": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 4,
    "ssm_state_size": 6,
    "n_groups": 2,
    "chunk_size": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 24,
    "time_step_min": 1e-30,  # transformers limits steps by it, and not by time_step_limit
}

MINIMAX = EXPERTS | {"num_local_experts": 8, "head_dim": 16, "rotary_dim": 6}
ERNIE = {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 24, "router_aux_loss_coef": 0.0}
HY = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_shared_experts": 2, "head_dim": 12}
AFMOE = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "num_shared_experts": 2,
    "head_dim": 12,
}
AFMOE |= {"sliding_window": 5, "layer_types": MIXED, "mup_enabled": True, "route_scale": 2.5}
COMMAND = {"num_experts": 6, "num_experts_per_tok": 2, "num_shared_experts": 2, "intermediate_size": 24, "head_dim": 12}
COMMAND |= {"sliding_window": 5, "first_k_dense_replace": 1, "prefix_dense_intermediate_size": 40}
# rotating: 4 of 12 channels, and 8
SHARES = [{"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": share} for share in (0.334, 0.7)]
MIMO = {"head_dim": 12, "v_head_dim": 6, "num_key_value_heads": 1, "sliding_window": 5, "n_routed_experts": 8}
MIMO |= {"num_experts_per_tok": 3, "moe_intermediate_size": 24, "attention_value_scale": 0.6}
MIMO |= {"rope_parameters": {"full_attention": SHARES[0], "sliding_attention": SHARES[1] | {"rope_theta": 50.0}}}
LAGUNA = NARROW | SHARED | {"head_dim": 12, "sliding_window": 5, "layer_types": MIXED, "moe_routed_scaling_factor": 1.5}
LAGUNA |= {"num_attention_heads_per_layer": [8, 4, 8]}


class Case(NamedTuple):
    """A model: its configuration class in transformers without the suffix, its fields, the dtype of its weights, and
    the size of files."""

    family: str
    fields: dict[str, Any]
    dtype: torch.dtype = torch.float32
    shard: str = "5GB"


CASES = {
    "llama, one key-value head": Case("Llama", SIZES | UNTIED | {"num_key_value_heads": 1}, shard="20KB"),
    "llama, tied, llama3 rope": Case("Llama", SIZES | TIED | {"rope_parameters": LLAMA3 | {"rope_theta": 500.0}}),
    "llama, linear rope": Case(
        "Llama", SIZES | UNTIED | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}
    ),
    "llama, yarn rope": Case("Llama", SIZES | UNTIED | {"rope_parameters": YARN | {"rope_theta": 1e4}}, BF16),
    "llama, biases, head_dim": Case(
        "Llama", SIZES | UNTIED | {"attention_bias": True, "mlp_bias": True, "head_dim": 12}
    ),
    "mistral, window": Case("Mistral", SIZES | UNTIED | {"sliding_window": 5}, BF16, "20KB"),
    "mistral, head_dim": Case("Mistral", SIZES | TIED | {"head_dim": 12, "sliding_window": None}),
    "qwen2, tied": Case("Qwen2", SIZES | TIED, BF16),
    "qwen2, windows": Case(
        "Qwen2", SIZES | UNTIED | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    ),
    "qwen3, tied": Case("Qwen3", SIZES | TIED | {"head_dim": 12}),
    "qwen3, yarn rope": Case(
        "Qwen3", SIZES | UNTIED | {"head_dim": 8, "rope_parameters": YARN | {"beta_fast": 4, "rope_theta": 1e3}}
    ),
    "olmo2": Case("Olmo2", SIZES | UNTIED, shard="20KB"),
    "olmo2, tied, all heads": Case("Olmo2", SIZES | TIED | {"num_key_value_heads": 4}, BF16),
    "phi3": Case("Phi3", SIZES | UNTIED),
    "phi3, tied, window": Case("Phi3", SIZES | TIED | {"sliding_window": 5}, BF16, "20KB"),
    "gemma": Case("Gemma", SIZES | {"head_dim": 12}, BF16),
    "gemma, one key-value head": Case("Gemma", SIZES | {"head_dim": 8, "num_key_value_heads": 1}, shard="20KB"),
    "gemma2": Case("Gemma2", SIZES | {"head_dim": 12, "query_pre_attn_scalar": 24, "sliding_window": 5}),
    "gemma2, caps that act": Case(
        "Gemma2",
        SIZES | {"head_dim": 8, "sliding_window": 6, "attn_logit_softcapping": 0.5, "final_logit_softcapping": 1.0},
        BF16,
    ),
    "smollm3": Case("SmolLM3", SIZES | TIED | {"no_rope_layer_interval": 2}),
    "smollm3, windows": Case(
        "SmolLM3", SIZES | UNTIED | {"no_rope_layers": [0, 1, 0], "use_sliding_window": True, "sliding_window": 5}
    ),
    "phi3, partial rope, window": Case(
        "Phi3", SIZES | UNTIED | {"head_dim": 8, "partial_rotary_factor": 0.75, "sliding_window": 7}
    ),
    "phi3, longrope": Case(
        "Phi3", SIZES | TIED | {"partial_rotary_factor": 0.75, "rope_scaling": LONGROPE} | LONG, BF16
    ),
    "starcoder2, window": Case("Starcoder2", SIZES | TIED | {"sliding_window": 5}, shard="20KB"),
    "starcoder2, no biases, head_dim": Case("Starcoder2", SIZES | UNTIED | {"use_bias": False, "head_dim": 12}, BF16),
    "granite": Case("Granite", SIZES | TIED | GRANITE),
    "granite, biases": Case(
        "Granite", SIZES | UNTIED | GRANITE | {"attention_bias": True, "logits_scaling": 7.0}, BF16, "20KB"
    ),
    "nemotron": Case("Nemotron", SIZES | UNTIED | {"head_dim": 12}, shard="20KB"),
    "nemotron, tied, biases": Case("Nemotron", SIZES | TIED | {"attention_bias": True, "mlp_bias": True}, BF16),
    "stablelm": Case("StableLm", SIZES | UNTIED, BF16),
    "stablelm, parallel, biases": Case(
        "StableLm", SIZES | TIED | {"use_parallel_residual": True, "use_qkv_bias": True}, shard="20KB"
    ),
    "stablelm, norms of each head": Case(
        "StableLm", SIZES | UNTIED | {"qk_layernorm": True, "use_parallel_residual": True}, shard="20KB"
    ),
    "gpt_neox": Case("GPTNeoX", ALL_HEADS | UNTIED, shard="20KB"),
    "gpt_neox, tied, in sequence": Case(
        "GPTNeoX", ALL_HEADS | TIED | {"use_parallel_residual": False, "rotary_pct": 1.0}, BF16
    ),
    "olmo3": Case("Olmo3", SIZES | UNTIED | {"sliding_window": 5, "num_hidden_layers": 4}),
    "olmo3, yarn rope": Case(
        "Olmo3", SIZES | TIED | {"sliding_window": 5, "layer_types": MIXED, "rope_scaling": YARN}, BF16, "20KB"
    ),
    "gemma3": Case(
        "Gemma3Text", SIZES | {"head_dim": 12, "query_pre_attn_scalar": 24, "sliding_window": 5, "layer_types": MIXED}
    ),
    "gemma3, linear rope, cap": Case(
        "Gemma3Text",
        SIZES
        | {"head_dim": 8, "sliding_window": 5, "layer_types": MIXED, "final_logit_softcapping": 1.0}
        | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        BF16,
        "20KB",
    ),
    "glm": Case("Glm", SIZES | UNTIED | {"head_dim": 8}, shard="20KB"),
    "glm, tied, no biases": Case(
        "Glm", SIZES | TIED | {"head_dim": 12, "attention_bias": False, "partial_rotary_factor": 1.0}, BF16
    ),
    "glm4": Case("Glm4", SIZES | UNTIED | {"head_dim": 8}),
    "glm4, one key-value head": Case("Glm4", SIZES | TIED | {"head_dim": 12, "num_key_value_heads": 1}, BF16, "20KB"),
    "cohere": Case("Cohere", SIZES | TIED, shard="20KB"),
    "cohere, untied, biases": Case("Cohere", SIZES | UNTIED | {"attention_bias": True, "logit_scale": 0.3}, BF16),
    "cohere, norms of each head": Case("Cohere", SIZES | TIED | {"use_qk_norm": True}, shard="20KB"),
    "cohere2": Case("Cohere2", SIZES | TIED | {"sliding_window": 5, "layer_types": MIXED}),
    "cohere2, untied": Case("Cohere2", SIZES | UNTIED | {"sliding_window": 7, "num_hidden_layers": 4}, BF16, "20KB"),
    "falcon, one key-value head": Case("Falcon", FALCON | TIED, shard="20KB"),
    "falcon, new architecture": Case(
        "Falcon", FALCON | UNTIED | {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}
    ),
    "falcon, new architecture, one norm": Case(
        "Falcon",
        FALCON | TIED | {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
        BF16,
    ),
    "falcon, in sequence, biases": Case(
        "Falcon", FALCON | TIED | {"multi_query": False, "parallel_attn": False, "bias": True}
    ),
    "ministral": Case("Ministral", SIZES | UNTIED | {"head_dim": 8, "sliding_window": 5}, shard="20KB"),
    "ministral, some windows": Case(
        "Ministral", SIZES | TIED | {"head_dim": 12, "sliding_window": 5, "layer_types": MIXED}, BF16
    ),
    "arcee": Case("Arcee", SIZES | UNTIED | {"head_dim": 12}, shard="20KB"),
    "arcee, tied, biases": Case("Arcee", SIZES | TIED | {"attention_bias": True, "mlp_bias": True}, BF16),
    "seed_oss": Case("SeedOss", SIZES | UNTIED | NO_DROPOUT | {"head_dim": 12}, shard="20KB"),
    "seed_oss, tied, other biases": Case(
        "SeedOss",
        SIZES
        | TIED
        | NO_DROPOUT
        | {"head_dim": 8, "attention_bias": False, "attention_out_bias": True, "mlp_bias": True},
        BF16,
    ),
    "ernie4_5": Case("Ernie4_5", SIZES | TIED | {"head_dim": 12}, shard="20KB"),
    "ernie4_5, untied, biases": Case("Ernie4_5", SIZES | UNTIED | {"head_dim": 8, "use_bias": True}, BF16),
    "jais2": Case("Jais2", SIZES | UNTIED, shard="20KB"),
    "hunyuan_v1_dense": Case("HunYuanDenseV1", SIZES | TIED | {"head_dim": 12, "rope_parameters": ALPHA}, BF16, "20KB"),
    "hunyuan_v1_dense, biases": Case("HunYuanDenseV1", SIZES | UNTIED | {"head_dim": 8, "attention_bias": True}),
    "hunyuan_v1_moe": Case(
        "HunYuanMoEV1",
        SIZES | UNTIED | {"head_dim": 8, "num_experts": 6, "moe_topk": 2, "rope_parameters": ALPHA},
        BF16,
        "20KB",
    ),
    "nanochat": Case("NanoChat", SIZES | UNTIED | {"final_logit_softcapping": 0.7}, shard="20KB"),
    "nanochat, tied, biases": Case("NanoChat", SIZES | TIED | {"attention_bias": True, "num_key_value_heads": 1}, BF16),
    "apertus": Case("Apertus", SIZES | UNTIED | {"rope_parameters": LLAMA3 | {"rope_theta": 500.0}}, BF16, "20KB"),
    "apertus, tied, biases": Case("Apertus", SIZES | TIED | {"attention_bias": True, "head_dim": 12}),
    "mixtral": Case("Mixtral", SIZES | UNTIED | EXPERTS | {"num_local_experts": 4}, shard="20KB"),
    "mixtral, tied, window": Case(
        "Mixtral", SIZES | TIED | EXPERTS | {"num_local_experts": 8, "sliding_window": 5}, BF16
    ),
    "olmoe": Case("Olmoe", SIZES | UNTIED | EXPERTS | {"num_experts": 6}),
    "olmoe, renormalized": Case(
        "Olmoe", SIZES | TIED | EXPERTS | {"num_experts": 4, "norm_topk_prob": True}, BF16, "20KB"
    ),
    "qwen2_moe, a dense layer": Case(
        "Qwen2Moe", SIZES | UNTIED | NARROW | SHARED | {"mlp_only_layers": [1]}, shard="20KB"
    ),
    "qwen2_moe, every second layer": Case(
        "Qwen2Moe", SIZES | TIED | NARROW | SHARED | {"decoder_sparse_step": 2}, BF16
    ),
    "qwen3_moe": Case("Qwen3Moe", SIZES | UNTIED | NARROW | {"head_dim": 12, "norm_topk_prob": True}, shard="20KB"),
    "qwen3_moe, tied, not renormalized": Case("Qwen3Moe", SIZES | TIED | NARROW, BF16),
    "qwen2_moe, windows": Case(
        "Qwen2Moe",
        SIZES | UNTIED | NARROW | SHARED | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    ),
    "qwen3_moe, windows": Case("Qwen3Moe", SIZES | UNTIED | NARROW | {"use_sliding_window": True, "sliding_window": 5}),
    "deepseek_v2": Case(
        "DeepseekV2",
        LATENT
        | UNTIED
        | GROUPS
        | {"q_lora_rank": 12, "topk_method": "group_limited_greedy", "routed_scaling_factor": 4.0},
        shard="20KB",
    ),
    "deepseek_v2, lite, yarn rope": Case(
        "DeepseekV2", LATENT | TIED | {"q_lora_rank": None, "rope_parameters": MSCALE}, BF16
    ),
    "deepseek_v3": Case(
        "DeepseekV3", LATENT | UNTIED | GROUPS | {"q_lora_rank": 12, "rope_parameters": MSCALE}, shard="20KB"
    ),
    "deepseek_v3, no groups, not renormalized": Case(
        "DeepseekV3",
        LATENT | TIED | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "norm_topk_prob": False},
        BF16,
    ),
    "deepseek_v32": Case("DeepseekV32", LATENT | UNTIED | GROUPS | INDEXER | {"rope_parameters": MSCALE}, shard="20KB"),
    "deepseek_v32, tied, no groups, not renormalized": Case(
        "DeepseekV32", LATENT | TIED | INDEXER | {"n_group": 1, "topk_group": 1, "norm_topk_prob": False}, BF16
    ),
    "glm_moe_dsa": Case(
        "GlmMoeDsa", LATENT | UNTIED | INDEXER | {"indexer_types": ["full", "shared", "full"]}, shard="20KB"
    ),
    "glm_moe_dsa, tied, all full, yarn rope": Case(
        "GlmMoeDsa", LATENT | TIED | GROUPS | INDEXER | {"rope_parameters": MSCALE}, BF16
    ),
    "glm4_moe": Case("Glm4Moe", SIZES | UNTIED | GLM_MOE | {"use_qk_norm": True, "attention_bias": True}, shard="20KB"),
    "glm4_moe, groups, tied": Case(
        "Glm4Moe", SIZES | TIED | GLM_MOE | {"n_group": 4, "topk_group": 2, "norm_topk_prob": False}, BF16
    ),
    "dots1": Case("Dots1", SIZES | UNTIED | DOTS | {"max_window_layers": 1, "attention_bias": True}, shard="20KB"),
    "dots1, tied, groups": Case(
        "Dots1", SIZES | TIED | DOTS | GROUPS | {"layer_types": MIXED, "norm_topk_prob": True}, BF16
    ),
    "solar_open": Case(
        "SolarOpen",
        {key: value for key, value in SIZES.items() if key != "intermediate_size"}
        | UNTIED
        | GLM_MOE
        | {"attention_bias": True, "rope_parameters": YARN | {"rope_theta": 1e3}},
        shard="20KB",
    ),
    "exaone4": Case("Exaone4", SIZES | UNTIED | {"sliding_window": 5, "layer_types": MIXED}, shard="20KB"),
    "exaone4, tied, no windows": Case(
        "Exaone4",
        SIZES
        | TIED
        | {"head_dim": 12, "sliding_window": None, "layer_types": ["full_attention"] * 3}
        | {"rope_parameters": LLAMA3 | {"rope_theta": 500.0}},
        BF16,
    ),
    "exaone_moe": Case(
        "ExaoneMoe",
        SIZES
        | UNTIED
        | EXAONE_MOE
        | GROUPS
        | {"sliding_window": 5, "layer_types": MIXED, "mlp_layer_types": ["sparse", "dense", "sparse"]},
        shard="20KB",
    ),
    "ministral3": Case(
        "Ministral3",
        SIZES | UNTIED | {"head_dim": 12, "sliding_window": 15, "rope_parameters": SCALED_QUERIES},
        shard="20KB",
    ),
    "ministral3, tied, rope alone": Case(
        "Ministral3",
        SIZES
        | TIED
        | {"head_dim": 8}
        | {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e3, "original_max_position_embeddings": 8}
            | {"llama_4_scaling_beta": 0.6}
        },
        BF16,
    ),
    "glm4_moe_lite": Case(
        "Glm4MoeLite",
        FROM_LATENTS | UNTIED | GROUPS | {"q_lora_rank": 12, "mlp_layer_types": ["sparse", "dense", "sparse"]},
        shard="20KB",
    ),
    "youtu": Case("Youtu", YOUTU | UNTIED | {"q_lora_rank": 12}, shard="20KB"),
    "youtu, tied, yarn rope": Case("Youtu", YOUTU | TIED | {"q_lora_rank": None, "rope_parameters": MSCALE}, BF16),
    "mistral4": Case(
        "Mistral4",
        LATENT | UNTIED | GROUPS | {"q_lora_rank": 12, "rope_parameters": SCALED_QUERIES},
        shard="20KB",
    ),
    "mistral4, tied, no groups, not renormalized": Case(
        "Mistral4",
        LATENT
        | TIED
        | {"q_lora_rank": None, "norm_topk_prob": False, "first_k_dense_replace": 0}
        | {"rope_parameters": SCALED_QUERIES | {"llama_4_scaling_beta": 0.0}},
        BF16,
    ),
    "gpt_oss": Case("GptOss", SIZES | UNTIED | OSS, shard="20KB"),
    "gpt_oss, tied, linear rope": Case(
        "GptOss",
        SIZES | TIED | OSS | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
        BF16,
    ),
    "qwen3_next": Case(
        "Qwen3Next",
        SIZES | UNTIED | NARROW | SHARED | DELTA | {"head_dim": 16, "layer_types": LINEAR},
        shard="20KB",
    ),
    "qwen3_next, tied, biases, a dense layer": Case(
        "Qwen3Next",
        SIZES
        | TIED
        | NARROW
        | SHARED
        | DELTA
        | {"linear_num_key_heads": 4, "head_dim": 16, "full_attention_interval": 2, "mlp_only_layers": [1]}
        | {"attention_bias": True, "norm_topk_prob": False},
        BF16,
    ),
    "qwen3_5_text": Case(
        "Qwen3_5Text",
        SIZES | UNTIED | DELTA | {"head_dim": 16, "layer_types": LINEAR, "rope_parameters": MROPE},
        shard="20KB",
    ),
    "qwen3_5_moe_text": Case(
        "Qwen3_5MoeText",
        {key: value for key, value in SIZES.items() if key != "intermediate_size"}
        | TIED
        | NARROW
        | SHARED
        | DELTA
        | {"head_dim": 16, "layer_types": LINEAR, "rope_parameters": MROPE},
        BF16,
    ),
    "olmo_hybrid": Case("OlmoHybrid", SIZES | UNTIED | DELTA | {"layer_types": LINEAR, "linear_a_log_min": 0.5}),
    "olmo_hybrid, tied, without rope": Case(
        "OlmoHybrid",
        SIZES
        | TIED
        | {"rope_parameters": NO_ROPE, "linear_a_log_min": 0.5, "num_key_value_heads": 4}
        | {"linear_allow_neg_eigval": False},
        BF16,
    ),
    "kimi_linear": Case("KimiLinear", KIMI | UNTIED),
    "kimi_linear, groups, a latent of queries": Case(
        "KimiLinear", KIMI | UNTIED | {"n_group": 4, "topk_group": 2, "q_lora_rank": 12, "norm_topk_prob": False}, BF16
    ),
    "lfm2": Case("Lfm2", SIZES | TIED | SHORT | {"block_multiple_of": 8}, shard="20KB"),
    "lfm2, untied, biases": Case(
        "Lfm2", SIZES | UNTIED | {"full_attn_idxs": [1], "conv_bias": True, "block_auto_adjust_ff_dim": False}, BF16
    ),
    "lfm2_moe": Case("Lfm2Moe", SIZES | TIED | SHORT | SHORT_EXPERTS, shard="20KB"),
    "lfm2_moe, untied, not renormalized": Case(
        "Lfm2Moe",
        SIZES | UNTIED | SHORT | SHORT_EXPERTS | {"norm_topk_prob": False, "routed_scaling_factor": 2.5},
        BF16,
    ),
    "mimo_v2_flash": Case("MiMoV2Flash", SIZES | UNTIED | MIMO, shard="20KB"),
    "mimo_v2_flash, groups, biases": Case(
        "MiMoV2Flash",
        SIZES
        | TIED
        | MIMO
        | {"n_group": 4, "topk_group": 2, "norm_topk_prob": False, "attention_bias": True, "num_key_value_heads": 2}
        | {"layer_types": MIXED, "mlp_layer_types": ["sparse", "dense", "sparse"], "attention_value_scale": None},
        BF16,
    ),
    "laguna": Case("Laguna", SIZES | UNTIED | LAGUNA, shard="20KB"),
    "laguna, tied, gates of channels, yarn rope": Case(
        "Laguna",
        SIZES
        | TIED
        | LAGUNA
        | {"gating": "per-element", "mlp_layer_types": ["sparse", "sparse", "dense"]}
        | {
            "rope_parameters": {
                "full_attention": YARN | {"rope_theta": 1e3, "partial_rotary_factor": 0.5, "beta_fast": 4.0},
                "sliding_attention": SHARES[1],
            }
        },
        BF16,
    ),
    "bamba": Case("Bamba", SIZES | UNTIED | BAMBA, shard="20KB"),
    "bamba, tied, one group, biases": Case(
        "Bamba",
        SIZES
        | TIED
        | BAMBA
        | {"mamba_n_groups": 1, "mamba_proj_bias": True, "attention_bias": True, "mlp_bias": True}
        | {"mamba_conv_bias": False, "time_step_limit": [0.3, 2.0]},
        BF16,
    ),
    "granitemoehybrid": Case(
        "GraniteMoeHybrid",
        SIZES
        | UNTIED
        | EXPERTS
        | GRANITE
        | MAMBA
        | {"layer_types": LINEAR, "num_local_experts": 4, "intermediate_size": 16, "shared_intermediate_size": 24},
        shard="20KB",
    ),
    "granitemoehybrid, tied, dense, rope": Case(
        "GraniteMoeHybrid",
        SIZES
        | TIED
        | MAMBA
        | {"layer_types": LINEAR, "num_local_experts": 0, "shared_intermediate_size": 40}
        | {"position_embedding_type": "rope"},
        BF16,
    ),
    "falcon_h1": Case("FalconH1", SIZES | UNTIED | FALCON_H1, shard="20KB"),
    "falcon_h1, tied, norm first, factors": Case(
        "FalconH1",
        SIZES
        | TIED
        | FALCON_H1
        | {"mamba_rms_norm": True, "mamba_n_groups": 1, "mlp_bias": True, "head_dim": 12}
        | {f"{name}_multiplier": factor for name, factor in FALCON_H1_FACTORS.items()}
        | {"mlp_multipliers": [0.5, 1.5], "ssm_multipliers": [0.5, 1.5, 0.7, 1.2, 0.8]},
        BF16,
    ),
    "nemotron_h": Case("NemotronH", NEMOTRON | UNTIED | {"moe_latent_size": 20}, shard="20KB"),
    "nemotron_h, groups, biases": Case(
        "NemotronH",
        NEMOTRON
        | UNTIED
        | {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
        | {"use_bias": True, "use_conv_bias": False},
        BF16,
    ),
    "granitemoe": Case(
        "GraniteMoe",
        SIZES | UNTIED | EXPERTS | GRANITE | {"num_local_experts": 6, "intermediate_size": 24},
        BF16,
        "20KB",
    ),
    "granitemoeshared, tied, biases": Case(
        "GraniteMoeShared",
        SIZES
        | TIED
        | EXPERTS
        | GRANITE
        | {"num_local_experts": 6, "intermediate_size": 24, "shared_intermediate_size": 40, "attention_bias": True},
        BF16,
    ),
    "flex_olmo": Case("FlexOlmo", SIZES | UNTIED | EXPERTS | {"num_experts": 6, "intermediate_size": 24}, BF16, "20KB"),
    "minimax_m2": Case("MiniMaxM2", SIZES | UNTIED | MINIMAX | {"intermediate_size": 24}, BF16, "20KB"),
    "ernie4_5_moe": Case("Ernie4_5_Moe", SIZES | TIED | ERNIE, BF16, "20KB"),
    "ernie4_5_moe, every second layer, a least sum": Case(
        "Ernie4_5_Moe",
        SIZES
        | UNTIED
        | ERNIE
        | {"num_hidden_layers": 4, "moe_layer_interval": 2, "moe_num_shared_experts": 0, "moe_norm_min": 0.5},
    ),
    "hy_v3": Case(
        "HYV3",
        SIZES | UNTIED | HY | {"attention_bias": True, "mlp_layer_types": ["sparse", "dense", "sparse"]},
        BF16,
        "20KB",
    ),
    "afmoe": Case("Afmoe", SIZES | UNTIED | AFMOE, BF16, "20KB"),
    "cohere2_moe": Case("Cohere2Moe", SIZES | TIED | COMMAND | {"sliding_window_pattern": 2}, BF16, "20KB"),
    "cohere2_moe, sigmoid, RMSNorm, sums": Case(
        "Cohere2Moe",
        SIZES
        | UNTIED
        | COMMAND
        | {"expert_selection_fn": "sigmoid", "rms_norm_eps": 1e-5, "shared_expert_combination_strategy": "sum"}
        | {"prefix_dense_sliding_window_pattern": 3, "first_k_dense_replace": 3, "num_hidden_layers": 5},
    ),
    "gpt2": Case("GPT2", GPT2, shard="20KB"),
    "gpt2, untied, narrow": Case("GPT2", GPT2 | UNTIED | {"n_inner": 40}, BF16),
}

# The cases that are proved on ranks: one or more of each family, among them those whose tensors are hardest to split.
# These are one key-value head for two ranks, norms with weights for each head, and the three orders of heads in
# Falcon's fused projection.
RECURRENT = ("Bamba", "GraniteMoeHybrid", "FalconH1", "NemotronH")
LAYOUT_CASES = [
    "llama, one key-value head",
    "mistral, window",
    "ministral, some windows",
    "qwen2, windows",
    "qwen3, tied",
    "olmo2",
    "olmo3, yarn rope",
    "phi3",
    "phi3, longrope",
    "gemma, one key-value head",
    "gemma2",
    "gemma3, linear rope, cap",
    "smollm3, windows",
    "granite, biases",
    "arcee, tied, biases",
    "seed_oss, tied, other biases",
    "ernie4_5",
    "jais2",
    "hunyuan_v1_dense, biases",
    "hunyuan_v1_moe",
    "nanochat, tied, biases",
    "apertus",
    "mixtral, tied, window",
    "olmoe",
    "qwen2_moe, a dense layer",
    "qwen3_moe",
    "deepseek_v2, lite, yarn rope",
    "deepseek_v3",
    "deepseek_v32",
    "glm_moe_dsa",
    "gpt_oss",
    "glm4_moe",
    "dots1",
    "solar_open",
    "exaone4",
    "exaone_moe",
    "ministral3",
    "glm4_moe_lite",
    "youtu",
    "mistral4",
    "nemotron, tied, biases",
    "starcoder2, window",
    "stablelm, norms of each head",
    "glm",
    "glm4, one key-value head",
    "cohere, norms of each head",
    "cohere2, untied",
    "gpt_neox",
    "falcon, one key-value head",
    "falcon, new architecture",
    "falcon, in sequence, biases",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "olmo_hybrid",
    "kimi_linear",
    "lfm2",
    "lfm2_moe",
    "bamba, tied, one group, biases",
    "granitemoehybrid",
    "falcon_h1, tied, norm first, factors",
    "nemotron_h",
    "granitemoe",
    "granitemoeshared, tied, biases",
    "flex_olmo",
    "minimax_m2",
    "ernie4_5_moe",
    "hy_v3",
    "afmoe",
    "cohere2_moe",
    "mimo_v2_flash",
    "laguna",
    "gpt2",
]


def tolerance(name: str) -> float:
    """How far logits, and gradients relative to their norm, may be from those of transformers."""
    return 1e-5 if name.startswith("deepseek") else 1e-4


def model_type(name: str) -> str:
    """The family of a case in config.json."""
    return name.partition(",")[0].replace("gemma3", "gemma3_text")


def make(case: Case) -> Any:
    """The model, every weight of it different from what a family starts with: ones and zeros would hide one that is
    ignored."""
    import transformers

    fields = copy.deepcopy(case.fields)  # configurations write into rope_parameters
    config = getattr(transformers, f"{case.family}Config")(**fields, attn_implementation="eager")
    torch.manual_seed(0)
    model = getattr(transformers, loader_of({"model_type": config.model_type}))
    model = (model.from_config if hasattr(model, "from_config") else model)(config).eval()
    with torch.no_grad():
        for value in model.parameters():
            # at the scale that a family starts with, what recurrences add would be small
            value.mul_(8 if case.family in RECURRENT and value.dim() > 1 else 1)
            value.add_(torch.randn_like(value), alpha=0.1)
        for name, value in model.named_parameters():
            if name.endswith("A_log"):  # a state lasts for more than a few tokens
                value.uniform_(-3.0, 1.0)
        for name, value in model.named_buffers():
            if name.endswith(ROUTER_BIAS):
                value.normal_(std=0.1)
    # Routers' biases, and some families' routers, are in fp32 in files of any dtype.
    kept = re.compile("|".join([*ROUTER_BIAS, *(model._keep_in_fp32_modules_strict or ())]))
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if not kept.search(name):
            value.data = value.to(case.dtype)
    return model


def write(case: Case, directory: Path) -> Path:
    """What transformers writes of it."""
    save(make(case), case, directory)
    return directory


def write_qwen_multimodal(name: str, directory: Path) -> Any:
    """A multimodal model whose language model is a Qwen3.5 case, with a module of multi-token prediction, which
    transformers does not read; returns the model."""
    import transformers

    family = CASES[name].family.removesuffix("Text")
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4}
    vision |= {"out_hidden_size": 32, "num_position_embeddings": 16}
    tokens = {"image_token_id": 3, "video_token_id": 4, "vision_start_token_id": 5, "vision_end_token_id": 6}
    options = tokens | {"tie_word_embeddings": CASES[name].fields["tie_word_embeddings"]}
    config = getattr(transformers, f"{family}Config")(
        text_config=CASES[name].fields, vision_config=vision, **options, attn_implementation="eager"
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for value in model.parameters():
            value.add_(torch.randn_like(value), alpha=0.1)
    model.save_pretrained(directory)
    add_tensors(
        directory, {"mtp.fc.weight": torch.randn(32, 64), "mtp.layers.0.input_layernorm.weight": torch.ones(32)}
    )
    (directory / "preprocessor_config.json").write_text('{"patch_size": 4}')
    return model


def add_tensors(directory: Path, more: dict[str, Tensor]) -> None:
    path = directory / "model.safetensors"
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
    save_file(tensors | more, path, {"format": "pt"})


def write_multimodal(name: str, directory: Path) -> Any:
    """A multimodal model whose language model is a case of Gemma 3, Ministral 3 or Mistral 4; returns it."""
    import transformers

    case, whole = CASES[name], "Gemma3" if name == "gemma3" else "Mistral3"
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    text = copy.deepcopy(case.fields) | {"model_type": model_type(name)}
    fields = {"image_token_index": 7, "eos_token_id": [2, 9]}
    if whole == "Gemma3":
        fields |= {"mm_tokens_per_image": 4, "boi_token_index": 5, "eoi_token_index": 6}
    else:
        vision |= {"model_type": "pixtral", "head_dim": 8}
        fields |= {"tie_word_embeddings": case.fields["tie_word_embeddings"]}
    torch.manual_seed(0)
    config = getattr(transformers, f"{whole}Config")(
        text_config=text, vision_config=vision, **fields, attn_implementation="eager"
    )
    model = getattr(transformers, f"{whole}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for value in model.parameters():
            value.add_(torch.randn_like(value), alpha=0.1)
    model.save_pretrained(directory)
    return model


def save(model: Any, case: Case, directory: Path) -> None:
    model.generation_config.pad_token_id = case.fields.get("pad_token_id")
    model.save_pretrained(directory, max_shard_size=case.shard)
    if case.family in ("OlmoHybrid", "KimiLinear"):
        as_published(model, directory)


def as_published(model: Any, directory: Path) -> None:
    """Write the file again with the names and shapes of published files, which transformers reads and changes."""
    path = directory / "model.safetensors"
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
    attention = [f"layers.{at}." for at, each in enumerate(model.config.layer_types) if each == "full_attention"]
    for name in list(tensors):
        stem, _, part = name.rpartition("_conv1d.weight")
        if part == "" and stem.endswith("q"):
            names = [f"{stem[:-1]}{each}" for each in "qkv"]
            whole = torch.cat([tensors[f"{each}_conv1d.weight"] for each in names])
            sizes = [len(tensors[f"{each}_proj.weight"]) for each in names]
            for each, own in zip(names, whole.split(sizes), strict=True):
                tensors[f"{each}_conv1d.weight"] = own.clone()
        published = re.sub(r"block_sparse_moe\.(\w+_proj)", r"mlp.\1", name)
        if any(layer in name for layer in attention):
            published = published.replace("feedforward_layer_norm", "post_attention_layernorm")
        tensors[published] = tensors.pop(name)
    save_file(tensors, path, {"format": "pt"})


def as_in_files(tensors: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Parameters of a model, or their gradients, under the names of its files: in memory transformers stacks the
    experts of a layer."""
    mixtral = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    results = {}
    if any(".mixer." in name for name in tensors):
        tensors = {re.sub(r"^model\.", "backbone.", name): value for name, value in tensors.items()}
    for name, value in tensors.items():
        stem, _, stacked = name.rpartition(".experts.")
        if stem and value is not None:
            parts = (
                {"gate_proj": value.chunk(2, 1)[0], "up_proj": value.chunk(2, 1)[1]}
                if "gate" in stacked
                else {stacked: value}
            )
            for part, experts in parts.items():
                for number, expert in enumerate(experts):
                    results[f"{stem}.experts.{number}.{part}.weight"] = expert
                    results[
                        f"{stem.replace('mlp', 'block_sparse_moe')}.experts.{number}.{mixtral.get(part)}.weight"
                    ] = expert
            results |= {
                key.replace(".block_sparse_moe.", ".feed_forward."): expert
                for key, expert in results.items()
                if ".feed_forward" in name
            }
        results |= {name: value, name.replace(".mlp.", ".block_sparse_moe."): value}
        for memory, file in (
            ("block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.input_linear.weight"),
            ("block_sparse_moe.experts.down_proj", "block_sparse_moe.output_linear.weight"),
            ("block_sparse_moe.router.weight", "block_sparse_moe.router.layer.weight"),
            ("mlp.gate.weight", "mlp.router.gate.weight"),
            ("mlp.shared_experts.", "mlp.shared_mlp."),
            ("forget_gate.", ""),
            ("self_attn.sinks", "self_attn.attention_sink_bias"),
            ("mlp.shared_experts.", "mlp.shared_expert."),
            ("input_layernorm", "attention_layer_norm"),
            ("post_attention_layernorm", "feedforward_layer_norm"),
        ):
            results[name.replace(memory, file)] = value
        if name.endswith(".conv1d.weight") and value is not None:
            stem = name.removesuffix("conv1d.weight")
            sizes = [tensors.get(f"{stem}{part}_proj.weight") for part in "qkv"]
            if all(each is not None for each in sizes):
                for part, own in zip("qkv", value.split([len(each) for each in sizes]), strict=True):
                    results[f"{stem}{part}_conv1d.weight"] = own
    return results


def load(directory: Path | str) -> Any:
    """transformers' model in fp32; nothing may be missing or left over."""
    import transformers

    options = {"dtype": torch.float32, "attn_implementation": "eager", "output_loading_info": True}
    model, report = getattr(transformers, loader_of(hf_config(directory))).from_pretrained(directory, **options)
    assert not any(report.values()), report
    return model.eval()


def logits_of(directory: Path, ids: Tensor) -> Tensor:
    """transformers' logits in fp32, [rows, tokens, vocabulary]."""
    with torch.no_grad():
        return load(directory)(input_ids=ids, use_cache=False).logits


def greedy(model: Any, prompt: list[int], count: int, **others: Any) -> tuple[list[int], Tensor]:
    """The greedy tokens of transformers' model and their logits [count, vocabulary], with its cache; Bamba's differ
    from those that the whole row gives, since its positions start again at 0 after a prompt."""
    model.generation_config.eos_token_id = None
    options = {
        "max_new_tokens": count,
        "do_sample": False,
        "use_cache": model.config.model_type != "bamba",
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    ids = torch.tensor([prompt])
    built = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options, **others)
    return built.sequences[0, len(prompt) :].tolist(), torch.cat(built.logits)


def random_ids(rows: int = 2, tokens: int = 24) -> Tensor:
    return torch.randint(VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(1))
