"""Rules for the ranges of numbers, and for run.name."""

import math
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from types import NoneType
from typing import Any, get_args

from megalite.config.rule import Rule, RuleContext
from megalite.config.schema import OPTIONS

_SIZES = """parallel.tp parallel.pp parallel.dp parallel.cp parallel.ep parallel.dp_shard
    parallel.virtual_stages parallel.powersgd_rank parallel.context_inner model.vocab_size
    model.hidden_size model.intermediate_size model.num_hidden_layers model.num_attention_heads
    model.num_key_value_heads model.head_dim model.max_position_embeddings model.sliding_window
    data.sequence_length model.num_experts model.num_experts_per_tok model.moe_intermediate_size
    model.shared_expert_intermediate_size model.decoder_sparse_step model.kv_lora_rank
    model.q_lora_rank model.qk_nope_head_dim model.qk_rope_head_dim model.v_head_dim
    model.n_group model.topk_group train.steps train.tokens train.global_batch_size
    train.micro_batch_size optimizer.base_batch_size fp16.loss_scale_window fp16.hysteresis
    checkpoint.interval checkpoint.keep checkpoint.keep_every faults.spike_window
    faults.skip_limit validation.interval validation.batches train.early_stopping_patience
    muon.ns_steps logging.interval profiling.memory_snapshot lora.ranks"""
_POSITIVE = """train.mtp_weight model.rope_theta model.rope_local_theta model.rms_norm_eps
    model.attention_scale model.attention_softcap model.logit_softcap model.logit_scale
    model.residual_multiplier model.embedding_scale model.initializer_range
    model.routed_scaling_factor model.expert_capacity_factor lora.alpha lora.alphas
    checkpoint.minutes parallel.bucket_mb train.epochs train.memory_budget optimizer.eps
    fp16.min_loss_scale faults.spike_sigma"""
_NOT_NEGATIVE = """model.mtp_layers model.router_aux_loss_coef model.router_z_loss_coef
    model.router_bias_rate run.seed lora.rank parallel.schedule_costs parallel.layer_costs
    train.grad_clip train.z_loss train.loss_chunk optimizer.lr optimizer.min_lr
    optimizer.warmup_steps optimizer.weight_decay muon.lr muon.weight_decay
    fp16.initial_scale_power train.early_stopping_threshold network.ib_gid_index
    network.ib_retries"""
_FRACTIONS = """model.embedding_dropout model.attention_dropout model.residual_dropout lora.dropout
    train.label_smoothing optimizer.betas muon.momentum train.ema_decay"""

_TOO_LARGE = 1e300
"""Below the largest float: an integer can have more digits than calculations with it can bear."""


def _bounded(
    options: str, test: Callable[[float], bool], why: str, legal: str, nearest: float | None = None
) -> list[Rule]:
    """Rules that numbers, or every number of a list or mapping, pass `test`; null passes; infinities, NaN and
    endless integers never do."""

    def way_out(option: str, context: RuleContext) -> str:
        """What is legal, and what was likely meant: null for 0 and -1, with which other programs say so, and
        no sign for a size."""
        value, nullable = attrgetter(option)(context), NoneType in get_args(OPTIONS[option].type)
        listed = f"Legal values: {legal}{', or null' if nullable else ''}."
        if not isinstance(value, int | float) or not abs(value) < _TOO_LARGE:
            return listed
        near = "null" if nullable and value in (0, -1) else -value if nearest == 1 and value < -1 else nearest
        return listed if near is None else f"{listed} Nearest: {near}."

    def out_of_range(option: str, context: RuleContext) -> bool:
        return not all(abs(number) < _TOO_LARGE and test(number) for number in _numbers(option, context))

    def reason(option: str, context: RuleContext) -> str:
        return (
            "is too large"
            if any(_TOO_LARGE <= each < math.inf for each in _numbers(option, context))
            else why
        )

    return [
        Rule(
            f"{option} in range",
            option,
            partial(out_of_range, option),
            message=partial(reason, option),
            legal=partial(way_out, option),
        )
        for option in options.split()
    ]


def _numbers(option: str, context: RuleContext) -> list[Any]:
    value = attrgetter(option)(context)
    return (
        []
        if value is None
        else value
        if isinstance(value, list)
        else list(value.values())
        if isinstance(value, dict)
        else [value]
    )


RULES: tuple[Rule, ...] = (
    *_bounded(_SIZES, lambda n: n >= 1, "is not a positive size", "1 and above", 1),
    *_bounded(_POSITIVE, lambda n: n > 0, "is not a positive number", "every number above 0"),
    *_bounded(_NOT_NEGATIVE, lambda n: n >= 0, "is negative or not finite", "0 and above", 0),
    *_bounded(_FRACTIONS, lambda n: 0 <= n < 1, "is out of range", "at least 0 and below 1"),
    *_bounded(
        "optimizer.wsd_decay_fraction",
        lambda n: 0 < n <= 1,
        "is not a fraction of the steps",
        "above 0, up to 1",
    ),
    Rule(
        "run.name is a directory name",
        "run.name",
        lambda c: c.run.name in ("", ".", "..") or "/" in c.run.name,
        message="is not the name of one directory",
        legal="Choose a name without /, and put the path into run.dir.",
    ),
)
