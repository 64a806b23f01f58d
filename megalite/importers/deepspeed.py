"""DeepSpeed's ds_config.json. Meanings and defaults are those of its docs/_pages/config-json.md,
runtime/config.py, runtime/zero/config.py and runtime/lr_schedules.py."""

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
        else harmless("scheduler.params.warmup_max_lr replaces it")
    )


def _minimum(value: Any, source: ImportedFile) -> Verdict:
    adam = default_adam(source)
    lr = source.get(f"{ADAM}lr", adam["lr"]) if adam else None
    if {type(lr), type(value)} <= {int, float}:
        return honoured({"optimizer.min_lr": rounded(value * lr)})
    return lost("it is a fraction of a learning rate that the file leaves open: set optimizer.min_lr")


def _weight_decay(value: Any, source: ImportedFile) -> Verdict:
    return honoured({"optimizer.weight_decay": value}, "norms and biases never decay here" if value else "")


def offload_parameters(stage: str, default: int) -> KeyRule:
    """The row of a parameter-offload key. stage: the key of the ZeRO stage, which must be 3; default: its
    default."""

    def judge(value: Any, source: ImportedFile) -> Verdict:
        if word(value) in ("NONE", "FALSE"):
            return honoured({"parallel.offload_parameters": False})
        if source.word(stage, default) != "3":
            return lost("it belongs to stage 3, in DeepSpeed too: set parallel.zero: 3")
        if word(value) not in ("CPU", "NVME", "TRUE"):
            return lost("parallel.offload_parameters is true or false")
        return honoured(
            {"parallel.offload_parameters": True},
            "weights go to CPU memory, not to disk" if word(value) == "NVME" else "",
        )

    return KeyRule(judge, "parallel.offload_parameters")


def nvme_path(device: str) -> KeyRule:
    """The row of an offload directory. device: the key of the device; the directory is used only if that is
    NVME."""
    away = harmless("nothing is offloaded to disk")
    return KeyRule(
        lambda value, source: (
            honoured({"parallel.offload_dir": value}) if source.word(device) == "NVME" else away
        )
    )


