"""torchtune's recipe YAML.

Meanings and defaults are those of its recipes/*_distributed.py and of the components that it names.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from megalite.importers import data, finetuning, preferences, quantization, torchtune_data
from megalite.importers.batch import Batch
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

NAME = "torchtune"
BATCH = Batch("", "batch_size", "gradient_accumulation_steps")
COMPONENT = "_component_"
SCHEDULES = {
    "GET_COSINE_SCHEDULE_WITH_WARMUP": "cosine",
    "COSINE_SCHEDULE_WITH_WARMUP": "cosine",
    "LINEARLR": "linear",
    "CONSTANTLR": "constant",
}


def recognizes(leaves: dict[str, Any]) -> bool:
    return any(key.endswith(COMPONENT) for key in leaves)


def ranks(source: ImportedFile) -> int | None:
    """Return shards · replicas if the file sets them."""
    source = resolved(source)
    shards, replicas = source.size("data_parallel_shard_dim"), source.size("data_parallel_replicate_dim") or 1
    return shards * replicas if shards else source.dp


def component(source: ImportedFile, section: str) -> str:
    """Return the last part of a component's name."""
    return str(source.get(f"{section}.{COMPONENT}", "")).split(".")[-1]


def _directory(value: Any, source: ImportedFile) -> Verdict:
    return finetuning.base_model(str(value).rstrip("/") or "/", source)


def _model(value: Any, source: ImportedFile) -> Verdict:
    """Check the model builder, whose architecture is read from the checkpoint instead.

    Those of adapters begin with lora_, qlora_ or dora_.
    """
    name = component(source, "model")
    if name.startswith("qlora"):
        return quantization.torchtune()
    if name.startswith("dora"):
        return honoured({"lora.dora": True})
    return harmless("the architecture is determined by model.from_hf")


def _quantized(value: Any, source: ImportedFile) -> Verdict:
    return quantization.torchtune() if word(value) == "TRUE" else harmless("disabled")


def _targets(value: Any, source: ImportedFile) -> Verdict:
    """Map lora_attn_modules, and with apply_lora_to_mlp all projections of the feed-forward block."""
    names = source.get("model.lora_attn_modules")
    names = [*names] if isinstance(names, list) else []
    if source.on("model.apply_lora_to_mlp"):
        names += ["gate_proj", "up_proj", "down_proj"]
    return finetuning.targets(names, source)


def _optimizer(value: Any, source: ImportedFile) -> Verdict:
    return finetuning.optimizer(
        "AdamW" if component(source, "optimizer") == "AdamW" else component(source, "optimizer"), source
    )


def _schedule(value: Any, source: ImportedFile) -> Verdict:
    decay = SCHEDULES.get(component(source, "lr_scheduler").upper())
    return (
        honoured({"optimizer.decay": decay})
        if decay
        else lost("optimizer.decay must be cosine, linear, wsd or constant")
    )


PREFERENCES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "DPOLoss": (
        {"train.objective": "dpo", "preference.loss": "sigmoid"},
        {"beta": 0.1, "label_smoothing": 0.0},
    ),
    "RSOLoss": ({"train.objective": "dpo", "preference.loss": "hinge"}, {"gamma": 0.1}),
    "SimPOLoss": ({"train.objective": "simpo"}, {"beta": 2.0, "gamma": 0.5, "label_smoothing": 0.0}),
}
"""Loss of pairs → its options, and the defaults of its numbers."""


def _loss(value: Any, source: ImportedFile) -> Verdict:
    name = component(source, "loss")
    if "CrossEntropy" in name or name.startswith("CE"):
        return harmless("the loss is always cross-entropy; use train.loss_chunk to compute it in chunks")
    if name in PREFERENCES:
        return honoured(PREFERENCES[name][0])
    if name == "IPOLoss":
        return lost("its log-ratios are sums over a completion, and those of train.objective: ipo are means")
    return lost(finetuning.OBJECTIVE)


def _of_pairs(option: str) -> KeyRule:
    """Return the row of a number of a loss of pairs."""
    row = sets(option)
    return KeyRule(
        lambda value, source: (
            row.judge(value, source)
            if component(source, "loss") in PREFERENCES
            else lost(finetuning.OBJECTIVE)
        ),
        option,
    )


def _gamma(value: Any, source: ImportedFile) -> Verdict:
    """Map gamma: the margin of SimPO, and of RSO what others call beta."""
    option = "beta" if component(source, "loss") == "RSOLoss" else "gamma"
    return _of_pairs(f"preference.{option}").judge(value, source)


