"""Each rule of the configuration has a row: values that break it, what the message says, and values that satisfy it."""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import pairwise
from operator import attrgetter
from random import Random
from typing import Any

import numpy as np
import pytest
import yaml

from megalite.config.amounts import duration_seconds
from megalite.config.errors import ConfigError
from megalite.config.layer_blocks import LAYER_BLOCKS, BlockOption
from megalite.config.rules import RULES, all_rules, check
from megalite.config.schema import OPTIONS, Config
from megalite.config.sections.model import ModelConfig
from megalite.data.preparation.writer import IndexedWriter
from megalite.parallel.pipeline.orders import RECIPES
from tests.support.preferences import write_labelled, write_preferences


@dataclass
class Row:
    rule: str
    broken: dict[str, Any]
    fixed: dict[str, Any]
    says: tuple[str, ...] = ()
    world: int | None = None
    devices: int | None = None


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 64, "attention_factor": 1.2}
LONGROPE |= {"short_factor": [1.0, 1.0], "long_factor": [1.0, 2.0]}

# option: (the nearest illegal value, a legal value next to it)
BOUNDS: dict[str, tuple[Any, Any]] = {
    "model.norm_topk_eps": (0, 1e-6),
    **dict.fromkeys(("store.part_mb", "store.spool_gb"), (0, 0.5)),
    "model.query_scale_beta": (0.0, None),
    "model.query_scale_positions": (0, None),
    "model.norm_topk_min": (0.0, None),
    "model.mixture_out_multiplier": (0.0, 1.0),
    **dict.fromkeys(
        ("parallel.tp", "parallel.pp", "parallel.dp", "parallel.cp", "model.num_hidden_layers", "train.steps"), (0, 1)
    ),
    **dict.fromkeys(
        ("data.sequence_length", "model.num_key_value_heads", "model.sliding_window", "model.intermediate_size"), (0, 1)
    ),
    **dict.fromkeys(
        (
            "checkpoint.interval",
            "checkpoint.copy_interval",
            "checkpoint.keep",
            "validation.batches",
            "logging.interval",
        ),
        (0, 1),
    ),
    "checkpoint.minutes": (0.0, 0.1),
    **{"data.lanes": (0, None), "data.shuffle_buffer": (0, 256), "data.fim_rate": (1.5, 0.0)},
    "data.fim_spm_rate": (-0.5, 0.5),
    **dict.fromkeys(("network.ib_gid_index", "network.ib_retries"), (-1, 0)),
    "profiling.memory_snapshot": (0, 1),
    **dict.fromkeys(
        ("optimizer.base_batch_size", "train.micro_batch_size", "faults.spike_window", "faults.skip_limit"), (0, 1)
    ),
    "faults.recheck": (0, 1),
    **dict.fromkeys(("validation.interval", "train.tokens", "logging.fp8_interval"), (0, None)),
    "parallel.virtual_stages": (0, 1),
    **dict.fromkeys(("parallel.ep", "model.num_experts_per_tok", "model.decoder_sparse_step"), (0, 1)),
    **dict.fromkeys(
        ("model.num_experts", "model.moe_intermediate_size", "model.shared_expert_intermediate_size"), (0, None)
    ),
    "model.moe_latent_size": (0, None),
    **dict.fromkeys(
        ("model.attention_in_multiplier", "model.key_multiplier", "model.attention_out_multiplier"), (0.0, 1.0)
    ),
    "model.mlp_multipliers": ([0.0, 1.0], None),
    **dict.fromkeys(("model.router_aux_loss_coef", "model.router_z_loss_coef", "model.router_bias_rate"), (-1e-9, 0.0)),
    **dict.fromkeys(("model.rope_local_theta", "model.expert_capacity_factor"), (0.0, None)),
    **dict.fromkeys(
        ("parallel.dp_shard", "parallel.min_ranks", "parallel.powersgd_rank", "parallel.context_inner"), (0, 1)
    ),
    "parallel.layer_costs": ([1.0, 1.0, -1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 0.0, 1.0, 1.0, 1.0]),
    "parallel.schedule_costs": ([1.0, -1.0, 1.0, 0.0], [1.0, 0.0, 1.0, 0.0]),
    "model.kv_lora_rank": (0, None),
    "model.mtp_layers": (-1, 0),
    "train.mtp_weight": (0.0, 1e-9),
    "model.topk_group": (0, 1),
    "model.routed_scaling_factor": (0.0, 1.0),
    "model.vocab_size": (0, 257),
    "model.hidden_size": (0, 8),
    "model.num_attention_heads": (0, 1),
    "model.head_dim": (-2, 2),
    "model.value_head_dim": (0, 8),
    "model.layer_heads": ([4, 0, 4, 4], [4, 4, 8, 4]),
    "model.max_position_embeddings": (0, 256),
    "train.global_batch_size": (0, 4),
    **dict.fromkeys(
        (
            "model.rope_theta",
            "model.rms_norm_eps",
            "model.attention_scale",
            "model.residual_multiplier",
            "model.initializer_range",
        ),
        (0.0, 1e-9),
    ),
    **dict.fromkeys(
        ("model.attention_softcap", "model.logit_softcap", "model.logit_scale", "model.embedding_scale"), (0.0, 1e-9)
    ),
    **dict.fromkeys(("parallel.bucket_mb", "optimizer.eps", "faults.spike_sigma", "train.epochs"), (0.0, 1e-9)),
    "train.memory_budget": (0.0, None),
    "train.loss_chunk": (-1, 0),
    **dict.fromkeys(("train.grad_clip", "train.z_loss", "optimizer.min_lr", "optimizer.weight_decay"), (-1e-9, 0.0)),
    **dict.fromkeys(("muon.lr", "muon.weight_decay"), (-1e-9, 0.0)),
    "muon.ns_steps": (0, 1),
    "muon.momentum": (1.0, 0.0),
    "ademamix.alpha": (-1e-9, 0.0),
    "ademamix.beta3": (1.0, 0.0),
    "lora.rank": (-1, 0),
    "lora.alpha": (0.0, 1e-9),
    "lora.dropout": (1.0, 0.0),
    **dict.fromkeys(("lora.ranks", "lora.alphas"), ({"q": 0}, None)),
    "optimizer.lr": (float("inf"), 1.0),
    **dict.fromkeys(("fp16.loss_scale_window", "fp16.hysteresis"), (0, 1)),
    "fp16.min_loss_scale": (0.0, 1e-9),
    "fp16.initial_scale_power": (-1, 0),
    **dict.fromkeys(("run.seed", "optimizer.warmup_steps", "ademamix.schedule_steps"), (-1, 0)),
    **dict.fromkeys(("model.embedding_dropout", "model.attention_dropout", "model.residual_dropout"), (1.0, 0.999)),
    "train.label_smoothing": (float("nan"), 0.0),
    "preference.label_smoothing": (0.5, 0.0),
    "distillation.temperature": (0.0, 1.0),
    "distillation.cross_entropy_weight": (-1.0, 0.0),
    "distillation.beta": (1.0, 0.5),
    "preference.beta": (0.0, 0.1),
    "preference.gamma": (-1e-9, 0.5),
    "preference.center_rewards": (-1e-9, 0.0),
    **dict.fromkeys(("preference.desirable_weight", "preference.undesirable_weight"), (0.0, 1.0)),
    "preference.nll_weight": (-1e-9, None),
    "train.ema_decay": (1.0, 0.0),
    "train.early_stopping_patience": (0, None),
    "train.early_stopping_threshold": (-1e-9, 0.0),
    "optimizer.betas": ([0.9, 1.0], [0.0, 0.999]),
    "optimizer.wsd_decay_fraction": (0.0, 1.0),
}

