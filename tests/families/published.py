"""Fields of config.json files as models and tools publish them, on small sizes."""

from typing import Any

SIZES = {
    "vocab_size": 100,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 64,
}
DENSE = SIZES | {"intermediate_size": 80}
GROUPED = DENSE | {"num_key_value_heads": 2}
LATENT = DENSE | {
    "num_key_value_heads": 6,
    "n_routed_experts": 8,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 2,
}
LATENT |= {"first_k_dense_replace": 1, "moe_layer_freq": 1, "q_lora_rank": None}
FALCON = SIZES | {"layer_norm_epsilon": 1e-5, "alibi": False, "bias": False, "multi_query": True, "parallel_attn": True}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
DEFAULT = {"rope_type": "default", "rope_theta": 5e5}
LINEAR = {"rope_type": "linear", "factor": 2.0}
LONGROPE = {"type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0]}

MAMBA = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 6, "mamba_d_head": "auto"}

# where the file comes from; its fields; those that are ignored
ACCEPTED: list[tuple[str, dict[str, Any], list[str]]] = [
    (
        "unsloth",
        GROUPED | {"model_type": "llama", "unsloth_version": "2026.4.2", "unsloth_fixed": True},
        ["unsloth_version", "unsloth_fixed"],
    ),
    (
        "an internal version",
        GROUPED | {"model_type": "qwen3", "head_dim": 16, "version": "r7", "_tag": {"a": 1}},
        ["version", "_tag"],
    ),
    (
        "Llama-2-13b",
        DENSE | {"model_type": "llama", "num_key_value_heads": 6, "pretraining_tp": 2, "pad_token_id": 0},
        ["pretraining_tp"],
    ),
    (
        "Llama-2 of MLC",
        DENSE | {"model_type": "llama", "context_window_size": 64, "pretraining_tp": 1},
        ["context_window_size"],
    ),
    (
        "Llama-3.1 by axolotl",
        GROUPED
        | {"model_type": "llama", "rope_theta": 5e5, "rope_scaling": LLAMA3, "_attn_implementation_autoset": True},
        [],
    ),
    (
        "Llama of nanotron",
        GROUPED | {"model_type": "llama", "rope_interleaved": True, "is_llama_config": True},
        ["rope_interleaved"],
    ),
    (
        "Qwen rewritten as Llama",
        GROUPED | {"model_type": "llama", "max_window_layers": 28, "sliding_window": None},
        ["max_window_layers"],
    ),
    (
        "transformers 5",
        GROUPED
        | {"model_type": "llama", "dtype": "bfloat16", "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        [],
    ),
    (
        "a compressed file, restored",
        GROUPED | {"model_type": "mistral", "quantization_config": None, "compression_config": {}},
        ["compression_config"],
    ),
    (
        "Llama with the field of a mixture",
        GROUPED | {"model_type": "llama", "num_local_experts": 8},
        ["num_local_experts"],
    ),
    ("Llama with the field of Cohere", GROUPED | {"model_type": "llama", "logit_scale": 0.5}, ["logit_scale"]),
    (
        "Command-R7B, another activation",
        GROUPED | {"model_type": "cohere2", "use_gated_activation": False},
        ["use_gated_activation"],
    ),
    (
        "linear rope with a mark",
        GROUPED | {"model_type": "llama", "rope_scaling": LINEAR | {"beta": 3}},
        ["rope_scaling.beta"],
    ),
    (
        "llama3 rope, the original length twice",
        GROUPED | {"model_type": "llama", "rope_scaling": LLAMA3, "original_max_position_embeddings": 16},
        [],
    ),
    (
        "both rope fields",
        GROUPED | {"model_type": "qwen3", "head_dim": 16, "rope_scaling": LINEAR, "rope_parameters": DEFAULT},
        [],
    ),
    (
        "both rope fields, with windows",
        GROUPED
        | {
            "model_type": "olmo3",
            "rope_scaling": LINEAR,
            "rope_parameters": {"full_attention": DEFAULT, "sliding_attention": DEFAULT},
        },
        [],
    ),
    (
        "yarn with a mark",
        GROUPED | {"model_type": "llama", "rope_scaling": YARN | {"finetuned": True}},
        ["rope_scaling.finetuned"],
    ),
    (
        "Qwen2.5-1M",
        GROUPED | {"model_type": "qwen2", "dual_chunk_attention_config": {"chunk_size": 8}},
        ["dual_chunk_attention_config"],
    ),
    (
        "Qwen2.5-Coder",
        GROUPED | {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 131072, "use_mrope": False},
        [],
    ),
    (
        "Qwen3",
        GROUPED | {"model_type": "qwen3", "head_dim": 16, "max_window_layers": 28, "attn_implementation": "sdpa"},
        [],
    ),
    (
        "Qwen3-MoE",
        GROUPED
        | {
            "model_type": "qwen3_moe",
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
        },
        [],
    ),
    (
        "Qwen2-MoE, both names",
        GROUPED
        | {"model_type": "qwen2_moe", "num_experts": 4, "num_local_experts": 4, "shared_expert_intermediate_size": 24},
        ["num_local_experts"],
    ),
    (
        "Mixtral",
        GROUPED
        | {"model_type": "mixtral", "num_local_experts": 4, "router_jitter_noise": 0.0, "output_router_logits": True},
        [],
    ),
    (
        "OLMoE",
        GROUPED
        | {"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": None, "rope_scaling": None},
        [],
    ),
    (
        "Pythia",
        DENSE
        | {
            "model_type": "gpt_neox",
            "num_key_value_heads": 6,
            "head_dim": 8,
            "hidden_dropout": 0.0,
            "classifier_dropout": 0.1,
        },
        [],
    ),
    (
        "GPT-NeoX, old",
        DENSE | {"model_type": "gpt_neox", "attention_probs_dropout_prob": 0.1},
        ["attention_probs_dropout_prob"],
    ),
    (
        "StableLM",
        GROUPED | {"model_type": "stablelm", "head_dim": 8, "hidden_dropout": 0.0, "rope_pct": 0.25, "norm_eps": 1e-5},
        ["rope_pct", "norm_eps"],
    ),
    (
        "StarCoder2",
        GROUPED | {"model_type": "starcoder2", "norm_type": "layer_norm", "mlp_type": "default"},
        ["norm_type"],
    ),
    (
        "Granite",
        GROUPED
        | {"model_type": "granite", "attention_multiplier": 0.01, "embedding_multiplier": 12.0, "logits_scaling": 16.0},
        [],
    ),
    (
        "Gemma 2",
        GROUPED
        | {"model_type": "gemma2", "head_dim": 16, "hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"},
        ["hidden_act"],
    ),
    (
        "Gemma 3",
        GROUPED
        | {"model_type": "gemma3_text", "head_dim": 16, "attn_logit_softcapping": None, "sliding_window_pattern": 6},
        [],
    ),
    (
        "Phi-3-mini",
        GROUPED
        | {"model_type": "phi3", "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}, "sliding_window": 64},
        [],
    ),
    (
        "Phi-4-mini",
        GROUPED
        | {"model_type": "phi3", "full_attn_mod": 1, "lm_head_bias": False, "rope_scaling": LONGROPE}
        | {"original_max_position_embeddings": 16},
        [],
    ),
    (
        "SmolLM3",
        GROUPED
        | {"model_type": "smollm3", "pretraining_tp": 2, "no_rope_layers": [1, 1, 0], "use_sliding_window": False},
        [],
    ),
    ("Minitron", GROUPED | {"model_type": "nemotron", "kv_channels": 8, "num_query_groups": 2}, ["num_query_groups"]),
    (
        "Command-R7B",
        GROUPED
        | {"model_type": "cohere2", "head_dim": 8, "rotary_pct": 1.0, "use_gated_activation": True, "layer_switch": 4},
        [],
    ),
    (
        "Falcon 7B",
        FALCON
        | {"model_type": "falcon", "num_kv_heads": 6, "n_layer": 3, "attention_dropout": 0.0, "hidden_dropout": 0.0},
        ["n_layer"],
    ),
    (
        "Falcon, old name",
        {key: value for key, value in FALCON.items() if key != "hidden_size"} | {"model_type": "falcon", "n_embed": 48},
        [],
    ),
    (
        "DialoGPT",
        {
            "model_type": "gpt2",
            "n_embd": 48,
            "n_layer": 3,
            "n_head": 6,
            "n_positions": 64,
            "n_ctx": 64,
            "vocab_size": 100,
        },
        [],
    ),
    ("GPT-2, general names", DENSE | {"model_type": "gpt2", "n_inner": 96}, ["intermediate_size"]),
    (
        "DeepSeek-V2-Lite",
        LATENT
        | {"model_type": "deepseek_v2", "ep_size": 1, "seq_aux": True, "n_shared_experts": 2, "pretraining_tp": 4},
        ["pretraining_tp"],
    ),
    (
        "Kimi-K2",
        LATENT
        | {
            "model_type": "deepseek_v3",
            "n_group": 1,
            "topk_group": 1,
            "num_nextn_predict_layers": 0,
            "vision_patch_size": 14,
        },
        ["vision_patch_size"],
    ),
    (
        "gpt-oss",
        GROUPED
        | {
            "model_type": "gpt_oss",
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "experts_per_token": 2,
        }
        | {"initial_context_length": 16, "sliding_window": 8, "rope_scaling": YARN | {"truncate": False}},
        ["experts_per_token", "initial_context_length"],
    ),
    (
        "MiMo-V2-Flash",
        GROUPED
        | {
            "model_type": "mimo_v2_flash",
            "head_dim": 12,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
        }
        | {"routed_scaling_factor": None, "sliding_window_size": 8, "rope_theta": 5e6, "partial_rotary_factor": 0.334},
        ["rope_theta", "partial_rotary_factor"],
    ),
    (
        "Laguna",
        GROUPED
        | {"model_type": "laguna", "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "gating": "per-head"}
        | {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "sliding_window": 8}
        | {"num_attention_heads_per_layer": [6, 8, 6], "mlp_only_layers": [0]},
        ["mlp_only_layers"],
    ),
    (
        "GLM-4.5",
        GROUPED
        | {
            "model_type": "glm4_moe",
            "head_dim": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "num_nextn_predict_layers": 1,
        },
        [],
    ),
    (
        "Qwen3-Next-80B-A3B",
        GROUPED
        | {"model_type": "qwen3_next", "head_dim": 16, "full_attention_interval": 3, "partial_rotary_factor": 0.25}
        | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "rope_theta": 1e7}
        | {"rope_scaling": None, "mlp_only_layers": [], "decoder_sparse_step": 1, "use_sliding_window": False},
        [],
    ),
    (
        "Qwen3.5-9B",
        GROUPED
        | {"model_type": "qwen3_5_text", "head_dim": 16, "attn_output_gate": True, "mtp_num_hidden_layers": 1}
        | {"rope_parameters": DEFAULT | {"mrope_section": [1, 1, 0], "mrope_interleaved": True}},
        ["mtp_num_hidden_layers"],
    ),
    (
        "Hunyuan-7B",
        GROUPED
        | {"model_type": "hunyuan_v1_dense", "head_dim": 16, "attention_head_dim": 16, "use_cla": False}
        | {"eod_token_id": 3, "rope_theta": 1e4}
        | {"rope_scaling": {"type": "dynamic", "alpha": 1e3, "factor": 1.0, "beta_fast": 32, "mscale": 1.0}},
        ["attention_head_dim", "use_cla", "rope_scaling.beta_fast", "rope_scaling.mscale"],
    ),
    (
        "Hunyuan-A13B",
        GROUPED
        | {"model_type": "hunyuan_v1_moe", "head_dim": 16, "num_experts": 4, "moe_topk": [2, 2, 2]}
        | {"num_shared_expert": [1, 1, 1], "moe_intermediate_size": [80, 80, 80]},
        ["num_shared_expert"],
    ),
    (
        "Apertus",
        GROUPED | {"model_type": "apertus", "hidden_act": "xielu", "post_norm": False, "rope_theta": 1.2e7},
        ["post_norm"],
    ),
    (
        "Kimi-Linear-48B-A3B",
        DENSE
        | {"model_type": "kimi_linear", "num_key_value_heads": 6, "head_dim": 72, "num_experts": 8}
        | {"num_experts_per_token": 2, "moe_intermediate_size": 24, "num_shared_experts": 1, "first_k_dense_replace": 1}
        | {"num_expert_group": 1, "topk_group": 1, "moe_renormalize": True, "moe_router_activation_func": "sigmoid"}
        | {"mla_use_nope": True, "use_grouped_topk": True, "moe_layer_freq": 1, "num_nextn_predict_layers": 0}
        | {"model_max_length": 64, "rope_theta": 1e4, "rope_scaling": None, "v_head_dim": 8}
        | {
            "linear_attn_config": {"head_dim": 8, "num_heads": 4, "short_conv_kernel_size": 4}
            | {"kda_layers": [1, 2], "full_attn_layers": [3]}
        },
        ["rope_theta"],
    ),
    (
        "LFM2-1.2B",
        {key: value for key, value in GROUPED.items() if key != "intermediate_size"}
        | {"model_type": "lfm2", "block_ff_dim": 96, "block_multiple_of": 32, "full_attn_idxs": [2]}
        | {"block_dim": 48, "conv_bias": False, "conv_L_cache": 3, "tie_embedding": True, "rope_theta": 1e6},
        [],
    ),
    (
        "Bamba",
        GROUPED
        | MAMBA
        | {"model_type": "bamba", "attn_layer_indices": [1], "rope_theta": 1e4, "attn_rotary_emb": 4}
        | {"num_logits_to_keep": 1, "mamba_chunk_size": 256},
        ["attn_rotary_emb"],
    ),
    (
        "Granite 4",
        GROUPED
        | MAMBA
        | {"model_type": "granitemoehybrid", "layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 0}
        | {"shared_intermediate_size": 80, "position_embedding_type": "nope", "init_method": "mup"},
        ["init_method"],
    ),
    (
        "Granite 4, without Mamba-2 layers",
        GROUPED
        | {"model_type": "granitemoehybrid", "layer_types": ["attention"] * 3, "num_local_experts": 0}
        | {"shared_intermediate_size": 80, "position_embedding_type": "rope", "mamba_n_heads": 128, "hidden_size": 48}
        | {"mamba_d_head": 12, "mamba_expand": 32},
        [],
    ),
    (
        "Falcon-H1",
        GROUPED
        | MAMBA
        | {"model_type": "falcon_h1", "mamba_d_ssm": 96, "mamba_use_mlp": True, "key_multiplier": 0.4}
        | {"mlp_multipliers": [0.9, 0.2], "ssm_multipliers": [0.3, 0.2, 0.3, 0.5, 0.2], "lm_head_multiplier": 0.04},
        ["mamba_use_mlp"],
    ),
    (
        "Granite 3 MoE",
        GROUPED | {"model_type": "granitemoe", "num_local_experts": 4, "num_experts_per_tok": 2, "rope_scaling": None},
        [],
    ),
    (
        "MiniMax-M2",
        GROUPED
        | {
            "model_type": "minimax_m2",
            "head_dim": 16,
            "rotary_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        }
        | {"scoring_func": "sigmoid", "use_routing_bias": True, "shared_intermediate_size": 0, "rope_theta": 5e6},
        ["shared_intermediate_size"],
    ),
    (
        "ERNIE 4.5, first layers with experts",
        GROUPED
        | {
            "model_type": "ernie4_5_moe",
            "moe_num_experts": 8,
            "moe_k": 2,
            "moe_intermediate_size": 24,
            "use_bias": False,
        }
        | {"moe_layer_start_index": 0, "moe_layer_end_index": 1, "moe_num_shared_experts": 0, "moe_capacity": [64] * 3},
        ["moe_capacity"],
    ),
    (
        "Hy3",
        GROUPED | {"model_type": "hy_v3", "num_local_experts": 8, "enable_moe_fp32_combine": True, "mlp_bias": False},
        [],
    ),
    (
        "Trinity",
        GROUPED
        | {"model_type": "afmoe", "num_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "score_func": "sigmoid"}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "attention_bias": False},
        [],
    ),
    (
        "Command-A+",
        GROUPED
        | {"model_type": "cohere2_moe", "first_k_dense_replace": 1, "sliding_window_pattern": 2, "rope_theta": 5e4}
        | {"prefix_dense_sliding_window_pattern": 1, "use_parallel_block": True},
        [],
    ),
    (
        "Nemotron-H",
        {key: value for key, value in GROUPED.items() if key != "num_hidden_layers"}
        | {"model_type": "nemotron_h", "hybrid_override_pattern": "M-*E", "num_hidden_layers": 4, "head_dim": 8}
        | {"mamba_num_heads": 8, "mamba_head_dim": 4, "ssm_state_size": 6, "n_groups": 2, "norm_eps": 1e-5}
        | {"n_routed_experts": 4, "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 24}
        | {"time_step_limit": [0.0, float("inf")], "time_step_rank": 8},
        ["norm_eps", "time_step_rank"],
    ),
]

# fields of a Llama, or of another family, that transformers reads and that we do not compute; what the message says
REJECTED: list[tuple[dict[str, Any], str]] = [
    ({"is_causal": False}, "is_causal = False is not supported by the llama family. Legal value: True."),
    ({"attention_chunk_size": 8}, "attention_chunk_size = 8 is not supported by the llama family."),
    ({"per_layer_config": {"0": {"intermediate_size": 40}}}, "per_layer_config = "),
    ({"transformers_weights": "other.safetensors"}, "transformers_weights = 'other.safetensors' is not supported"),
    ({"configuration_files": ["config.4.0.0.json"]}, "configuration_files = ['config.4.0.0.json'] is not supported"),
    (
        {"sliding_window": 8},
        "sliding_window = 8 is not supported by the llama family. Remove it if a llama model computes the same.",
    ),
    (
        {"model_type": "gpt_neox", "num_key_value_heads": 2},
        "num_key_value_heads = 2 is not supported by the gpt_neox family. Legal value: 6.",
    ),
    (
        {"model_type": "gpt_neox", "head_dim": 16},
        "head_dim = 16 is not supported by the gpt_neox family. Legal value: 8.",
    ),
    (
        {"model_type": "stablelm", "hidden_dropout": 0.1},
        "hidden_dropout = 0.1 is not supported by the stablelm family. Legal value: 0.0.",
    ),
    ({"model_type": "olmoe", "clip_qkv": 8.0}, "clip_qkv = 8.0 is not supported by the olmoe family."),
    (
        {"model_type": "mixtral", "router_jitter_noise": 0.1},
        "router_jitter_noise = 0.1 is not supported by the mixtral family.",
    ),
    (
        {"model_type": "mixtral", "num_experts": 4, "num_local_experts": 8},
        "num_experts = 4 contradicts num_local_experts = 8: both are",
    ),
    (
        {"model_type": "gemma2", "use_bidirectional_attention": True},
        "use_bidirectional_attention = True is not supported by the gemma2",
    ),
    (
        {"model_type": "bamba", "attn_layer_indices": [1], "layer_types": ["full_attention"] * 3},
        "layers_block_type = ['full_attention', 'full_attention', 'full_attention'] contradicts attn_layer_indices",
    ),
    (
        {"model_type": "bamba", "mamba_n_heads": 8, "hidden_act": "gelu"},
        "hidden_act = 'gelu' is not supported after a convolution. Legal value: silu.",
    ),
    (
        {"model_type": "bamba", "mamba_n_heads": 8, "mamba_d_head": 10},
        "mamba_d_head = 10 does not make 96 channels with mamba_n_heads = 8.",
    ),
    (
        {"model_type": "granitemoehybrid", "layer_types": ["sliding_attention"] * 3},
        "layer_types = 'sliding_attention' is not supported. Legal values: linear_attention, full_attention.",
    ),
    (
        {"model_type": "falcon_h1", "mamba_n_heads": 8, "projectors_bias": True},
        "projectors_bias = True is not supported with mamba_proj_bias = False. They must be equal.",
    ),
    (
        {"model_type": "falcon_h1", "mamba_n_heads": 8, "ssm_multipliers": [0.5]},
        "ssm_multipliers = [0.5] has 1 numbers, but must have 5.",
    ),
    (
        {"model_type": "nemotron_h", "mamba_hidden_act": "gelu"},
        "mamba_hidden_act = 'gelu' is not supported by the nemotron_h family. Legal value: 'silu'.",
    ),
    (
        {"model_type": "nemotron_h", "layers_block_type": ["moe"], "mlp_bias": True},
        "mlp_bias = True is not supported with experts, which have no biases in this family.",
    ),
    ({"model_type": "nemotron_h", "tie_word_embeddings": True}, "transformers never ties the head in this family."),
    (
        {"model_type": "nemotron_h", "hybrid_override_pattern": "MX"},
        "layers_block_type = 'X' is not supported. Legal values: linear_attention, full_attention, mlp, moe.",
    ),
    ({"rope_scaling": "linear"}, "rope_scaling = 'linear' is not an object"),
    (
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}},
        "rope_scaling.partial_rotary_factor = 0.5",
    ),
]