def _reference(value: Any, source: ImportedFile) -> Verdict:
    """Map the reference of a recipe that trains all parameters. Its own start needs no name."""
    if component(source, "loss") not in PREFERENCES:
        return lost(finetuning.OBJECTIVE)
    if component(source, "loss") == "SimPOLoss":
        return harmless("there is no reference")
    if str(value).rstrip("/") == str(source.get("checkpointer.checkpoint_dir")).rstrip("/"):
        return harmless("the reference is the model from which training starts")
    return honoured({"preference.reference": f"hf:{str(value).rstrip('/')}"})


def _divergence(value: Any, source: ImportedFile) -> Verdict:
    """Map the loss of a distillation, whose teacher is that of teacher_checkpointer."""
    kinds = {"ForwardKL": "forward", "ReverseKL": "reverse"}
    divergences = [kind for name, kind in kinds.items() if component(source, "kd_loss").startswith(name)]
    if not divergences:
        return lost("distillation.divergence is forward, reverse or jsd: set it, and train.objective")
    return honoured({"train.objective": "distillation", "distillation.divergence": divergences[0]})


def _ratio(value: Any, source: ImportedFile) -> Verdict:
    """Map the share of the divergence in the loss. Here, the divergence has no factor."""
    if type(value) not in (int, float) or not 0 < value <= 1:
        return lost("without a share of the divergence there is no distillation")
    weight = {"distillation.cross_entropy_weight": rounded((1 - value) / value)}
    return honoured(weight, "" if value == 1 else f"the loss is 1 / {value} times as large")


def _teacher(value: Any, source: ImportedFile) -> Verdict:
    return honoured({"distillation.teacher": f"hf:{str(value).rstrip('/')}"})


def _clip(value: Any, source: ImportedFile) -> Verdict:
    return honoured({"train.grad_clip": 0 if value is None else value})


DEPTH = 10
"""Limit of the references from one to the next, of which a circle has no end."""
REFERENCE = re.compile(r"\$\{([^${}]+)\}")


def resolved(source: ImportedFile) -> ImportedFile:
    """Replace references to other keys, such as ${output_dir}/logs, by their values.

    References to missing keys are kept.
    """

    def value(given: Any, depth: int = 0) -> Any:
        if not isinstance(given, str) or depth > DEPTH:
            return given
        whole = REFERENCE.fullmatch(given)
        if whole and whole[1] in source.leaves:
            return value(source.leaves[whole[1]], depth + 1)
        return REFERENCE.sub(
            lambda match: (
                str(value(source.leaves[match[1]], depth + 1)) if match[1] in source.leaves else match[0]
            ),
            given,
        )

    return replace(source, leaves={key: value(given) for key, given in source.leaves.items()})


def _packing(value: Any, source: ImportedFile) -> Verdict:
    """Map packing. Packed documents and conversations do not attend to each other in torchtune."""
    return data.packing(value, torchtune_data.is_text(source))


def _datasets(value: Any, source: ImportedFile) -> Verdict:
    """Map several datasets, which may be packed."""
    verdict, packed = torchtune_data.training(value, source), torchtune_data.packed(source)
    return verdict if packed is None else verdict._replace(options=_packing(packed, source).options)


def _length(value: Any, source: ImportedFile) -> Verdict:
    return honoured(preferences.row_length(value, component(source, "loss") in PREFERENCES))


def _sharded(value: Any, source: ImportedFile) -> Verdict:
    """Map the sharding of a distributed recipe, which uses FSDP2.

    Weights stay gathered if fsdp_reshard_after_forward is off.
    """
    if word(value) not in ("TRUE", "FALSE"):
        return lost("expected true or false")
    return honoured({"parallel.zero": 3} | ({} if value else {"parallel.zero3_reshard": "step"}))


def _steps(value: Any, source: ImportedFile) -> Verdict:
    """Return the number of steps over all epochs, which torchtune may end earlier."""
    count = source.size("epochs")
    if count is None or type(value) is not int:
        return left("set train.steps to the number of steps over all epochs")
    return honoured({"train.steps": value * count}, "an epoch may have fewer steps in torchtune")


def _shards(value: Any, source: ImportedFile) -> Verdict:
    """Map the number of shards, which also span the context-parallel ranks."""
    cp = source.size("context_parallel_dim") or 1
    return (
        harmless("all remaining ranks are used by default")
        if value == -1
        else honoured({"parallel.dp": source.dp, "parallel.dp_shard": value * cp})
    )


def _replicas(value: Any, source: ImportedFile) -> Verdict:
    """Map the number of replicas, each sharded over the remaining ranks."""
    if value == 1:
        return harmless("this is always the case")
    if source.dp and type(value) is int and value > 0 and source.dp % value == 0:
        return honoured(
            {
                "parallel.dp": source.dp,
                "parallel.dp_shard": source.dp // value * (source.size("context_parallel_dim") or 1),
            }
        )
    return left(f"set parallel.dp_shard to parallel.dp / {value}")