# sizes of blocks that the model does not have keep their defaults
BOUNDS |= {
    f"model.{each.name}": (0, each.default)
    for each in fields(ModelConfig)
    if set(each.metadata.get("kinds", ())) & {"delta", "mamba", "convolution"} and type(each.default) in (int, float)
}
BOUNDS |= {"model.delta_norm_eps": (0.0, None), "model.mamba_time_step_limit": ([-1.0, 1.0], None)}
MIXERS = {kind: {"model.layer_blocks": [f"{kind}+feed_forward"] * 4} for kind in ("delta", "mamba", "convolution")}
EXPERTS = {"model.num_experts": 4}
GROUPS = EXPERTS | {"model.num_experts_per_tok": 1}
LATENTS = {"model.kv_lora_rank": 8}
LATENT_ROWS = {  # rule: what breaks it, next to latents, and what the same option must be
    **{
        f"{name} is incompatible with latents": (f"model.{name}", 0.5, 1.0)
        for name in ("attention_in_multiplier", "key_multiplier", "attention_out_multiplier")
    },
    "value_head_dim is incompatible with latents": ("model.value_head_dim", 8, None),
    "layer_heads is incompatible with latents": ("model.layer_heads", [4, 4, 4, 4], None),
    "local_attention is incompatible with latents": ("model.local_attention", {"head_dim": 8}, None),
    "qk_norm is incompatible with latents": ("model.qk_norm", "head", "none"),
    "attention_sinks is incompatible with latents": ("model.attention_sinks", True, False),
    "attention_gate is incompatible with latents": ("model.attention_gate", True, False),
    "head_dim is incompatible with latents": ("model.head_dim", 16, None),
    "attention_bias is incompatible with latents": ("model.attention_bias", True, False),
    "attention_out_bias is incompatible with latents": ("model.attention_out_bias", True, False),
    "partial_rotary_factor is incompatible with latents": ("model.partial_rotary_factor", 0.5, 1.0),
    "every head has its key and value": ("model.num_key_value_heads", 2, None),
    "even rotating width for rope": ("model.qk_rope_head_dim", 3, 2),
    "model.q_lora_rank in range": ("model.q_lora_rank", 0, 1),
    "model.qk_nope_head_dim in range": ("model.qk_nope_head_dim", 0, 1),
    "model.v_head_dim in range": ("model.v_head_dim", 0, 1),
}
WINDOWED = {"model.sliding_window": 5, "model.sliding_window_layers": [1]}
# the defaults of the widths that rotate and of indexers fit each other
INDEXED = LATENTS | {"model.q_lora_rank": 8, "model.index_topk": 4}
SHARED = {"model.indexer_types": ["full", "shared", "full", "full"]}
INDEXED_ROWS = {  # rule: what breaks it, next to an indexer, and what the same option must be
    "an indexer needs q_lora_rank": ("model.q_lora_rank", None, 8),
    "sliding_window is incompatible with an indexer": ("model.sliding_window", 4, None),
    "attention_softcap is incompatible with an indexer": ("model.attention_softcap", 5.0, None),
    "attention_dropout is incompatible with an indexer": ("model.attention_dropout", 0.1, 0.0),
    "the rotating channels of an indexer are some of its own": ("model.index_head_dim", 62, 64),
    "an indexer type for each layer": ("model.indexer_types", ["full"] * 3, ["full"] * 4),
    "indexer types are known": ("model.indexer_types", ["full", "fulll", "full", "full"], ["full"] * 4),
    "a selection to share": ("model.indexer_types", ["shared", "full", "full", "full"], ["full"] * 4),
    "model.index_topk in range": ("model.index_topk", 0, 1),
    "model.index_n_heads in range": ("model.index_n_heads", 0, 1),
    "model.index_loss_coef in range": ("model.index_loss_coef", -0.1, 0.0),
}
DPO = {"train.objective": "dpo", "lora.rank": 4, "data.train": "pairs"}
SIMPO = {"train.objective": "simpo", "data.train": "pairs"}
KTO = {"train.objective": "kto", "lora.rank": 4, "data.train": "labelled"}
REWARD = {"train.objective": "reward", "model.output_head": "reward", "data.train": "pairs"}
DISTILLATION = {"train.objective": "distillation", "distillation.teacher": "."}
FP8_GRADIENTS = {"train.fp8": "block", "train.fp8_weight_gradients": True, "data.sequence_length": 128}
FP8_GRADIENTS |= {"train.micro_batch_size": 2, "train.global_batch_size": 8, "model.max_position_embeddings": 128}
CP2 = {"parallel.cp": 2}
GRAPHS = {"train.graphs": True}
GRAPHED: list[tuple[str, Any, Any, dict[str, Any]]] = [  # option, what graphs do not support, what they do, others
    ("parallel.tp", 2, 1, {}),
    ("parallel.cp", 2, 1, {}),
    ("parallel.zero", 2, 1, {"parallel.dp": 2}),
    ("parallel.offload", "cpu", "none", {}),
    ("parallel.schedule", "zb-h1", "gpipe", {}),
    ("model.num_experts", 4, None, {}),
    ("model.mtp_layers", 1, 0, {}),
    ("model.index_topk", 4, None, {"model.kv_lora_rank": 8, "model.q_lora_rank": 8}),
    *((f"model.{name}_dropout", 0.1, 0.0, {}) for name in ("embedding", "attention", "residual")),
    ("lora.dropout", 0.1, 0.0, {"lora.rank": 4}),
    ("data.reset_positions", True, False, {}),
    ("data.train", "chat", "tokens", {}),
    ("train.fp8", "block", "none", {}),
    ("train.compile", True, False, {}),
    ("faults.recheck", 5, None, {"run.deterministic": True}),
    ("logging.loss_by_source", True, False, {"data.train": {"tokens": 1.0, "bare": 1.0}}),
]
STREAM = {"data.train": "jsonl:x", "data.tokenizer": "byte"}
VALIDATED = {"data.validation": 0.1, "validation.interval": 5}
RAMPED = {"train.rampup_batch_size": [4, 4, 9], "train.global_batch_size": 8, "train.micro_batch_size": 4}
_REAL = ("router_aux_loss_coef", "router_z_loss_coef", "expert_capacity_factor")
ROWS = [
    *(
        Row(f"{name} needs experts", {f"model.{name}": value}, EXPERTS, ("has no effect",))
        for name, value in (
            *(("moe_intermediate_size", 8), ("shared_expert_intermediate_size", 8), ("moe_latent_size", 8)),
        )
    ),
    *(Row(f"{name} needs experts", {f"model.{name}": 0.1}, EXPERTS) for name in _REAL),
    Row("router_scores needs experts", {"model.router_scores": "sigmoid"}, EXPERTS),
    Row("routed_scaling_factor needs experts", {"model.routed_scaling_factor": 2.5}, EXPERTS),
    Row("mixture_out_multiplier needs experts", {"model.mixture_out_multiplier": 0.5}, EXPERTS),
    Row(
        "norm_topk_min of renormalized weights",
        EXPERTS | {"model.norm_topk_min": 0.5, "model.norm_topk_prob": False},
        {"model.norm_topk_prob": True},
        ("has no effect: model.num_experts = 4, model.norm_topk_prob = false",),
    ),
    Row("n_group needs experts", {"model.n_group": 2}, EXPERTS),
    Row("model.n_group in range", GROUPS | {"model.n_group": 0}, {"model.n_group": 1}),
    Row("groups divide the experts", GROUPS | {"model.n_group": 3}, {"model.n_group": 2}, ("Nearest: 2 or 4.",)),
    Row(
        "a group has two experts",
        GROUPS | {"model.n_group": 4, "model.router_scores": "sigmoid"},
        {"model.n_group": 2},
        ("two best experts", "Legal values: 1, 2."),
    ),
    Row(
        "group_score needs groups",
        EXPERTS | {"model.group_score": "largest"},
        {"model.group_score": "auto"},
        ("model.n_group = null",),
    ),
    Row("topk_group needs groups", GROUPS | {"model.topk_group": 2}, {"model.n_group": 2}, ("model.n_group = null",)),
    Row(
        "groups have a token's experts",
        EXPERTS | {"model.n_group": 4, "model.num_experts_per_tok": 2},
        {"model.topk_group": 2},
        ("model.topk_group = 1 of model.n_group = 4",),
    ),
    *(
        Row(f"{name} needs latents", {f"model.{name}": 8}, LATENTS, ("model.kv_lora_rank = null",))
        for name in ("q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    ),
    *(Row(rule, LATENTS | {option: bad}, {option: good}) for rule, (option, bad, good) in LATENT_ROWS.items()),
    *(
        Row(f"{name} needs an indexer", {f"model.{name}": value}, INDEXED, ("model.index_topk = null",))
        for name, value in (
            *(("index_n_heads", 8), ("index_head_dim", 64), ("index_loss_coef", 0.1)),
            ("indexer_types", SHARED["model.indexer_types"]),
        )
    ),
    Row("an indexer needs kv_lora_rank", {"model.index_topk": 4}, INDEXED, ("requires model.kv_lora_rank",)),
    *(Row(rule, INDEXED | {option: bad}, {option: good}) for rule, (option, bad, good) in INDEXED_ROWS.items()),
    Row(
        "model.index_head_dim in range",
        INDEXED | {"model.qk_rope_head_dim": 2, "model.index_head_dim": 0},
        {"model.index_head_dim": 2},
    ),
    Row(
        "indexed_attention blocks and index_topk",
        LATENTS | {"model.layer_blocks": ["indexed_attention+feed_forward"] * 4},
        INDEXED,
        ("model.index_topk = null", "name latent_attention"),
    ),
    Row(
        "stages begin where an indexer selects",
        INDEXED | SHARED | {"parallel.pp": 2, "parallel.partition": [1, 3]},
        {"parallel.partition": [2, 2]},
        ("begins a stage at layer 1", "Begin stages at layers 0, 2, 3"),
    ),
    Row(
        "enough layers where an indexer selects",
        INDEXED | SHARED | {"parallel.pp": 4},
        {"parallel.pp": 2},
        ("makes 4 stages, but only 3 layers may begin one", "Nearest: 3."),
    ),
    Row(
        "adapters leave indexers as they are",
        INDEXED | {"model.index_loss_coef": 0.1, "lora.rank": 4},
        {"model.index_loss_coef": 0.0},
        ("indexers are frozen",),
    ),
    Row(
        "a warm-up trains indexers",
        INDEXED | {"train.indexer": "warmup"},
        {"model.index_loss_coef": 0.1},
        ("model.index_loss_coef is not set",),
    ),
    Row(
        "blocks support context parallelism",
        INDEXED | {"parallel.cp": 2, "parallel.context": "ring"},
        {"parallel.context": "gather"},
        ("indexed_attention", "Legal values: ulysses, gather, auto."),
    ),
    Row(
        "model.qk_rope_head_dim in range",
        LATENTS | {"model.qk_rope_head_dim": 0, "model.position": "none"},
        {"model.qk_rope_head_dim": 1},
    ),
    Row(
        "lora.targets are of this attention", {"lora.rank": 4, "lora.targets": ["q", "kv_b"]}, LATENTS, ("names kv_b",)
    ),
    Row(
        "a token's experts exist",
        EXPERTS | {"model.num_experts_per_tok": 5},
        {"model.num_experts_per_tok": 4},
        ("Nearest: 4.",),
    ),
    Row("mlp_only_layers exist", EXPERTS | {"model.mlp_only_layers": [4]}, {"model.mlp_only_layers": [3]}),
    Row(
        "a mixture is left",
        EXPERTS | {"model.mlp_only_layers": [0, 1, 2, 3]},
        {"model.mlp_only_layers": [0]},
        ("all layers are dense",),
    ),
    Row("router_logit_bias needs experts", {"model.router_logit_bias": True}, EXPERTS),
    Row(
        "clamped_swiglu is gated",
        {"model.hidden_act": "clamped_swiglu", "model.gated_mlp": False},
        {"model.gated_mlp": True},
    ),
    Row("ep splits experts", {"parallel.ep": 2, "parallel.dp": 2}, EXPERTS, ("Legal values: 1.",)),
    Row(
        "ep divides the experts",
        EXPERTS | {"parallel.ep": 3, "parallel.dp": 3, "train.global_batch_size": 24},
        {"parallel.ep": 1},
        ("Nearest: 1.",),
    ),
    Row(
        "ep divides a stage",
        EXPERTS | {"parallel.ep": 4, "parallel.dp": 2},
        {"parallel.ep": 2},
        ("the 2 ranks of a stage", "Nearest: 2."),
    ),
    Row(
        "experts are sharded over whole groups",
        EXPERTS | {"parallel.ep": 4, "parallel.dp": 4, "parallel.dp_shard": 2},
        {"parallel.dp_shard": 4},
        ("dp_shard * cp * tp = 2", "Nearest: 2."),
    ),
    Row("experts need a split sequence", EXPERTS | {"parallel.tp": 2}, {"parallel.sequence_parallel": True}),
    Row(
        "tp divides the shared expert",
        EXPERTS | {"parallel.tp": 2, "parallel.sequence_parallel": True, "model.shared_expert_intermediate_size": 7},
        {"model.shared_expert_intermediate_size": 8},
    ),
    Row(
        "balanced parts of gather or ring",
        {"parallel.context_parts": "balanced", "parallel.cp": 2},
        {"parallel.context": "ring"},
        ("has no effect: with parallel.context = ulysses",),
    ),
    Row(
        "PowerSGD reduces over all of dp",
        EXPERTS
        | {
            "parallel.powersgd_rank": 4,
            "parallel.dp": 2,
            "parallel.dp_shard": 1,
            "parallel.tp": 2,
            "parallel.sequence_parallel": True,
        },
        {"parallel.dp_shard": 2},
        ("not supported with parallel.dp_shard = 1",),
    ),
    *(Row(f"{option} in range", {option: bad}, {option: good}) for option, (bad, good) in BOUNDS.items()),
    Row("run.name is a directory name", {"run.name": "a/b"}, {"run.name": "a-b"}, ("run.dir",)),
    Row(
        "preset or from_hf",
        {"model.preset": "tiny", "model.from_hf": "hf"},
        {"model.from_hf": None},
        ("model.preset = tiny",),
    ),
    Row("lora has a rank", {"lora.targets": ["q"]}, {"lora.rank": 4}, ("trains the model itself",)),
    Row("lora has a rank", {"lora.dropout": 0.1}, {"lora.rank": 4}),
    Row("lora has a rank", {"lora.base": "nf4"}, {"lora.rank": 4}),
    Row(
        "adapters that start at what quantization has lost",
        {"lora.rank": 4, "lora.start": "loftq"},
        {"lora.base": "nf4"},
    ),
    Row(
        "adapters that start at what quantization has lost",
        {"lora.rank": 4, "lora.start": "loftq", "lora.base": "nf4", "lora.dora": True},
        {"lora.dora": False},
    ),
    Row("scales that are quantized", {"lora.rank": 4, "lora.double_quant": True}, {"lora.base": "nf4"}),
    Row(
        "a quantized base and fp8",
        {"lora.rank": 4, "lora.base": "nf4", "train.fp8": "block", "train.precision": "bf16"},
        {"lora.base": "none"},
    ),
    Row(
        "lora.targets are there",
        {"lora.rank": 4, "lora.targets": ["gate"], "model.gated_mlp": False},
        {"lora.targets": None},
        ("model.gated_mlp = false", "leave lora.targets out"),
    ),
    Row("lora has a rank", {"lora.dora": True}, {"lora.rank": 4}),
    Row(
        "adapters of experts need experts",
        {"lora.rank": 4, "lora.targets": ["q", "experts.in"]},
        EXPERTS,
        ("experts.in, but",),
    ),
    Row(
        "adapters are of some layer",
        EXPERTS | {"lora.rank": 4, "lora.targets": ["up", "down"]},
        {"model.mlp_only_layers": [1]},
        ("nothing would be trained", "experts.in and experts.down"),
    ),
    Row(
        "adapters are of some layer", EXPERTS | {"lora.rank": 4, "lora.targets": ["up"]}, {"lora.targets": ["up", "q"]}
    ),
    *(
        Row(
            f"lora.{option} and experts",
            EXPERTS | {"lora.rank": 4, "lora.targets": ["experts.down"], f"lora.{option}": on},
            {"lora.targets": None},
            ("as in PEFT",),
        )
        for option, on in (("dropout", 0.1), ("dora", True))
    ),
    *(
        Row(
            f"lora.{option} are known",
            {"lora.rank": 4, f"lora.{option}": value},
            {f"lora.{option}": None},
            ("names wq. Legal names: ",),
        )
        for option, value in (
            ("targets", ["q", "wq"]),
            ("ranks", {"wq": 1}),
            ("alphas", {"wq": 1.0}),
            ("modules_to_save", ["wq"]),
        )
    ),
    Row(
        "lora.ranks are of targets",
        {"lora.rank": 4, "lora.targets": ["q"], "lora.ranks": {"q": 2, "down": 1}},
        {"lora.targets": ["q", "down"]},
        ('lora.ranks = {"q": 2, "down": 1} names down, which has no adapter', "add it to lora.targets"),
    ),
    Row(
        "lora.alphas are of targets",
        {"lora.rank": 4, "lora.alphas": {"gate": 1.0}, "model.gated_mlp": False},
        {"lora.alphas": {"up": 1.0}},
    ),
    Row(
        "a tied head is saved with the embedding",
        {"lora.rank": 4, "lora.modules_to_save": ["head"], "model.tie_word_embeddings": True},
        {"lora.modules_to_save": ["embedding", "head"]},
        ("the head is the embedding",),
    ),
    Row(
        "lora.init_from is an adapter",
        {"lora.rank": 4, "lora.init_from": "nowhere", "model.init_from": "."},
        {"lora.init_from": "."},
        ("adapter_config.json) for model.init_from = .",),
    ),
    Row(
        "lora.init_from is an adapter",
        {"lora.rank": 4, "lora.init_from": "."},
        {"model.init_from": "."},
        ("model.init_from = null",),
    ),
    Row(
        "init_from exists",
        {"model.init_from": "nowhere"},
        {"model.init_from": "."},
        ("neither a checkpoint (manifest",),
    ),
    Row(
        "init_from exists",
        {"model.init_from": "megatron:theirs"},
        {"model.init_from": "."},
        ("run megalite convert import megatron:theirs CHECKPOINT_DIR",),
    ),
    Row(
        "checkpoint exists",
        {"checkpoint.load": "torchtitan:theirs"},
        {"checkpoint.load": "auto"},
        ("run megalite convert import torchtitan:theirs CHECKPOINT_DIR",),
    ),
    Row(
        "init_from hf exists",
        {"model.init_from": "hf:nowhere"},
        {"model.init_from": None},
        ("config.json is missing", "after hf:"),
    ),
    Row(
        "hidden size over heads",
        {"model.num_attention_heads": 6, "model.hidden_size": 64},
        {"model.head_dim": 10},
        ("4 or 8",),
    ),
    Row(
        "heads over key-value heads",
        {"model.num_attention_heads": 8, "model.num_key_value_heads": 3},
        {"model.num_key_value_heads": 2},
        ("Legal values: 1, 2, 4, 8. Nearest: 2 or 4.",),
    ),
    Row(
        "even head width for rope",
        {"model.hidden_size": 12},
        {"model.position": "learned"},
        ("model.head_dim = 3 ", "multiples of 2. Nearest: 2 or 4."),
    ),
    Row(
        "partial_rotary_factor rotates pairs",
        {"model.partial_rotary_factor": 0.08},
        {"model.partial_rotary_factor": 0.25},
        ("in pairs",),
    ),
    Row(
        "partial_rotary_factor needs rope",
        {"model.partial_rotary_factor": 0.5, "model.position": "none"},
        {"model.position": "rope"},
    ),
    Row("rope_local_theta needs rope and a window", {"model.rope_local_theta": 1e4}, {"model.sliding_window": 8}),
    Row(
        "parallel_block with norms before",
        {"model.parallel_block": "two_norms", "model.norm_placement": "both"},
        {"model.norm_placement": "pre"},
        ("model.norm_placement = both",),
    ),
    Row("norm_bias of a LayerNorm", {"model.norm_bias": False}, {"model.norm": "layer"}, ("model.norm = rms",)),
    Row("mup's keys", {"model.mup": {"base_width": 64, "width": 3}}, {"model.mup": {"base_width": 64}}, ("width",)),
    Row("mup's values", {"model.mup": {"base_depth": 2}}, {"model.mup": {"base_width": 64}}, ("base_width",)),
    Row(
        "mup's base has whole heads",
        {"model.mup": {"base_width": 20}, "model.hidden_size": 64, "model.num_attention_heads": 4},
        {"model.mup": {"base_width": 32}},
        ("num_attention_heads = 4", "16, 32, 48, 64"),
    ),
    Row(
        "mup keeps the size of a head",
        {
            "model.mup": {"base_width": 32, "num_attention_heads": 4},
            "model.hidden_size": 64,
            "model.num_attention_heads": 4,
        },
        {"model.head_dim": 16},
        ("8 channels",),
    ),
    Row(
        "mup starts from random weights",
        {"model.mup": {"base_width": 64}, "model.init_from": "hf:weights"},
        {"model.mup": None},
    ),
    Row(
        "mup and adapters of PEFT",
        {"model.mup": {"base_width": 64}, "lora.rank": 4, "lora.init_from": ".", "model.init_from": "."},
        {"model.mup": None},
    ),
    Row(
        "mup scales the logits of words",
        REWARD | {"model.mup": {"base_width": 64}},
        {"model.mup": None},
    ),
    Row(
        "mup sets learning rates",
        {"model.mup": {"base_width": 64}, "optimizer.lr_scaling": "sqrt", "optimizer.base_batch_size": 4},
        {"optimizer.lr_scaling": "none"},
    ),
    Row(
        "rope_scaling needs rope", {"model.rope_scaling": LLAMA3, "model.position": "none"}, {"model.position": "rope"}
    ),
    Row(
        "rope_scaling type",
        {"model.rope_scaling": {"rope_type": "ntk"}},
        {"model.rope_scaling": LLAMA3},
        ("default, linear, llama3",),
    ),
    Row(
        "rope_scaling values",
        {"model.rope_scaling": {"rope_type": "linear"}},
        {"model.rope_scaling": {"rope_type": "linear", "factor": 2}},
        ("{rope_type: linear, factor: N}",),
    ),
    Row(
        "rope_scaling values",
        {"model.rope_scaling": LLAMA3 | {"beta": 1}},
        {"model.rope_scaling": {"rope_type": "default"}},
    ),
    Row(
        "rope_scaling values",
        {"model.rope_scaling": LLAMA3 | {"factor": 0}},
        {"model.rope_scaling": LLAMA3},
        ("not a positive number",),
    ),
    Row(
        "rope_scaling values",
        {"model.rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}},
        {"model.rope_scaling": LLAMA3},
        ("interpolates",),
    ),
    Row(
        "rope_scaling values",
        {"model.head_dim": 4, "model.rope_scaling": LONGROPE | {"long_factor": [1.0]}},
        {"model.rope_scaling": LONGROPE},
        ("requires 2 numbers, one for each pair",),
    ),
    Row(
        "an entry of layer_blocks for each layer",
        {"model.layer_blocks": ["attention+feed_forward"]},
        {"model.num_hidden_layers": 1},
        ("1 is the number of entries", "model.num_hidden_layers = 4"),
    ),
    Row(
        "layer_blocks are known",
        {"model.layer_blocks": [*["attention+feed_forward"] * 3, "atention+feed_forward"]},
        {"model.layer_blocks": ["attention+feed_forward"] * 4},
        ("atention", "latent_attention", "mixture"),
    ),
    Row(
        "a slot for each block of a layer",
        {"model.layer_blocks": [*["attention"] * 3, "attention+attention+feed_forward"]},
        {"model.layer_blocks": ["attention+feed_forward"] * 4},
        ("attention+attention+feed_forward",),
    ),
    Row(
        "one way to place blocks beside each other",
        {"model.layer_blocks": ["attention|feed_forward"] * 4, "model.parallel_block": "two_norms"},
        {"model.parallel_block": "none"},
        ("attention|feed_forward", "model.parallel_block = two_norms"),
    ),
    Row(
        "blocks beside each other with norms before",
        {"model.layer_blocks": ["attention|feed_forward"] * 4, "model.norm_placement": "post"},
        {"model.layer_blocks": ["attention+feed_forward"] * 4},
        ("attention|feed_forward", "model.norm_placement = post"),
    ),
    Row(
        "blocks support context parallelism",
        {"model.layer_blocks": ["whole_rows+feed_forward"] * 4, "parallel.cp": 2},
        {"parallel.cp": 1},
        ("ulysses", "whole_rows", "Set parallel.cp to 1"),
    ),
    Row(
        "mixture blocks and num_experts",
        {"model.layer_blocks": ["attention+mixture"] * 4, "model.num_experts": None},
        {"model.num_experts": 4},
        ("model.num_experts = null",),
    ),
    Row(
        "latent_attention blocks and kv_lora_rank",
        {"model.layer_blocks": ["latent_attention+feed_forward"] * 4},
        {"model.kv_lora_rank": 16},
        ("model.kv_lora_rank = null",),
    ),
    Row(
        "attention blocks and kv_lora_rank",
        {"model.layer_blocks": ["attention+feed_forward"] * 4, "model.kv_lora_rank": 16},
        {"model.kv_lora_rank": None},
        ("model.kv_lora_rank = 16", "Name latent_attention"),
    ),
    Row(
        "query_scale_beta and its positions",
        {"model.query_scale_beta": 0.1},
        {"model.query_scale_positions": 16},
        ("and model.query_scale_positions = null",),
    ),
    Row(
        "scaled queries rotate",
        {"model.query_scale_beta": 0.1, "model.query_scale_positions": 16, "model.no_rope_layers": [0]},
        {"model.no_rope_layers": None},
        ("model.no_rope_layers = [0]",),
    ),
    Row(
        "entries of local_attention",
        WINDOWED | {"model.local_attention": {"heads": 2}},
        {"model.local_attention": {"head_dim": 8}},
        ("has an entry heads", "num_attention_heads"),
    ),
    Row(
        "local_attention needs a window",
        {"model.local_attention": {"head_dim": 8}},
        WINDOWED,
        ("model.sliding_window = null",),
    ),
    Row(
        "one entry of layer_heads for each layer",
        {"model.layer_heads": [4, 4, 8]},
        {"model.layer_heads": [4, 4, 8, 4]},
        ("model.num_hidden_layers = 4", "4 numbers"),
    ),
    Row(
        "heads of layers are given once",
        WINDOWED | {"model.layer_heads": [4, 4, 8, 4], "model.local_attention": {"num_attention_heads": 8}},
        {"model.layer_heads": None},
        ("model.local_attention",),
    ),
    Row(
        "heads of each layer over key-value heads",
        {"model.layer_heads": [4, 4, 6, 4], "model.num_key_value_heads": 4},
        {"model.num_key_value_heads": 2},
        ("layer 2 6 query heads for 4 key-value heads",),
    ),
    Row(
        "heads of a local layer over key-value heads",
        WINDOWED | {"model.local_attention": {"num_key_value_heads": 3}},
        {"model.local_attention": {"num_key_value_heads": 2}},
        ("4 query heads for 3 key-value heads", "1, 2, 4"),
    ),
    Row(
        "heads of local layers rotate in pairs",
        WINDOWED | {"model.local_attention": {"head_dim": 9}},
        {"model.local_attention": {"head_dim": 10}},
        ("multiple of 2",),
    ),
    Row(
        "another rotation has a base of its own",
        WINDOWED
        | {"model.local_attention": {"head_dim": 8}, "model.rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"model.rope_local_theta": 100.0},
        ("model.rope_local_theta",),
    ),
    Row(
        "sink_layers needs sinks",
        {"model.sink_layers": [1]},
        {"model.attention_sinks": True},
        ("model.attention_sinks = false",),
    ),
    Row(
        "sink_layers exist",
        {"model.sink_layers": [4], "model.attention_sinks": True},
        {"model.sink_layers": [3]},
        ("distinct layers",),
    ),
    *(
        Row(f"{name} needs a gate", {f"model.{name}": value}, {"model.attention_gate": True}, ("has no effect",))
        for name, value in (("attention_gate_act", "softplus"), ("attention_gate_width", "head"))
    ),
    Row(
        "gates have no sinks beside them",
        {"model.attention_gate": True, "model.attention_sinks": True},
        {"model.attention_sinks": False},
        ("model.attention_sinks = true",),
    ),
    Row(
        "xielu is plain",
        {"model.hidden_act": "xielu", "model.gated_mlp": True},
        {"model.gated_mlp": False},
        ("model.gated_mlp = true",),
    ),
    Row(
        "norms after the rotation",
        {"model.qk_norm_after_rope": True},
        {"model.qk_norm": "head"},
        ("model.qk_norm = none",),
    ),
    Row(
        "norms of heads without weights",
        {"model.qk_norm_weight": False, "model.qk_norm": "full"},
        {"model.qk_norm": "head"},
        ("model.qk_norm = full",),
    ),
    Row(
        "no bias without a weight",
        {"model.norm_weight": False, "model.norm": "layer"},
        {"model.norm_bias": False},
        ("model.norm_bias = true",),
    ),
    Row(
        "modules of multi-token prediction read the embedding itself",
        {"model.embedding_norm": True, "model.mtp_layers": 1},
        {"model.mtp_layers": 0},
        ("model.mtp_layers = 1",),
    ),
    Row(
        "a factor on the input of attention alone",
        {"model.attention_in_multiplier": 0.5, "model.attention_bias": True},
        {"model.attention_bias": False},
        ("model.attention_bias = true",),
    ),
    Row(
        "a factor on keys without norms",
        {"model.key_multiplier": 0.5, "model.qk_norm": "head"},
        {"model.qk_norm": "none"},
        ("model.qk_norm = head",),
    ),
    Row(
        "two factors of the feed-forward",
        {"model.mlp_multipliers": [0.5]},
        {"model.mlp_multipliers": [0.5, 2.0]},
        ("must be two numbers",),
    ),
    Row("post_norm_layers exist", {"model.post_norm_layers": [4]}, {"model.post_norm_layers": [0, 3]}, ("0 to 3",)),
    Row(
        "post_norm_layers without parallel_block",
        {"model.post_norm_layers": [1], "model.parallel_block": "two_norms"},
        {"model.parallel_block": "none"},
        ("model.parallel_block = two_norms",),
    ),
    Row("no_rope_layers exist", {"model.no_rope_layers": [3, 4]}, {"model.no_rope_layers": [0, 3]}, ("0 to 3",)),
    Row(
        "no_rope_layers needs rope",
        {"model.no_rope_layers": [1], "model.position": "learned"},
        {"model.no_rope_layers": None},
    ),
    Row(
        "sliding_window_layers exist",
        {"model.sliding_window": 8, "model.sliding_window_layers": [1, 1]},
        {"model.sliding_window_layers": [1]},
        ("each once",),
    ),
    Row("sliding_window_layers needs a window", {"model.sliding_window_layers": [1]}, {"model.sliding_window": 8}),
    *(
        Row(
            f"fields of {kind} blocks need one",
            {option: 2},
            MIXERS[kind],
            (f"has no {kind} block, and {option} is set",),
        )
        for kind, option in (
            ("delta", "model.linear_conv_kernel_dim"),
            ("mamba", "model.mamba_conv_kernel"),
            ("convolution", "model.conv_kernel"),
        )
    ),
    Row(
        "attention beside a block with a state",
        {"model.layer_blocks": ["convolution+attention+feed_forward"] * 4},
        {"model.layer_blocks": ["convolution|attention+feed_forward"] * 4},
        ("which have the same norm",),
    ),
    Row(
        "value heads over key heads",
        MIXERS["delta"] | {"model.linear_num_key_heads": 3},
        {"model.linear_num_key_heads": 4},
        ("every key head must be shared by the same number of value heads",),
    ),
    Row(
        "a decay by channel has a key head for each value head",
        MIXERS["delta"] | {"model.delta_decay": "channel"},
        {"model.linear_num_key_heads": 32},
        ("model.delta_decay = channel",),
    ),
    Row(
        "mamba heads over groups",
        MIXERS["mamba"] | {"model.mamba_n_groups": 3},
        {"model.mamba_n_groups": 4},
        ("does not divide model.mamba_num_heads = 128",),
    ),
    Row(
        "limits of mamba's steps",
        MIXERS["mamba"] | {"model.mamba_time_step_limit": [2.0, 1.0]},
        {"model.mamba_time_step_limit": [1.0, 2.0]},
        ("the smallest and the largest step",),
    ),
    Row(
        "mamba's five multipliers",
        MIXERS["mamba"] | {"model.mamba_multipliers": [1.0]},
        {"model.mamba_multipliers": [1.0] * 5},
        ("for z, x, B, C and dt",),
    ),
    Row(
        "mamba's biases have no factor before them",
        MIXERS["mamba"] | {"model.mamba_proj_bias": True, "model.mamba_in_multiplier": 0.5},
        {"model.mamba_in_multiplier": 1.0},
        ("model.mamba_in_multiplier = 0.5",),
    ),
    *(
        Row(
            f"tp {verb} {of}",
            MIXERS[kind] | options | {"parallel.tp": 4, "model.num_attention_heads": 8, "model.intermediate_size": 64},
            {"parallel.tp": 2},
            (says,),
        )
        for verb, of, kind, options, says in (
            (
                *("divides", "value heads of delta blocks", "delta"),
                {"model.linear_num_value_heads": 6, "model.linear_num_key_heads": 2},
                "each rank must hold whole value heads",
            ),
            (
                *("fits", "key heads of delta blocks", "delta"),
                {"model.linear_num_value_heads": 12, "model.linear_num_key_heads": 6},
                "split or replicated evenly",
            ),
            (
                *("divides", "heads of mamba blocks", "mamba"),
                {"model.mamba_num_heads": 6, "model.mamba_n_groups": 2},
                "each rank must hold whole heads",
            ),
            (
                *("fits", "groups of mamba blocks", "mamba"),
                {"model.mamba_num_heads": 12, "model.mamba_n_groups": 6},
                "split or replicated evenly",
            ),
            (
                *("divides", "channels of convolution blocks", "convolution"),
                {"model.hidden_size": 90, "model.head_dim": 16},
                "each rank must hold whole channels",
            ),
        )
    ),
    Row(
        "tp divides heads",
        {"parallel.tp": 6, "model.num_attention_heads": 32},
        {"parallel.tp": 8, "parallel.dp": 1},
        (
            "parallel.tp = 6 does not divide model.num_attention_heads = 32",
            "Legal values: 1, 2, 4, 8, 16. Nearest: 4 or 8.",
        ),
    ),
    Row(
        "tp divides heads",
        {"parallel.tp": 4, "model.layer_heads": [4, 4, 6, 4], "model.num_key_value_heads": 2},
        {"parallel.tp": 2, "parallel.dp": 4},
        ("does not divide the 6 query heads of layer 2", "Legal values: 1, 2."),
    ),
    Row(
        "tp fits key-value heads",
        {"parallel.tp": 4, "model.num_attention_heads": 12, "model.num_key_value_heads": 6, "model.hidden_size": 48},
        {"parallel.tp": 2},
        ("Legal values: 1, 2. Nearest: 2.",),
    ),
    Row(
        "tp divides the feed-forward",
        {"parallel.tp": 4, "model.intermediate_size": 90},
        {"parallel.tp": 2},
        ("= 90", "Nearest: 2."),
    ),
    Row(
        "sequence_parallel divides the sequence",
        {"parallel.sequence_parallel": True, "parallel.tp": 4, "data.sequence_length": 30},
        {"data.sequence_length": 32},
        ("Legal values: multiples of 4. Nearest: 28 or 32.",),
    ),
    Row(
        "ulysses divides heads",
        {"parallel.cp": 3, "model.num_attention_heads": 8, "model.num_key_value_heads": 2},
        {"parallel.context": "ring"},
        (
            "heads / tp = 8 and key-value heads / tp = 2",
            "Nearest: 2 or 4. Or set parallel.context to gather, ring or auto.",
        ),
        world=3,
    ),
    *(
        Row(
            f"ulysses divides {of}",
            MIXERS[kind] | sizes | {"parallel.cp": 8, "model.num_attention_heads": 8},
            {"parallel.context": "auto"},
            (f"each rank computes whole {of}", "Nearest: 4. Or set parallel.context to gather, ring or auto."),
            world=8,
        )
        for kind, of, sizes in (
            (
                *("delta", "value heads of delta blocks"),
                {"model.linear_num_value_heads": 4, "model.linear_num_key_heads": 2},
            ),
            ("mamba", "heads of mamba blocks", {"model.mamba_num_heads": 4, "model.mamba_n_groups": 1}),
        )
    ),
    Row(
        "inner ranks belong to a ring",
        {"parallel.context_inner": 2, "parallel.cp": 4, "model.num_attention_heads": 8},
        {"parallel.context": "ring"},
        ("is incompatible with parallel.cp = 4 and parallel.context = ulysses", "Set parallel.context to ring"),
        world=4,
    ),
    Row(
        "inner ranks divide the ring",
        {"parallel.context_inner": 4, "parallel.cp": 4, "parallel.context": "ring"},
        {"parallel.context_inner": 2},
        (
            "does not divide parallel.cp = 4 into several groups",
            "one group alone is parallel.context = ulysses",
            "Nearest: 2.",
        ),
        world=4,
    ),
    Row(
        "inner ranks divide heads",
        {"parallel.context_inner": 3, "parallel.cp": 6, "parallel.context": "ring", "model.num_attention_heads": 8},
        {"parallel.context_inner": 2},
        ("is incompatible with heads / tp = 8", "computes whole heads"),
        world=6,
    ),
    Row(
        "virtual stages belong to the schedule",
        {"parallel.virtual_stages": 2},
        {"parallel.schedule": "interleaved"},
        ("parallel.schedule = 1f1b, which requires 1",),
    ),
    Row(
        "a layer for each stage", {"parallel.pp": 5}, {"parallel.pp": 4}, ("model.num_hidden_layers = 4", "Nearest: 4.")
    ),
    Row(
        "four schedule costs",
        {"parallel.schedule_costs": [1.0, 1.0, 1.0]},
        {"parallel.schedule_costs": [1.0, 2.0, 0.0, 0.1]},
        ("[1, 1, 1, 0]",),
    ),
    Row(
        "partition has a number for each stage",
        {"parallel.pp": 2, "parallel.partition": [4]},
        {"parallel.partition": [3, 1]},
        ("[2, 2]",),
    ),
    Row(
        "partition leaves no stage empty",
        {"parallel.pp": 2, "parallel.partition": [4, 0]},
        {"parallel.partition": [1, 3]},
        ("[2, 2]",),
    ),
    Row(
        "partition holds every layer",
        {"parallel.pp": 3, "parallel.partition": [1, 1, 1]},
        {"parallel.partition": [1, 2, 1]},
        ("[2, 1, 1]",),
    ),
    Row(
        "a cost for each part",
        {"parallel.layer_costs": [1.0, 1.0, 1.0, 1.0, 1.0]},
        {"parallel.layer_costs": [0.0, 1.0, 1.0, 1.0, 1.0, 2.0]},
        ("model.num_hidden_layers = 4", "Expected 6 numbers"),
    ),
    Row(
        "partition or layer costs",
        {"parallel.layer_costs": [0.0, 1.0, 1.0, 1.0, 1.0, 2.0], "parallel.partition": [4]},
        {"parallel.partition": None},
        ("parallel.partition = [4] is set",),
    ),
    Row(
        "the mesh fills the world",
        {"parallel.tp": 2, "parallel.dp": 3},
        {"parallel.dp": 4},
        ("= 3 ", "Legal values: 4."),
        world=8,
    ),
    Row(
        "pp fits the world",
        {"parallel.pp": 3, "parallel.dp": None},
        {"parallel.pp": 4, "parallel.dp": 2},
        ("= 1 * 3 * 1 = 3, which does not divide the run's 8 processes", "Start 6 or 9 processes", "1, 2, 4, 8"),
        world=8,
    ),
    Row(
        "tp fits the world",
        {"parallel.tp": 4, "parallel.dp": None},
        {"parallel.tp": 2, "parallel.dp": 1},
        ("parallel.tp = 4 makes", "= 4, which exceeds the run's 2 processes", "--nproc 4"),
        world=2,
    ),
    Row(
        "cp fits the world",
        {"parallel.cp": 4, "parallel.dp": None},
        {"parallel.cp": 2, "parallel.dp": 1},
        ("parallel.cp = 4 makes", "= 4, which exceeds the run's 2 processes", "--nproc 4"),
        world=2,
    ),
    Row(
        "dp_shard divides dp",
        {"parallel.dp": 4, "parallel.dp_shard": 3},
        {"parallel.dp_shard": 2},
        ("Nearest: 2 or 4.",),
        world=4,
    ),
    Row(
        "dp_shard shares something",
        {"parallel.dp": 2, "parallel.dp_shard": 2, "parallel.zero": 0},
        {"parallel.zero": 3},
        ("= 0",),
        world=2,
    ),
    Row("zero stage", {"parallel.zero": 4}, {"parallel.zero": 0}, ("not a ZeRO stage",)),
    Row(
        "offloaded parameters are sharded",
        {"parallel.offload_parameters": True, "parallel.zero": 2},
        {"parallel.zero": 3},
        ("offload_parameters = true", "parallel.zero = 2"),
    ),
    Row(
        "offload_dir is for disk",
        {"parallel.offload_dir": "/scratch"},
        {"parallel.offload": "disk"},
        ("= /scratch has no effect", "none"),
    ),
    Row(
        "bf16 reduction of wider gradients",
        {"parallel.reduce_dtype": "bf16", "train.grad_dtype": "bf16", "train.precision": "bf16"},
        {"train.grad_dtype": "fp32"},
        ("are already sent as bf16",),
    ),
    Row(
        "no proof in bf16",
        {"parallel.reduce_dtype": "bf16", "train.precision": "fp64"},
        {"train.precision": "fp16"},
        ("fp64",),
    ),
    Row(
        "an elastic run keeps its errors",
        {"parallel.powersgd_rank": 4, "parallel.min_ranks": 1},
        {"parallel.min_ranks": None},
        ("parallel.powersgd_rank = 4",),
    ),
    Row(
        "PowerSGD reduces whole gradients",
        {"parallel.powersgd_rank": 4, "parallel.zero": 2},
        {"parallel.zero": 1},
        ("shards them",),
    ),
    Row(
        "PowerSGD reduces over all of dp",
        {"parallel.powersgd_rank": 4, "parallel.dp": 4, "parallel.dp_shard": 2},
        {"parallel.dp_shard": 4},
        ("not supported with parallel.dp_shard = 2",),
    ),
    Row(
        "PowerSGD keeps fp32 errors",
        {"parallel.powersgd_rank": 4, "train.grad_dtype": "bf16", "train.precision": "bf16"},
        {"train.grad_dtype": "fp32"},
        ("would lose",),
    ),
    Row(
        "one compression",
        {"parallel.powersgd_rank": 4, "parallel.reduce_dtype": "bf16"},
        {"parallel.reduce_dtype": "fp32"},
        ("Remove",),
    ),
    Row(
        "an objective and its data",
        {"train.objective": "simpo"},
        {"data.train": "pairs"},
        ("tokens, which has no preferences", "megalite prepare --preference"),
    ),
    Row(
        "an objective and its data",
        {"data.train": "pairs"},
        {"train.objective": "orpo"},
        ("train.objective = cross_entropy", "pairs, which has pairs of completions", "simpo or another"),
    ),
    Row(
        "a change of scores",
        DPO | {"preference.allow_reference_change": True},
        {"preference.allow_reference_change": False},
        ("preference.reference = null",),
    ),
    Row(
        "scores have no mismatched completions",
        KTO | {"preference.reference": "scores:x"},
        {"preference.reference": None},
        ("train.objective = kto",),
    ),
    Row("an objective and its head", REWARD | {"model.output_head": "vocabulary"}, {"model.output_head": "reward"}),
    Row(
        "an objective and its head",
        {"model.output_head": "reward", "data.train": "pairs", "train.objective": "simpo"},
        {"train.objective": "reward"},
        ("which reads log-probabilities",),
    ),
    Row(
        "rewards have no likelihoods",
        REWARD | {"train.objective": "own.py:Own", "preference.nll_weight": 0.1},
        {"preference.nll_weight": None},
        ("train.objective = own.py:Own",),
    ),
    Row(
        "a reward model has no head of tokens to save",
        REWARD | {"lora.rank": 4, "lora.modules_to_save": ["head", "norms"]},
        {"lora.modules_to_save": ["norms"]},
        ("always trained",),
    ),
    Row(
        "other completions are in other rows",
        KTO | {"data.packing": True},
        {"data.packing": False},
        ("train.objective = kto",),
    ),
    Row("other completions are in the batch", KTO | {"train.global_batch_size": 1}, {"train.global_batch_size": 4}),
    Row(
        "a start in fp8",
        DPO | {"lora.rank": 0, "train.fp8": "block"},
        {"preference.reference": "hf:."},
        ("train.objective = dpo", "a copy of their start"),
    ),
    *(
        Row(f"{option} and objectives over sequences", SIMPO | others | {option: value}, {option: none}, ("simpo",))
        for option, value, none, others in (
            ("model.mtp_layers", 1, 0, {}),
            ("train.label_smoothing", 0.1, 0.0, {}),
            ("train.z_loss", 0.1, 0.0, {}),
            ("logging.loss_by_source", True, False, {"data.train": {"pairs": 1.0, "other pairs": 1.0}}),
        )
    ),
    *(
        Row(f"preference.{name} is read", {f"preference.{name}": value}, fixed, ("train.objective = cross_entropy",))
        for name, value, fixed in (
            ("beta", 0.2, DPO),
            ("reference", "scores:x", DPO),
            ("allow_reference_change", True, DPO | {"preference.reference": "scores:x"}),
            ("loss", "hinge", DPO),
            ("label_smoothing", 0.1, SIMPO),
            ("gamma", 0.1, SIMPO),
            ("nll_weight", 0.1, SIMPO),
            ("center_rewards", 0.1, REWARD),
            ("desirable_weight", 0.5, KTO),
            ("undesirable_weight", 0.5, KTO),
        )
    ),
    Row(
        "smoothing of a logistic loss",
        DPO | {"preference.label_smoothing": 0.1, "preference.loss": "hinge"},
        {"preference.loss": "robust"},
        ("preference.loss = hinge",),
    ),
    Row(
        "stored words have a forward divergence",
        DISTILLATION | {"distillation.teacher": "scores:x", "distillation.divergence": "reverse"},
        {"distillation.divergence": "forward"},
        ("distillation.teacher = scores:x",),
    ),
    *(
        Row(
            f"words are stored for {option}",
            DISTILLATION | {"distillation.teacher": "scores:x", option: ["tokens", "bare"]},
            {option: fixed},
            ("distillation.teacher = scores:x",),
        )
        for option, fixed in (
            ("data.train", {"tokens": 1.0, "bare": 1.0}),
            ("data.validation", {"one": "tokens", "two": "bare"}),
        )
    ),
    Row(
        "labels that may be wrong",
        DPO | {"preference.loss": "exo_pair"},
        {"preference.label_smoothing": 0.001},
        ("preference.loss = exo_pair",),
    ),
    Row(
        "losses of cpo",
        SIMPO | {"train.objective": "cpo", "preference.loss": "apo_zero"},
        {"preference.loss": "hinge"},
        ("train.objective = cpo",),
    ),
    Row("a teacher is given", DISTILLATION | {"distillation.teacher": None}, {"distillation.teacher": "."}),
    Row(
        "the mixture of jsd",
        DISTILLATION | {"distillation.beta": 0.3},
        {"distillation.divergence": "jsd"},
        ("distillation.divergence = forward",),
    ),
    *(
        Row(f"distillation.{name} is read", {f"distillation.{name}": value}, fixed, ("cross_entropy",))
        for name, value, fixed in (
            ("teacher", ".", {"train.objective": "distillation"}),
            ("divergence", "reverse", DISTILLATION),
            ("beta", 0.3, DISTILLATION | {"distillation.divergence": "jsd"}),
            ("temperature", 2.0, DISTILLATION),
            ("cross_entropy_weight", 1.0, DISTILLATION),
        )
    ),
    *(
        Row(f"{option} and distillation", DISTILLATION | {option: value}, {option: none}, ("distillation",))
        for option, value, none in (("model.mtp_layers", 1, 0), ("train.graphs", True, False))
    ),
    *(
        Row(
            f"train.{name} and a divergence alone",
            DISTILLATION | {f"train.{name}": 0.1},
            {"distillation.cross_entropy_weight": 1.0},
            ("part of the cross-entropy",),
        )
        for name in ("label_smoothing", "z_loss")
    ),
    Row("training data is given", {"data.train": None}, {"data.train": "tokens"}, ("megalite prepare",)),
    Row(
        "data.train is one text",
        {"data.train": "{tokens:1}"},
        {"data.train": {"tokens": 1.0}},
        ("a space after each colon",),
    ),
    Row("data.validation is one text", {"data.validation": "[tokens,other]"}, {"data.validation": ["tokens"]}),
    Row(
        "validation data is named",
        {"data.validation": {}},
        {"data.validation": None},
        ("is not set", "or null"),
    ),
    Row("recompute mode", {"train.recompute": "experts"}, EXPERTS, ("names experts, but the model has none",)),
    Row(
        "recompute mode", {"train.recompute": "none,x,none,none"}, {"train.recompute": "none"}, ("has x, which is not",)
    ),
    Row("streams have a tokenizer", {"data.train": "jsonl:x"}, {"data.tokenizer": "byte"}, ("jsonl:x is tokenized",)),
    Row("data.tokenizer is of streams", {"data.tokenizer": "byte"}, {"data.train": "mds:x"}, ("FORMAT:PATH",)),
    Row("data.text_key is of streams", {"data.text_key": "x"}, STREAM, ("no stream",)),
    Row("data.bad_records is of streams", {"data.bad_records": "skip"}, STREAM, ("no stream",)),
    Row("lanes are of streams", {"data.lanes": 2}, STREAM, ("read at random",)),
    Row("the buffer is of shuffled streams", {"data.shuffle_buffer": 3}, {"data.fim_rate": 0.5}, ("no stream",)),
    Row(
        "the buffer is of shuffled streams",
        STREAM | {"data.shuffle_buffer": 3, "data.shuffle": False},
        STREAM | {"data.shuffle": True},
    ),
    Row(
        "a list is of streams or of token files",
        STREAM | {"data.train": ["jsonl:x", "tokens"]},
        {"data.train": ["jsonl:x", "parquet:y"]},
        ("a blend",),
    ),
    Row("a stream has no held-out part", STREAM | {"data.validation": 0.1}, {"data.validation": "tokens"}),
    Row(
        "validation on a stream ends",
        STREAM | {"data.validation": "jsonl:y", "validation.batches": None},
        {"validation.batches": 2},
        ("jsonl:y has no end",),
    ),
    Row("epochs are counted", STREAM | {"train.epochs": 1.0}, {"train.epochs": None}, ("train.tokens",)),
    Row("epochs are counted", {"data.fim_rate": 0.5, "train.epochs": 1.0}, {"train.epochs": None}, ("data.fim_rate",)),
    Row("fill-in-the-middle rewrites text", {"data.fim_rate": 0.5, "data.train": "chat"}, {"data.train": "tokens"}),
    Row("data.fim_spm_rate is of fill-in-the-middle", {"data.fim_spm_rate": 0.1}, {"data.fim_rate": 0.5}),
    Row("data.fim_tokens is of fill-in-the-middle", {"data.fim_tokens": ["a", "b", "c"]}, {"data.fim_rate": 0.5}),
    Row(
        "three tokens of fill-in-the-middle",
        {"data.fim_rate": 0.5, "data.fim_tokens": ["a", "b", "b"]},
        {"data.fim_tokens": ["a", "b", "c"]},
        ("[PREFIX, SUFFIX, MIDDLE]",),
    ),
    Row("chat or text", STREAM | {"data.validation": "chat"}, {"data.validation": "tokens"}),
    Row("packing of conversations", STREAM | {"data.packing": True}, {"data.packing": False}),
    Row("data.train weights are positive", {"data.train": {"tokens": 0.0}}, {"data.train": {"tokens": 0.1}}),
    Row("data.train weights are positive", {"data.train": {"tokens": float("inf")}}, {"data.train": {"tokens": 0.1}}),
    Row(
        "data.train exists",
        {"data.train": ["tokens", "token"]},
        {"data.train": ["tokens"]},
        ("could not find token.bin and token.idx", "Nearest: tokens."),
    ),
    Row(
        "a validation set has a name",
        {"data.validation": {"": "tokens"}},
        {"data.validation": {"a": "tokens"}},
        ("{NAME: PREFIX}",),
    ),
    Row(
        "data.validation weights are positive",
        {"data.validation": {"tokens": -1.0}},
        {"data.validation": {"tokens": 1.0}},
    ),
    Row(
        "data.validation exists",
        {"data.validation": "elsewhere/x"},
        {"data.validation": "tokens"},
        ("--output elsewhere/x",),
    ),
    Row("held-out share", {"data.validation": 1.0}, {"data.validation": 0.05}, ("above 0 and below 1",)),
    Row(
        "one vocabulary",
        {"data.validation": "other"},
        {"data.validation": "tokens"},
        ("tokens has 257", "other has 300"),
    ),
    Row(
        "vocabulary is known",
        {"data.train": "bare", "model.vocab_size": None},
        {"model.vocab_size": 10},
        ("bare.json",),
    ),
    Row(
        "vocabulary holds the data",
        {"model.vocab_size": 256},
        {"model.vocab_size": 257},
        ("257 tokens", "Nearest: 257."),
    ),
    Row(
        "vocabulary holds the data",
        {"model.vocab_size": 256, "model.from_hf": "hf", "model.init_from": "."},
        {"model.vocab_size": 257},
        (
            "257 tokens",
            "added to the model's tokenizer, set model.resize_embeddings = mean",
            "prepare the data again with --tokenizer hf",
        ),
    ),
    Row(
        "rows are added to weights",
        {"model.resize_embeddings": "mean"},
        {"model.init_from": "."},
        ("Set model.init_from",),
    ),
    Row(
        "new rows are trained",
        {
            "model.resize_embeddings": "mean",
            "model.init_from": ".",
            "lora.rank": 2,
            "lora.modules_to_save": ["embedding"],
        },
        {"lora.modules_to_save": ["embedding", "head"]},
        ("does not include head",),
    ),
    Row(
        "data.reset_positions needs an end-of-document token",
        {"data.reset_positions": True, "data.train": "bare"},
        {"data.train": "tokens"},
    ),
    Row(
        "data.eod_mask_loss needs an end-of-document token",
        {"data.eod_mask_loss": True, "data.validation": "bare"},
        {"data.validation": None},
        ("bare.json",),
    ),
    Row(
        "data.reset_positions needs an end-of-document token",
        {"data.reset_positions": True, "data.train": "chat"},
        {"data.reset_positions": False},
        ("chat.json names none, or says chat", "correct for chat data"),
    ),
    Row(
        "chat or text",
        {"data.train": ["chat", "tokens"]},
        {"data.train": ["chat"], "data.validation": 0.1},
        ("mix conversations (chat) with text", "megalite prepare --chat"),
    ),
    Row("chat or text", {"data.train": "chat", "data.validation": "tokens"}, {"data.validation": {"chat": 1.0}}),
    Row(
        "fine-tuning starts from weights",
        {"model.from_hf": "hf", "data.train": "chat"},
        {"model.init_from": "none"},
        (
            "would train random weights on conversations, because model.from_hf = hf",
            "Set it to hf:hf",
            "none to train random weights on purpose",
        ),
    ),
    Row(
        "fine-tuning starts from weights",
        {"model.from_hf": "hf", "data.train": {"chat": 1.0}},
        {"model.init_from": "."},
    ),
    Row("fine-tuning starts from weights", {"model.from_hf": "hf", "data.train": "chat"}, {"checkpoint.load": "."}),
    Row(
        "an objective and its data",
        SIMPO | {"data.train": "tokens", "data.packing": True},
        {"data.train": "pairs"},
        ("--preference",),
    ),
    Row(
        "packing of conversations",
        {"data.packing": True},
        {"data.packing": True, "data.train": "chat"},
        ("is text", "--chat"),
    ),
    Row(
        "rows have the tokens that modules predict",
        {"model.mtp_layers": 4, "data.sequence_length": 4},
        {"model.mtp_layers": 3},
        ("up to 3",),
    ),
    Row(
        "modules of multi-token prediction look up tokens only",
        {"model.mtp_layers": 1, "model.position": "learned"},
        {"model.position": "rope"},
        ("model.position = learned", "Set it to 0"),
    ),
    Row(
        "adapters and modules of multi-token prediction",
        {"model.mtp_layers": 1, "lora.rank": 4},
        {"model.mtp_layers": 0},
        ("lora.rank = 4", "PEFT", "Set it to 0"),
    ),
    Row(
        "sequence within the model's positions",
        {"data.sequence_length": 2049},
        {"data.sequence_length": 2048},
        ("up to 2048",),
    ),
    Row(
        "whole microbatches",
        {"train.global_batch_size": 30, "parallel.dp": 2},
        {"train.global_batch_size": 32},
        ("4 * 2", "Legal values: multiples of 8. Nearest: 24 or 32."),
    ),
    Row(
        "whole microbatches",
        {"train.global_batch_size": 2},
        {"train.global_batch_size": 4},
        ("multiples of 4. Nearest: 4.",),
    ),
    Row(
        "fp64 on CPU",
        {"train.precision": "fp64"},
        {"train.precision": "fp32"},
        ("2 GPUs", "CUDA_VISIBLE_DEVICES"),
        devices=2,
    ),
    Row("bf16 gradients of bf16", {"train.grad_dtype": "bf16"}, {"train.precision": "bf16"}, ("not fp32",)),
    Row(
        "recompute mode",
        {"train.recompute": "every-0"},
        {"train.recompute": "every-3"},
        ("none, selective, full, every-2",),
    ),
    Row("a budget says how much", {"train.recompute": "budget"}, {"train.memory_budget": 7e10}, ("70GB", "0.9")),
    Row(
        "what a budget is for",
        {"train.memory_budget": 7e10},
        {"train.recompute": "budget"},
        ("train.recompute = none",),
    ),
    Row(
        "kernels can run",
        {"train.kernels": "triton"},
        {"train.kernels": "auto"},
        ("requires a GPU", "auto or torch"),
        devices=0,
    ),
    *(
        Row(f"store.{key} is a duration", {f"store.{key}": "10"}, {f"store.{key}": "10s"}, ("30s",))
        for key in ("interval", "retry", "final_wait")
    ),
    Row(
        "the spool can be written",
        {"run.dir": "memory://runs", "run.spool": __file__},
        {"run.dir": "memory://runs", "run.spool": "."},
        ("is not writable", "run.dir = memory://runs"),
    ),
    Row(
        "no overwriting in a store",
        {"run.dir": "memory://runs", "run.overwrite": True},
        {"run.dir": "memory://runs", "run.overwrite": False},
        ("another run.name",),
    ),
    Row("timeout is a duration", {"run.timeout": "10"}, {"run.timeout": "10s"}, ("10m",)),
    Row("stop_after is a duration", {"train.stop_after": "90"}, {"train.stop_after": "1h30m"}, ("3h50m",)),
    Row("watchdog is a duration", {"train.watchdog": "5"}, {"train.watchdog": None}, ("or null to turn it off",)),
    *(
        Row(
            "faults can happen",
            {"faults.inject": ["kill:rank=0,step=3", fault]},
            {"faults.inject": fixed},
            (f"= {fault} {says}",),
        )
        for fault, fixed, says in (
            ("kil:rank=0,step=3", "kill:rank=0,step=3", "is not a known kind of fault (nearest: kill)"),
            ("kill", "kill:step=3", "requires step"),
            ("slow:step=3", "slow:step=3,seconds=0.5", "requires seconds and step"),
            (
                "nan:step=3,factor=2",
                "spike:step=3,factor=nan",
                "requires step, and besides it takes rank and restart only",
            ),
            ("exit:rank=first,step=3", "exit:rank=0,step=3-5,restart=2", "has a value that is not a number"),
            ("hang:step=5-3", "hang:step=3-5", "has a value out of range"),
            ("hang:step=0", "hang:step=1", "has a value out of range"),
            ("slow:step=1,seconds=-1", None, "has a value out of range"),
            ("bitflip:step=3", None, "requires matmul and step, and besides it takes pass, rank and restart only"),
            ("bitflip:step=3,matmul=0.5", None, "has a value out of range"),
            ("bitflip:step=3,matmul=0,pass=5", None, "has a value out of range"),
        )
    ),
    *(
        Row("faults can happen", {"faults.inject": "sigterm:rank=0,step=2 nan:rank=1,step=2"}, fixed, ("nan:rank=1",))
        for fixed in ({"faults.inject": "nan:step=2"}, {"parallel.min_ranks": 1})
    ),
    *(
        Row("faults can happen", {"faults.recheck": every, "faults.inject": fault}, {"faults.inject": fixed}, (says,))
        for every, fault, fixed, says in (
            (None, "bitflip:step=4,matmul=0", None, "= bitflip:step=4 requires faults.recheck"),
            (2, "bitflip:step=3,matmul=0,pass=1", "bitflip:step=3,matmul=0", "a step that faults.recheck = 2 does not"),
        )
    ),
    Row(
        "recheck of steps that repeat",
        {"faults.recheck": 10},
        {"run.deterministic": True},
        ("faults.recheck = 10 requires run.deterministic on a GPU",),
        devices=1,
    ),
    Row(
        "recheck of the same kernels",
        {"faults.recheck": 10, "run.deterministic": True, "train.compile": True},
        {"train.compile": False},
        ("with train.compile = true on a GPU",),
        devices=1,
    ),
    Row("warm-up within the run", {"optimizer.warmup_steps": 101}, {"optimizer.warmup_steps": 100}, ("Nearest: 100.",)),
    Row(
        "warm-up before the decay",
        {"optimizer.decay": "wsd", "optimizer.warmup_steps": 60, "optimizer.wsd_decay_fraction": 0.5},
        {"optimizer.wsd_decay_fraction": 0.4},
        ("up to 0.4",),
    ),
    Row("min_lr below lr", {"optimizer.min_lr": 1e-3}, {"optimizer.min_lr": 3e-4}, ("optimizer.lr = 0.0003",)),
    Row("a known optimizer", {"optimizer.name": "lyon"}, {"optimizer.name": "lion"}, ("FILE:CLASS", "lion")),
    Row(
        "a slow average",
        {"optimizer.name": "ademamix", "ademamix.beta3": 0.5},
        {"ademamix.beta3": 0.99},
        ("optimizer.betas",),
    ),
    Row("two betas", {"optimizer.betas": [0.9]}, {"optimizer.betas": [0.9, 0.9]}),
    Row("fewer than 100 Newton-Schulz iterations", {"muon.ns_steps": 100}, {"muon.ns_steps": 99}, ("1 to 99",)),
    Row(
        "Muon's rate follows AdamW's",
        {"optimizer.name": "muon", "optimizer.lr": 0.0},
        {"optimizer.lr": 1e-9},
        ("muon.lr = 0.02",),
    ),
    Row(
        "Muon has matrices", {"optimizer.name": "muon", "lora.rank": 4}, {"optimizer.name": "adamw"}, ("lora.rank = 4",)
    ),
    Row(
        "Muon runs where the weights are",
        {"optimizer.name": "muon", "parallel.offload": "cpu"},
        {"parallel.offload": "none"},
        ("optimizer.name = muon",),
    ),
    Row(
        "lr_scaling has its base",
        {"optimizer.lr_scaling": "sqrt"},
        {"optimizer.base_batch_size": 8},
        ("optimizer.base_batch_size",),
    ),
    Row("the run can be written", {"run.dir": __file__}, {"run.dir": "."}, ("is not writable",)),
    Row("checkpoint exists", {"checkpoint.load": "nowhere"}, {"checkpoint.load": "."}, ("auto nor none",)),
    Row(
        "checkpoint.keep_every in range",
        {"checkpoint.keep": 1, "checkpoint.keep_every": 0},
        {"checkpoint.keep_every": 1},
    ),
    Row("keep_every beside keep", {"checkpoint.keep_every": 10}, {"checkpoint.keep": 2}, ("all checkpoints are kept",)),
    Row(
        "copies of state in memory",
        {"checkpoint.async_save": True, "parallel.offload": "disk"},
        {"parallel.offload": "cpu"},
        ("= disk",),
    ),
    Row(
        "resume or warm start",
        {"checkpoint.load": ".", "model.init_from": "."},
        {"checkpoint.load": "auto"},
        ("step 0",),
    ),
    Row("validation has data", {"validation.interval": 5}, {"data.validation": 0.1}, ("held-out fraction",)),
    Row(
        "average on the device or in memory",
        {"train.ema_decay": 0.9, "parallel.offload": "disk"},
        {"parallel.offload": "cpu"},
        ("= disk",),
    ),
    Row("validation of an average", {"validation.ema": True}, {"train.ema_decay": 0.9}, ("train.ema_decay = null",)),
    Row("best of validations", {"checkpoint.keep_best": True}, VALIDATED, ("validation.interval = null",)),
    Row("patience with validations", {"train.early_stopping_patience": 2}, VALIDATED, ("validation.interval = null",)),
    Row(
        "threshold with patience",
        VALIDATED | {"train.early_stopping_threshold": 0.1},
        {"train.early_stopping_patience": 2},
        ("train.early_stopping_patience = null",),
    ),
    Row(
        "monitored set exists",
        {"validation.monitor": "a"},
        {"data.validation": {"a": "tokens"}},
        ("data.validation is a single set",),
    ),
    Row(
        "monitored set exists",
        {"data.validation": {"one": "tokens", "two": "tokens"}, "validation.monitor": "tow"},
        {"validation.monitor": "two"},
        ("Legal values: one, two",),
    ),
    Row(
        "losses of the members of a blend",
        {"logging.loss_by_source": True, "data.train": ["tokens"]},
        {"data.train": {"tokens": 1.0, "./tokens": 1.0}},
        ("not a blend",),
    ),
    Row(
        "statistics of fp8 operands",
        {"logging.fp8_interval": 10},
        {"logging.fp8_interval": None},
        ("logging.fp8_interval = 10", "train.fp8 = none"),
    ),
    Row(
        "ramp-up of the batch size",
        {"train.rampup_batch_size": [4, 4]},
        {"train.rampup_batch_size": None},
        ("three positive numbers",),
    ),
    Row(
        "ramp-up of the batch size",
        {"train.rampup_batch_size": [512, 4, 9]},
        {"train.rampup_batch_size": None},
        ("starts above",),
    ),
    Row(
        "ramp-up of the batch size",
        {"train.rampup_batch_size": [4, 5, 9], "train.global_batch_size": 8},
        {"train.rampup_batch_size": [4, 4, 9]},
        ("in whole increments",),
    ),
    Row(
        "whole microbatches of a ramp-up",
        {"train.rampup_batch_size": [2, 2, 9], "train.global_batch_size": 8, "train.micro_batch_size": 4},
        {"train.rampup_batch_size": [4, 4, 9]},
        ("parallel.dp = 4",),
    ),
    Row("no ramp-up with faults.rollback", RAMPED | {"faults.rollback": True}, {"faults.rollback": False}),
    Row("no ramp-up with profiling.timeline", RAMPED | {"profiling.timeline": True}, {"profiling.timeline": False}),
    *(
        Row(
            f"logging.{tracker}_{name} needs {tracker}",
            {f"logging.{tracker}_{name}": value},
            {f"logging.{tracker}": True},
            (f"logging.{tracker} = null",),
        )
        for tracker, name, value in (
            ("wandb", "entity", "team"),
            ("wandb", "group", "ablation"),
            ("wandb", "tags", ["a"]),
            ("wandb", "name", "first"),
            ("wandb", "mode", "offline"),
            ("mlflow", "uri", "http://localhost:5000"),
            ("mlflow", "tags", {"team": "a"}),
            ("trackio", "group", "ablation"),
        )
    ),
    Row("profiled steps are a range", {"profiling.steps": [3]}, {"profiling.steps": [3, 3]}, ("[3, 5]",)),
    Row("profiled steps are a range", {"profiling.steps": [0, 5]}, {"profiling.steps": [1, 5]}),
    Row("profiled steps are a range", {"profiling.steps": [4, 3]}, {"profiling.steps": [3, 4]}),
    Row(
        "profiled steps within the run",
        {"profiling.timeline": True, "train.steps": 2},
        {"profiling.steps": [2, 5]},
        ("train.steps = 2", "at most 2"),
    ),
    Row(
        "profiled ranks exist",
        {"profiling.ranks": [0, 2], "parallel.dp": 2},
        {"profiling.ranks": [1]},
        ("2 processes", "0 to 1"),
    ),
    Row(
        "snapshot of a GPU",
        {"profiling.memory_snapshot": 3},
        {"profiling.memory_snapshot": None},
        ("requires a GPU",),
        devices=0,
    ),
    Row("fp8 with a wide range", {"train.fp8": "block", "train.precision": "fp16"}, {"train.precision": "bf16"}),
    Row("powers of two for blocks", {"train.fp8": "mxfp8", "train.fp8_power_of_two": True}, {"train.fp8": "block"}),
    Row("weight gradients in blocks", FP8_GRADIENTS | {"train.fp8": "mxfp8"}, {"train.fp8": "block"}),
    Row("weight gradients in fp8 are trained", FP8_GRADIENTS | {"lora.rank": 2}, {"lora.rank": 0}),
    Row(
        "weight gradients in fp8 read whole blocks",
        FP8_GRADIENTS | CP2 | {"parallel.context": "ring"},
        {"parallel.context": "ulysses"},
        ("multiples of 64.", "micro_batch_size to 4"),
    ),
    Row(
        "weight gradients of experts in fp8 read whole microbatches",
        FP8_GRADIENTS | EXPERTS | CP2 | {"parallel.dp": 2, "parallel.context": "ulysses"},
        {"parallel.ep": 2},
        ("cp * tp = 2", "as parallel.ep"),
    ),
    Row("outer layers with fp8", {"train.fp8_first_last": 1}, {"train.fp8": "block"}, ("has no effect",)),
    Row(
        "train.fp8_first_last in range",
        {"train.fp8": "block", "train.fp8_first_last": -1},
        {"train.fp8_first_last": 0},
    ),
    Row("inner layers with fp8", {"train.fp8": "block", "train.fp8_first_last": 2}, {"train.fp8_first_last": 1}),
    Row("graphs on a GPU", GRAPHS, {"train.graphs": False}, ("requires a GPU",), devices=0),
    *(
        Row(f"graphs and {option}", GRAPHS | {option: broken} | others, {option: fixed}, (f"{option} = ",), devices=1)
        for option, broken, fixed, others in GRAPHED
    ),
    Row(
        "graphs and train.recompute",
        GRAPHS | {"train.recompute": "budget", "train.memory_budget": 1e9},
        {"train.graphs": False},
        ("train.recompute = budget",),
        devices=1,
    ),
    Row(
        "graphs of known blocks",
        GRAPHS | {"model.layer_blocks": ["whole_rows+feed_forward"] * 4},
        {"model.layer_blocks": ["attention+feed_forward"] * 4},
        ("whole_rows, a kind of block",),
        devices=1,
    ),
    Row("InfiniBand's timeout", {"network.ib_timeout": 32}, {"network.ib_timeout": 23}, ("1 to 31",)),
    Row("InfiniBand's timeout", {"network.ib_timeout": 0}, {"network.ib_timeout": 1}),
    Row(
        "variables have names",
        {"network.variables": {"NCCL ALGO": "Ring"}},
        {"network.variables": {"NCCL_ALGO": "Ring"}},
    ),
]


@pytest.fixture(autouse=True)
def token_files(tmp_path, monkeypatch):
    """tokens: 257 tokens and an EOS; chat: conversations; other: another vocabulary; bare: by a tool that says nothing;
    pairs, labelled: preferences. Own is an objective of rewards, weights a Hugging Face model. Triton compiles."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for prefix in ("tokens", "chat", "other", "bare", "pairs", "other pairs", "labelled"):
        (tmp_path / f"{prefix}.bin").touch()
        (tmp_path / f"{prefix}.idx").touch()
    (tmp_path / "manifest.json").touch()  # makes . a checkpoint
    (tmp_path / "adapter_config.json").touch()  # and an adapter
    (tmp_path / "tokens.json").write_text(json.dumps({"vocab_size": 257, "eos": 256}))
    (tmp_path / "chat.json").write_text(json.dumps({"vocab_size": 257, "eos": 256, "chat": {}}))
    for prefix in ("pairs", "other pairs", "labelled"):
        about = {"vocab_size": 257, "eos": 256, "chat": {}, "preference": prefix.removeprefix("other ")}
        (tmp_path / f"{prefix}.json").write_text(json.dumps(about))
    (tmp_path / "other.json").write_text(json.dumps({"vocab_size": 300, "eos": 0}))
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").touch()
    (tmp_path / "own.py").write_text("from megalite.objectives.reward import Reward\n\n\nclass Own(Reward): pass\n")


def configure(options: dict[str, Any]) -> Config:
    config = Config()
    for option, value in ({"data.train": "tokens", "model.vocab_size": 257, "parallel.dp": 1} | options).items():
        section, key = option.split(".")
        assert hasattr(getattr(config, section), key)
        setattr(getattr(config, section), key, value)
    return config


@pytest.fixture(autouse=True)
def _a_kind_without_context_parallelism(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LAYER_BLOCKS, "whole_rows", BlockOption("attention", ()))


def verdict(options: dict[str, Any], world: int | None = None, devices: int | None = None) -> str | None:
    config = configure(options)
    parallel = config.parallel
    try:
        check(config, world or parallel.tp * parallel.pp * parallel.cp * (parallel.dp or 1), devices)
    except ConfigError as error:
        return str(error)
    return None


def proposals(option: str, message: str) -> Iterator[dict[str, Any]]:
    """The values that a message proposes: "Nearest: A or B", "Set it to A, or section.key to B", "Leave it out"."""
    way_out = message.rpartition(". ")[2] if "Nearest: " not in message else message[message.index("Nearest: ") :]
    default = attrgetter(option.replace("model.rope_scaling.rope_type", "model.rope_scaling"))(Config())
    if nearest := re.search(r"Nearest: (.+?)(?: or (.+?))?(?:, for .*)?\.(?:$| Or)", way_out):
        for value in filter(None, nearest.groups()):
            yield (
                {option: read(value)}
                if option in OPTIONS
                else {"model.rope_scaling": None if value == "default" else LLAMA3}
            )
    for name, value in re.findall(
        r"(?:[Ss]et|, or) (it|\w+\.\w+)(?: too)?,?(?: for example)? to ([\w.:]+?)[.,;:]?(?:\s(?!and)|$)", way_out
    ):
        yield {option if name == "it" else name: read(value)}
    if "Nearest" not in way_out and (example := re.search(r", for example:? (\[[\d., ]+\])", way_out)):
        yield {option: read(example[1])}
    if re.search(r"(Leave|leave) it out|Remove it", way_out):
        yield {option: default}


def read(text: str) -> Any:
    """A value as it is written, in YAML."""
    return yaml.safe_load(text)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.rule)
def test_rule(row: Row, monkeypatch):
    rule = next(rule for rule in RULES if rule.name == row.rule)
    message = verdict(row.broken, row.world, row.devices)
    assert message is not None and message.startswith(f"{rule.option} = "), message
    for part in row.says:
        assert part in message
    assert verdict(row.broken | row.fixed, row.world, row.devices) is None
    monkeypatch.setattr(all_rules, "RULES", (rule,))
    assert verdict(row.broken, row.world, row.devices) == message, "another rule spoke first"
    for proposed in proposals(rule.option, message):
        assert verdict(row.broken | proposed, row.world, row.devices) is None, f"{proposed} is suggested, and illegal"


def test_two_broken_rules_are_two_messages_unless_one_has_to_do_with_the_other():
    """Random pairs of rows: no rule ends in another error because of what an earlier one has found, and few are left
    for the next try."""
    random, both, pairs = Random(1), 0, 0
    while pairs < 300:
        one, other = random.sample(ROWS, 2)
        if one.broken.keys() & other.broken.keys() or {one.world, other.world} - {None}:
            continue
        if one.broken.keys() & other.fixed.keys() and other.broken.keys() & one.fixed.keys():
            continue  # each may be the way out of the other
        devices = one.devices if one.devices is not None else other.devices
        message = verdict(one.broken | other.broken, devices=devices)
        assert message is not None, (one, other)
        both += message.startswith("There are ")
        pairs += 1
    assert both > 0.9 * pairs


def test_every_rule_has_a_row_and_a_name_of_its_own():
    names = [rule.name for rule in RULES]
    assert len(set(names)) == len(names)
    assert set(names) == {row.rule for row in ROWS}


def test_a_run_that_resumes_has_its_weights(tmp_path):
    """Fine-tuning that began before its start had to be named, and texts, which may pretrain a model of that shape."""
    forgotten = {"model.from_hf": "hf", "data.train": "chat", "run.dir": str(tmp_path), "run.name": "old"}
    assert verdict(forgotten) is not None
    (tmp_path / "old" / "checkpoints").mkdir(parents=True)
    (tmp_path / "old" / "checkpoints" / "latest").touch()
    assert verdict(forgotten) is None
    assert verdict(forgotten | {"checkpoint.load": "none"}) is not None
    assert verdict({"model.from_hf": "hf"}) is None


def test_none_is_no_checkpoint_of_that_name():
    assert verdict({"model.init_from": "none"}) is None
    assert verdict({"model.init_from": "none", "checkpoint.load": "."}) is None
    assert "lora.init_from" in (verdict({"model.init_from": "none", "lora.rank": 4, "lora.init_from": "."}) or "")


def test_defaults_are_legal():
    assert verdict({}) is None


@pytest.mark.parametrize("heads, kv, ffn", [(8, 8, 16), (8, 2, 24), (12, 3, 48), (6, 6, 9), (12, 4, 12)])
def test_tensor_parallel_sizes_are_those_that_split_evenly(heads: int, kv: int, ffn: int):
    for tp in range(1, 2 * heads):
        # Written from the layout: rank r owns the query heads [r * heads / tp, (r + 1) * heads / tp), and each
        # key-value head they read.
        owned = [range(rank * heads // tp, (rank + 1) * heads // tp) for rank in range(tp)]
        read = [{head * kv // heads for head in mine} for mine in owned]
        equal = len({len(mine) for mine in owned}) == 1 and len(owned[0]) > 0 and len({len(mine) for mine in read}) == 1
        whole = tp <= kv and all(a.isdisjoint(b) for a, b in pairwise(read)) or tp > kv and tp % kv == 0
        legal = heads % tp == 0 and equal and whole and ffn % tp == 0
        shape = {
            "model.num_attention_heads": heads,
            "model.num_key_value_heads": kv,
            "model.intermediate_size": ffn,
            "model.head_dim": 8,
        }
        assert (verdict(shape | {"parallel.tp": tp}) is None) == legal, tp


def test_kernels_need_triton_and_a_gpu_or_its_interpreter(monkeypatch):
    kernels = {"train.kernels": "triton"}
    assert verdict(kernels, devices=1) is None
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert verdict(kernels, devices=0) is None
    monkeypatch.setitem(sys.modules, "triton", None)
    assert "the package triton, which is not installed" in (verdict(kernels, devices=1) or "")
    assert verdict({"train.kernels": "auto"}, devices=1) is None


def test_graphs_take_every_schedule_that_does_not_split_the_backward():
    whole = {name for name, recipe in RECIPES.items() if not recipe.splits}
    legal = {name for name in RECIPES if verdict(GRAPHS | {"parallel.schedule": name}, devices=1) is None}
    assert legal == whole


def test_durations():
    assert duration_seconds("3h50m") == 13800
    assert duration_seconds("90m") == 5400
    assert duration_seconds("1h1s") == 3601
    assert [duration_seconds(text) for text in ("", "5", "1m1h", "-1s", "1d", "1.5h")] == [None] * 6


def test_positions_are_those_of_documents_that_begin_at_0(tmp_path):
    """Two documents of 20 tokens, and one of 33 where a row of 40 still has a position too many."""
    pairs, long = write_preferences(tmp_path / "a", [(8, 12, 12)]), write_preferences(tmp_path / "b", [(8, 25, 12)])
    with IndexedWriter(tmp_path / "text", 257) as writer:
        writer.add(np.arange(41), [20, 21])
        writer.finish({"vocab_size": 257, "eos": 256, "preparation": {}})
    rows = {"data.sequence_length": 40, "model.max_position_embeddings": 32, "train.objective": "orpo"}
    assert verdict(rows | {"data.train": pairs}) is None
    assert "the longest document has 33 positions" in (verdict(rows | {"data.train": long}) or "")
    assert "exceeds" in (verdict(rows | {"data.train": pairs, "data.validation": long}) or "")
    assert "exceeds" in (verdict(rows | {"data.train": pairs, "model.position": "learned"}) or ""), "padding reads it"
    text = rows | {"train.objective": "cross_entropy", "data.train": str(tmp_path / "text")}
    assert "exceeds" in (verdict(text) or "")
    assert verdict(text | {"data.reset_positions": True}) is None
    labelled = write_labelled(tmp_path / "c", [(8, 12)] * 2, [True, False])
    kto = {"train.objective": "kto", "lora.rank": 4, "data.train": labelled}
    assert "exceeds" in (verdict(rows | kto) or ""), "prompts get other completions"


def test_a_broken_description_of_the_data_is_named(tmp_path):
    (tmp_path / "tokens.json").write_text("[")
    assert "tokens.json is not a JSON object" in (verdict({}) or "")
