"""The arguments in a checkpoint of Megatron-LM ↔ our configuration.

A checkpoint has the namespace of all arguments, defaults included. Those that describe the model and the
optimizer go through the table of `megalite import-config`, under the names of the command line. For an
export the model's shape becomes arguments, which are read again: a model that they do not describe exactly
cannot be exported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megalite.checkpoint import CheckpointError
from megalite.config.load import from_dict
from megalite.config.rule import show
from megalite.config.schema import Config
from megalite.config.sections.model import ModelConfig
from megalite.config.values import nest
from megalite.huggingface.config_json import TRAINING_ONLY, meaning
from megalite.importers.convert import convert
from megalite.importers.megatron_hybrid import BLOCKS

SHAPE = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels"),
    *("group_query_attention", "num_query_groups", "max_position_embeddings", "position_embedding_type"),
    *("rotary_base", "rotary_percent", "rotary_interleaved", "rotary_seq_len_interpolation_factor"),
    *("use_rope_scaling", "rope_scaling_factor", "no_rope_freq", "normalization", "norm_epsilon"),
    *("apply_layernorm_1p", "swiglu", "squared_relu", "quick_geglu", "openai_gelu", "add_qkv_bias"),
    *("untie_embeddings_and_output_weights", "init_method_std", "qk_layernorm", "window_size"),
    *("window_attn_skip_freq", "attention_dropout", "hidden_dropout", "attention_output_gate"),
    *("multi_latent_attention", "kv_lora_rank", "q_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim"),
    *("v_head_dim", "rope_type", "rotary_scaling_factor", "mscale", "mscale_all_dim"),
    *("num_experts", "moe_layer_freq", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"),
    *("moe_shared_expert_gate", "moe_router_topk", "moe_router_score_function", "moe_router_pre_softmax"),
    *("moe_router_num_groups", "moe_router_group_topk", "moe_router_topk_scaling_factor"),
    *("moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff"),
    *("moe_router_enable_expert_bias", "moe_router_bias_update_rate"),
    *("hybrid_layer_pattern", "hybrid_override_pattern", "mamba_state_dim", "mamba_head_dim"),
    *("mamba_num_groups", "mamba_num_heads", "experimental_attention_variant", "linear_attention_type"),
    *("linear_attention_freq", "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads"),
    *("linear_num_value_heads", "linear_conv_kernel_dim"),
)
"""Arguments that describe the model."""
TRAINING = (
    *("lr", "min_lr", "lr_decay_style", "lr_decay_iters", "lr_warmup_iters", "lr_warmup_fraction"),
    *("train_iters", "train_samples", "global_batch_size", "micro_batch_size", "adam_beta1", "adam_beta2"),
    *("adam_eps", "weight_decay", "clip_grad", "bf16", "fp16", "seq_length"),
)
"""Arguments of training that a run may take over."""
ONLY = {
    **{"qk_l2_norm": False, "softmax_type": "vanilla", "apply_residual_connection_post_layernorm": False},
    **{
        "heterogeneous_layers_config_path": None,
        "moe_input_jitter_eps": None,
        "moe_apply_probs_on_input": False,
    },
    **{"enable_hyper_connections": False, "moe_latent_size": None, "activation_func_clamp_value": None},
}
"""Arguments that change what a model computes, and the only supported value."""
ROUNDING = ("norm_rounding", "gated_norm_rounding")
"""Fields that only say when values are rounded to 16 bits."""
TANH = ("gelu_pytorch_tanh", "gelu_new")
"""Two names of one activation."""
LATENT_EPSILON = 1e-6
DIVISIBLE = 128
"""Megatron-LM's default of make_vocab_size_divisible_by."""