def _context(value: Any, source: ImportedFile) -> Verdict:
    method = {"ALLTOALL": "ring"}.get(source.word("context_parallel_rotate_method"), "gather")
    return honoured({"parallel.cp": value} | ({} if value == 1 else {"parallel.context": method}))


def _offload(value: Any, source: ImportedFile) -> Verdict:
    return honoured(
        {"parallel.zero": 3, "parallel.offload": "cpu", "parallel.offload_parameters": True}
        if value
        else {"parallel.offload": "none"}
    )


def _decayed(value: Any, source: ImportedFile) -> Verdict:
    return honoured(
        {"optimizer.weight_decay": value},
        "weight decay is never applied to norms and biases" if value else "",
    )


DATA = "handled by the `megalite prepare` command, as far as it is supported"
TABLE: Table = {
    **BATCH.table(),
    f"model.{COMPONENT}": KeyRule(_model),
    "model.lora_rank": sets("lora.rank"),
    "model.lora_alpha": sets("lora.alpha"),
    "model.lora_dropout": sets("lora.dropout"),
    **each("model.", "lora_attn_modules apply_lora_to_mlp", KeyRule(_targets, "lora.targets")),
    "model.apply_lora_to_output": missing("the head is always frozen with LoRA"),
    "model.use_dora": finetuning.DORA,
    "model.quantize_base": KeyRule(_quantized, "lora.base"),
    "model.*": to_do("the architecture is determined by model.from_hf: set model.* to change it"),
    f"checkpointer.{COMPONENT}": never("weights are always read from Hugging Face files"),
    "checkpointer.checkpoint_dir": KeyRule(_directory, "model.from_hf"),
    "checkpointer.*": never(
        "model.init_from reads all files of the directory; use `megalite convert export` to write them"
    ),
    "tokenizer.max_seq_len": KeyRule(_length, "data.sequence_length"),
    "tokenizer.prompt_template": finetuning.TEMPLATE,
    "tokenizer.*": never("use the tokenizer of model.from_hf with `megalite prepare`"),
    f"dataset.{COMPONENT}": KeyRule(torchtune_data.training, "data.train"),
    "dataset": KeyRule(_datasets, "data.train"),
    "dataset.packed": KeyRule(_packing, "data.packing"),
    "dataset.*": never(DATA),
    f"dataset_val.{COMPONENT}": KeyRule(torchtune_data.validation, "data.validation"),
    "dataset_val.*": never(DATA),
    "seed": sets("run.seed"),
    "shuffle": sets("data.shuffle"),
    "epochs": finetuning.epochs("max_steps_per_epoch"),
    "max_steps_per_epoch": KeyRule(_steps, "train.steps"),
    f"optimizer.{COMPONENT}": KeyRule(_optimizer),
    "optimizer.lr": sets("optimizer.lr"),
    "optimizer.weight_decay": KeyRule(_decayed, "optimizer.weight_decay"),
    **{f"optimizer.{key}": sets(f"optimizer.{key}") for key in ("betas", "eps")},
    **each("optimizer.", "fused foreach", never("AdamW is always fused")),
    "optimizer_in_bwd": missing("the step follows the backward, since clipping needs the global norm"),
    f"lr_scheduler.{COMPONENT}": KeyRule(_schedule, "optimizer.decay"),
    "lr_scheduler.num_warmup_steps": sets("optimizer.warmup_steps"),
    "lr_scheduler.num_cycles": only("0.5", "the cosine schedule has no further cycles"),
    f"loss.{COMPONENT}": KeyRule(_loss, "train.objective"),
    "loss.beta": _of_pairs("preference.beta"),
    "loss.gamma": KeyRule(_gamma, "preference.gamma"),
    "loss.label_smoothing": _of_pairs("preference.label_smoothing"),
    "ref_checkpointer.checkpoint_dir": KeyRule(_reference, "preference.reference"),
    "ref_checkpointer.*": never("determined by preference.reference"),
    f"kd_loss.{COMPONENT}": KeyRule(_divergence, "train.objective"),
    "kd_loss.num_output_chunks": never("use train.loss_chunk, a number of tokens"),
    "kd_ratio": KeyRule(_ratio, "distillation.cross_entropy_weight"),
    "teacher_checkpointer.checkpoint_dir": KeyRule(_teacher, "distillation.teacher"),
    **each("", "teacher_model.* teacher_checkpointer.*", never("determined by distillation.teacher")),
    **each("", "loss.* teacher_* kd_* ref_* reward_* value_* policy_*", missing(finetuning.OBJECTIVE)),
    "quantizer.*": missing(quantization.UNSUPPORTED),
    "loss.num_output_chunks": never("use train.loss_chunk, a number of tokens"),
    "clip_grad_norm": KeyRule(_clip, "train.grad_clip"),
    "compile": sets("train.compile"),
    "compile.*": to_do("use train.compile, which compiles the functions between linears"),
    "dtype": sets(
        "train.precision",
        {"BF16": "bf16", "FP32": "fp32", "FP16": "fp16"},
        "train.precision must be bf16, fp16 or fp32",
    ),
    "enable_activation_checkpointing": KeyRule(finetuning.recompute, "train.recompute"),
    "enable_activation_offloading": missing(
        "offloading activations is not supported: use train.recompute: full"
    ),
    **each("ac_", "mode option", to_do("set train.recompute to selective or every-K")),
    "fsdp_cpu_offload": KeyRule(_offload, "parallel.offload"),
    "fsdp_reshard_after_forward": KeyRule(_sharded, "parallel.zero"),
    "custom_sharded_layers": never("embedding and head are always sharded like the layers"),
    "tensor_parallel_dim": sets("parallel.tp"),
    "context_parallel_dim": KeyRule(_context, "parallel.cp"),
    "context_parallel_rotate_method": never("parallel.context is set instead"),
    "data_parallel_shard_dim": KeyRule(_shards, "parallel.dp_shard"),
    "data_parallel_replicate_dim": KeyRule(_replicas, "parallel.dp_shard"),
    "tensor_parallel_plan.*": never("the tensor-parallel plan is fixed"),
    "output_dir": sets("run.dir", roughly="the run directory is run.dir/run.name"),
    f"metric_logger.{COMPONENT}": KeyRule(
        lambda value, _: (
            honoured({"logging.tensorboard": True})
            if "TensorBoard" in str(value)
            else harmless("metrics.jsonl")
        )
    ),
    "metric_logger.project": sets("logging.wandb"),
    "metric_logger.*": never("metrics are written to the run directory"),
    "log_every_n_steps": sets("logging.interval"),
    **each(
        "",
        "log_peak_memory_stats log_level",
        never("metrics.jsonl contains the time and memory of each step"),
    ),
    "run_val_every_n_steps": sets("validation.interval"),
    "batch_size_val": never("validation uses the batch size of training"),
    "save_every_n_steps": sets("checkpoint.interval"),
    "low_cpu_ram": never("weights are read directly"),
    "fsdp.cpu_offload": KeyRule(_offload, "parallel.offload"),
    **each(
        "",
        "resume_from_checkpoint should_load_recipe_state",
        never("checkpoint.load: auto resumes from the run directory"),
    ),
    **each(
        "",
        "save_adapter_weights_only save_last_epoch_only",
        never("use `megalite convert adapter-export` to save only the adapters"),
    ),
    "enable_async_checkpointing": sets("checkpoint.async_save"),
    "profiler.*": never("use profiling.ranks and profiling.steps to trace with torch.profiler"),
    "device": only("CUDA", "a run uses all visible GPUs: set CUDA_VISIBLE_DEVICES= (empty) to hide them"),
    "cudnn_deterministic_mode": sets("run.deterministic"),
    "tokenizer": never("the tokenizer of model.from_hf is used"),
}


