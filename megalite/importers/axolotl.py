"""axolotl's YAML.

Meanings and defaults are those of its utils/schemas/config.py, training.py, peft.py and transformers'
Trainer.
"""

from __future__ import annotations

from typing import Any

from megalite.importers import accelerate, axolotl_data, data, finetuning, preferences, quantization
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
    sets,
    to_do,
    word,
)

NAME = "axolotl"
BATCH = Batch("", "micro_batch_size", "gradient_accumulation_steps")


def recognizes(leaves: dict[str, Any]) -> bool:
    return "base_model" in leaves


def ranks(source: ImportedFile) -> int | None:
    """Compute the data-parallel size: shards · replicas · expert-parallel ranks, which read different data.

    Without shards, all remaining ranks are used.
    """
    shards, replicas = source.size("dp_shard_size"), source.size("dp_replicate_size") or 1
    return shards * replicas * (source.size("expert_parallel_size") or 1) if shards else source.dp


def _adapter(value: Any, source: ImportedFile) -> Verdict:
    name = word(value)
    if name in ("NONE", "FALSE"):
        return harmless("full fine-tuning")
    if name not in ("LORA", "QLORA"):
        return lost("only LoRA adapters are supported: set lora.rank")
    return honoured({"lora.rank": source.get("lora_r")} if source.size("lora_r") else {})


def _with_adapter(row: KeyRule) -> KeyRule:
    """Return a row that counts only where the file chooses an adapter."""
    off = harmless("no adapter is trained")
    return KeyRule(
        lambda value, source: (
            row.judge(value, source) if source.word("adapter") in ("LORA", "QLORA") else off
        ),
        row.option,
    )


def _targets(value: Any, source: ImportedFile) -> Verdict:
    """Map the LoRA targets. lora_target_linear adds all projections to the list."""
    return (
        harmless("lora_target_linear includes all projections")
        if source.on("lora_target_linear")
        else finetuning.targets(value, source)
    )


def _precision(value: Any, source: ImportedFile) -> Verdict:
    """Map the precision. bf16: auto selects bf16 on GPUs that support it, and fp16 on others."""
    if word(value) == "AUTO":
        return honoured({"train.precision": "bf16"}, "auto selects fp16 on GPUs without bf16")
    return honoured({"train.precision": "bf16"}) if word(value) in ("TRUE", "FULL") else harmless("disabled")


def _validation(value: Any, source: ImportedFile) -> Verdict:
    """Return a share of the conversations, or their number."""
    if not value:
        return harmless("no validation, which is the default")
    return (
        honoured({"data.validation": value})
        if type(value) is float and value < 1
        else lost("set data.validation to a fraction or a prefix")
    )


def _batch_size(value: Any, source: ImportedFile) -> Verdict:
    """Check the number of sequences per rank and step.

    With the micro-batch, it determines the accumulation steps if the file does not set them.
    """
    if BATCH.steps in source.leaves:
        return harmless("overridden by gradient_accumulation_steps")
    steps = source.get(BATCH.steps)
    return (
        harmless(f"results in {steps} gradient_accumulation_steps")
        if steps
        else lost("not a multiple of micro_batch_size")
    )


def _fsdp(value: Any, source: ImportedFile) -> Verdict:
    """Map transformers' fsdp option, whose strategy fsdp_config specifies in more detail."""
    names = {word(name) for name in (value if isinstance(value, list) else str(value).split())}
    stages = [accelerate.STRATEGIES[name] for name in names if name in accelerate.STRATEGIES]
    strategy = any(key.endswith(("sharding_strategy", "reshard_after_forward")) for key in source.leaves)
    options: dict[str, Any] = {"parallel.zero": stages[0]} if stages and not strategy else {}
    offloaded = "OFFLOAD" in names and not any(key.endswith("offload_params") for key in source.leaves)
    if offloaded:
        whole = options.get("parallel.zero") == 3
        options |= {"parallel.offload": "cpu"} | ({"parallel.offload_parameters": True} if whole else {})
    return honoured(options) if options else harmless("sharding is configured by fsdp_config")