def config_of(arguments: Mapping[str, Any], rows: int, place: str) -> tuple[Config, list[str]]:
    """Return the configuration that arguments describe, and notes on what differs.

    Args:
        rows: of the embedding.
        place: the checkpoint, for messages.

    Raises:
        CheckpointError: the model has something that is not supported, named by its argument.
    """
    for name, value in ONLY.items():
        given = arguments.get(name, value)
        if getattr(given, "arguments", None):  # the record of an enumeration
            given = str(given.arguments[0])
        if given not in (value, None, False):
            raise CheckpointError(f"{place} was trained with {name}={given}, which is not supported.")
    leaves = _leaves(arguments)
    leaves["padded-vocab-size"] = rows
    imported = convert(leaves, 1, project="megatron")
    shape_keys = {name.replace("_", "-") for name in SHAPE} | {"disable-bias-linear", "no-bias-gelu-fusion"}
    lost = [remark for remark in imported.remarks if remark.kind == "lost"]
    for remark in lost:
        if remark.key in shape_keys:
            raise CheckpointError(
                f"{place} was trained with {remark.key.replace('-', '_')}={show(remark.value)}, which is "
                "not supported: "
                f"{remark.why}."
            )
    notes = [
        f"{remark.key.replace('-', '_')}={show(remark.value)}: {remark.why}"
        for remark in imported.remarks
        if remark.kind in ("lost", "approximate") and remark.key in leaves
    ]
    options = {
        name: value
        for name, value in imported.options.items()
        if name.startswith(("model.", "train.", "optimizer.")) or name == "data.sequence_length"
    }
    return from_dict(nest(options)), notes


