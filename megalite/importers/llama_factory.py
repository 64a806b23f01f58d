"""LLaMA-Factory's YAML. Meanings and defaults are those of its hparams/*.py and of transformers' Trainer."""

from __future__ import annotations

from typing import Any

from megalite.importers import data, finetuning
from megalite.importers.batch import Batch
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
    sets,
    to_do,
    word,
)

NAME = "LLaMA-Factory"
BATCH = Batch("", "per_device_train_batch_size", "gradient_accumulation_steps")
PREFERENCES = ("DPO", "KTO")
"""Values of `stage` whose data is preferences."""
MARKS = ("finetuning_type", "cutoff_len", "stage", "template", "lora_target")


def recognizes(leaves: dict[str, Any]) -> bool:
    return "model_name_or_path" in leaves and any(key in leaves for key in MARKS)


def ranks(source: ImportedFile) -> int | None:
    return source.dp


def _method(value: Any, source: ImportedFile) -> Verdict:
    if word(value) == "FULL":
        return honoured({"lora.rank": 0})
    return (
        honoured({"lora.rank": source.get("lora_rank")})
        if word(value) == "LORA"
        else lost("only full fine-tuning and LoRA are supported: set lora.rank")
    )


def _adapter(row: KeyRule) -> KeyRule:
    """Return a row that counts only for finetuning_type lora."""
    off = harmless("no adapter is trained")
    return KeyRule(
        lambda value, source: row.judge(value, source) if source.word("finetuning_type") == "LORA" else off,
        row.option,
    )


def _stage(value: Any, source: ImportedFile) -> Verdict:
    return harmless("this is always the case") if word(value) in ("SFT", "PT") else lost(finetuning.OBJECTIVE)


def _is_text(source: ImportedFile) -> bool:
    return source.word("stage") == "PT"


def _datasets(value: Any, source: ImportedFile) -> Verdict:
    """Map the dataset names, whose files dataset_info.json lists."""
    if source.word("stage", "sft") not in ("SFT", "PT", *PREFERENCES):
        return lost("data of rewards and generations is not supported")
    preference = source.word("stage", "sft") in PREFERENCES
    names = ", ".join(
        str(name).strip() for name in (value if isinstance(value, list) else str(value).split(","))
    )
    chosen = [
        ["--loss_on", kind]
        for key, kind in (("train_on_prompt", "all"), ("mask_history", "last"))
        if source.on(key) and not preference
    ]
    options = [word for part in chosen[:1] for word in part]
    verdict = data.prepared(
        [ImportedDataset(text=_is_text(source), preference=preference)],
        source.get("model_name_or_path"),
        options,
    )
    where = f"{source.get('dataset_dir', 'data')}/dataset_info.json"
    return verdict._replace(
        why=f"{verdict.why}; replace FILE with the files or hf:NAME that {where} lists for {names}, "
        "separated by spaces"
    )


def _validation(value: Any, source: ImportedFile) -> Verdict:
    """Return a share of the data, or a number of examples."""
    if not value:
        return harmless("no validation, which is the default")
    return (
        honoured({"data.validation": value})
        if type(value) is float and value < 1
        else lost("set data.validation to a fraction or a prefix")
    )


def _packing(value: Any, source: ImportedFile) -> Verdict:
    """Map packing. With packing, conversations attend to each other; with neat_packing, they do not.

    Text is packed by default.
    """
    on = source.on("packing") or source.on("neat_packing")
    if word(value) != "TRUE" and on:
        return harmless("enabled by the other of packing and neat_packing")
    if _is_text(source) and source.get("packing") is None:
        return harmless("documents are always concatenated to fill every row")
    return data.packing(value, _is_text(source), document_mask=source.on("neat_packing"))


def _length(value: Any, source: ImportedFile) -> Verdict:
    """Set the length of a row.

    A packed row of conversations has cutoff_len tokens in LLaMA-Factory, the last of which is only predicted.
    """
    packed = (source.on("packing") or source.on("neat_packing")) and not _is_text(source)
    return honoured({"data.sequence_length": value - 1 if packed and type(value) is int else value})


def _recompute(value: Any, source: ImportedFile) -> Verdict:
    return honoured({"train.recompute": "none" if word(value) == "TRUE" else "full"})


def _resize(value: Any, source: ImportedFile) -> Verdict:
    if word(value) != "TRUE":
        return harmless("disabled")
    return honoured({"model.resize_embeddings": "mean"}, "LLaMA-Factory adds noise to the mean")