def _recompute(value: Any, source: ImportedFile) -> Verdict:
    """Map activation checkpointing, which FSDP's own switch also enables."""
    if (
        any(source.on(f"fsdp_config.{prefix}activation_checkpointing") for prefix in ("", "fsdp_"))
        and word(value) == "FALSE"
    ):
        return harmless("enabled by activation_checkpointing of fsdp_config")
    return finetuning.recompute(value, source)


METHODS = {"VARLEN_LLAMA3": "gather", "BATCH_RING": "ring", "BATCH_ZIGZAG": "ring", "BATCH_STRIPE": "ring"}


def _context(value: Any, source: ImportedFile) -> Verdict:
    """Map context parallelism. By default, packed rows gather keys and values, and others use a ring."""
    method = METHODS.get(source.word("ring_attn_func"), "gather" if source.on("sample_packing") else "ring")
    return honoured({"parallel.cp": value} | ({} if value == 1 else {"parallel.context": method}))


def _shards(value: Any, source: ImportedFile) -> Verdict:
    """Map the number of shards, which also span the context-parallel ranks."""
    cp = source.size("context_parallel_size") or source.size("sequence_parallel_degree") or 1
    return honoured(
        {"parallel.dp": source.dp, "parallel.dp_shard": value * cp if type(value) is int else value}
    )


