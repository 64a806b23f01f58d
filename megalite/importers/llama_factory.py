"""LLaMA-Factory's YAML. Meanings and defaults are those of its hparams/*.py and of transformers' Trainer."""

from __future__ import annotations

from typing import Any

from megalite.importers import data, finetuning, llama_factory_data, preferences, quantization
from megalite.importers.batch import Batch
from megalite.importers.llama_factory_data import PREFERENCES, is_text
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
    sets,
    to_do,
    word,
)

NAME = "LLaMA-Factory"
BATCH = Batch("", "per_device_train_batch_size", "gradient_accumulation_steps")
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


OBJECTIVES: dict[str, dict[str, Any]] = {
    "SIGMOID": {"train.objective": "dpo", "preference.loss": "sigmoid"},
    "HINGE": {"train.objective": "dpo", "preference.loss": "hinge"},
    "IPO": {"train.objective": "ipo"},
    "ORPO": {"train.objective": "orpo"},
    "SIMPO": {"train.objective": "simpo"},
}
"""pref_loss of stage dpo → the options."""
NLL_OF_PROMPTS = "the likelihood is of prompts, too, and a mean over the tokens of a batch, not over pairs"
VALUE_HEAD = "the head has no bias, and LLaMA-Factory saves its own in a file of its own"


def _stage(value: Any, source: ImportedFile) -> Verdict:
    name = word(value)
    if name == "DPO":
        return harmless("train.objective is set by pref_loss")
    if name == "KTO":
        return honoured({"train.objective": "kto"})
    if name == "RM":
        return honoured(preferences.REWARD, VALUE_HEAD)
    if name == "PPO":
        return lost(preferences.GENERATES)
    return harmless("this is always the case") if name in ("SFT", "PT") else lost(finetuning.OBJECTIVE)


def _preference_loss(value: Any, source: ImportedFile) -> Verdict:
    name = word(value)
    if name not in OBJECTIVES:
        why = "kto takes single completions with labels: use stage: kto" if name == "KTO_PAIR" else LOSS
        return preferences.without_loss("dpo", why)
    return honoured(OBJECTIVES[name], NLL_OF_PROMPTS if name == "ORPO" else "")


def _likelihood(value: Any, source: ImportedFile) -> Verdict:
    if not value:
        return harmless("disabled")
    if source.word("stage") == "KTO":
        return lost("kto has no likelihood of good completions beside its loss")
    mean = "a mean over the tokens of a batch, not over pairs"
    if source.word("pref_loss") == "ORPO" and type(value) in (int, float):  # whose loss has it already
        return honoured(
            {"preference.nll_weight": rounded(1 + value)}, f"beside the likelihood of orpo; {mean}"
        )
    return honoured({"preference.nll_weight": value}, mean)


def _reference(value: Any, source: ImportedFile) -> Verdict:
    return honoured({"preference.reference": f"hf:{value}"})


def _start(value: Any, source: ImportedFile) -> Verdict:
    """Map the adapter that training continues, which the reference model of LLaMA-Factory does not have."""
    options, stage = {"lora.init_from": value}, source.word("stage")
    refers = stage == "KTO" or (stage == "DPO" and source.word("pref_loss") not in ("ORPO", "SIMPO"))
    if refers and source.get("ref_model") is None:
        options["preference.reference"] = f"hf:{source.get('model_name_or_path')}"
    return honoured(options)


def _in(stages: str, row: KeyRule, losses: str = "") -> KeyRule:
    """Return a row that counts only in these stages and, if they are given, for these values of pref_loss."""

    def judge(value: Any, source: ImportedFile) -> Verdict:
        if source.word("stage") not in stages.split():
            return harmless(f"only used with stage: {stages.lower().replace(' ', ' or ')}")
        if losses and source.word("pref_loss") not in losses.split():
            return harmless(f"only used with pref_loss: {losses.lower().replace(' ', ' or ')}")
        return row.judge(value, source)

    return KeyRule(judge, row.option)


def _lora_dropout(value: Any, source: ImportedFile) -> Verdict:
    if source.word("stage") in ("DPO", "KTO") and value:
        return honoured({"lora.dropout": 0.0}, "LLaMA-Factory turns dropout off with preferences")
    return honoured({"lora.dropout": value})


def _datasets(value: Any, source: ImportedFile) -> Verdict:
    """Map the dataset names, whose files and columns dataset_info.json lists."""
    if source.word("stage", "sft") not in ("SFT", "PT", *PREFERENCES):
        return lost(preferences.GENERATES)
    preference = source.word("stage", "sft") in PREFERENCES
    chosen = [
        ["--loss_on", kind]
        for key, kind in (("train_on_prompt", "all"), ("mask_history", "last"))
        if source.on(key) and not preference
    ]
    options = [word for part in chosen[:1] for word in part]
    if preference:
        options = preferences.limits(source.size("cutoff_len"), "truncate")
    datasets, hint = llama_factory_data.datasets(value, source)
    verdict = data.prepared(datasets, source.get("model_name_or_path"), options)
    return verdict._replace(why=f"{verdict.why}; {hint}") if hint else verdict


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
    if is_text(source) and source.get("packing") is None:
        return harmless("documents are always concatenated to fill every row")
    return data.packing(value, is_text(source), document_mask=source.on("neat_packing"))


