"""Batches, precision, optimizer, checkpoints, validation and profiling."""

import importlib.util
import os
import re

from megalite.config.rule import Facts, Rule, around, is_checkpoint

_DURATION = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")


def duration_seconds(text: str) -> int | None:
    """Seconds of a duration such as 3h50m, 90m or 30s; None where it is not one."""
    match = _DURATION.fullmatch(text)
    if match is None or not text:
        return None
    hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return 3600 * hours + 60 * minutes + seconds


def _kernels_lack(c: Facts) -> str:
    """What Triton kernels need and do not have here; empty where they can run. In its interpreter Triton needs no GPU."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton, which is not installed"
    if c.local_devices == 0 and os.environ.get("TRITON_INTERPRET") != "1":
        return "a GPU (or TRITON_INTERPRET=1 in the environment, which runs kernels on the CPU, very slowly)"
    return ""


RULES: tuple[Rule, ...] = (
    Rule(
        "whole microbatches",
        "train.global_batch_size",
        broken=lambda c: c.train.global_batch_size % (c.train.micro_batch_size * (c.parallel.dp or 1)),
        why=lambda c: f"is not a multiple of train.micro_batch_size * parallel.dp = {c.train.micro_batch_size} * {c.parallel.dp}",
        legal=lambda c: around(c.train.global_batch_size, c.train.micro_batch_size * (c.parallel.dp or 1)),
    ),
    Rule(
        "fp64 on CPU",
        "train.precision",
        broken=lambda c: c.train.precision == "fp64" and c.local_devices,
        why=lambda c: f"is for proof on CPU, and this run would use {c.local_devices} GPUs",
        legal="Set it to fp32, bf16 or fp16, or hide the GPUs with CUDA_VISIBLE_DEVICES= (empty).",
    ),
    Rule(
        "bf16 gradients of bf16",
        "train.grad_dtype",
        broken=lambda c: c.train.grad_dtype == "bf16" and c.train.precision != "bf16",
        why=lambda c: f"needs train.precision = bf16, not {c.train.precision}",
        legal="Leave it out, or set train.precision to bf16.",
    ),
    Rule(
        "recompute mode",
        "train.recompute",
        broken=lambda c: not re.fullmatch(r"none|selective|full|every-[1-9]\d*", c.train.recompute),
        why="is not a recomputation mode",
        legal=["none", "selective", "full", "every-2"],
    ),
    Rule(
        "kernels can run",
        "train.kernels",
        broken=lambda c: c.train.kernels == "triton" and _kernels_lack(c),
        why=lambda c: f"needs {_kernels_lack(c)}",
        legal="Set it to auto or torch.",
    ),
    Rule(
        "timeout is a duration",
        "run.timeout",
        broken=lambda c: not duration_seconds(c.run.timeout),
        why="is not a duration",
        legal="Write hours, minutes and seconds in this order: 1h, 10m or 30s.",
    ),
    Rule(
        "stop_after is a duration",
        "train.stop_after",
        broken=lambda c: c.train.stop_after is not None and not duration_seconds(c.train.stop_after),
        why="is not a duration",
        legal="Write hours, minutes and seconds in this order: 3h50m, 90m or 30s.",
    ),
    Rule(
        "warm-up within the run",
        "optimizer.warmup_steps",
        broken=lambda c: c.optimizer.warmup_steps > c.train.steps,
        why=lambda c: f"exceeds train.steps = {c.train.steps}",
        legal=lambda c: f"Legal values: 0 to {c.train.steps}. Nearest: {c.train.steps}.",
    ),
    Rule(
        "warm-up before the decay",
        "optimizer.wsd_decay_fraction",
        broken=lambda c: (
            c.optimizer.decay == "wsd" and c.optimizer.warmup_steps + c.optimizer.wsd_decay_fraction * c.train.steps > c.train.steps
        ),
        why=lambda c: (
            f"of train.steps = {c.train.steps} starts the decay before optimizer.warmup_steps = {c.optimizer.warmup_steps} are done"
        ),
        legal=lambda c: f"Legal values: up to {1 - c.optimizer.warmup_steps / c.train.steps:.4g}; or shorten the warm-up.",
    ),
    Rule(
        "min_lr below lr",
        "optimizer.min_lr",
        broken=lambda c: c.optimizer.min_lr > c.optimizer.lr,
        why=lambda c: f"exceeds optimizer.lr = {c.optimizer.lr}",
        legal=lambda c: f"Legal values: 0 to {c.optimizer.lr}. Nearest: {c.optimizer.lr}.",
    ),
    Rule(
        "two betas",
        "optimizer.betas",
        broken=lambda c: len(c.optimizer.betas) != 2,
        why="is not a pair",
        legal="Give two numbers, for example [0.9, 0.95].",
    ),
    Rule(
        "lr_scaling has its base",
        "optimizer.lr_scaling",
        broken=lambda c: c.optimizer.lr_scaling != "none" and c.optimizer.base_batch_size is None,
        why="needs optimizer.base_batch_size, the batch size at which optimizer.lr was chosen",
        legal="Give it, or set optimizer.lr_scaling to none.",
    ),
    Rule(
        "checkpoint exists",
        "checkpoint.load",
        broken=lambda c: c.checkpoint.load not in ("auto", "none") and not is_checkpoint(c.checkpoint.load),
        why="is neither auto nor none nor a checkpoint directory: it has no state.json",
        legal="Give a checkpoint directory, for example runs/NAME/checkpoints/step_00000100.",
    ),
    Rule(
        "resume or warm start",
        "model.init_from",
        broken=lambda c: c.model.init_from and c.checkpoint.load not in ("auto", "none"),
        why=lambda c: f"starts at step 0, but checkpoint.load = {c.checkpoint.load} resumes a run",
        legal="Remove one of the two.",
    ),
    Rule(
        "validation has data",
        "validation.interval",
        broken=lambda c: c.validation.interval is not None and c.data.validation is None,
        why="needs data.validation",
        legal="Give a token file PREFIX or a held-out fraction such as 0.05, or set validation.interval to null.",
    ),
    Rule(
        "profiled steps are a range",
        "profiling.steps",
        broken=lambda c: len(c.profiling.steps) != 2 or not 1 <= c.profiling.steps[0] <= c.profiling.steps[1],
        why="is not a first and a last step",
        legal="Give two numbers, counted from 1, for example [3, 5].",
    ),
    Rule(
        "profiled steps within the run",
        "profiling.steps",
        broken=lambda c: c.profiling.timeline and c.profiling.steps[0] > c.train.steps,
        why=lambda c: f"begins after train.steps = {c.train.steps}",
        legal=lambda c: f"The first may be at most {c.train.steps}; or turn profiling.timeline off.",
    ),
)