def _leaves(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments under the names of the command line, without those that are off."""
    leaves = {
        name.replace("_", "-"): value
        for name in (*SHAPE, *TRAINING)
        if (value := arguments.get(name)) is not None and value is not False
    }
    if arguments.get("add_bias_linear") is False:
        leaves["disable-bias-linear"] = True
    if arguments.get("bias_gelu_fusion") is False:
        leaves["no-bias-gelu-fusion"] = True
    leaves = {
        name: list(value) if isinstance(value, tuple) and name != "window-size" else value
        for name, value in leaves.items()
    }
    if leaves.get("window-size") is not None:
        leaves["window-size"] = str(leaves["window-size"])
    if "hybrid-layer-pattern" in leaves or "hybrid-override-pattern" in leaves:
        leaves.pop("num-layers", None)
    return leaves


def check_same(given: ModelConfig, described: ModelConfig, place: str) -> None:
    """Raise CheckpointError if a model that was given differs from that of the arguments."""
    ours, theirs = _compared(given), _compared(described)
    different = [name for name in ours if ours[name] != theirs[name]]
    if different:
        listed = "; ".join(
            f"model.{name} is {show(ours[name])}, but {show(theirs[name])} in the arguments"
            for name in different[:5]
        )
        raise CheckpointError(f"--model does not match {place}: {listed}. Correct it, or leave --model out.")


def _compared(model: ModelConfig) -> dict[str, Any]:
    """Return what a model computes, without what only training uses."""
    free = (*TRAINING_ONLY, "initializer_range", "router_bias_rate", "max_position_embeddings", *ROUNDING)
    values = {name: value for name, value in meaning(model).items() if name not in free}
    if values["hidden_act"] in TANH:
        values["hidden_act"] = TANH[0]
    if not model.num_experts:
        values = {
            name: value for name, value in values.items() if not name.startswith(("router", "moe", "shared"))
        }
    return values


# ---- export


def arguments_of(config: Config, *, padded: int, divisible: int) -> dict[str, Any]:
    """Return the arguments that describe a model and its training.

    Args:
        padded: rows of the embedding.
        divisible: make_vocab_size_divisible_by.

    Raises:
        CheckpointError: Megatron-LM has no arguments for the model, naming the first field that it cannot
            express.
    """
    model = config.model
    arguments = _shape_of(model) | {
        "vocab_size": model.vocabulary,
        "padded_vocab_size": padded,
        "make_vocab_size_divisible_by": divisible,
    }
    arguments |= _training_of(config)
    described, _ = config_of(arguments, model.vocabulary, "the export")
    ours, theirs = _compared(model), _compared(described.model)
    different = [name for name in ours if ours[name] != theirs[name]]
    if different:
        name = different[0]
        raise CheckpointError(
            f"Megatron-LM has no argument for model.{name}={show(ours[name])} (its arguments give "
            f"{show(theirs[name])}). "
            "Use a Hugging Face directory (megalite convert export without --format)."
        )
    return arguments


def _shape_of(model: ModelConfig) -> dict[str, Any]:
    layers = range(model.num_hidden_layers)
    local = [model.window(layer) is not None for layer in layers]
    theta = model.rope_theta
    arguments: dict[str, Any] = {
        "num_layers": model.num_hidden_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.intermediate_size,
        "num_attention_heads": model.num_attention_heads,
        "kv_channels": model.head_size,
        "group_query_attention": model.kv_heads != model.num_attention_heads,
        "num_query_groups": model.kv_heads,
        "max_position_embeddings": model.max_position_embeddings,
        "position_embedding_type": {"learned": "learned_absolute"}.get(model.position, model.position),
        "rotary_base": int(theta) if theta == int(theta) else theta,
        "rotary_percent": model.partial_rotary_factor,
        "normalization": {"rms": "RMSNorm", "layer": "LayerNorm"}[model.norm],
        "norm_epsilon": model.rms_norm_eps,
        "apply_layernorm_1p": model.norm_offset == 1,
        "swiglu": model.gated_mlp,
        "squared_relu": model.hidden_act == "relu2",
        "bias_gelu_fusion": model.hidden_act in TANH,
        "openai_gelu": model.hidden_act in TANH,
        "add_bias_linear": model.mlp_bias,
        "add_qkv_bias": model.attention_bias,
        "untie_embeddings_and_output_weights": not model.tie_word_embeddings,
        "init_method_std": model.initializer_range,
        "attention_dropout": model.attention_dropout,
        "hidden_dropout": model.residual_dropout,
        "qk_layernorm": model.qk_norm == "head",
        "attention_output_gate": model.attention_gate,
    }
    if any(local):
        arguments["window_size"] = ((model.sliding_window or 1) - 1, 0)
        if not all(local):
            arguments["window_attn_skip_freq"] = [int(each) for each in local]
    if model.rope_scaling and model.rope_scaling.get("rope_type") == "llama3":
        arguments |= {"use_rope_scaling": True, "rope_scaling_factor": model.rope_scaling["factor"]}
    if model.kv_lora_rank is not None:
        arguments |= {
            "multi_latent_attention": True,
            "qk_layernorm": True,
            "kv_lora_rank": model.kv_lora_rank,
            "q_lora_rank": model.q_lora_rank,
            "qk_head_dim": model.qk_nope_head_dim,
            "qk_pos_emb_head_dim": model.qk_rope_head_dim,
            "v_head_dim": model.v_head_dim,
            "rope_type": "rope",
            "group_query_attention": False,
        }
    return arguments | _mixture_of(model) | _hybrid_of(model)


def _mixture_of(model: ModelConfig) -> dict[str, Any]:
    if not model.num_experts:
        return {}
    mixtures = [int(model.is_mixture(layer)) for layer in range(model.num_hidden_layers)]
    return {
        "num_experts": model.num_experts,
        "moe_layer_freq": 1 if all(mixtures) else mixtures,
        "moe_ffn_hidden_size": model.expert_width,
        "moe_router_topk": model.num_experts_per_tok,
        "moe_router_score_function": model.router_scores,
        "moe_router_pre_softmax": model.router_scores == "softmax" and not model.norm_topk_prob,
        "moe_router_num_groups": model.n_group,
        "moe_router_group_topk": model.topk_group if model.n_group else None,
        "moe_router_topk_scaling_factor": model.routed_scaling_factor,
        "moe_router_enable_expert_bias": model.router_balance == "bias",
        "moe_router_bias_update_rate": model.router_bias_rate,
        "moe_router_load_balancing_type": "none" if model.router_balance == "bias" else "aux_loss",
        "moe_shared_expert_intermediate_size": model.shared_expert_intermediate_size,
        "moe_shared_expert_gate": bool(model.shared_expert_intermediate_size and model.shared_expert_gate),
        "moe_grouped_gemm": True,
    }


def _hybrid_of(model: ModelConfig) -> dict[str, Any]:
    kinds = [model.block_names(layer) for layer in range(model.num_hidden_layers)]
    arguments: dict[str, Any] = {}
    if any(len(each) == 1 for each in kinds):
        letters = {name: letter for letter, name in BLOCKS.items()}
        arguments["hybrid_override_pattern"] = "".join(letters.get(each[0], "?") for each in kinds)
        arguments["is_hybrid_model"] = True
    elif any("delta" in each for each in kinds):
        arguments["experimental_attention_variant"] = "gated_delta_net"
        arguments["linear_attention_freq"] = [int("delta" in each) for each in kinds]
    if any("mamba" in each for each in kinds):
        arguments |= {
            "mamba_state_dim": model.mamba_state_size,
            "mamba_head_dim": model.mamba_head_dim,
            "mamba_num_groups": model.mamba_n_groups,
            "mamba_num_heads": model.mamba_num_heads,
        }
    if any("delta" in each for each in kinds):
        arguments |= {
            name: getattr(model, name)
            for name in (
                *("linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads"),
                *("linear_num_value_heads", "linear_conv_kernel_dim"),
            )
        }
    return arguments


def _training_of(config: Config) -> dict[str, Any]:
    train, optimizer = config.train, config.optimizer
    return {
        "lr": optimizer.lr,
        "min_lr": optimizer.min_lr,
        "lr_decay_style": {"wsd": "WSD"}.get(optimizer.decay, optimizer.decay),
        "lr_warmup_iters": optimizer.warmup_steps,
        "train_iters": train.steps,
        "lr_decay_iters": train.steps,
        "global_batch_size": train.global_batch_size,
        "micro_batch_size": train.micro_batch_size,
        "adam_beta1": optimizer.betas[0],
        "adam_beta2": optimizer.betas[1],
        "adam_eps": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
        "clip_grad": train.grad_clip,
        "bf16": train.precision == "bf16",
        "fp16": train.precision == "fp16",
        "seq_length": config.data.sequence_length,
    }


def padded_rows(vocabulary: int, divisible: int, tp: int) -> int:
    """Return the rows of the embedding in Megatron-LM: the next multiple of `divisible` for each tp rank."""
    return -(-vocabulary // (divisible * tp)) * divisible * tp


def latent_note(model: ModelConfig) -> list[str]:
    """Return a note if norms of latents differ: their epsilon is fixed here, in Megatron-LM norm_epsilon."""
    if model.kv_lora_rank is None or model.rms_norm_eps == LATENT_EPSILON:
        return []
    return [
        f"norms of latents have an epsilon of {LATENT_EPSILON:g} in megalite and norm_epsilon="
        f"{model.rms_norm_eps:g} in Megatron-LM"
    ]


def without_padding(config: Config, arguments: Mapping[str, Any], rows: int, place: str) -> Config:
    """Return the configuration with the vocabulary of the tokenizer in place of the padded one.

    Raises CheckpointError if the arguments do not have it.
    """
    size = arguments.get("vocab_size")
    if type(size) is not int or not 0 < size <= rows:
        raise CheckpointError(
            f"{place}: --drop_padding needs the vocabulary size of the tokenizer, but its arguments have "
            f"vocab_size={size!r} and the embedding has {rows:,} rows. Leave --drop_padding out."
        )
    return replace(config, model=replace(config.model, vocab_size=size))