def _length(value: Any, source: ImportedFile) -> Verdict:
    """Set the length of a row.

    A packed row of conversations has cutoff_len tokens in LLaMA-Factory, the last of which is only predicted.
    """
    if source.word("stage") in PREFERENCES:
        return honoured(preferences.row_length(value, source.word("stage") != "KTO"))
    packed = (source.on("packing") or source.on("neat_packing")) and not is_text(source)
    return honoured({"data.sequence_length": value - 1 if packed and type(value) is int else value})


def _recompute(value: Any, source: ImportedFile) -> Verdict:
    return honoured({"train.recompute": "none" if word(value) == "TRUE" else "full"})


def _resize(value: Any, source: ImportedFile) -> Verdict:
    if word(value) != "TRUE":
        return harmless("disabled")
    return honoured({"model.resize_embeddings": "mean"}, "LLaMA-Factory adds noise to the mean")


LOSS = f"set train.objective: pref_loss is one of {', '.join(OBJECTIVES).lower()}"
TABLE: Table = {
    **finetuning.TRAINING_ARGUMENTS,
    **BATCH.table(),
    "model_name_or_path": KeyRule(finetuning.base_model, "model.from_hf"),
    **each(
        "",
        "trust_remote_code use_fast_tokenizer cache_dir low_cpu_mem_usage",
        never("config.json and the tokenizer files are read directly"),
    ),
    "adapter_name_or_path": KeyRule(_start, "lora.init_from"),
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
    "quantization_bit": KeyRule(quantization.factory, "lora.base"),
    **each("", "quantization_* double_quantization", never("only used with quantization_bit")),
    "stage": KeyRule(_stage),
    **each(
        "",
        "do_train do_eval do_predict predict_with_generate",
        never("use `megalite train` or `megalite evaluate`"),
    ),
    "finetuning_type": KeyRule(_method, "lora.rank"),
    "lora_rank": _adapter(sets("lora.rank")),
    "lora_alpha": _adapter(sets("lora.alpha")),
    "lora_dropout": _adapter(KeyRule(_lora_dropout, "lora.dropout")),
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
    "fp8": missing("float8 is not supported: the closest option is train.precision: bf16"),
    **each(
        "",
        "plot_loss print_param_status disable_shuffling use_swanlab swanlab_*",
        never("use `megalite report` to plot the loss"),
    ),
    "pref_loss": _in("DPO", KeyRule(_preference_loss, "train.objective")),
    "pref_beta": _in("DPO KTO", sets("preference.beta")),
    "pref_ftx": _in("DPO KTO", KeyRule(_likelihood, "preference.nll_weight")),
    "pref_bco_weight": missing("losses of a classifier of prompts are not supported"),
    "dpo_label_smoothing": _in("DPO", sets("preference.label_smoothing"), "SIGMOID"),
    "ld_alpha": preferences.REFERENCES["ld_alpha"],
    "kto_chosen_weight": _in("KTO", sets("preference.desirable_weight")),
    "kto_rejected_weight": _in("KTO", sets("preference.undesirable_weight")),
    "simpo_gamma": _in("DPO", sets("preference.gamma"), "SIMPO"),
    "ref_model": _in(
        "DPO KTO",
        KeyRule(lambda value, _: honoured({"preference.reference": f"hf:{value}"}), "preference.reference"),
    ),
    **each("", "ref_model_adapters ref_model_quantization_bit", missing("merge it into ref_model")),
    **each("", "ppo_* reward_model*", missing(preferences.GENERATES)),
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
        **_preference_defaults(source),
        "cutoff_len": 2048,
        "disable_gradient_checkpointing": False,
        **trainer,
        "logging_steps": 500,
    }


def _preference_defaults(source: ImportedFile) -> dict[str, Any]:
    """Return the numbers of the objective, and the packing of its data, which depends on the stage."""
    stage = source.word("stage")
    if stage not in PREFERENCES:
        return {}
    numbers: dict[str, Any] = {"RM": {}, "KTO": {"kto_chosen_weight": 1.0, "kto_rejected_weight": 1.0}}.get(
        stage, {"pref_loss": "sigmoid", "dpo_label_smoothing": 0.0, "simpo_gamma": 0.5}
    )
    return {"packing": False, **({} if stage == "RM" else {"pref_beta": 0.1}), **numbers}
