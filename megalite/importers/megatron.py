"""Megatron-LM's command-line arguments. Meanings and defaults are those of its
megatron/training/arguments.py, training.py and megatron/core/optimizer_param_scheduler.py. The model's shape
is in megatron_model.py, with megatron_experts.py and megatron_latent_attention.py."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from megalite.config import rampup
from megalite.config.sections.train import TrainConfig
from megalite.importers import finetuning, megatron_experts, megatron_model, megatron_script
from megalite.importers import megatron_latent_attention as latent_attention
from megalite.importers.batch import Batch
from megalite.importers.megatron_script import LAUNCH, open_row, unknown_parts
from megalite.importers.verdict import (
    ImportedFile,
    KeyRule,
    Table,
    Verdict,
    each,
    harmless,
    honoured,
    left,
    lost,
    missing,
    never,
    only,
    rounded,
    row_of,
    sets,
    to_do,
    word,
)

NAME = "Megatron-LM"
TP, PP, CP = "tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size"
BATCH = Batch("global-batch-size", "micro-batch-size", "")
RAMP = "rampup-batch-size"
MARKS = (TP, PP, "num-layers", BATCH.micro, "seq-length", "train-iters")
SWITCHES = frozenset(
    (
        "bf16",
        "fp16",
        "swiglu",
        "squared-relu",
        "qk-layernorm",
        "apply-layernorm-1p",
        "add-qkv-bias",
        "disable-bias-linear",
        "mock-data",
    )
    + (
        "group-query-attention",
        "untie-embeddings-and-output-weights",
        "use-rotary-position-embeddings",
        "use-rope-scaling",
    )
    + (
        "sequence-parallel",
        "use-distributed-optimizer",
        "overlap-grad-reduce",
        "overlap-param-gather",
        "recompute-activations",
    )
    + (
        "use-mcore-models",
        "use-flash-attn",
        "no-save-optim",
        "no-load-optim",
        "no-load-rng",
        "finetune",
        latent_attention.SWITCH,
    )
    + tuple(megatron_experts.SWITCHES)
)
"""Arguments without a value: a variable that follows is one of further arguments."""


def parse(text: str, read: Callable[[str], str | None] = lambda path: None, name: str = "") -> dict[str, Any]:
    """The arguments of a command, or of the training command in a script: name → value, true for a switch, a
    list for several values.

    read: the text of another script that this one names, None if there is none; name: the script's own path.
    """
    return megatron_script.parse(text, MARKS, SWITCHES, read, name)


def of_yaml(tree: Any) -> Any:
    """The arguments in a YAML file that lists them under MODEL_ARGS, as Megatron-LM's functional tests do;
    other content unchanged."""
    given = tree.get("MODEL_ARGS") if isinstance(tree, dict) else None
    return megatron_script.of_mapping(given) if isinstance(given, dict) else tree


def recognizes(leaves: dict[str, Any]) -> bool:
    return any(key in leaves for key in MARKS)


def ranks(source: ImportedFile) -> int | None:
    """The launcher's processes, divided by tp, pp and cp; None if one of them is not known."""
    processes, parts = _world(source), [source.count(key) for key in (TP, PP, CP)]
    replica = math.prod(part or 0 for part in parts)
    if source.dp is None and processes and replica and processes % replica == 0:
        return processes // replica
    return source.dp


def _world(source: ImportedFile) -> int | None:
    """The number of processes: on each node times nodes, as torchrun or DeepSpeed have it, or in all, as
    Accelerate or Slurm."""
    for each_node, nodes in PROCESSES:
        on_a_node = source.size(f"{LAUNCH}{each_node}")
        if on_a_node:
            count = source.count(f"{LAUNCH}{nodes}") if nodes else 1
            return count and on_a_node * count
    return None


PROCESSES = (
    ("nproc-per-node", "nnodes"),
    ("num-gpus", "num-nodes"),
    ("num-processes", ""),
    ("ntasks", ""),
    ("ntasks-per-node", "nodes"),
)


def _processes(value: Any, source: ImportedFile) -> Verdict:
    return (
        honoured({"parallel.dp": source.dp})
        if source.dp
        else left("parallel.dp is the number of processes / (tp * pp * cp)")
    )