def _replicas(value: Any, source: ImportedFile) -> Verdict:
    """Map the number of replicas. Without dp_shard_size, each is sharded over all remaining ranks."""
    if value == 1 or source.size("dp_shard_size"):
        return honoured({"parallel.dp": source.dp}) if source.dp else harmless("this is always the case")
    if source.dp and type(value) is int and value > 0 and source.dp % value == 0:
        return _shards(source.dp // value, source)
    return left(f"set parallel.dp_shard to parallel.dp / {value}")


def _tracker(option: str, project: str) -> KeyRule:
    """Return the row of a switch of a tracker, whose project another key may name."""

    def judge(value: Any, source: ImportedFile) -> Verdict:
        return honoured({option: value}) if source.get(project) is None else harmless(f"see {project}")

    return KeyRule(judge, option)


def _unless(*others: str) -> KeyRule:
    """Return a row of the run's name, which these keys replace."""

    def judge(value: Any, source: ImportedFile) -> Verdict:
        first = next((key for key in others if source.get(key)), None)
        return harmless(f"{first} is it") if first else honoured({"run.name": value})

    return KeyRule(judge, "run.name")


def _minimum(value: Any, source: ImportedFile) -> Verdict:
    lr = source.number("learning_rate")
    return (
        lost("set optimizer.min_lr")
        if lr is None or type(value) not in (int, float)
        else honoured({"optimizer.min_lr": rounded(value * lr)})
    )


def _packing(value: Any, source: ImportedFile) -> Verdict:
    """Check the packing of texts.

    Packed texts of pretraining_dataset attend to each other only without pretrain_multipack_attn, which is on
    by default.
    """
    mask = source.get("pretrain_multipack_attn") is not False or "pretraining_dataset" not in source.leaves
    return data.packing(value, axolotl_data.is_text(source), mask)


def _objective(value: Any, source: ImportedFile) -> Verdict:
    """Map rl. DPO's loss is that of dpo_loss_type, and dpo_norm_loss divides it by lengths."""
    name = word(value)
    if name == "DPO":
        return harmless("train.objective is set by dpo_loss_type")
    if name not in axolotl_data.PREFERENCES:
        return lost(preferences.GENERATES)
    return honoured({"train.objective": name.lower()})


def _dpo_loss(value: Any, source: ImportedFile) -> Verdict:
    if source.word("rl") != "DPO":
        return harmless("only used with rl: dpo")
    verdict = preferences.dpo(value, source.get("dpo_loss_weights"))
    if source.on("dpo_norm_loss") and verdict.options.get("preference.loss") == "sigmoid":
        return verdict._replace(options=verdict.options | {"preference.loss": "sigmoid_norm"})
    return verdict


def _normalized(value: Any, source: ImportedFile) -> Verdict:
    if word(value) != "TRUE" or source.word("dpo_loss_type") in ("['SIGMOID']", "SIGMOID"):
        return harmless("included in preference.loss")
    return lost("only the sigmoid loss is divided by lengths: preference.loss: sigmoid_norm")


def _in(methods: str, row: KeyRule) -> KeyRule:
    """Return a row that counts only with these values of rl."""
    off = harmless(f"only used with rl: {methods.lower().replace(' ', ' or ')}")
    return KeyRule(
        lambda value, source: row.judge(value, source) if source.word("rl") in methods.split() else off,
        row.option,
    )


def _beta(value: Any, source: ImportedFile) -> Verdict:
    if source.get("orpo_alpha") is not None and source.word("rl") == "ORPO":
        return harmless("overridden by orpo_alpha")
    return honoured({"preference.beta": value})


def _length(value: Any, source: ImportedFile) -> Verdict:
    pairs = source.on("reward_model") or source.word("rl").lower() in preferences.PAIRS
    return honoured(preferences.row_length(value, pairs))


def _lora_dropout(value: Any, source: ImportedFile) -> Verdict:
    if source.on("disable_dropout") and value:
        return honoured({"lora.dropout": 0.0}, "TRL's disable_dropout turns it off with preferences")
    return honoured({"lora.dropout": value})


def _reward(value: Any, source: ImportedFile) -> Verdict:
    return honoured(preferences.REWARD) if word(value) == "TRUE" else harmless("disabled")


WARMUP, LONGEST_WARMUP = 0.03, 100
INTERNAL = "has no effect on the run"
TABLE: Table = {
    **finetuning.TRAINER,
    **each(
        "",
        "lora_layers_to_transform lora_layers_pattern peft_layers_to_transform",
        missing("adapters are added to every layer"),
    ),
    **{
        key: row
        for prefix in ("fsdp_config.", "fsdp_config.fsdp_")
        for key, row in accelerate.fsdp_rows(prefix).items()
    },
    **BATCH.table(),
    "batch_size": KeyRule(_batch_size, "train.global_batch_size"),
    "base_model": KeyRule(finetuning.base_model, "model.from_hf"),
    **each(
        "",
        "base_model_config tokenizer_config processor_type",
        to_do("set model.from_hf to the directory of the model and its tokenizer"),
    ),
    **each(
        "",
        "model_type tokenizer_type is_*_derived_model trust_remote_code tokenizer_use_fast tokenizer_legacy",
        never("determined by config.json"),
    ),
    "is_*": never("determined by config.json"),
    "revision_of_model": to_do("download that revision and set model.from_hf to its directory"),
    **each(
        "",
        "gptq gptq_* bnb_config_kwargs.* qat.* llmcompressor.*",
        missing(quantization.UNSUPPORTED),
    ),
    **each(
        "",
        "model_quantization_config model_quantization_config_kwargs.*",
        missing(quantization.UNSUPPORTED),
    ),
    "quantize_moe_experts": only("TRUE", "lora.base includes the matrices of experts"),
    "load_in_4bit": KeyRule(quantization.axolotl_in_4_bits, "lora.base"),
    "load_in_8bit": KeyRule(quantization.axolotl_in_8_bits, "lora.base"),
    **quantization.AXOLOTL_KWARGS,
    **each(
        "",
        "model_config.* overrides_of_model_config.* overrides_of_model_kwargs.*",
        to_do("set model.* to change the architecture"),
    ),
    **each(
        "",
        "resize_token_embeddings_to_32x tokenizer_use_mistral_common",
        missing("the vocabulary size is determined by model.from_hf"),
    ),
    **each(
        "",
        "low_cpu_mem_usage device_map hf_use_auth_token torch_dtype",
        never("the model files are read directly"),
    ),
    **each("", "datasets pretraining_dataset", KeyRule(axolotl_data.training, "data.train")),
    "test_datasets": KeyRule(axolotl_data.validation, "data.validation"),
    **each("", "chat_template chat_template_jinja default_system_message", finetuning.TEMPLATE),
    **each("", "tokens tokens.*", to_do(finetuning.ADDED_TOKENS)),
    **each("special_tokens.", "pad_token unk_token", never("padding does not require a token")),
    **each(
        "",
        "special_tokens.* added_tokens_overrides.* eot_tokens",
        to_do("determined by the tokenizer of model.from_hf: change it there"),
    ),
    **each("", "train_on_inputs excess_length_strategy", never("included in the `megalite prepare` command")),
    **each(
        "",
        "dataset_prepared_path dataset_processes dataset_* shuffle_merged_datasets",
        never("data is preprocessed by `megalite prepare`"),
    ),
    "val_set_size": KeyRule(_validation, "data.validation"),
    "sequence_len": KeyRule(_length, "data.sequence_length"),
    "sample_packing": KeyRule(_packing, "data.packing"),
    **each(
        "",
        "sample_packing_* eval_sample_packing multipack_* pretrain_multipack_*",
        never("packing has no further options"),
    ),
    "pad_to_sequence_len": never("all rows have the full length"),
    **each(
        "",
        "skip_prepare_dataset streaming streaming_* curriculum_sampling",
        never("data is preprocessed by `megalite prepare`"),
    ),
    "min_sample_len": missing("`megalite prepare` keeps short samples"),
    "reinit_weights": never("model.init_from: none is set instead"),
    "adapter": KeyRule(_adapter, "lora.rank"),
    "lora_r": _with_adapter(sets("lora.rank")),
    "lora_alpha": _with_adapter(sets("lora.alpha")),
    "lora_dropout": _with_adapter(KeyRule(_lora_dropout, "lora.dropout")),
    "lora_target_modules": _with_adapter(KeyRule(_targets, "lora.targets")),
    "lora_target_linear": never("the default of lora.targets is all projections"),
    "lora_modules_to_save": _with_adapter(KeyRule(finetuning.modules_to_save, "lora.modules_to_save")),
    "peft_use_dora": _with_adapter(finetuning.DORA),
    "peft_use_rslora": _with_adapter(finetuning.RSLORA),
    "lora_model_dir": sets("lora.init_from"),
    **each(
        "", "lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel", never(finetuning.KERNELS)
    ),
    "lora_target_parameters": missing("use lora.targets, which also includes the projections of experts"),
    "lora_fan_in_fan_out": never("determined by the weights of model.from_hf"),
    **each(
        "",
        "unfrozen_parameters relora* lisa_* peft.*",
        missing("either either all weights or adapters are trained and lora.modules_to_save"),
    ),
    "loraplus_*": missing("A and B always have the same learning rate"),
    "num_epochs": finetuning.epochs("max_steps"),
    "optimizer": KeyRule(finetuning.optimizer),
    "lr_scheduler": KeyRule(finetuning.decay, "optimizer.decay"),
    "cosine_constant_lr_ratio": missing("the cosine schedule always ends at train.steps"),
    "cosine_min_lr_ratio": KeyRule(_minimum, "optimizer.min_lr"),
    **each(
        "",
        "embedding_lr embedding_lr_scale lr_groups",
        missing("all weights use the same learning rate, optimizer.lr"),
    ),
    **each("", "bf16 bfloat16", KeyRule(_precision, "train.precision")),
    **each("", "fp16 float16", finetuning.switch("train.precision", "fp16")),
    "float32": finetuning.switch("train.precision", "fp32"),
    "fp8": missing("float8 is not supported: the closest option is train.precision: bf16"),
    "gradient_checkpointing": KeyRule(_recompute, "train.recompute"),
    "activation_offloading": missing("offloading activations is not supported: use train.recompute: full"),
    "gradient_checkpointing_kwargs.*": never("train.recompute has no further options"),
    **each(
        "",
        "flash_attention xformers_attention sdp_attention flex_attention eager_attention attention "
        "flash_attn_*",
        never(finetuning.ATTENTION),
    ),
    **each("", "attn_implementation s2_attention", never(finetuning.ATTENTION)),
    **each(
        "",
        "use_kernels use_scattermoe use_sonicmoe fused_attn_kernel tiled_mlp* experts_implementation",
        never(finetuning.KERNELS),
    ),
    **each("", "plugins liger_* unsloth_* cut_cross_entropy", never(finetuning.KERNELS)),
    "saves_per_epoch": finetuning.steps("checkpoint.interval", per_epoch=True),
    "evals_per_epoch": finetuning.steps("validation.interval", per_epoch=True),
    "save_first_step": missing("use checkpoint.interval"),
    "fsdp": KeyRule(_fsdp, "parallel.zero"),
    "fsdp_version": never("only selects the FSDP API"),
    "tensor_parallel_size": sets("parallel.tp"),
    **each("", "context_parallel_size sequence_parallel_degree", KeyRule(_context, "parallel.cp")),
    "ring_attn_func": never("parallel.context is set instead"),
    "heads_k_stride": never("only affects how context-parallel ranks communicate"),
    "expert_parallel_size": sets("parallel.ep"),
    "dp_shard_size": KeyRule(_shards, "parallel.dp_shard"),
    "dp_replicate_size": KeyRule(_replicas, "parallel.dp_shard"),
    "wandb_project": sets("logging.wandb"),
    "wandb_name": sets("run.name"),
    "run_name": _unless("wandb_name"),
    "wandb_run_id": _unless("wandb_name", "run_name"),
    **each(
        "",
        "use_swanlab swanlab_* use_otel_metrics otel_* accelerator_config.* use_ray ray_*",
        never("all metrics are written to metrics.jsonl"),
    ),
    "mlflow_experiment_name": sets("logging.mlflow"),
    "mlflow_tracking_uri": sets("logging.mlflow_uri"),
    "use_mlflow": _tracker("logging.mlflow", "mlflow_experiment_name"),
    "trackio_project_name": sets("logging.trackio"),
    "use_trackio": _tracker("logging.trackio", "trackio_project_name"),
    **each(
        "",
        "wandb_* mlflow_* trackio_* use_wandb comet_* gc_steps",
        never("all metrics are written to metrics.jsonl"),
    ),
    "use_tensorboard": sets("logging.tensorboard"),
    **each("", "auto_resume_from_checkpoints strict debug device local_rank world_size ddp", never(INTERNAL)),
    "ddp_bucket_cap_mb": sets(
        "parallel.bucket_mb", roughly="parallel.bucket_mb is the maximum size of a bucket in MB of fp32"
    ),
    "early_stopping_patience": missing(
        "requires validation data: set data.validation, then train.early_stopping_patience"
    ),
    "loss_watchdog_*": missing("use faults.spike_sigma, which skips steps with a high loss"),
    **each(
        "",
        "process_reward_model ebft.* diffusion.* use_eaft eaft_*",
        missing(finetuning.OBJECTIVE),
    ),
    "rl": KeyRule(_objective, "train.objective"),
    "dpo_loss_type": KeyRule(_dpo_loss, "train.objective"),
    "dpo_loss_weights": never("included in preference.nll_weight"),
    "dpo_norm_loss": _in("DPO", KeyRule(_normalized, "preference.loss")),
    "dpo_label_smoothing": _in("DPO", preferences.smoothing("dpo_loss_type")),
    "dpo_use_weighting": preferences.REFERENCES["use_weighting"],
    "dpo_*": never("only affects how TRL computes the loss"),
    "dpo_generate_during_eval": missing("use `megalite generate` with a checkpoint"),
    "rl_beta": _in("DPO IPO SIMPO ORPO KTO", KeyRule(_beta, "preference.beta")),
    "orpo_alpha": _in("ORPO", sets("preference.beta")),
    "simpo_gamma": _in("SIMPO", sets("preference.gamma")),
    "cpo_alpha": _in("SIMPO", sets("preference.nll_weight")),
    "rpo_alpha": _in("DPO IPO", sets("preference.nll_weight")),
    "kto_desirable_weight": _in("KTO", sets("preference.desirable_weight")),
    "kto_undesirable_weight": _in("KTO", sets("preference.undesirable_weight")),
    "precompute_ref_log_probs": preferences.precomputed("base_model"),
    "rl_adapter_ref_model": never("the reference is the model from which training starts"),
    "max_prompt_len": preferences.REFERENCES["max_prompt_len"],
    "disable_dropout": preferences.DROPOUT,
    "reward_model": KeyRule(_reward, "train.objective"),
    "num_labels": only("1", "a reward model has one output"),
    "center_rewards_coefficient": sets("preference.center_rewards"),
    **each("", "kd_* kd_trainer", missing(preferences.STORED)),
    **each("", "rl_* trl.* vllm.* grpo_* ppo_*", missing(preferences.GENERATES)),
}


def table(source: ImportedFile) -> Table:
    """Return the rows for this file's keys.

    axolotl limits the default warm-up, which a fraction of the steps cannot express.
    """
    if "warmup_ratio" in source.leaves:
        return TABLE
    limited = KeyRule(
        lambda value, _: honoured(finetuning.share(value), f"limited to {LONGEST_WARMUP} steps in axolotl"),
        "optimizer.warmup_steps",
    )
    return TABLE | {"warmup_ratio": limited}


def defaults(source: ImportedFile) -> dict[str, Any]:
    """Return the defaults of axolotl and of transformers' Trainer that differ from ours."""
    sharded = source.get("fsdp") or any(key.startswith("fsdp_config.") for key in source.leaves)
    strategy = {"fsdp": ["full_shard"]} if sharded and "fsdp" not in source.leaves else {}
    trainer = {"num_epochs": 1.0, "weight_decay": 0.0, "lr_scheduler": "cosine", "adam_beta1": 0.9}
    return {
        "bf16": "auto",
        "sequence_len": 512,
        **trainer,
        **strategy,
        **_preference_defaults(source),
        **_default_warmup(source),
        **_default_accumulation(source),
    }


def _default_warmup(source: ImportedFile) -> dict[str, Any]:
    if source.get("warmup_steps") is not None or source.get("warmup_ratio") is not None:
        return {}
    steps = source.size("max_steps")
    return (
        {"warmup_ratio": WARMUP}
        if steps is None
        else {"warmup_steps": min(int(WARMUP * steps), LONGEST_WARMUP)}
    )


def _default_accumulation(source: ImportedFile) -> dict[str, Any]:
    size, micro = source.size("batch_size"), source.size(BATCH.micro)
    return (
        {BATCH.steps: size // micro}
        if size and micro and size % micro == 0 and BATCH.steps not in source.leaves
        else {}
    )


def _preference_defaults(source: ImportedFile) -> dict[str, Any]:
    """Return the numbers and switches of TRL that axolotl leaves as they are, and the packing of the data."""
    objective, switches = source.word("rl"), {"sample_packing": False, "disable_dropout": True}
    if objective not in axolotl_data.PREFERENCES:
        return switches if source.on("reward_model") else {}
    beta = {} if objective == "ORPO" and source.get("orpo_alpha") is not None else {"rl_beta": 0.1}
    numbers: dict[str, dict[str, Any]] = {
        "DPO": {"dpo_loss_type": ["sigmoid"], "dpo_label_smoothing": 0.0},
        "SIMPO": {"simpo_gamma": 0.5, "cpo_alpha": 1.0},
        "KTO": {"kto_desirable_weight": 1.0, "kto_undesirable_weight": 1.0},
    }
    return {**switches, **beta, **numbers.get(objective, {})}
