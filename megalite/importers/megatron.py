"""Megatron-LM's command-line arguments.

Meanings and defaults are those of its megatron/training/arguments.py, training.py and
megatron/core/optimizer_param_scheduler.py. The model's shape is in megatron_model.py, with
megatron_experts.py, megatron_latent_attention.py and megatron_hybrid.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from megalite.config import rampup
from megalite.config.sections.train import TrainConfig
from megalite.importers import (
    finetuning,
    megatron_experts,
    megatron_hybrid,
    megatron_model,
    megatron_script,
)
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
    + tuple(megatron_hybrid.SWITCHES)
)
"""Arguments without a value: a variable that follows is one of further arguments."""


def parse(text: str, read: Callable[[str], str | None] = lambda path: None, name: str = "") -> dict[str, Any]:
    """Return the arguments of a command or of the training command in a script: name → value.

    The value is true for a switch, and a list for several values.

    Args:
        read: path of another script that this one names → its text; None if there is none.
        name: the script's own path.
    """
    return megatron_script.parse(text, MARKS, SWITCHES, read, name)


def of_yaml(tree: Any) -> Any:
    """Return the arguments under MODEL_ARGS of a YAML file, as in Megatron-LM's functional tests.

    Other content is returned unchanged.
    """
    given = tree.get("MODEL_ARGS") if isinstance(tree, dict) else None
    return megatron_script.of_mapping(given) if isinstance(given, dict) else tree


def recognizes(leaves: dict[str, Any]) -> bool:
    return any(key in leaves for key in MARKS)


def ranks(source: ImportedFile) -> int | None:
    """Return the launcher's processes, divided by tp, pp and cp, or None if one of them is not known."""
    processes, parts = _world(source), [source.count(key) for key in (TP, PP, CP)]
    replica = math.prod(part or 0 for part in parts)
    if source.dp is None and processes and replica and processes % replica == 0:
        return processes // replica
    return source.dp


def _world(source: ImportedFile) -> int | None:
    """Return the number of processes.

    torchrun and DeepSpeed give the number per node and the number of nodes, Accelerate and Slurm the total.
    """
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
        else left("set parallel.dp to the number of processes / (tp * pp * cp)")
    )


STRATEGIES = {"NO_SHARD": 0, "OPTIM": 1, "OPTIM_GRADS": 2, "OPTIM_GRADS_PARAMS": 3}


def _zero(value: Any, source: ImportedFile) -> Verdict:
    """Map the distributed optimizer to ZeRO-1, and FSDP by its sharding strategy (no_shard by default)."""
    if source.on("use-torch-fsdp2"):
        return honoured({"parallel.zero": 3})
    if source.on("use-megatron-fsdp") or source.on("use-custom-fsdp"):
        stage = STRATEGIES.get(source.word("data-parallel-sharding-strategy", "no_shard"))
        return lost("set parallel.zero") if stage is None else honoured({"parallel.zero": stage})
    return honoured({"parallel.zero": int(source.on("use-distributed-optimizer"))})