TABLE: Table = {
    **finetuning.TRAINER,
    **BATCH.table(),
    "model_name_or_path": KeyRule(finetuning.base_model, "model.from_hf"),
    **each(
        "",
        "trust_remote_code use_fast_tokenizer cache_dir low_cpu_mem_usage",
        never("config.json and the tokenizer files are read directly"),
    ),
    "adapter_name_or_path": sets("lora.init_from"),
    "model_revision": only("MAIN", "download that revision and set model.from_hf to its directory"),
    "resize_vocab": KeyRule(_resize, "model.resize_embeddings"),
    **each(
        "",
        "add_tokens add_special_tokens new_special_tokens new_special_tokens_config",
        to_do(finetuning.ADDED_TOKENS),
    ),
    **each(
        "",
        "rope_scaling shift_attn mixture_of_depths",
        missing("not supported: set model.rope_scaling"),
    ),
    **each(
        "",
        "flash_attn use_unsloth* enable_liger_kernel use_kv_cache use_v1_kernels",
        never(finetuning.KERNELS),
    ),
    "disable_gradient_checkpointing": KeyRule(_recompute, "train.recompute"),
    "use_reentrant_gc": never("train.recompute has no further options"),
    **each(
        "", "upcast_layernorm upcast_lmhead_output", never("norms and the loss are always computed in fp32")
    ),
    "train_from_scratch": never("model.init_from: none is set instead"),
    **each("", "quantization_* double_quantization", missing(finetuning.QUANTIZED)),
    "stage": KeyRule(_stage),
    **each(
        "",
        "do_train do_eval do_predict predict_with_generate",
        never("use `megalite train` or `megalite evaluate`"),
    ),
    "finetuning_type": KeyRule(_method, "lora.rank"),
    "lora_rank": _adapter(sets("lora.rank")),
    "lora_alpha": _adapter(sets("lora.alpha")),
    "lora_dropout": _adapter(sets("lora.dropout")),
    "lora_target": _adapter(KeyRule(finetuning.targets, "lora.targets")),
    "additional_target": _adapter(KeyRule(finetuning.modules_to_save, "lora.modules_to_save")),
    "use_dora": _adapter(finetuning.DORA),
    "use_rslora": _adapter(finetuning.RSLORA),
    **each(
        "",
        "loraplus_* pissa_* use_galore use_apollo use_badam use_adam_mini use_llama_pro",
        missing("only AdamW is supported, and adapters start at zero"),
    ),
    "use_muon": KeyRule(
        lambda value, source: honoured(finetuning.muon(source)) if value is True else harmless("disabled"),
        "optimizer.name",
    ),
    "create_new_adapter": missing("only one adapter can be trained"),
    "pure_bf16": missing("master weights are always fp32: use train.precision: bf16"),
    "dataset": KeyRule(_datasets, "data.train"),
    "eval_dataset": KeyRule(
        lambda *_: left("prepare token files in the same way and set data.validation"), "data.validation"
    ),
    **each(
        "", "dataset_dir media_dir tokenized_path", never("data is read from the token files in data.train")
    ),
    "template": finetuning.TEMPLATE,
    **each("", "tool_format default_system enable_thinking", finetuning.TEMPLATE),
    "cutoff_len": KeyRule(_length, "data.sequence_length"),
    **each("", "train_on_prompt mask_history", never("included in the `megalite prepare` command")),
    "streaming": never("token files are always memory-mapped"),
    **each(
        "", "mix_strategy interleave_probs", to_do("to blend data sets, use data.train: {PREFIX: weight}")
    ),
    **each(
        "",
        "overwrite_cache preprocessing_* buffer_size ignore_pad_token_for_loss",
        never("data is preprocessed by `megalite prepare`"),
    ),
    "max_samples": missing("reduce the input of `megalite prepare`"),
    "val_size": KeyRule(_validation, "data.validation"),
    **each("", "packing neat_packing", KeyRule(_packing, "data.packing")),
    "num_train_epochs": finetuning.epochs("max_steps"),
    "lr_scheduler_type": KeyRule(finetuning.decay, "optimizer.decay"),
    "optim": KeyRule(finetuning.optimizer),
    "bf16": finetuning.switch("train.precision", "bf16"),
    "fp16": finetuning.switch("train.precision", "fp16"),
    "fp8": missing("float8 is not supported: the closest option is train.precision: bf16"),
    **each(
        "",
        "plot_loss print_param_status disable_shuffling use_swanlab swanlab_*",
        never("use `megalite report` to plot the loss"),
    ),
    **each("", "pref_* dpo_* ppo_* kto_* simpo_* ref_model* reward_model*", missing(finetuning.OBJECTIVE)),
    **each("", "use_dft_loss use_asft_loss asft_* use_eaft_loss eaft_*", missing(finetuning.OBJECTIVE)),
    **each("", "image_* video_* audio_*", missing("only text data is supported")),
    **each("", "freeze_*", missing("either all weights or adapters are trained")),
    **each(
        "",
        "oft_* apollo_* galore_* badam_* use_kt kt_* fp8_*",
        missing("only full fine-tuning and LoRA with AdamW are supported"),
    ),
    **each("", "export_* infer_backend ray_* use_mca", never("has no effect on the run")),
    "tensor_model_parallel_size": sets("parallel.tp"),
    "pipeline_model_parallel_size": sets("parallel.pp"),
    "context_parallel_size": sets("parallel.cp"),
    "expert_model_parallel_size": sets("parallel.ep"),
    "sequence_parallel": sets("parallel.sequence_parallel"),
    "use_distributed_optimizer": sets(
        "parallel.zero", {"TRUE": 1, "FALSE": 0}, "parallel.zero must be 0, 1, 2 or 3"
    ),
    **each(
        "", "overlap_* bias_activation_fusion apply_rope_fusion moe_grouped_gemm", never(finetuning.KERNELS)
    ),
}


def table(source: ImportedFile) -> Table:
    return TABLE


def defaults(source: ImportedFile) -> dict[str, Any]:
    """Return the defaults of LLaMA-Factory and of transformers' Trainer that differ from ours."""
    adapter = (
        {"lora_rank": 8, "lora_alpha": 2 * (source.size("lora_rank") or 8)}
        if source.word("finetuning_type", "lora") == "LORA"
        else {}
    )
    trainer = {
        "num_train_epochs": 3.0,
        "learning_rate": 5e-5,
        "weight_decay": 0.0,
        "adam_beta1": 0.9,
        "lr_scheduler_type": "linear",
        BATCH.micro: 8,
    }
    return {
        "finetuning_type": "lora",
        **adapter,
        "cutoff_len": 2048,
        "disable_gradient_checkpointing": False,
        **trainer,
        "logging_steps": 500,
    }