STRATEGIES = {"NO_SHARD": 0, "OPTIM": 1, "OPTIM_GRADS": 2, "OPTIM_GRADS_PARAMS": 3}


def _zero(value: Any, source: ImportedFile) -> Verdict:
    """The distributed optimizer is ZeRO-1; FSDP shards by its strategy, which is no_shard by default."""
    if source.on("use-torch-fsdp2"):
        return honoured({"parallel.zero": 3})
    if source.on("use-megatron-fsdp") or source.on("use-custom-fsdp"):
        stage = STRATEGIES.get(source.word("data-parallel-sharding-strategy", "no_shard"))
        return lost("set parallel.zero") if stage is None else honoured({"parallel.zero": stage})
    return honoured({"parallel.zero": int(source.on("use-distributed-optimizer"))})


def _instances(value: Any, source: ImportedFile) -> Verdict:
    if value == 1:
        return harmless("it is so here")
    cp = source.count(CP)
    if source.dp and cp and type(value) is int and value > 0 and source.dp % value == 0:
        return honoured({"parallel.dp": source.dp, "parallel.dp_shard": source.dp // value * cp})
    return left(f"set parallel.dp_shard to parallel.dp / {value}")


def _virtual(value: Any, source: ImportedFile) -> Verdict:
    """Stages per rank, or layers per stage."""
    layers, stages = source.size("num-layers"), source.count(PP)
    per_rank = source.size("num-virtual-stages-per-pipeline-rank")
    per_stage = source.size("num-layers-per-virtual-pipeline-stage")
    if per_rank is None and layers and stages and per_stage and layers % (stages * per_stage) == 0:
        per_rank = layers // (stages * per_stage)
    if per_rank is None or per_rank == 1:
        return (
            lost("set parallel.schedule: interleaved and parallel.virtual_stages")
            if per_rank is None
            else harmless("it is so here")
        )
    return honoured({"parallel.schedule": "interleaved", "parallel.virtual_stages": per_rank})


def _partition(value: Any, source: ImportedFile) -> Verdict:
    """Layers of the first and of the last stage; the others share the rest evenly."""
    layers, stages = source.size("num-layers"), source.count(PP) or 0
    first, last = (source.size(f"decoder-{place}-pipeline-num-layers") for place in ("first", "last"))
    inner = stages - (first is not None) - (last is not None)
    rest = (layers or 0) - (first or 0) - (last or 0)
    if not layers or inner < 1 or rest % inner:
        return lost("set parallel.partition to the number of layers of each stage")
    return honoured(
        {
            "parallel.partition": [first] * (first is not None)
            + [rest // inner] * inner
            + [last] * (last is not None)
        }
    )


def _ramp(source: ImportedFile) -> TrainConfig | None:
    """The batch sizes of a run that starts with smaller ones; None if it does not."""
    ramp, batch = source.get(RAMP), source.size(BATCH.total)
    if not batch or not isinstance(ramp, list) or not all(type(part) is int for part in ramp):
        return None
    train = TrainConfig(global_batch_size=batch, rampup_batch_size=ramp)
    return None if rampup.problem(train) else train


def _train_samples(value: Any, source: ImportedFile) -> Verdict:
    """The steps that read so many samples, also with batches that grow."""
    ramp = _ramp(source)
    if ramp is None or type(value) is not int or value < 1:
        return _samples("train.steps").judge(value, source)
    steps = rampup.steps_for(ramp, value)
    return honoured(
        {"train.steps": steps},
        "" if rampup.samples_after(ramp, steps) == value else "the last step reads a whole batch",
    )


def _steps(source: ImportedFile) -> int | None:
    samples = source.get("train-samples")
    return source.size("train-iters") or _train_samples(samples, source).options.get("train.steps")


def _samples(option: str) -> KeyRule:
    """A row for a number of samples, which is one of steps here."""

    def judge(value: Any, source: ImportedFile) -> Verdict:
        batch = source.size(BATCH.total)
        if not batch or type(value) is not int:
            return left(f"set {option} to {value} / train.global_batch_size")
        return honoured(
            {option: value // batch}, "" if value % batch == 0 else "it is no whole number of steps"
        )

    return KeyRule(judge, option)


def _horizon(value: Any, source: ImportedFile) -> Verdict:
    """The schedule ends with the run here."""
    steps, batch = _steps(source), source.size(BATCH.total)
    end = source.size("lr-decay-iters") or (batch and (source.size("lr-decay-samples") or 0) // batch)
    if source.word("lr-decay-style", "linear") == "CONSTANT" or end == steps:
        return harmless("the schedule ends with train.steps")
    return lost(
        f"the schedule ends with train.steps, not after {end} of them: at its end there the rate stays at "
        "optimizer.min_lr"
    )


def _warmup_fraction(value: Any, source: ImportedFile) -> Verdict:
    """A share of the steps over which the rate decays."""
    batch, samples = source.size(BATCH.total), source.size("lr-decay-samples")
    decay = (
        source.size("lr-decay-iters") or (samples // batch if samples and batch else None) or _steps(source)
    )
    if decay is None or type(value) not in (int, float):
        return honoured(finetuning.share(value))
    return honoured({"optimizer.warmup_steps": round(value * decay)})


STYLES = {"CONSTANT": "constant", "LINEAR": "linear", "COSINE": "cosine", "WSD": "wsd"}


def _style(value: Any, source: ImportedFile) -> Verdict:
    style, steps = STYLES.get(source.word("lr-decay-style")), _steps(source)
    if style is None:
        return lost("optimizer.decay is cosine, linear, wsd or constant: linear is nearest")
    if style != "wsd":
        return honoured({"optimizer.decay": style})
    length = source.size("lr-wsd-decay-iters")
    options: dict[str, Any] = {"optimizer.decay": "wsd"} | (
        {"optimizer.wsd_decay_fraction": length / steps} if length and steps else {}
    )
    exact = source.word("lr-wsd-decay-style", "exponential") == "LINEAR" and len(options) == 2
    return honoured(
        options, "" if exact else "the decay of wsd is linear, over optimizer.wsd_decay_fraction of the run"
    )


def _betas(value: Any, source: ImportedFile) -> Verdict:
    return honoured({"optimizer.betas": [source.get("adam-beta1"), source.get("adam-beta2")]})


def _recompute(value: Any, source: ImportedFile) -> Verdict:
    kind, method = source.word("recompute-granularity", "none"), source.word("recompute-method", "uniform")
    if source.on("recompute-activations") or kind == "SELECTIVE":
        return honoured({"train.recompute": "selective"})
    if kind == "NONE":
        return harmless("recompute-granularity is not set")
    if kind != "FULL":
        return lost("set train.recompute: none, selective, full or every-K")
    every = method == "UNIFORM" and source.size("recompute-num-layers") in (1, None)
    return honoured(
        {"train.recompute": "full"},
        "" if every else "every layer is recomputed, one at a time: every-K recomputes fewer of them",
    )


def _modules(value: Any, source: ImportedFile) -> Verdict:
    if not source.on("recompute-activations") and source.word("recompute-granularity", "none") in (
        "NONE",
        "FULL",
    ):
        return harmless("it is for selective recomputation")
    return (
        harmless("selective recomputes attention, as here")
        if word(value) in ("CORE_ATTN", "['CORE_ATTN']")
        else lost("attention only")
    )


def _data(value: Any, source: ImportedFile) -> Verdict:
    """PREFIX, or WEIGHT PREFIX WEIGHT PREFIX …; token files have the same format."""
    parts = value if isinstance(value, list) else [value]
    numbers = [type(part) in (int, float) for part in parts]
    if len(parts) > 1 and numbers == [True, False] * (len(parts) // 2):
        weights: dict[str, float] = {}
        for weight, prefix in zip(parts[::2], parts[1::2], strict=True):
            weights[prefix] = rounded(weights.get(prefix, 0.0) + weight)
        return honoured({"data.train": weights})
    return honoured({"data.train": value if isinstance(value, str) else [str(part) for part in parts]})


def _split(value: Any, source: ImportedFile) -> Verdict:
    """Shares of training, validation and test."""
    parts = [float(part) for part in re.findall(r"\d+\.?\d*|\.\d+", str(value))] + [0.0, 0.0]
    if not sum(parts):
        return lost("set data.validation to a share of the data")
    if not parts[1] or "data-path" not in source.leaves:
        return harmless(
            "nothing is held out of data that is given by itself"
            if parts[1]
            else "nothing is validated, as here"
        )
    share = float(f"{parts[1] / sum(parts):.6g}")
    return honoured(
        {"data.validation": share}, "the share of the test data is trained on here" if parts[2] else ""
    )


def _validated(source: ImportedFile) -> bool:
    return "valid-data-path" in source.leaves or (
        "data-path" in source.leaves and bool(_split(source.get("split"), source).options)
    )


def _validation(option: str) -> KeyRule:
    off = harmless("without validation data nothing is validated")
    return KeyRule(
        lambda value, source: honoured({option: value}) if _validated(source) and value else off, option
    )


def _documents(value: Any, source: ImportedFile) -> Verdict:
    if source.on("reset-position-ids") and source.on("reset-attention-mask"):
        return honoured({"data.reset_positions": True})
    return lost("data.reset_positions does both, positions and attention")


def _load(value: Any, source: ImportedFile) -> Verdict:
    if value == source.get("save"):
        return harmless("checkpoint.load: auto resumes the run, as here")
    return left(
        "such checkpoints are converted through Hugging Face: export it there, then `megalite convert "
        "import` and model.init_from"
    )


def _scale_power(value: Any, source: ImportedFile) -> Verdict:
    power = math.log2(value) if type(value) in (int, float) and value > 0 else 0.5
    return honoured(
        {"fp16.initial_scale_power": round(power)},
        "" if power == round(power) else "it is a power of two here",
    )


def _has(source: ImportedFile, key: str) -> bool:
    """Whether a key is given, or may be given by what a script does not set."""
    return key in source.leaves or bool(source.unsettled())


def _checkpoint_activations(value: Any, source: ImportedFile) -> Verdict:
    """The older names of full recomputation."""
    every = source.count("checkpoint-num-layers", 1) == 1
    return honoured(
        {"train.recompute": "full"},
        "" if every else "every layer is recomputed, one at a time: every-K recomputes fewer of them",
    )


OVERLAP, FUSED = "it is always on, without an option", "fused operations are train.kernels"
TOKENS = (
    "token files have their tokenizer beside them: `megalite prepare --tokenizer` wrote it, or write "
    "PREFIX.json with vocab_size and eos"
)
METRICS = "metrics.jsonl has it for each step"
FP8 = "there is no float8: train.precision: bf16 is nearest"
FORMAT = "a checkpoint holds the whole model, and any layout loads it"
TABLE: Table = {
    **megatron_model.TABLE,
    **megatron_experts.TABLE,
    **latent_attention.TABLE,
    **BATCH.table(),
    **megatron_script.TABLE,
    **{f"{LAUNCH}{key}": KeyRule(_processes, "parallel.dp") for key, _ in PROCESSES},
    TP: sets("parallel.tp"),
    PP: sets("parallel.pp"),
    CP: sets("parallel.cp"),
    "cp-comm-type": sets(
        "parallel.context",
        {"P2P": "ring", "ALL_GATHER": "gather", "A2A": "ulysses"},
        "one method serves all layers and ranks: parallel.context is ulysses, gather or ring",
    ),
    "sequence-parallel": KeyRule(
        lambda value, source: (
            harmless("tp is 1") if source.count(TP) == 1 else honoured({"parallel.sequence_parallel": True})
        )
    ),
    **each(
        "",
        "use-distributed-optimizer use-megatron-fsdp use-custom-fsdp use-torch-fsdp2",
        KeyRule(_zero, "parallel.zero"),
    ),
    "data-parallel-sharding-strategy": KeyRule(_zero, "parallel.zero"),
    "num-distributed-optimizer-instances": KeyRule(_instances, "parallel.dp_shard"),
    **each(
        "",
        "num-layers-per-virtual-pipeline-stage num-virtual-stages-per-pipeline-rank",
        KeyRule(_virtual, "parallel.virtual_stages"),
    ),
    **each(
        "decoder-",
        "first-pipeline-num-layers last-pipeline-num-layers",
        KeyRule(_partition, "parallel.partition"),
    ),
    "pipeline-model-parallel-layout": missing("set parallel.partition to the number of layers of each stage"),
    **each(
        "account-for-",
        "embedding-in-pipeline-split loss-in-pipeline-split",
        never("stages are balanced by cost, head included"),
    ),
    RAMP: sets("train.rampup_batch_size"),
    "train-iters": sets("train.steps"),
    "train-samples": KeyRule(_train_samples, "train.steps"),
    "lr": sets("optimizer.lr"),
    "min-lr": sets("optimizer.min_lr"),
    **each("", "lr-decay-style lr-wsd-decay-style lr-wsd-decay-iters", KeyRule(_style, "optimizer.decay")),
    **each("", "lr-decay-iters lr-decay-samples", KeyRule(_horizon, "train.steps")),
    "lr-warmup-iters": sets("optimizer.warmup_steps"),
    "lr-warmup-samples": _samples("optimizer.warmup_steps"),
    "lr-warmup-fraction": KeyRule(_warmup_fraction, "optimizer.warmup_steps"),
    "lr-warmup-init": only("0", "warm-up starts at 0"),
    **each(
        "decoupled-", "lr min-lr", missing("embedding and head have the same rate as the rest: optimizer.lr")
    ),
    "optimizer": only(
        "ADAM",
        "set optimizer.name: muon for Muon, and muon.*; else AdamW, optimizer.*",
        "AdamW is the optimizer here",
    ),
    **each("", "adam-beta1 adam-beta2", KeyRule(_betas, "optimizer.betas")),
    "adam-eps": sets("optimizer.eps"),
    "weight-decay": sets("optimizer.weight_decay"),
    **each(
        "", "start-weight-decay end-weight-decay", missing("weight decay is constant: optimizer.weight_decay")
    ),
    "weight-decay-incr-style": only("CONSTANT", "weight decay is constant: optimizer.weight_decay"),
    "clip-grad": sets("train.grad_clip"),
    "bf16": sets("train.precision", {"TRUE": "bf16"}),
    "fp16": sets("train.precision", {"TRUE": "fp16"}),
    "initial-loss-scale": KeyRule(_scale_power, "fp16.initial_scale_power"),
    "min-loss-scale": sets("fp16.min_loss_scale"),
    "loss-scale-window": sets("fp16.loss_scale_window"),
    "hysteresis": sets("fp16.hysteresis"),
    "loss-scale": missing("the loss scale is always dynamic, from fp16.initial_scale_power on"),
    "grad-reduce-in-bf16": sets("train.grad_dtype", {"TRUE": "bf16"}),
    "accumulate-allreduce-grads-in-fp32": never(
        "gradients are accumulated in fp32 by default (train.grad_dtype)"
    ),
    "fp8-format": missing(FP8),
    "fp8-*": KeyRule(
        lambda value, source: (
            missing(FP8).judge(value, source)
            if _has(source, "fp8-format")
            else harmless("fp8-format is not set")
        )
    ),
    "use-checkpoint-args": to_do(
        "the model's shape is that of the checkpoint: export it to Hugging Face, and set model.from_hf"
    ),
    "yaml-cfg": to_do("arguments are in that file: give its values"),
    **each(
        "",
        "checkpoint-activations activations-checkpoint-method",
        KeyRule(_checkpoint_activations, "train.recompute"),
    ),
    "zero-stage": sets("parallel.zero"),
    "deepspeed-config": to_do("`megalite import-config` translates this file, too"),
    **each(
        "",
        "deepspeed deepspeed-activation-checkpointing DDP-impl no-pipeline-parallel",
        never("the other arguments say it"),
    ),
    **each(
        "",
        "recompute-activations recompute-granularity recompute-method recompute-num-layers",
        KeyRule(_recompute, "train.recompute"),
    ),
    "recompute-modules": KeyRule(_modules, "train.recompute"),
    "seed": sets("run.seed"),
    "deterministic-mode": sets("run.deterministic"),
    "data-path": KeyRule(_data, "data.train"),
    "train-data-path": KeyRule(_data, "data.train"),
    "valid-data-path": KeyRule(
        lambda value, source: honoured({"data.validation": _data(value, source).options["data.train"]})
    ),
    "split": KeyRule(_split, "data.validation"),
    **each(
        "",
        "test-data-path mock-data data-args-path per-split-data-args-path",
        to_do("set data.train and data.validation"),
    ),
    **each("", "reset-position-ids reset-attention-mask", KeyRule(_documents, "data.reset_positions")),
    "eod-mask-loss": sets("data.eod_mask_loss"),
    **each("", "tokenizer-type tokenizer-model vocab-file merge-file tiktoken-*", never(TOKENS)),
    "save": sets("run.dir", roughly="the run's own directory is run.dir/run.name"),
    "load": KeyRule(_load, "checkpoint.load"),
    **each(
        "", "finetune no-load-optim no-load-rng", to_do("model.init_from starts at step 0 with weights only")
    ),
    "save-interval": sets("checkpoint.interval"),
    "async-save": sets("checkpoint.async_save"),
    **each(
        "",
        "ckpt-* auto-detect-ckpt-format use-dist-ckpt no-save-optim no-save-rng dist-ckpt-*",
        never(FORMAT),
    ),
    "exit-duration-in-mins": KeyRule(
        lambda value, _: honoured({"train.stop_after": f"{value}m"}), "train.stop_after"
    ),
    "exit-interval": missing("train.stop_after, a duration, is nearest"),
    "distributed-timeout-minutes": KeyRule(
        lambda value, _: honoured({"run.timeout": f"{value}m"}), "run.timeout"
    ),
    "eval-interval": _validation("validation.interval"),
    "eval-iters": _validation("validation.batches"),
    "log-interval": sets("logging.interval"),
    "tensorboard-dir": KeyRule(
        lambda value, _: honoured({"logging.tensorboard": True}, "it is in the run's directory"),
        "logging.tensorboard",
    ),
    "wandb-project": sets("logging.wandb"),
    "wandb-exp-name": sets("run.name"),
    **each(
        "", "wandb-* tensorboard-* log-* timing-* no-one-logger one-logger-* logging-level", never(METRICS)
    ),
    "profile*": missing("profiling.ranks and profiling.steps trace with torch.profiler"),
    "use-cpu-initialization": never("weights are the same wherever they are drawn"),
    "calculate-per-token-loss": never("the loss is always the mean over all tokens"),
    **each(
        "",
        "overlap-* no-overlap-* delay-* align-* defer-* tp-comm-* ddp-* nccl-* use-nccl-ub high-priority-* "
        "batch-p2p-*",
        never(OVERLAP),
    ),
    **each(
        "",
        "cross-entropy-* transformer-impl use-mcore-models use-flash-attn attention-backend "
        "no-persist-layer-norm",
        never(FUSED),
    ),
    **each(
        "no-",
        "masked-softmax-fusion bias-swiglu-fusion bias-dropout-fusion rope-fusion "
        "gradient-accumulation-fusion",
        never(FUSED),
    ),
    **each(
        "",
        "manual-gc* empty-unused-memory-level check-for-nan-* no-check-for-nan-* num-workers data-cache-path",
        never("nothing here has it"),
    ),
    **each(
        "",
        "no-create-attention-mask-in-dataloader no-mmap-bin-files dataloader-type distributed-backend",
        never("nothing here has it"),
    ),
    "expert-*": missing("nothing here is its counterpart"),
}


def table(source: ImportedFile) -> Table:
    """The rows for these arguments: those with a value that is not known are left open."""
    rows = dict(TABLE)
    for key, value in source.leaves.items():
        row = row_of(TABLE, key)
        if row is not None and unknown_parts(value) and row_of(megatron_script.TABLE, key) is None:
            rows[key] = open_row(row, value)
    return rows


def defaults(source: ImportedFile) -> dict[str, Any]:
    """Megatron-LM's defaults that differ from ours."""
    values = {
        **{
            "use-distributed-optimizer": False,
            "adam-beta1": 0.9,
            "adam-beta2": 0.999,
            "weight-decay": 0.01,
            "lr-decay-style": "linear",
        },
        **{"log-interval": 100, "eval-interval": 1000, "eval-iters": 100},
    }
    if source.size("mtp-num-layers"):
        values |= {"mtp-loss-scaling-factor": 0.1}
    if "data-path" in source.leaves:
        values |= {"split": "969,30,1"}
    if source.on("fp16"):
        values |= {"initial-loss-scale": 2.0**32}
    if BATCH.total not in source.leaves and source.dp and (micro := source.size(BATCH.micro)):
        values |= {BATCH.total: micro * source.dp}
    return values | megatron_model.defaults(source) | megatron_experts.defaults(source)
