"""axolotl's YAML. Meanings and defaults are those of its utils/schemas/config.py, training.py, peft.py and
transformers' Trainer."""

from __future__ import annotations

from typing import Any

from megalite.importers import accelerate, axolotl_data, data, finetuning
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
    """Shards times replicas times the ranks of experts, which read data of their own; without shards, all
    ranks that are left."""
    shards, replicas = source.size("dp_shard_size"), source.size("dp_replicate_size") or 1
    return shards * replicas * (source.size("expert_parallel_size") or 1) if shards else source.dp


def _adapter(value: Any, source: ImportedFile) -> Verdict:
    name = word(value)
    if name in ("NONE", "FALSE"):
        return harmless("the model itself is trained")
    if name not in ("LORA", "QLORA"):
        return lost("adapters are LoRA: set lora.rank")
    rank = honoured({"lora.rank": source.get("lora_r")} if source.size("lora_r") else {})
    return rank if name == "LORA" else rank._replace(kind="approximate", why=finetuning.QUANTIZED)


def _with_adapter(row: KeyRule) -> KeyRule:
    """A row that counts only where the file chooses an adapter."""
    off = harmless("there is no adapter")
    return KeyRule(
        lambda value, source: (
            row.judge(value, source) if source.word("adapter") in ("LORA", "QLORA") else off
        ),
        row.option,
    )


def _targets(value: Any, source: ImportedFile) -> Verdict:
    """lora_target_linear adds all projections to those of the list."""
    return (
        harmless("lora_target_linear has all projections")
        if source.on("lora_target_linear")
        else finetuning.targets(value, source)
    )


def _precision(value: Any, source: ImportedFile) -> Verdict:
    """bf16: auto is bf16 on GPUs that have it, and fp16 on others."""
    if word(value) == "AUTO":
        return honoured({"train.precision": "bf16"}, "auto is fp16 on GPUs without bf16")
    return honoured({"train.precision": "bf16"}) if word(value) in ("TRUE", "FULL") else harmless("it is off")


def _validation(value: Any, source: ImportedFile) -> Verdict:
    """A share of the conversations, or their number."""
    if not value:
        return harmless("nothing is validated, as here")
    return (
        honoured({"data.validation": value})
        if type(value) is float and value < 1
        else lost("set data.validation to a share, or a prefix")
    )


def _batch_size(value: Any, source: ImportedFile) -> Verdict:
    """Sequences of one rank in a step: with the micro-batch it gives the accumulation steps, if the file does
    not have them."""
    if BATCH.steps in source.leaves:
        return harmless("gradient_accumulation_steps replaces it")
    steps = source.get(BATCH.steps)
    return (
        harmless(f"it gives {steps} gradient_accumulation_steps")
        if steps
        else lost("it is no multiple of micro_batch_size")
    )


def _fsdp(value: Any, source: ImportedFile) -> Verdict:
    """Words of transformers' fsdp option; fsdp_config has the strategy in more detail."""
    names = {word(name) for name in (value if isinstance(value, list) else str(value).split())}
    stages = [accelerate.STRATEGIES[name] for name in names if name in accelerate.STRATEGIES]
    strategy = any(key.endswith(("sharding_strategy", "reshard_after_forward")) for key in source.leaves)
    options: dict[str, Any] = {"parallel.zero": stages[0]} if stages and not strategy else {}
    offloaded = "OFFLOAD" in names and not any(key.endswith("offload_params") for key in source.leaves)
    if offloaded:
        whole = options.get("parallel.zero") == 3
        options |= {"parallel.offload": "cpu"} | ({"parallel.offload_parameters": True} if whole else {})
    return honoured(options) if options else harmless("fsdp_config says how weights are sharded")


def _recompute(value: Any, source: ImportedFile) -> Verdict:
    """FSDP's own switch checkpoints the layers, too."""
    if (
        any(source.on(f"fsdp_config.{prefix}activation_checkpointing") for prefix in ("", "fsdp_"))
        and word(value) == "FALSE"
    ):
        return harmless("activation_checkpointing of fsdp_config turns it on")
    return finetuning.recompute(value, source)


METHODS = {"VARLEN_LLAMA3": "gather", "BATCH_RING": "ring", "BATCH_ZIGZAG": "ring", "BATCH_STRIPE": "ring"}


def _context(value: Any, source: ImportedFile) -> Verdict:
    """By default packed rows gather keys and values, and others pass them around."""
    method = METHODS.get(source.word("ring_attn_func"), "gather" if source.on("sample_packing") else "ring")
    return honoured({"parallel.cp": value} | ({} if value == 1 else {"parallel.context": method}))


