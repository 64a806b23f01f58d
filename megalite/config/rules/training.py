"""Rules between the sections that say how a run trains, saves and validates."""

import importlib.util
import math
import os
import re
from collections.abc import Callable
from difflib import get_close_matches

from megalite.config.dims import aligned_positions
from megalite.config.rampup import problem
from megalite.config.rule import Rule, multiples
from megalite.config.rules.context import RuleContext
from megalite.config.token_files import named_sets

TOKEN_BLOCK = 128
"""Tokens with a common scale in a weight gradient in fp8."""
MODES = ("none", "selective", "full", "every-2", "budget")


def _kernels_lack(c: RuleContext) -> str:
    """What is missing to run Triton kernels; empty if they can run. Triton's interpreter needs no GPU."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton, which is not installed"
    if c.local_devices == 0 and os.environ.get("TRITON_INTERPRET") != "1":
        return "a GPU (or TRITON_INTERPRET=1 in the environment, which runs kernels on the CPU, very slowly)"
    return ""


def _warmup_lacks(c: RuleContext) -> str:
    """The option without which no indexer is trained; empty: none lacks."""
    if c.model.index_topk is None:
        return "model.index_topk"
    return "" if c.model.index_loss_coef else "model.index_loss_coef"


def _aligned_tokens(c: RuleContext) -> int:
    """The tokens of which every rank's segments of a microbatch are multiples."""
    return aligned_positions(c) * c.train.micro_batch_size


