"""torchtitan's TOML.

Meanings and defaults are those of its config/job_config.py, distributed/parallel_dims.py and
components/lr_scheduler.py; older names of a key have the same row.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from megalite.config.errors import ConfigError
from megalite.config.rule import show
from megalite.importers import data
from megalite.importers.data import ImportedDataset
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
    optimizer,
    rounded,
    sets,
    to_do,
    word,
)

NAME = "torchtitan"
PARALLEL, TRAINING, SCHEDULE = "parallelism.", "training.", "lr_scheduler."
DEGREES = {axis: f"{PARALLEL}{axis}_parallel_degree" for axis in ("tensor", "pipeline", "context")}
SHARD, REPLICATE = f"{PARALLEL}data_parallel_shard_degree", f"{PARALLEL}data_parallel_replicate_degree"
LOCAL, GLOBAL, MICRO = (
    f"{TRAINING}local_batch_size",
    f"{TRAINING}global_batch_size",
    f"{PARALLEL}pipeline_parallel_microbatch_size",
)
MARKS = ("job.dump_folder", "model.flavor", PARALLEL, f"{TRAINING}local_batch_size", "activation_checkpoint.")
SCHEDULES = {"1F1B": "1f1b", "GPIPE": "gpipe", "INTERLEAVED1F1B": "interleaved", "ZBVZEROBUBBLE": "zb-v"}
SWITCHES = {
    "profiling": "enable_profiling",
    "validation": "enable",
    "fault_tolerance": "enable",
    "memory_estimation": "enabled",
}
"""Section → the key that turns it on; newer or older files also have enable or enabled."""


def recognizes(leaves: dict[str, Any]) -> bool:
    return any(key.startswith(MARKS) for key in leaves)


def ranks(source: ImportedFile) -> int | None:
    """Return replicas · shards. By default, the number of shards is -1: all remaining ranks."""
    shards, replicas = source.size(SHARD), source.size(REPLICATE) or 1
    return shards * replicas if shards else source.dp


def _shards(value: Any, source: ImportedFile) -> Verdict:
    """Map the number of shards. Without it, weights are replicated (DDP)."""
    reshard, pipeline = (
        source.word(f"{PARALLEL}fsdp_reshard_after_forward", "default"),
        source.size(DEGREES["pipeline"]) or 1,
    )
    if value == 1:
        return honoured({"parallel.zero": 0, **({"parallel.dp": source.dp} if source.dp else {})})
    options: dict[str, Any] = {"parallel.zero": 3}
    if reshard == "NEVER" or (reshard == "DEFAULT" and pipeline > 1):
        options["parallel.zero3_reshard"] = "step"
    if source.dp is None:
        return honoured(options, "parallel.dp is computed from the remaining ranks, as in torchtitan")
    replicas = source.size(REPLICATE) or 1
    if source.dp % replicas == 0 and replicas > 1:
        # its shards span cp too
        options["parallel.dp_shard"] = source.dp // replicas * (source.size(DEGREES["context"]) or 1)
    return honoured(options | {"parallel.dp": source.dp})


def _replicas(value: Any, source: ImportedFile) -> Verdict:
    if source.dp:
        return _shards(source.get(SHARD), source)
    return (
        harmless("this is always the case")
        if value == 1
        else left(f"set parallel.dp_shard to parallel.dp / {value}")
    )


def _batch(value: Any, source: ImportedFile) -> Verdict:
    """Map the batch size. A pipeline splits local_batch_size into microbatches."""
    local, total, stages = (
        source.size(LOCAL) or source.size(f"{TRAINING}batch_size"),
        source.size(GLOBAL),
        source.size(DEGREES["pipeline"]) or 1,
    )
    micro = source.size(MICRO) if stages > 1 else local
    options = {"train.micro_batch_size": micro} if micro else {}
    if total:
        if local and source.dp and total % (local * source.dp):
            raise ConfigError(
                f"{GLOBAL}={total} must be a multiple of {LOCAL} * data-parallel ranks = {local} * "
                f"{source.dp}. Correct one of them."
            )
        return honoured(options | {"train.global_batch_size": total})
    if local and source.dp:
        return honoured(options | {"train.global_batch_size": local * source.dp})
    return honoured(options, f"set train.global_batch_size to {local} * parallel.dp")


def _decay(value: Any, source: ImportedFile) -> Verdict:
    """Map the decay. With decay_ratio, the learning rate is constant until the decay starts."""
    ratio, kind = source.number(f"{SCHEDULE}decay_ratio"), source.word(f"{SCHEDULE}decay_type")
    if ratio is not None:
        options = {"optimizer.decay": "wsd", "optimizer.wsd_decay_fraction": ratio}
        return honoured(options, "" if kind == "LINEAR" else "the wsd decay is always linear")
    if kind == "SQRT":
        return lost("set optimizer.decay: the closest value is linear")
    return (
        honoured({"optimizer.decay": kind.lower()})
        if kind in ("LINEAR", "COSINE")
        else lost("set optimizer.decay")
    )


def _minimum(value: Any, source: ImportedFile) -> Verdict:
    lr = source.number("optimizer.lr")
    if lr is None or type(value) not in (int, float):
        return lost("a fraction of the learning rate: set optimizer.min_lr")
    return honoured({"optimizer.min_lr": rounded(value * lr)})


def _betas(value: Any, source: ImportedFile) -> Verdict:
    return honoured({"optimizer.betas": [source.get("optimizer.beta1"), source.get("optimizer.beta2")]})


def _recompute(value: Any, source: ImportedFile) -> Verdict:
    """Map activation checkpointing.

    Per-layer selective checkpointing recomputes every n-th layer. Per-operation checkpointing saves the
    expensive matmuls.
    """
    mode, option = (
        source.word("activation_checkpoint.mode"),
        source.word("activation_checkpoint.selective_ac_option"),
    )
    if mode in ("NONE", "FULL"):
        return honoured({"train.recompute": mode.lower()})
    if mode == "SELECTIVE" and option.isdecimal() and option != "0":
        return honoured({"train.recompute": "full" if option == "1" else f"every-{option}"})
    if mode == "SELECTIVE":
        return honoured(
            {"train.recompute": "selective"}, "selective recomputes attention instead of a list of operations"
        )
    return lost("set train.recompute to none, selective, full or every-K")


@cache
def flavors() -> dict[str, dict[str, Any]]:
    """Return name/flavor → options of the section model."""
    import yaml

    table: dict[str, dict[str, Any]] = yaml.safe_load(
        Path(__file__).with_name("torchtitan_flavors.yaml").read_text(encoding="utf-8")
    )
    return table


def _flavor(value: Any, source: ImportedFile) -> Verdict:
    name = f"{source.get('model.name')}/{source.get('model.flavor')}"
    shape = flavors().get(name)
    if shape is None:
        return lost(f"unknown model (supported: {', '.join(flavors())}): set model.preset or model.from_hf")
    options = {f"model.{key}": size for key, size in shape.items()}
    remarks = {
        "llama": "earlier versions of torchtitan do not use rope_scaling" if "rope_scaling" in shape else "",
        "deepseek": "torchtitan scales rotary embeddings above 4,096 tokens only and centers the expert bias",
        "qwen": "torchtitan centers the expert bias after each step" if "router_balance" in shape else "",
    }
    return honoured(options, next(text for family, text in remarks.items() if family in name))


def _tensor(value: Any, source: ImportedFile) -> Verdict:
    """Map tensor parallelism, which always includes sequence parallelism in torchtitan."""
    return honoured(
        {"parallel.tp": value, "parallel.sequence_parallel": True} if value != 1 else {"parallel.tp": 1}
    )


def _pipeline(value: Any, source: ImportedFile) -> Verdict:
    schedule = SCHEDULES.get(source.word(f"{PARALLEL}pipeline_parallel_schedule").replace("_", ""))
    if value == 1:
        return honoured({"parallel.pp": 1})
    if schedule is None:
        return honoured({"parallel.pp": value}, "its schedule is not supported: set parallel.schedule")
    return honoured({"parallel.pp": value, "parallel.schedule": schedule})


def _context(value: Any, source: ImportedFile) -> Verdict:
    """Map the method of context parallelism, which gathers keys and values by default."""
    method = {"ALLTOALL": "ring"}.get(source.word(f"{PARALLEL}context_parallel_rotate_method"), "gather")
    return honoured({"parallel.cp": value} | ({} if value == 1 else {"parallel.context": method}))


def _layers_per_stage(value: Any, source: ImportedFile) -> Verdict:
    return left(
        f"set parallel.partition to stages of {show(value)} layers, or leave it unset to balance stages by "
        "cost"
    )


def _checkpoint_interval(value: Any, source: ImportedFile) -> Verdict:
    on = source.on("checkpoint.enable") or source.on("checkpoint.enable_checkpoint")
    return (
        honoured({"checkpoint.interval": value})
        if on
        else harmless("disabled in torchtitan; use checkpoint.minutes")
    )


DATASETS = {"c4": ("hf:allenai/c4:en", "train"), "c4_validation": ("hf:allenai/c4:en", "validation")}
"""Dataset → what `megalite prepare` calls it, and its split."""


def _data(option: str) -> KeyRule:
    """Return the row of a dataset and its path.

    Args:
        option: data.train or data.validation.
    """
    section = TRAINING if option == "data.train" else "validation."

    def judge(value: Any, source: ImportedFile) -> Verdict:
        name, path = source.get(f"{section}dataset"), source.get(f"{section}dataset_path")
        hub, split = DATASETS.get(str(name), (f"hf:{name}" if "/" in str(name) else data.FILE, "train"))
        assets = source.get("model.hf_assets_path")  # tokenizer_path names another kind of file
        inputs = data.located(path) if path else (hub,)
        if name == "c4_test" and inputs[0].endswith("/*"):
            inputs = (f"{inputs[0]}.json",)  # lines of JSON
        dataset = ImportedDataset(inputs, text=True, split="train" if path else split)
        return data.prepared(
            [dataset], assets, (), option, "PREFIX" if option == "data.train" else "VALIDATION"
        )

    return KeyRule(judge, option)


FLOAT8 = "float8 is not supported: the closest option is train.precision: bf16"
TABLE: Table = {
    "job.dump_folder": sets("run.dir"),
    **each(
        "job.",
        "description config_file print_args use_for_integration_test custom_config_module",
        never("has no effect on the run"),
    ),
    "profiling.*": missing("the closest options are profiling.steps, ranks and timeline"),
    "metrics.log_freq": sets("logging.interval"),
    "metrics.enable_tensorboard": sets("logging.tensorboard"),
    "metrics.enable_wandb": sets("logging.wandb"),
    "metrics.*": never("metrics of all ranks are written to the run directory"),
    **each("model.", "name flavor", KeyRule(_flavor, "model.preset")),
    "model.hf_assets_path": never("included in the `megalite prepare` command"),
    "model.tokenizer_path": to_do(
        "pass the Hugging Face directory of the tokenizer to `megalite prepare --tokenizer`"
    ),
    **each("model.", "converters print_after_conversion", missing(FLOAT8)),
    "optimizer.name": optimizer(
        "ADAMW", "set muon.lr: optimizer.lr only applies to the tensors that AdamW updates"
    ),
    **{f"optimizer.{key}": sets(f"optimizer.{key}") for key in ("lr", "eps", "weight_decay")},
    **each("optimizer.", "beta1 beta2", KeyRule(_betas, "optimizer.betas")),
    **each("optimizer.", "implementation fused foreach", never("AdamW is always fused")),
    "optimizer.early_step_in_backward": missing(
        "the optimizer step runs after backward because clipping requires the global norm"
    ),
    f"{SCHEDULE}warmup_steps": sets("optimizer.warmup_steps"),
    **each(SCHEDULE, "decay_type decay_ratio", KeyRule(_decay, "optimizer.decay")),
    **each(SCHEDULE, "lr_min min_lr_factor", KeyRule(_minimum, "optimizer.min_lr")),
    f"{SCHEDULE}total_steps": to_do("the schedule always ends at train.steps"),
    **each(
        TRAINING, "local_batch_size batch_size global_batch_size", KeyRule(_batch, "train.global_batch_size")
    ),
    MICRO: KeyRule(_batch, "train.micro_batch_size"),
    f"{TRAINING}seq_len": sets("data.sequence_length"),
    f"{TRAINING}max_norm": sets("train.grad_clip"),
    f"{TRAINING}steps": sets("train.steps"),
    **each(TRAINING, "dataset dataset_path", _data("data.train")),
    f"{TRAINING}enable_cpu_offload": KeyRule(
        lambda value, _: honoured(
            {"parallel.offload": "cpu", "parallel.offload_parameters": True}
            if value
            else {"parallel.offload": "none"}
        )
    ),
    f"{TRAINING}mixed_precision_param": sets(
        "train.precision",
        {"BFLOAT16": "bf16", "FLOAT32": "fp32"},
        "the closest option is train.precision: bf16",
    ),
    f"{TRAINING}mixed_precision_reduce": sets(
        "parallel.reduce_dtype",
        {"FLOAT32": "fp32", "BFLOAT16": "bf16"},
        "parallel.reduce_dtype must be fp32 or bf16",
    ),
    f"{TRAINING}dtype": only("FLOAT32", "master weights are always fp32"),
    **each("", f"{TRAINING}compile compile.enable", sets("train.compile")),
    "compile.*": never("train.compile has no further options"),
    **each("", f"{TRAINING}seed debug.seed", sets("run.seed")),
    **each("", f"{TRAINING}deterministic debug.deterministic", sets("run.deterministic")),
    **each(TRAINING, "gc_freq gc_debug", never("garbage collection is not configurable")),
    "debug.*": never("has no effect on the run"),
    SHARD: KeyRule(_shards, "parallel.zero"),
    REPLICATE: KeyRule(_replicas, "parallel.dp_shard"),
    f"{PARALLEL}fsdp_reshard_after_forward": never("parallel.zero3_reshard is set instead"),
    DEGREES["tensor"]: KeyRule(_tensor, "parallel.tp"),
    DEGREES["pipeline"]: KeyRule(_pipeline, "parallel.pp"),
    DEGREES["context"]: KeyRule(_context, "parallel.cp"),
    f"{PARALLEL}context_parallel_rotate_method": never(
        "parallel.context is set instead if context parallelism is used"
    ),
    f"{PARALLEL}context_parallel_*": never("only affects how context-parallel ranks communicate"),
    f"{PARALLEL}pipeline_parallel_schedule": never(
        "parallel.schedule is set if pipeline parallelism is used"
    ),
    **each(
        PARALLEL,
        "pipeline_parallel_layers_per_stage pipeline_parallel_split_points module_fqns_per_model_part",
        KeyRule(_layers_per_stage),
    ),
    **each(
        PARALLEL,
        "pipeline_parallel_first_stage_less_layers pipeline_parallel_last_stage_less_layers",
        never("stages are balanced by cost"),
    ),
    f"{PARALLEL}pipeline_parallel_schedule_csv": only(
        "", "see parallel.schedule for the supported schedules"
    ),
    f"{PARALLEL}expert_parallel_degree": sets("parallel.ep"),
    f"{PARALLEL}expert_tensor_parallel_degree": only(
        "1", "experts are not split: parallel.ep also distributes them over tp ranks"
    ),
    **each(
        PARALLEL,
        "expert_parallel_comm_backend expert_parallel_a2a_impl",
        never("parallel.expert_dispatch has a single implementation"),
    ),
    **each(
        PARALLEL,
        "disable_loss_parallel enable_async_tensor_parallel enable_compiled_autograd",
        never("there is a single implementation"),
    ),
    **each("checkpoint.", "enable enable_checkpoint", never("checkpoint.interval is set if enabled")),
    "checkpoint.interval": KeyRule(_checkpoint_interval, "checkpoint.interval"),
    "checkpoint.async_mode": KeyRule(
        lambda value, _: honoured({"checkpoint.async_save": word(value) != "DISABLED"}),
        "checkpoint.async_save",
    ),
    "checkpoint.keep_latest_k": KeyRule(
        lambda value, _: (
            honoured({"checkpoint.keep": value}) if value else harmless("all checkpoints are kept by default")
        )
    ),
    "checkpoint.initial_load_path": to_do(
        "convert the weights to Hugging Face format, run `megalite convert import` and set model.init_from"
    ),
    "checkpoint.load_step": only(
        "-1", "set checkpoint.load to that step's directory", "the newest checkpoint is loaded by default"
    ),
    "checkpoint.*": never("checkpoints always contain the whole model and can be loaded with any layout"),
    **each("activation_checkpoint.", "mode selective_ac_option", KeyRule(_recompute, "train.recompute")),
    "activation_checkpoint.*": never("train.recompute has no further options"),
    **each(
        "",
        "float8.* mx.* quantize.*",
        never("only used if converters selects it; float8 is not supported"),
    ),
    "comm.init_timeout_seconds": KeyRule(
        lambda value, _: honoured({"run.timeout": f"{value}s"}), "run.timeout"
    ),
    "comm.*": never("only run.timeout and the watchdog are supported"),
    "memory_estimation.*": missing("use `megalite train --dry_run` to estimate memory"),
    "fault_tolerance.*": missing("use torchrun's --max-restarts; see docs/faults.md"),
    "experimental.*": missing("the imported module only works with torchtitan"),
    "validation.freq": sets("validation.interval"),
    "validation.steps": KeyRule(
        lambda value, _: (
            harmless("all of the data is used by default")
            if value == -1
            else honoured({"validation.batches": value})
        )
    ),
    **each("validation.", "dataset dataset_path", _data("data.validation")),
    **each(
        "validation.",
        "enable enabled local_batch_size seq_len",
        never("validation uses the batch size and sequence length of training"),
    ),
}


def table(source: ImportedFile) -> Table:
    """Return the rows for this file's keys: those of sections that are off are harmless."""
    rows = dict(TABLE)
    for section, switch in SWITCHES.items():
        if not any(source.on(f"{section}.{name}") for name in (switch, "enable", "enabled")):
            rows |= {
                key: never(f"{section} is disabled") for key in source.leaves if key.startswith(f"{section}.")
            }
    return rows


def defaults(source: ImportedFile) -> dict[str, Any]:
    """Return torchtitan's defaults that differ from megalite's."""
    factor = "lr_min" if f"{SCHEDULE}lr_min" in source.leaves else "min_lr_factor"
    batch = {} if f"{TRAINING}batch_size" in source.leaves else {LOCAL: 8}
    return {
        **{
            "optimizer.lr": 8e-4,
            "optimizer.beta1": 0.9,
            "optimizer.beta2": 0.95,
            "optimizer.weight_decay": 0.1,
        },
        **{f"{SCHEDULE}warmup_steps": 200, f"{SCHEDULE}decay_type": "linear", f"{SCHEDULE}{factor}": 0.0},
        **{
            f"{TRAINING}seq_len": 2048,
            f"{TRAINING}steps": 10000,
            f"{TRAINING}mixed_precision_param": "bfloat16",
            **batch,
        },
        **{SHARD: -1, MICRO: 1, f"{PARALLEL}pipeline_parallel_schedule": "1F1B"},
        **{
            "activation_checkpoint.mode": "selective",
            "activation_checkpoint.selective_ac_option": "2",
            "metrics.log_freq": 10,
        },
        **{"model.name": "llama3", "model.flavor": "debugmodel"},
    }