def _shards(value: Any, source: ImportedFile) -> Verdict:
    """Shards span the ranks of a sequence, too."""
    cp = source.size("context_parallel_size") or source.size("sequence_parallel_degree") or 1
    return honoured(
        {"parallel.dp": source.dp, "parallel.dp_shard": value * cp if type(value) is int else value}
    )


def _replicas(value: Any, source: ImportedFile) -> Verdict:
    """Each replica is sharded over the ranks that are left, if dp_shard_size does not say over how many."""
    if value == 1 or source.size("dp_shard_size"):
        return honoured({"parallel.dp": source.dp}) if source.dp else harmless("it is so here")
    if source.dp and type(value) is int and value > 0 and source.dp % value == 0:
        return _shards(source.dp // value, source)
    return left(f"set parallel.dp_shard to parallel.dp / {value}")


def _unless(*others: str) -> KeyRule:
    """A row of the run's name, which these keys replace."""

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
    """Packed texts of pretraining_dataset attend to each other without pretrain_multipack_attn, which is on
    by default."""
    mask = source.get("pretrain_multipack_attn") is not False or "pretraining_dataset" not in source.leaves
    return data.packing(value, axolotl_data.is_text(source), mask)


WARMUP, LONGEST_WARMUP = 0.03, 100
INTERNAL = "it changes nothing in a run here"
TABLE: Table = {
    **finetuning.TRAINER,
    **each(
        "",
        "lora_layers_to_transform lora_layers_pattern peft_layers_to_transform",
        missing("every layer has adapters"),
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
        to_do("model.from_hf is the model's directory, with its tokenizer"),
    ),
    **each(
        "",
        "model_type tokenizer_type is_*_derived_model trust_remote_code tokenizer_use_fast tokenizer_legacy",
        never("config.json says it"),
    ),
    "is_*": never("config.json says it"),
    "revision_of_model": to_do("fetch that revision, and set model.from_hf to its directory"),
    **each(
        "",
        "load_in_8bit load_in_4bit gptq gptq_* bnb_config_kwargs.* qat.* llmcompressor.*",
        missing(finetuning.QUANTIZED),
    ),
    **each(
        "",
        "quantize_moe_experts model_quantization_config model_quantization_config_kwargs.*",
        missing(finetuning.QUANTIZED),
    ),
    **each(
        "",
        "model_config.* overrides_of_model_config.* overrides_of_model_kwargs.*",
        to_do("set model.* to change the shape"),
    ),
    **each(
        "",
        "resize_token_embeddings_to_32x tokenizer_use_mistral_common",
        missing("the vocabulary is that of model.from_hf"),
    ),
    **each(
        "",
        "low_cpu_mem_usage device_map hf_use_auth_token torch_dtype",
        never("the files of the model are read as they are"),
    ),
    **each("", "datasets pretraining_dataset", KeyRule(axolotl_data.training, "data.train")),
    "test_datasets": KeyRule(axolotl_data.validation, "data.validation"),
    **each("", "chat_template chat_template_jinja default_system_message", finetuning.TEMPLATE),
    **each("", "tokens tokens.*", to_do(finetuning.ADDED_TOKENS)),
    **each("special_tokens.", "pad_token unk_token", never("rows are padded without a token")),
    **each(
        "",
        "special_tokens.* added_tokens_overrides.* eot_tokens",
        to_do("the tokenizer of model.from_hf decides: change it there"),
    ),
    **each("", "train_on_inputs excess_length_strategy", never("the command that prepares the data has it")),
    **each(
        "",
        "dataset_prepared_path dataset_processes dataset_* shuffle_merged_datasets",
        never("`megalite prepare` makes the data beforehand"),
    ),
    "val_set_size": KeyRule(_validation, "data.validation"),
    "sequence_len": sets("data.sequence_length"),
    "sample_packing": KeyRule(_packing, "data.packing"),
    **each(
        "",
        "sample_packing_* eval_sample_packing multipack_* pretrain_multipack_*",
        never("packing has no options"),
    ),
    "pad_to_sequence_len": never("every row has the full length"),
    **each(
        "",
        "skip_prepare_dataset streaming streaming_* curriculum_sampling",
        never("`megalite prepare` makes the data beforehand"),
    ),
    "min_sample_len": missing("`megalite prepare` keeps short ones"),
    "reinit_weights": never("model.init_from: none is set for it"),
    "adapter": KeyRule(_adapter, "lora.rank"),
    "lora_r": _with_adapter(sets("lora.rank")),
    "lora_alpha": _with_adapter(sets("lora.alpha")),
    "lora_dropout": _with_adapter(sets("lora.dropout")),
    "lora_target_modules": _with_adapter(KeyRule(_targets, "lora.targets")),
    "lora_target_linear": never("all projections have adapters without lora.targets"),
    "lora_modules_to_save": _with_adapter(KeyRule(finetuning.modules_to_save, "lora.modules_to_save")),
    "peft_use_dora": _with_adapter(finetuning.DORA),
    "peft_use_rslora": _with_adapter(finetuning.RSLORA),
    "lora_model_dir": sets("lora.init_from"),
    **each(
        "", "lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel", never(finetuning.KERNELS)
    ),
    "lora_target_parameters": missing("lora.targets has names for the matrices of experts, too"),
    "lora_fan_in_fan_out": never("the layout of the weights is that of model.from_hf"),
    **each(
        "",
        "unfrozen_parameters relora* lisa_* peft.*",
        missing("all weights are trained, or adapters with lora.modules_to_save"),
    ),
    "loraplus_*": missing("A and B have the same learning rate"),
    "num_epochs": finetuning.epochs("max_steps"),
    "optimizer": KeyRule(finetuning.optimizer),
    "lr_scheduler": KeyRule(finetuning.decay, "optimizer.decay"),
    "cosine_constant_lr_ratio": missing("the cosine ends with train.steps"),
    "cosine_min_lr_ratio": KeyRule(_minimum, "optimizer.min_lr"),
    **each(
        "",
        "embedding_lr embedding_lr_scale lr_groups",
        missing("all weights have the same rate: optimizer.lr"),
    ),
    **each("", "bf16 bfloat16", KeyRule(_precision, "train.precision")),
    **each("", "fp16 float16", finetuning.switch("train.precision", "fp16")),
    "float32": finetuning.switch("train.precision", "fp32"),
    "fp8": missing("there is no float8: train.precision: bf16 is nearest"),
    "gradient_checkpointing": KeyRule(_recompute, "train.recompute"),
    "activation_offloading": missing("activations are recomputed, not offloaded: train.recompute: full"),
    "gradient_checkpointing_kwargs.*": never("train.recompute has no further choices"),
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
    "save_first_step": missing("checkpoint.interval says when"),
    "fsdp": KeyRule(_fsdp, "parallel.zero"),
    "fsdp_version": never("it chooses FSDP's interface, not what is computed"),
    "tensor_parallel_size": sets("parallel.tp"),
    **each("", "context_parallel_size sequence_parallel_degree", KeyRule(_context, "parallel.cp")),
    "ring_attn_func": never("parallel.context is set for it"),
    "heads_k_stride": never("it is how the ranks of one sequence communicate"),
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
        never("metrics.jsonl has everything"),
    ),
    **each("", "wandb_* mlflow_* use_wandb comet_* gc_steps", never("metrics.jsonl has everything")),
    "use_tensorboard": sets("logging.tensorboard"),
    **each("", "auto_resume_from_checkpoints strict debug device local_rank world_size ddp", never(INTERNAL)),
    "ddp_bucket_cap_mb": sets(
        "parallel.bucket_mb", roughly="here it is the maximum size of a bucket, in MB of fp32"
    ),
    "early_stopping_patience": missing(
        "there is no validation data yet: set data.validation, and then train.early_stopping_patience"
    ),
    "loss_watchdog_*": missing("faults.spike_sigma skips steps of a high loss"),
    **each(
        "",
        "process_reward_model num_labels ebft.* diffusion.* use_eaft eaft_*",
        missing(finetuning.OBJECTIVE),
    ),
    **each("", "rl rl_* trl.* vllm.* reward_model orpo_* dpo_* kto_* simpo_*", missing(finetuning.OBJECTIVE)),
}


def table(source: ImportedFile) -> Table:
    """The rows for this file's keys; the default warm-up has a limit, which a share of the steps does not
    have here."""
    if "warmup_ratio" in source.leaves:
        return TABLE
    limited = KeyRule(
        lambda value, _: honoured(finetuning.share(value), f"it is at most {LONGEST_WARMUP} steps there"),
        "optimizer.warmup_steps",
    )
    return TABLE | {"warmup_ratio": limited}


def defaults(source: ImportedFile) -> dict[str, Any]:
    """The defaults of axolotl and of transformers' Trainer that differ from ours."""
    sharded = source.get("fsdp") or any(key.startswith("fsdp_config.") for key in source.leaves)
    strategy = {"fsdp": ["full_shard"]} if sharded and "fsdp" not in source.leaves else {}
    trainer = {"num_epochs": 1.0, "weight_decay": 0.0, "lr_scheduler": "cosine", "adam_beta1": 0.9}
    return {
        "bf16": "auto",
        "sequence_len": 512,
        **trainer,
        **strategy,
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