def _whole_micro_batch(c: RuleContext) -> int:
    """The next micro-batch size with whole blocks of tokens."""
    rows = TOKEN_BLOCK // math.gcd(TOKEN_BLOCK, aligned_positions(c))
    return -(-c.train.micro_batch_size // rows) * rows


def _splits_rows_of_experts(c: RuleContext) -> bool:
    """Whether an expert's rows of one microbatch do not meet on one rank, in the order of their tokens."""
    zigzag = c.parallel.cp > 1 and c.parallel.context != "ulysses"
    return c.model.has_mixtures and (zigzag or c.parallel.ep % c.dims.sequence != 0)


def _samples_at_once(c: RuleContext) -> int:
    return c.train.micro_batch_size * c.dims.dp


def _wrong_mode(c: RuleContext) -> str:
    """What is wrong with the recomputation mode; empty: nothing."""
    if c.train.recompute in ("none", "selective", "full"):
        return ""
    from megalite.config.recompute import problem

    if "experts" in re.split("[*+,]", c.train.recompute) and not c.model.has_mixtures:
        return "names experts, but the model has none"
    return problem(c.train.recompute, c.model.num_hidden_layers + c.model.mtp_layers) or ""


def _modes(c: RuleContext) -> str:
    """The recomputation modes, with the nearest to one that is misspelled."""
    near = get_close_matches(c.train.recompute, MODES, n=1)
    listed = (
        f"Legal values: {', '.join(MODES)}, or operations such as attn_norm+mlp_in, also in a list by layers."
    )
    return f"{listed} Nearest: {near[0]}." if near else listed


def _example_ramp(c: RuleContext) -> str:
    """A ramp-up of whole microbatches."""
    step = _samples_at_once(c)
    return f"Expected [START, INCREMENT, SAMPLES], for example [{step}, {step}, 10000]."


def _longest_decay(c: RuleContext) -> str:
    """The share of the steps that the warm-up leaves for the decay."""
    share = f"{math.floor(1e4 * (1 - c.optimizer.warmup_steps / c.train.steps)) / 1e4:g}"
    return f"Legal values: up to {share}. Nearest: {share}. Or shorten the warm-up."


def _no_ramp_up(option: str, is_set: Callable[[RuleContext], bool], what: str) -> Rule:
    """Return the rule that an option is incompatible with a ramp-up of the batch size."""
    return Rule(
        f"no ramp-up with {option}",
        "train.rampup_batch_size",
        lambda c: c.train.rampup_batch_size and is_set(c),
        message=f"is not supported with {{{option}}}, because {what}",
        legal=f"Remove it, or set {option} to false.",
    )


RULES: tuple[Rule, ...] = (
    Rule(
        "a warm-up trains indexers",
        "train.indexer",
        lambda c: c.train.indexer == "warmup" and _warmup_lacks(c),
        message=lambda c: f"trains the indexers alone, but {_warmup_lacks(c)} is not set",
        legal=lambda c: (
            f"Set {_warmup_lacks(c)}, or remove train.indexer. Options of the shape come from "
            "model.from_hf, weights alone from model.init_from."
        ),
    ),
    Rule(
        "whole microbatches",
        "train.global_batch_size",
        lambda c: c.train.global_batch_size % _samples_at_once(c),
        message=lambda c: (
            f"is not a multiple of train.micro_batch_size * parallel.dp = {c.train.micro_batch_size} * "
            f"{c.dims.dp}"
        ),
        legal=lambda c: multiples(c.train.global_batch_size, _samples_at_once(c)),
    ),
    Rule(
        "ramp-up of the batch size",
        "train.rampup_batch_size",
        lambda c: problem(c.train),
        message=lambda c: problem(c.train) or "",
        legal=_example_ramp,
    ),
    Rule(
        "whole microbatches of a ramp-up",
        "train.rampup_batch_size",
        lambda c: any(each % _samples_at_once(c) for each in (c.train.rampup_batch_size or [])[:2]),
        message=lambda c: (
            "has sizes that are not multiples of train.micro_batch_size * parallel.dp = "
            f"{_samples_at_once(c)}"
        ),
        legal=lambda c: f"{_example_ramp(c)[:-1]}, or choose a smaller train.micro_batch_size.",
    ),
    _no_ramp_up(
        "faults.rollback",
        lambda c: c.faults.rollback,
        "a rollback would change the batch sizes of later steps",
    ),
    _no_ramp_up("profiling.timeline", lambda c: c.profiling.timeline, "a timeline shows a single schedule"),
    Rule(
        "fp64 on CPU",
        "train.precision",
        lambda c: c.train.precision == "fp64" and c.local_devices,
        message=lambda c: f"is only supported on the CPU, but this run would use {c.local_devices} GPUs",
        legal="Set it to fp32, bf16 or fp16, or hide the GPUs with CUDA_VISIBLE_DEVICES= (empty).",
    ),
    Rule(
        "recheck of steps that repeat",
        "faults.recheck",
        lambda c: c.faults.recheck is not None and c.local_devices and not c.run.deterministic,
        message="requires run.deterministic on a GPU, where a repeated step may otherwise have other bits",
        legal="Set run.deterministic to true, or faults.recheck to null.",
    ),
    Rule(
        "recheck of the same kernels",
        "faults.recheck",
        lambda c: c.faults.recheck is not None and c.local_devices and c.train.compile,
        message="is not supported with {train.compile} on a GPU, where each rank tunes its own kernels",
        legal="Set train.compile to false, or faults.recheck to null.",
    ),
    Rule(
        "recompute mode",
        "train.recompute",
        _wrong_mode,
        message=_wrong_mode,
        legal=_modes,
    ),
    Rule(
        "kernels can run",
        "train.kernels",
        lambda c: c.train.kernels == "triton" and _kernels_lack(c),
        message=lambda c: f"requires {_kernels_lack(c)}",
        legal="Set it to auto or torch.",
    ),
    Rule(
        "warm-up within the run",
        "optimizer.warmup_steps",
        lambda c: c.optimizer.warmup_steps > c.known_steps,
        message="exceeds {train.steps}",
        legal=lambda c: (
            f"Legal values: 0 to {c.train.steps}, or a share of them such as 5%. Nearest: {c.train.steps}."
        ),
    ),
    Rule(
        "warm-up before the decay",
        "optimizer.wsd_decay_fraction",
        lambda c: (
            c.optimizer.decay == "wsd"
            and c.optimizer.warmup_steps + c.optimizer.wsd_decay_fraction * c.known_steps > c.known_steps
        ),
        message="of {train.steps} would start the decay before the end of {optimizer.warmup_steps}",
        legal=_longest_decay,
    ),
    Rule(
        "Muon's rate follows AdamW's",
        "optimizer.lr",
        lambda c: c.optimizer.name == "muon" and not c.optimizer.lr,
        message="must be positive, because {muon.lr} follows the warm-up and decay of optimizer.lr in "
        "proportion",
        legal="Use a number above 0; to train only the matrices, set it to a very small number.",
    ),
    Rule(
        "Muon has matrices",
        "optimizer.name",
        lambda c: c.optimizer.name == "muon" and c.lora.rank,
        message="updates the matrices of the layers, which are frozen with {lora.rank}; adapters require "
        "AdamW",
        legal="Set it to adamw, or lora.rank to 0.",
    ),
    Rule(
        "Muon runs where the weights are",
        "parallel.offload",
        lambda c: c.optimizer.name == "muon" and c.parallel.offload != "none",
        message="is not supported with {optimizer.name}, which requires its state on the device",
        legal="Set it to none, or optimizer.name to adamw.",
    ),
    Rule(
        "copies of state in memory",
        "checkpoint.async_save",
        lambda c: c.checkpoint.async_save and c.parallel.offload == "disk",
        message="would copy the state to CPU memory, which {parallel.offload} avoids",
        legal="Set checkpoint.async_save to false, or parallel.offload to cpu.",
    ),
    Rule(
        "resume or warm start",
        "model.init_from",
        lambda c: c.model.initial_weights and c.checkpoint.names_checkpoint,
        message="starts a run at step 0, but {checkpoint.load} resumes one",
        legal="Remove one of the two.",
    ),
    Rule(
        "average on the device or in memory",
        "train.ema_decay",
        lambda c: c.train.ema_decay is not None and c.parallel.offload == "disk",
        message="would read and write the whole average in every step, because {parallel.offload} keeps only "
        "parts "
        "of the state in memory",
        legal="Set it to null, or parallel.offload to cpu.",
    ),
    Rule(
        "validation of an average",
        "validation.ema",
        lambda c: c.validation.ema and c.train.ema_decay is None,
        message="requires an average of the weights, but {train.ema_decay}",
        legal="Set train.ema_decay, for example to 0.999, or validation.ema to false.",
    ),
    Rule(
        "validation has data",
        "validation.interval",
        lambda c: c.validation.interval and c.data.validation is None,
        message="requires data.validation",
        legal="Use a token file PREFIX or a held-out fraction such as 0.05, or set validation.interval "
        "to "
        "null.",
    ),
    Rule(
        "best of validations",
        "checkpoint.keep_best",
        lambda c: c.checkpoint.keep_best and c.validation.interval is None,
        message="requires validation, but {validation.interval}",
        legal="Set validation.interval, or checkpoint.keep_best to false.",
    ),
    Rule(
        "patience with validations",
        "train.early_stopping_patience",
        lambda c: c.train.early_stopping_patience and c.validation.interval is None,
        message="requires validation, but {validation.interval}",
        legal="Set validation.interval, or remove train.early_stopping_patience.",
    ),
    Rule(
        "monitored set exists",
        "validation.monitor",
        lambda c: (
            c.validation.monitor is not None and c.validation.monitor not in named_sets(c.data.validation)
        ),
        message="is not a set of data.validation",
        legal=lambda c: list(named_sets(c.data.validation)) or "Remove it: data.validation is a single set.",
    ),
    Rule(
        "losses of the members of a blend",
        "logging.loss_by_source",
        lambda c: c.logging.loss_by_source and not (isinstance(c.data.train, dict) and len(c.data.train) > 1),
        message="has no effect, because data.train is not a blend",
        legal="Set data.train to {PREFIX: weight}, or set it to false.",
    ),
    Rule(
        "weight gradients in fp8 are trained",
        "train.fp8_weight_gradients",
        lambda c: c.train.fp8_weight_gradients and c.lora.rank,
        message="has no effect with {lora.rank}: matrices that may multiply in fp8 are frozen",
        legal="Remove it.",
    ),
    Rule(
        "weight gradients in fp8 read whole blocks",
        "train.fp8_weight_gradients",
        lambda c: c.train.fp8_weight_gradients and _aligned_tokens(c) % TOKEN_BLOCK,
        message=lambda c: (
            f"requires that segments of a microbatch on each rank have multiples of {TOKEN_BLOCK} tokens, "
            f"but with train.micro_batch_size = {c.train.micro_batch_size} they have multiples of "
            f"{_aligned_tokens(c)}"
        ),
        legal=lambda c: (
            f"Set train.micro_batch_size to {_whole_micro_batch(c)}, increase data.sequence_length, "
            "or remove it."
        ),
    ),
    Rule(
        "weight gradients of experts in fp8 read whole microbatches",
        "train.fp8_weight_gradients",
        lambda c: c.train.fp8_weight_gradients and _splits_rows_of_experts(c),
        message=lambda c: (
            f"requires that the ranks of a microbatch, cp * tp = {c.dims.sequence}, send an "
            "expert's rows to one rank, in the order of their tokens"
        ),
        legal=lambda c: (
            f"Use a multiple of {c.dims.sequence} as parallel.ep and ulysses as "
            "parallel.context, or remove it."
        ),
    ),
    Rule(
        "statistics of fp8 operands",
        "logging.fp8_interval",
        lambda c: c.logging.fp8_interval is not None and c.train.fp8 == "none",
        message="has no effect with {train.fp8}",
        legal="Set train.fp8 to block or mxfp8, or remove it.",
    ),
    Rule(
        "profiled steps within the run",
        "profiling.steps",
        lambda c: (c.profiling.timeline or c.profiling.ranks) and c.profiling.steps[0] > c.known_steps,
        message="begins after {train.steps}",
        legal=lambda c: f"Set a first step of at most {c.train.steps}, or remove timeline and ranks.",
    ),
    Rule(
        "profiled ranks exist",
        "profiling.ranks",
        lambda c: not set(c.profiling.ranks) <= set(range(c.world_size)),
        message=lambda c: f"contains ranks that do not exist among {c.world_size} processes",
        legal=lambda c: f"Choose among 0 to {c.world_size - 1}.",
    ),
    Rule(
        "snapshot of a GPU",
        "profiling.memory_snapshot",
        lambda c: c.profiling.memory_snapshot and c.local_devices == 0,
        message="requires a GPU, but this run does not use one",
        legal="Leave it out.",
    ),
)
