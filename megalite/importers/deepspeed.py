"""DeepSpeed's ds_config.json.

Meanings and defaults are those of its docs/_pages/config-json.md, runtime/config.py, runtime/zero/config.py
and runtime/lr_schedules.py.
"""

from __future__ import annotations

from typing import Any

from megalite.importers.batch import Batch
from megalite.importers.verdict import (
    ImportedFile,
    KeyRule,
    Table,
    Verdict,
    each,
    harmless,
    honoured,
    lost,
    never,
    only,
    optimizer,
    rounded,
    sets,
    word,
)

NAME = "DeepSpeed"
BATCH = Batch("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
ZERO, ADAM, WARMUP = "zero_optimization.", "optimizer.params.", "scheduler.params."
MARKS = (
    *BATCH,
    ZERO[:-1],
    "gradient_clipping",
    "fp16.enabled",
    "bf16.enabled",
    "optimizer.type",
    "scheduler.type",
)
"""Keys that identify a DeepSpeed configuration: it has some of them, and no other file has."""
OFF = (
    "fp16",
    "bf16",
    "bfloat16",
    "tensorboard",
    "wandb",
    "csv_monitor",
    "comet",
    "flops_profiler",
    "comms_logger",
    "amp",
    "elasticity",
)
"""Sections that are off unless they set `enabled`."""


def recognizes(leaves: dict[str, Any]) -> bool:
    return any(key.startswith(MARKS) for key in leaves)


def ranks(source: ImportedFile) -> int | None:
    return source.dp


def _learning_rate(value: Any, source: ImportedFile) -> Verdict:
    replaced = source.get(f"{WARMUP}warmup_max_lr", default_warmup(source).get("warmup_max_lr"))
    return (
        honoured({"optimizer.lr": value})
        if replaced is None
        else harmless("overridden by scheduler.params.warmup_max_lr")
    )


def _minimum(value: Any, source: ImportedFile) -> Verdict:
    adam = default_adam(source)
    lr = source.get(f"{ADAM}lr", adam["lr"]) if adam else None
    if {type(lr), type(value)} <= {int, float}:
        return honoured({"optimizer.min_lr": rounded(value * lr)})
    return lost("a fraction of a learning rate that the file does not set: set optimizer.min_lr")


def _weight_decay(value: Any, source: ImportedFile) -> Verdict:
    return honoured(
        {"optimizer.weight_decay": value},
        "weight decay is never applied to norms and biases" if value else "",
    )


def offload_parameters(stage: str, default: int) -> KeyRule:
    """Return the row of a parameter-offload key.

    Args:
        stage: the key of the ZeRO stage, which must be 3.
        default: its default.
    """

    def judge(value: Any, source: ImportedFile) -> Verdict:
        if word(value) in ("NONE", "FALSE"):
            return honoured({"parallel.offload_parameters": False})
        if source.word(stage, default) != "3":
            return lost("only applies to ZeRO stage 3: set parallel.zero: 3")
        if word(value) not in ("CPU", "NVME", "TRUE"):
            return lost("parallel.offload_parameters must be true or false")
        return honoured(
            {"parallel.offload_parameters": True},
            "weights can be offloaded to CPU memory, but not to disk" if word(value) == "NVME" else "",
        )

    return KeyRule(judge, "parallel.offload_parameters")


def nvme_path(device: str) -> KeyRule:
    """Return the row of an offload directory, which is used only if the device is NVME.

    Args:
        device: the key of the device.
    """
    away = harmless("no offloading to disk")
    return KeyRule(
        lambda value, source: (
            honoured({"parallel.offload_dir": value}) if source.word(device) == "NVME" else away
        )
    )


DEVICES = {"NONE": "none", "CPU": "cpu", "NVME": "disk", "TRUE": "cpu", "FALSE": "none"}
GATHERING = "layers are gathered as a whole and prefetched (parallel.zero3_reshard, parallel.bucket_mb)"
WHOLE = "checkpoints always contain the whole model and can be loaded with any layout"
TRANSFERS = "offload transfers are not configurable"
PROFILE = "use profiling.timeline; metrics.jsonl contains the time and memory of each step"
DIVIDED = "the loss is divided before backward, so gradients are only summed"
BOOLEAN = "expected true or false"
STEP = only("FALSE", "not supported, and changes the result of a step", "disabled")
OFFLOAD = sets("parallel.offload", DEVICES, "parallel.offload must be none, cpu or disk")
STAGE = sets(
    "parallel.zero", {str(stage): stage for stage in range(4)}, "the ZeRO stage must be 0, 1, 2 or 3"
)
TABLE: Table = {
    **BATCH.table(),
    "gradient_clipping": sets("train.grad_clip"),
    "steps_per_print": sets("logging.interval"),
    "zero_optimization": sets("parallel.zero", {"TRUE": 1, "FALSE": 0}, BOOLEAN),
    f"{ZERO}stage": STAGE,
    f"{ZERO}reduce_bucket_size": sets(
        "parallel.bucket_mb",
        roughly="parallel.bucket_mb is the maximum size of a bucket in MB of fp32",
        scale=4e-6,
    ),
    f"{ZERO}offload_optimizer.device": OFFLOAD,
    f"{ZERO}offload_optimizer.nvme_path": nvme_path(f"{ZERO}offload_optimizer.device"),
    f"{ZERO}offload_optimizer.ratio": only("1", "partial offloading of the optimizer state is not supported"),
    f"{ZERO}offload_param.device": offload_parameters(f"{ZERO}stage", 0),
    f"{ZERO}cpu_offload": OFFLOAD,
    f"{ZERO}cpu_offload_param": offload_parameters(f"{ZERO}stage", 0),
    **each(ZERO, "offload_optimizer.* offload_param.* cpu_offload_use_pin_memory", never(TRANSFERS)),
    f"{ZERO}mics_shard_size": KeyRule(
        lambda size, _: harmless("disabled") if size == -1 else honoured({"parallel.dp_shard": size})
    ),
    f"{ZERO}zero_hpz_partition_size": only(
        "1", "the closest option is parallel.dp_shard, which shards all states within groups"
    ),
    **each(
        f"{ZERO}zero_quantized_",
        "weights gradients nontrainable_weights",
        only("FALSE", "the closest option is parallel.reduce_dtype: bf16"),
    ),
    f"{ZERO}stage3_param_persistence_threshold": only("0", "small tensors are always sharded"),
    **each(
        ZERO,
        "overlap_comm contiguous_gradients reduce_scatter round_robin_gradients",
        never("always enabled"),
    ),
    **each(ZERO, "allgather_partitions allgather_bucket_size sub_group_size", never(GATHERING)),
    **each(ZERO, "max_live_parameters max_reuse_distance", never(GATHERING)),
    f"{ZERO}gather_16bit_weights_on_model_save": never(WHOLE),
    **each(
        f"{ZERO}stage3_",
        "max_live_parameters max_reuse_distance prefetch_bucket_size model_persistence_threshold",
        never(GATHERING),
    ),
    **each(f"{ZERO}stage3_gather_", "16bit_weights_on_model_save fp16_weights_on_model_save", never(WHOLE)),
    **each(ZERO, "elastic_checkpoint load_from_fp32_weights", never(WHOLE)),
    f"{ZERO}ignore_unused_parameters": never("all parameters are used"),
    "fp16.enabled": sets("train.precision", {"TRUE": "fp16"}, BOOLEAN),
    **{
        f"fp16.{key}": sets(f"fp16.{key}")
        for key in ("initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")
    },
    "fp16.loss_scale": only(
        "0",
        "the loss scale is always dynamic, starting from fp16.initial_scale_power",
        "0 selects dynamic loss scaling, which is always used",
    ),
    "fp16.consecutive_hysteresis": only("FALSE", "fp16.hysteresis is reset when the scale is doubled"),
    **each(
        "fp16.", "auto_cast fused_mode", never("not needed: inputs are token ids, and AdamW is always fused")
    ),
    **each("", "bf16.enabled bfloat16.enabled", sets("train.precision", {"TRUE": "bf16"}, BOOLEAN)),
    "bf16.immediate_grad_update": never("gradients are always accumulated immediately"),
    **each(
        "",
        "fp16.fp16_master_weights_and_grads bf16.bf16_master_weights_and_grads",
        only("FALSE", "master weights are always fp32"),
    ),
    "bf16.bf16_optimizer_states": sets("optimizer.moments", {"TRUE": "bf16", "FALSE": "fp32"}),
    **each("", "amp.enabled torch_autocast.enabled", only("FALSE", "use train.precision: bf16 or fp16")),
    "data_types.grad_accum_dtype": sets(
        "train.grad_dtype", {"FP32": "fp32", "BF16": "bf16"}, "train.grad_dtype must be fp32 or bf16"
    ),
    "communication_data_type": sets(
        "parallel.reduce_dtype",
        {"FP32": "fp32", "BF16": "bf16", "BFP16": "bf16"},
        "parallel.reduce_dtype must be fp32 or bf16",
    ),
    "optimizer.type": optimizer("ADAM ADAMW"),
    f"{ADAM}lr": KeyRule(_learning_rate, "optimizer.lr"),
    **{f"{ADAM}{key}": sets(f"optimizer.{key}") for key in ("betas", "eps")},
    f"{ADAM}weight_decay": KeyRule(_weight_decay, "optimizer.weight_decay"),
    f"{ADAM}max_grad_norm": sets("train.grad_clip"),
    f"{ADAM}adam_w_mode": only(
        "TRUE", "weight decay is always decoupled (AdamW): adjust optimizer.weight_decay"
    ),
    f"{ADAM}bias_correction": only("TRUE", "AdamW always applies bias correction"),
    f"{ADAM}amsgrad": only("FALSE", "AMSGrad is not supported"),
    **each(
        "optimizer.",
        "params.torch_adam params.fused params.foreach legacy_fusion",
        never("AdamW is always fused"),
    ),
    "scheduler.type": sets(
        "optimizer.decay",
        {"WARMUPLR": "constant", "WARMUPDECAYLR": "linear", "WARMUPCOSINELR": "cosine"},
        "optimizer.decay must be cosine, linear, wsd or constant",
    ),
    f"{WARMUP}warmup_max_lr": sets("optimizer.lr"),
    f"{WARMUP}warmup_num_steps": sets("optimizer.warmup_steps"),
    f"{WARMUP}total_num_steps": sets("train.steps"),
    f"{WARMUP}cos_min_ratio": KeyRule(_minimum, "optimizer.min_lr"),
    f"{WARMUP}warmup_type": only("LINEAR", "warm-up is always linear: adjust optimizer.warmup_steps"),
    **each(
        WARMUP,
        "warmup_min_lr warmup_min_ratio",
        only("0", "warm-up always starts at 0: adjust optimizer.warmup_steps"),
    ),
    f"{WARMUP}last_batch_iteration": only("-1", "runs start at step 0: use checkpoint.load to resume"),
    "tensorboard.enabled": sets("logging.tensorboard", {"TRUE": True}, BOOLEAN),
    **each(
        "tensorboard.",
        "output_path job_name",
        only("", "logs are written to the run directory: set run.dir and run.name"),
    ),
    "wandb.enabled": only("TRUE", BOOLEAN, "enabled by wandb.project"),
    "wandb.project": sets("logging.wandb"),
    **each(
        "",
        "wall_clock_breakdown memory_breakdown dump_state flops_profiler.* comms_logger.*",
        only("FALSE", PROFILE, "disabled"),
    ),
    "_comment*": never("comment"),
    **each(
        "",
        "progressive_layer_drop.* data_efficiency.* curriculum_learning.* compression_training.* "
        "sparse_attention.*",
        STEP,
    ),
    "autotuning.*": only("FALSE", "use `megalite plan` to choose a layout", "disabled"),
    **each("compile.", "disable backend deepcompile", never("determined by train.compile")),
    "activation_checkpointing.*": only("FALSE", "use train.recompute", "disabled"),
    "aio.*": never(TRANSFERS),
    "checkpoint.*": never(WHOLE),
    "elasticity.*": only("FALSE", "checkpoints can be loaded with any number of ranks: restart the run"),
    "seq_parallel_communication_data_type": never("activations are sent in their own dtype"),
    "prescale_gradients": only("FALSE", DIVIDED),
    "gradient_predivide_factor": only("1", DIVIDED),
    "sparse_gradients": only("FALSE", "gradients are always dense"),
    **each(
        "",
        "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer",
        never("all optimizers are supported at every stage"),
    ),
    "dataloader_drop_last": never("the data repeats, so every batch is full"),
    "tensor_parallel.autotp_size": only("0 1", "set parallel.tp, and parallel.dp to the remaining ranks"),
}


def _muon_lr(value: Any, source: ImportedFile) -> Verdict:
    """Return the learning rate of tensors to which neither adam_lr nor muon_lr applies."""
    rest = {
        option: value
        for key, option in (("adam_lr", "optimizer.lr"), ("muon_lr", "muon.lr"))
        if source.get(ADAM + key) is None
    }
    return honoured(rest) if rest else harmless("overridden by adam_lr and muon_lr")


DECAYS = ("optimizer.weight_decay", "muon.weight_decay")
MUON: Table = {
    f"{ADAM}lr": KeyRule(_muon_lr, "muon.lr"),
    f"{ADAM}muon_lr": sets("muon.lr"),
    f"{ADAM}adam_lr": sets("optimizer.lr"),
    f"{ADAM}momentum": sets("muon.momentum"),
    f"{ADAM}weight_decay": KeyRule(
        lambda value, _: honoured({"optimizer.weight_decay": value, "muon.weight_decay": value}),
        "muon.weight_decay",
    ),
}
"""Rows of the parameters of Muon, which updates the matrices, and of the Adam beside it."""


def table(source: ImportedFile) -> Table:
    """Return the rows for this file's keys.

    Parameters of optimizers other than Adam and Muon are lost; keys of sections that are off are harmless.
    """
    rows, name = dict(TABLE), source.get("optimizer.type", "AdamW")
    if word(name) == "MUON":
        rows |= MUON
    for key in source.leaves:
        if key.startswith(ADAM) and word(name) not in ("ADAM", "ADAMW", "MUON"):
            rows[key] = KeyRule(lambda value, _: lost(f"only applies to {name}: set optimizer.* for AdamW"))
        section = next(
            (part for part in _sections(key) if source.word(f"{part}.enabled", part not in OFF) == "FALSE"),
            None,
        )
        if section:
            rows[key] = never(f"{section} is disabled")
    return rows


def _sections(key: str) -> list[str]:
    """Return the sections that contain a key, outermost first."""
    return [key[:end] for end, letter in enumerate(key) if letter == "."]


def defaults(source: ImportedFile) -> dict[str, Any]:
    """Return DeepSpeed's defaults that differ from megalite's.

    Defaults of the optimizer and the schedule are included if the file chooses one.
    """
    # in old versions true meant stage 1
    defaults = {} if type(source.get(ZERO[:-1])) is bool else {f"{ZERO}stage": 0}
    if f"{ADAM}max_grad_norm" not in source.leaves:
        defaults["gradient_clipping"] = 0
    defaults |= {ADAM + key: value for key, value in default_adam(source).items()}
    return defaults | {WARMUP + key: value for key, value in default_warmup(source).items()}


def default_adam(source: ImportedFile) -> dict[str, Any]:
    adam = source.word("optimizer.type") in ("ADAM", "ADAMW")
    return {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0} if adam else {}


def default_warmup(source: ImportedFile) -> dict[str, Any]:
    own = {
        "WARMUPLR": {},
        "WARMUPDECAYLR": {"warmup_max_lr": 1e-3},
        "WARMUPCOSINELR": {"cos_min_ratio": 1e-4},
    }
    chosen = own.get(source.word("scheduler.type"))
    return {} if chosen is None else {"warmup_num_steps": 1000, "warmup_type": "log"} | chosen