def table(source: ImportedFile) -> Table:
    """Return the rows for this file's keys, which judge the values that references lead to."""
    rows, whole = dict(TABLE), resolved(source)
    used = {name for value in source.leaves.values() for name in REFERENCE.findall(str(value))}
    for key, value in whole.leaves.items():
        row, open_name = row_of(TABLE, key), REFERENCE.search(str(value))
        if open_name:
            rows[key] = to_do(f"the file does not set {open_name[1]}")
        elif row is None and key in used:
            rows[key] = never("used by another key")
        elif row is not None:
            rows[key] = _following(row, value)
    return rows


def _following(row: KeyRule, value: Any) -> KeyRule:
    return (
        never("empty value")
        if value in (None, [])
        else KeyRule(lambda _, source: row.judge(value, resolved(source)), row.option)
    )


def defaults(source: ImportedFile) -> dict[str, Any]:
    """Return torchtune's defaults that differ from megalite's.

    They include the defaults of torch's AdamW, and of FSDP in a distributed recipe.
    """
    source = resolved(source)
    adam = (
        {"optimizer.weight_decay": 0.01, "optimizer.betas": [0.9, 0.999]}
        if component(source, "optimizer") == "AdamW"
        else {}
    )
    schedule = (
        {}
        if f"lr_scheduler.{COMPONENT}" in source.leaves
        else {f"lr_scheduler.{COMPONENT}": "torch.optim.lr_scheduler.ConstantLR"}
    )
    ratio = {"kd_ratio": 0.5} if f"kd_loss.{COMPONENT}" in source.leaves else {}
    _, numbers = PREFERENCES.get(component(source, "loss"), ({}, {}))
    pairs = {f"loss.{name}": value for name, value in numbers.items()}
    return {**adam, **schedule, **ratio, **pairs, "clip_grad_norm": 0, "fsdp_reshard_after_forward": True}