def _instances(value: Any, source: ImportedFile) -> Verdict:
    if value == 1:
        return harmless("this is always the case")
    cp = source.count(CP)
    if source.dp and cp and type(value) is int and value > 0 and source.dp % value == 0:
        return honoured({"parallel.dp": source.dp, "parallel.dp_shard": source.dp // value * cp})
    return left(f"set parallel.dp_shard to parallel.dp / {value}")


def _virtual(value: Any, source: ImportedFile) -> Verdict:
    """Map the virtual pipeline: stages per rank, or layers per stage."""
    layers, stages = source.size("num-layers"), source.count(PP)
    per_rank = source.size("num-virtual-stages-per-pipeline-rank")
    per_stage = source.size("num-layers-per-virtual-pipeline-stage")
    if per_rank is None and layers and stages and per_stage and layers % (stages * per_stage) == 0:
        per_rank = layers // (stages * per_stage)
    if per_rank is None or per_rank == 1:
        return (
            lost("set parallel.schedule: interleaved and parallel.virtual_stages")
            if per_rank is None
            else harmless("this is always the case")
        )
    return honoured({"parallel.schedule": "interleaved", "parallel.virtual_stages": per_rank})


def _partition(value: Any, source: ImportedFile) -> Verdict:
    """Map the layers of the first and the last stage. The others share the rest evenly."""
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
    """Return the batch sizes of a run that starts with smaller ones, or None if it does not."""
    ramp, batch = source.get(RAMP), source.size(BATCH.total)
    if not batch or not isinstance(ramp, list) or not all(type(part) is int for part in ramp):
        return None
    train = TrainConfig(global_batch_size=batch, rampup_batch_size=ramp)
    return None if rampup.problem(train) else train


def _train_samples(value: Any, source: ImportedFile) -> Verdict:
    """Return the steps that read so many samples, also with batches that grow."""
    ramp = _ramp(source)
    if ramp is None or type(value) is not int or value < 1:
        return _samples("train.steps").judge(value, source)
    steps = rampup.steps_for(ramp, value)
    return honoured(
        {"train.steps": steps},
        "" if rampup.samples_after(ramp, steps) == value else "the last step uses a full batch",
    )


def _steps(source: ImportedFile) -> int | None:
    samples = source.get("train-samples")
    return source.size("train-iters") or _train_samples(samples, source).options.get("train.steps")


def _samples(option: str) -> KeyRule:
    """Return a row for a number of samples, which is converted to steps."""

    def judge(value: Any, source: ImportedFile) -> Verdict:
        batch = source.size(BATCH.total)
        if not batch or type(value) is not int:
            return left(f"set {option} to {value} / train.global_batch_size")
        return honoured({option: value // batch}, "" if value % batch == 0 else "rounded to whole steps")

    return KeyRule(judge, option)


def _horizon(value: Any, source: ImportedFile) -> Verdict:
    """Check the length of the schedule, which always ends with the run in megalite."""
    steps, batch = _steps(source), source.size(BATCH.total)
    end = source.size("lr-decay-iters") or (batch and (source.size("lr-decay-samples") or 0) // batch)
    if source.word("lr-decay-style", "linear") == "CONSTANT" or end == steps:
        return harmless("the schedule always ends at train.steps")
    return lost(
        f"the schedule ends at train.steps instead of step {end}, after which Megatron-LM keeps "
        "optimizer.min_lr"
    )


def _warmup_fraction(value: Any, source: ImportedFile) -> Verdict:
    """Return a share of the steps over which the rate decays."""
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
        return lost("optimizer.decay must be cosine, linear, wsd or constant: the closest is linear")
    if style != "wsd":
        return honoured({"optimizer.decay": style})
    length = source.size("lr-wsd-decay-iters")
    options: dict[str, Any] = {"optimizer.decay": "wsd"} | (
        {"optimizer.wsd_decay_fraction": length / steps} if length and steps else {}
    )
    exact = source.word("lr-wsd-decay-style", "exponential") == "LINEAR" and len(options) == 2
    return honoured(
        options,
        ""
        if exact
        else "the wsd decay is always linear, over the fraction optimizer.wsd_decay_fraction of the run",
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
        return lost("set train.recompute to none, selective, full or every-K")
    every = method == "UNIFORM" and source.size("recompute-num-layers") in (1, None)
    return honoured(
        {"train.recompute": "full"},
        "" if every else "every layer is recomputed separately: use every-K to recompute fewer layers",
    )


def _modules(value: Any, source: ImportedFile) -> Verdict:
    if not source.on("recompute-activations") and source.word("recompute-granularity", "none") in (
        "NONE",
        "FULL",
    ):
        return harmless("only applies to selective recomputation")
    return (
        harmless("selective recomputation of attention is the default")
        if word(value) in ("CORE_ATTN", "['CORE_ATTN']")
        else lost("only attention is supported")
    )


def _data(value: Any, source: ImportedFile) -> Verdict:
    """Map the data: PREFIX, or WEIGHT PREFIX WEIGHT PREFIX …. The format of token files is the same."""
    parts = value if isinstance(value, list) else [value]
    numbers = [type(part) in (int, float) for part in parts]
    if len(parts) > 1 and numbers == [True, False] * (len(parts) // 2):
        weights: dict[str, float] = {}
        for weight, prefix in zip(parts[::2], parts[1::2], strict=True):
            weights[prefix] = rounded(weights.get(prefix, 0.0) + weight)
        return honoured({"data.train": weights})
    return honoured({"data.train": value if isinstance(value, str) else [str(part) for part in parts]})


def _split(value: Any, source: ImportedFile) -> Verdict:
    """Map the split into training, validation and test data."""
    parts = [float(part) for part in re.findall(r"\d+\.?\d*|\.\d+", str(value))] + [0.0, 0.0]
    if not sum(parts):
        return lost("set data.validation to a fraction of the data")
    if not parts[1] or "data-path" not in source.leaves:
        return harmless(
            "separate validation data is used instead" if parts[1] else "no validation, which is the default"
        )
    share = float(f"{parts[1] / sum(parts):.6g}")
    return honoured({"data.validation": share}, "the test split is used for training" if parts[2] else "")


def _validated(source: ImportedFile) -> bool:
    return "valid-data-path" in source.leaves or (
        "data-path" in source.leaves and bool(_split(source.get("split"), source).options)
    )


def _validation(option: str) -> KeyRule:
    off = harmless("no validation without validation data")
    return KeyRule(
        lambda value, source: honoured({option: value}) if _validated(source) and value else off, option
    )


def _documents(value: Any, source: ImportedFile) -> Verdict:
    if source.on("reset-position-ids") and source.on("reset-attention-mask"):
        return honoured({"data.reset_positions": True})
    return lost("data.reset_positions resets both positions and attention")


def _load(value: Any, source: ImportedFile) -> Verdict:
    if value == source.get("save"):
        return harmless("checkpoint.load: auto resumes the run by default")
    return left(
        "run `megalite convert import megatron:DIR CHECKPOINT` and set model.init_from, or checkpoint.load"
    )


def _scale_power(value: Any, source: ImportedFile) -> Verdict:
    power = math.log2(value) if type(value) in (int, float) and value > 0 else 0.5
    return honoured(
        {"fp16.initial_scale_power": round(power)},
        "" if power == round(power) else "rounded to a power of two",
    )


def _has(source: ImportedFile, key: str) -> bool:
    """Return whether a key is set, or may be set by unknown arguments."""
    return key in source.leaves or bool(source.unsettled())


def _checkpoint_activations(value: Any, source: ImportedFile) -> Verdict:
    """Return the older names of full recomputation."""
    every = source.count("checkpoint-num-layers", 1) == 1
    return honoured(
        {"train.recompute": "full"},
        "" if every else "every layer is recomputed separately: use every-K to recompute fewer layers",
    )


OVERLAP, FUSED = "always enabled", "fused operations are selected by train.kernels"
TOKENS = (
    "the tokenizer is recorded in PREFIX.json, written by `megalite prepare --tokenizer`, or by hand with "
    "vocab_size and eos"
)
METRICS = "written to metrics.jsonl for each step"
FP8 = "float8 is not supported: the closest option is train.precision: bf16"
FORMAT = "checkpoints always contain the whole model and can be loaded with any layout"
TABLE: Table = {
    **megatron_model.TABLE,
    **megatron_experts.TABLE,
    **latent_attention.TABLE,
    **megatron_hybrid.TABLE,
    **BATCH.table(),
    **megatron_script.TABLE,
    **{f"{LAUNCH}{key}": KeyRule(_processes, "parallel.dp") for key, _ in PROCESSES},
    TP: sets("parallel.tp"),
    PP: sets("parallel.pp"),
    CP: sets("parallel.cp"),
    "cp-comm-type": sets(
        "parallel.context",
        {"P2P": "ring", "ALL_GATHER": "gather", "A2A": "ulysses"},
        "all layers and ranks use the same method: parallel.context must be ulysses, gather or ring",
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
        never("stages are balanced by cost, including the head"),
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
    **each("decoupled-", "lr min-lr", missing("all weights use the same learning rate, optimizer.lr")),
    "optimizer": only(
        "ADAM",
        "only AdamW and Muon are supported: set optimizer.name and optimizer.* or muon.*",
        "AdamW is the default",
    ),
    **each("", "adam-beta1 adam-beta2", KeyRule(_betas, "optimizer.betas")),
    "adam-eps": sets("optimizer.eps"),
    "weight-decay": sets("optimizer.weight_decay"),
    **each(
        "",
        "start-weight-decay end-weight-decay",
        missing("weight decay is always constant: set optimizer.weight_decay"),
    ),
    "weight-decay-incr-style": only(
        "CONSTANT", "weight decay is always constant: set optimizer.weight_decay"
    ),
    "clip-grad": sets("train.grad_clip"),
    "bf16": sets("train.precision", {"TRUE": "bf16"}),
    "fp16": sets("train.precision", {"TRUE": "fp16"}),
    "initial-loss-scale": KeyRule(_scale_power, "fp16.initial_scale_power"),
    "min-loss-scale": sets("fp16.min_loss_scale"),
    "loss-scale-window": sets("fp16.loss_scale_window"),
    "hysteresis": sets("fp16.hysteresis"),
    "loss-scale": missing("the loss scale is always dynamic, starting from fp16.initial_scale_power"),
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
        "the architecture is read from the checkpoint, as by `megalite convert import megatron:DIR`"
    ),
    "yaml-cfg": to_do("the arguments are in that file: pass them instead"),
    **each(
        "",
        "checkpoint-activations activations-checkpoint-method",
        KeyRule(_checkpoint_activations, "train.recompute"),
    ),
    "zero-stage": sets("parallel.zero"),
    "deepspeed-config": to_do("convert this file with `megalite import-config` too"),
    **each(
        "",
        "deepspeed deepspeed-activation-checkpointing DDP-impl no-pipeline-parallel",
        never("determined by the other arguments"),
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
    "save": sets("run.dir", roughly="the run directory is run.dir/run.name"),
    "load": KeyRule(_load, "checkpoint.load"),
    **each(
        "",
        "finetune no-load-optim no-load-rng",
        to_do("use model.init_from, which loads only the weights and starts at step 0"),
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
    "exit-interval": missing("the closest option is train.stop_after, a duration"),
    "distributed-timeout-minutes": KeyRule(
        lambda value, _: honoured({"run.timeout": f"{value}m"}), "run.timeout"
    ),
    "eval-interval": _validation("validation.interval"),
    "eval-iters": _validation("validation.batches"),
    "log-interval": sets("logging.interval"),
    "tensorboard-dir": KeyRule(
        lambda value, _: honoured({"logging.tensorboard": True}, "written to the run directory"),
        "logging.tensorboard",
    ),
    "wandb-project": sets("logging.wandb"),
    "wandb-exp-name": sets("run.name"),
    **each(
        "", "wandb-* tensorboard-* log-* timing-* no-one-logger one-logger-* logging-level", never(METRICS)
    ),
    "profile*": missing("use profiling.ranks and profiling.steps to trace with torch.profiler"),
    "use-cpu-initialization": never("initial weights do not depend on the device"),
    "calculate-per-token-loss": never("the loss is always averaged over all tokens"),
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
        never("no corresponding option"),
    ),
    **each(
        "",
        "no-create-attention-mask-in-dataloader no-mmap-bin-files dataloader-type distributed-backend",
        never("no corresponding option"),
    ),
    "expert-*": missing("no corresponding option"),
}


def table(source: ImportedFile) -> Table:
    """Return the rows for these arguments. Arguments with unknown values are left open."""
    rows = dict(TABLE)
    for key, value in source.leaves.items():
        row = row_of(TABLE, key)
        if row is not None and unknown_parts(value) and row_of(megatron_script.TABLE, key) is None:
            rows[key] = open_row(row, value)
    return rows


def defaults(source: ImportedFile) -> dict[str, Any]:
    """Return Megatron-LM's defaults that differ from megalite's."""
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
    shape = megatron_model.defaults(source) | megatron_hybrid.defaults(source)
    return values | shape | megatron_experts.defaults(source)