DEVICES = {"NONE": "none", "CPU": "cpu", "NVME": "disk", "TRUE": "cpu", "FALSE": "none"}
GATHERING = (
    "whole layers are gathered, the next one while the current one computes (parallel.zero3_reshard, "
    "parallel.bucket_mb)"
)
WHOLE = "a checkpoint holds the whole model, and any layout loads it"
TRANSFERS = "transfers to and from CPU memory or disk have no options"
PROFILE = "profiling.timeline shows what ran when; metrics.jsonl has each step's time and memory"
DIVIDED = "the loss is divided before the backward, so that gradients are only summed"
BOOLEAN = "it is neither true nor false"
STEP = only("FALSE", "it changes what a step computes: nothing here does so", "it is off")
OFFLOAD = sets("parallel.offload", DEVICES, "parallel.offload is none, cpu or disk")
STAGE = sets(
    "parallel.zero", {str(stage): stage for stage in range(4)}, "the stages of ZeRO are 0, 1, 2 and 3"
)
TABLE: Table = {
    **BATCH.table(),
    "gradient_clipping": sets("train.grad_clip"),
    "steps_per_print": sets("logging.interval"),
    "zero_optimization": sets("parallel.zero", {"TRUE": 1, "FALSE": 0}, BOOLEAN),
    f"{ZERO}stage": STAGE,
    f"{ZERO}reduce_bucket_size": sets(
        "parallel.bucket_mb", roughly="here it is the maximum size of a bucket, in MB of fp32", scale=4e-6
    ),
    f"{ZERO}offload_optimizer.device": OFFLOAD,
    f"{ZERO}offload_optimizer.nvme_path": nvme_path(f"{ZERO}offload_optimizer.device"),
    f"{ZERO}offload_optimizer.ratio": only("1", "all of the optimizer state is offloaded, or none"),
    f"{ZERO}offload_param.device": offload_parameters(f"{ZERO}stage", 0),
    f"{ZERO}cpu_offload": OFFLOAD,
    f"{ZERO}cpu_offload_param": offload_parameters(f"{ZERO}stage", 0),
    **each(ZERO, "offload_optimizer.* offload_param.* cpu_offload_use_pin_memory", never(TRANSFERS)),
    f"{ZERO}mics_shard_size": KeyRule(
        lambda size, _: harmless("it is off") if size == -1 else honoured({"parallel.dp_shard": size})
    ),
    f"{ZERO}zero_hpz_partition_size": only(
        "1", "parallel.dp_shard is nearest: it shards all states within groups"
    ),
    **each(
        f"{ZERO}zero_quantized_",
        "weights gradients nontrainable_weights",
        only("FALSE", "parallel.reduce_dtype: bf16 is nearest"),
    ),
    f"{ZERO}stage3_param_persistence_threshold": only("0", "small tensors are sharded like large ones"),
    **each(
        ZERO,
        "overlap_comm contiguous_gradients reduce_scatter round_robin_gradients",
        never("it is always on, without an option"),
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
    f"{ZERO}ignore_unused_parameters": never("every parameter is used"),
    "fp16.enabled": sets("train.precision", {"TRUE": "fp16"}, BOOLEAN),
    **{
        f"fp16.{key}": sets(f"fp16.{key}")
        for key in ("initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")
    },
    "fp16.loss_scale": only(
        "0",
        "the loss scale is always dynamic, from fp16.initial_scale_power on",
        "0 is dynamic, as it is here",
    ),
    "fp16.consecutive_hysteresis": only("FALSE", "fp16.hysteresis starts again when the scale is doubled"),
    **each("fp16.", "auto_cast fused_mode", never("the inputs are token numbers, and one fused AdamW runs")),
    **each("", "bf16.enabled bfloat16.enabled", sets("train.precision", {"TRUE": "bf16"}, BOOLEAN)),
    "bf16.immediate_grad_update": never("gradients accumulate at once"),
    **each(
        "",
        "fp16.fp16_master_weights_and_grads bf16.bf16_master_weights_and_grads",
        only("FALSE", "master weights are fp32"),
    ),
    "bf16.bf16_optimizer_states": only(
        "FALSE", "Adam's moments are fp32; parallel.offload moves them off the device"
    ),
    **each("", "amp.enabled torch_autocast.enabled", only("FALSE", "set train.precision to bf16 or fp16")),
    "data_types.grad_accum_dtype": sets(
        "train.grad_dtype", {"FP32": "fp32", "BF16": "bf16"}, "train.grad_dtype is fp32 or bf16"
    ),
    "communication_data_type": sets(
        "parallel.reduce_dtype",
        {"FP32": "fp32", "BF16": "bf16", "BFP16": "bf16"},
        "parallel.reduce_dtype is fp32 or bf16",
    ),
    "optimizer.type": optimizer("ADAM ADAMW"),
    f"{ADAM}lr": KeyRule(_learning_rate, "optimizer.lr"),
    **{f"{ADAM}{key}": sets(f"optimizer.{key}") for key in ("betas", "eps")},
    f"{ADAM}weight_decay": KeyRule(_weight_decay, "optimizer.weight_decay"),
    f"{ADAM}max_grad_norm": sets("train.grad_clip"),
    f"{ADAM}adam_w_mode": only(
        "TRUE", "weight decay is decoupled here (AdamW): set optimizer.weight_decay to fit"
    ),
    f"{ADAM}bias_correction": only("TRUE", "AdamW always corrects its bias"),
    f"{ADAM}amsgrad": only("FALSE", "AdamW keeps no maximum of its second moment"),
    **each(
        "optimizer.",
        "params.torch_adam params.fused params.foreach legacy_fusion",
        never("one fused AdamW runs, over flat shards"),
    ),
    "scheduler.type": sets(
        "optimizer.decay",
        {"WARMUPLR": "constant", "WARMUPDECAYLR": "linear", "WARMUPCOSINELR": "cosine"},
        "optimizer.decay is cosine, linear, wsd or constant",
    ),
    f"{WARMUP}warmup_max_lr": sets("optimizer.lr"),
    f"{WARMUP}warmup_num_steps": sets("optimizer.warmup_steps"),
    f"{WARMUP}total_num_steps": sets("train.steps"),
    f"{WARMUP}cos_min_ratio": KeyRule(_minimum, "optimizer.min_lr"),
    f"{WARMUP}warmup_type": only("LINEAR", "warm-up is linear here: set optimizer.warmup_steps to fit"),
    **each(
        WARMUP,
        "warmup_min_lr warmup_min_ratio",
        only("0", "warm-up starts at 0: set optimizer.warmup_steps to fit"),
    ),
    f"{WARMUP}last_batch_iteration": only("-1", "a run starts at step 0; checkpoint.load resumes one"),
    "tensorboard.enabled": sets("logging.tensorboard", {"TRUE": True}, BOOLEAN),
    **each(
        "tensorboard.",
        "output_path job_name",
        only("", "logs are stored in the run's directory: set run.dir and run.name"),
    ),
    "wandb.enabled": only("TRUE", BOOLEAN, "wandb.project turns it on"),
    "wandb.project": sets("logging.wandb"),
    **each(
        "",
        "wall_clock_breakdown memory_breakdown dump_state flops_profiler.* comms_logger.*",
        only("FALSE", PROFILE, "it is off"),
    ),
    "_comment*": never("it is a comment"),
    **each(
        "",
        "progressive_layer_drop.* data_efficiency.* curriculum_learning.* compression_training.* "
        "sparse_attention.*",
        STEP,
    ),
    "autotuning.*": only("FALSE", "`megalite plan` chooses a layout", "it is off"),
    **each("compile.", "disable backend deepcompile", never("train.compile chooses it")),
    "activation_checkpointing.*": only(
        "FALSE", "train.recompute determines which activations are kept", "it is off"
    ),
    "aio.*": never(TRANSFERS),
    "checkpoint.*": never(WHOLE),
    "elasticity.*": only("FALSE", "restart on another number of ranks: any layout loads a checkpoint"),
    "seq_parallel_communication_data_type": never("activations are sent as they are"),
    "prescale_gradients": only("FALSE", DIVIDED),
    "gradient_predivide_factor": only("1", DIVIDED),
    "sparse_gradients": only("FALSE", "gradients are dense"),
    **each(
        "",
        "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer",
        never("every stage has every optimizer"),
    ),
    "dataloader_drop_last": never("the data is an endless stream, and every batch is full"),
    "tensor_parallel.autotp_size": only("0 1", "set parallel.tp, and parallel.dp to the ranks that are left"),
}


def _muon_lr(value: Any, source: ImportedFile) -> Verdict:
    """The rate of all tensors, but for those that adam_lr or muon_lr is for."""
    rest = {
        option: value
        for key, option in (("adam_lr", "optimizer.lr"), ("muon_lr", "muon.lr"))
        if source.get(ADAM + key) is None
    }
    return honoured(rest) if rest else harmless("adam_lr and muon_lr replace it")


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
    """The rows for this file's keys. Parameters of optimizers other than Adam and Muon are lost; keys of
    sections that are off are harmless."""
    rows, name = dict(TABLE), source.get("optimizer.type", "AdamW")
    if word(name) == "MUON":
        rows |= MUON
    for key in source.leaves:
        if key.startswith(ADAM) and word(name) not in ("ADAM", "ADAMW", "MUON"):
            rows[key] = KeyRule(lambda value, _: lost(f"it is meant for {name}: set optimizer.* for AdamW"))
        section = next(
            (part for part in _sections(key) if source.word(f"{part}.enabled", part not in OFF) == "FALSE"),
            None,
        )
        if section:
            rows[key] = never(f"{section} is off")
    return rows


def _sections(key: str) -> list[str]:
    """The sections that contain a key, outermost first."""
    return [key[:end] for end, letter in enumerate(key) if letter == "."]


def defaults(source: ImportedFile) -> dict[str, Any]:
    """DeepSpeed's defaults that differ from ours; those of the optimizer and the schedule if the file chooses
    one."""
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
