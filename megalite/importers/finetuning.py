"""Rows shared by fine-tuning projects: base model, adapters, epochs, and transformers' Trainer options."""

from __future__ import annotations

import shlex
from typing import Any

from megalite.config.errors import ConfigError
from megalite.families.peft_names import with_own_names
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
    plain,
    rounded,
    sets,
    to_do,
    word,
)

PROJECTIONS = {
    "q_proj": "q",
    "k_proj": "k",
    "v_proj": "v",
    "o_proj": "o",
    "output_proj": "o",
    "gate_proj": "gate",
    "up_proj": "up",
}
PROJECTIONS |= {"down_proj": "down", "w1": "gate", "w2": "down", "w3": "up"}
DECAYS = {
    "COSINE": "cosine",
    "LINEAR": "linear",
    "CONSTANT": "constant",
    "CONSTANT_WITH_WARMUP": "constant",
    "COSINE_WITH_MIN_LR": "cosine",
}
DECAYS |= {"WARMUP_STABLE_DECAY": "wsd"}
ADAMS = (
    "ADAMW",
    "ADAMW_TORCH",
    "ADAMW_TORCH_FUSED",
    "ADAMW_HF",
    "ADAMW_APEX_FUSED",
    "ADAMW_TORCH_NPU_FUSED",
    "ADAMW_TORCH_XLA",
)
_EIGHT = {"optimizer.moments": "8bit"}
_LION, _ADEMAMIX = {"optimizer.name": "lion"}, {"optimizer.name": "ademamix"}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("ADAMW_BNB_8BIT", "ADAMW_8BIT", "ADAMW_TORCH_8BIT", "PAGED_ADAMW_8BIT"), _EIGHT),
    **dict.fromkeys(("ADAMW8BIT", "PAGEDADAMW8BIT"), _EIGHT),
    **dict.fromkeys(("LION_32BIT", "PAGED_LION_32BIT"), _LION),
    **dict.fromkeys(("LION_8BIT", "PAGED_LION_8BIT"), _LION | _EIGHT),
    **dict.fromkeys(("ADEMAMIX", "PAGED_ADEMAMIX_32BIT"), _ADEMAMIX),
    **dict.fromkeys(("ADEMAMIX_8BIT", "PAGED_ADEMAMIX_8BIT"), _ADEMAMIX | _EIGHT),
}
"""Optimizers by the names of transformers, and by the classes of bitsandbytes and torchao."""
SAVED = {
    "embed_tokens": "embedding",
    "wte": "embedding",
    "lm_head": "head",
    "output": "head",
    "norm": "norms",
}
MODELS = ("base_model", "model_name_or_path", "checkpointer.checkpoint_dir")
FROM_SCRATCH = ("reinit_weights", "train_from_scratch")
HELD_OUT = ("val_set_size", "val_size")
VALIDATED = ("test_datasets", "eval_dataset")
ATTENTION = "attention is always fused"
ADDED_TOKENS = (
    "add them to the tokenizer (add_tokens, save_pretrained), prepare the data with it, and set "
    "model.resize_embeddings=mean"
)
KERNELS = "fused operations are selected by train.kernels"
OBJECTIVE = "an objective that is not supported: train.objective lists those that are"
VALIDATION = "requires validation data: set data.validation first"


def base_model(value: Any, source: ImportedFile) -> Verdict:
    """Map a Hugging Face model to its architecture and weights.

    A run that starts from random weights uses only the architecture.
    """
    random = any(source.on(key) for key in FROM_SCRATCH)
    return honoured({"model.from_hf": value, "model.init_from": "none" if random else f"hf:{value}"})


def _named(option: str, value: Any, own: dict[str, str], source: ImportedFile) -> tuple[list[str], list[str]]:
    """Return our names of the listed modules, and the names that do not support adapters.

    The names are in a list or separated by commas.

    Names that only some families have, for example of fused projections, stay as they are: `megalite train`
    knows them.
    """
    model = next((source.leaves[key] for key in MODELS if isinstance(source.get(key), str)), None)
    known, unknown = [], []
    for name in (str(name).strip() for name in (value if isinstance(value, list) else str(value).split(","))):
        try:
            if name not in own:
                with_own_names({option: [name], "model.from_hf": model})
            known.append(own.get(name, name))
        except ConfigError:
            unknown.append(name)
    return [*dict.fromkeys(known)], unknown


def targets(value: Any, source: ImportedFile) -> Verdict:
    """Map the names of projections, in a list or separated by commas."""
    names = value if isinstance(value, list) else str(value).split(",")
    names = [str(name).strip() for name in names]
    if any(word(name) in ("ALL", "ALL-LINEAR") for name in names):
        return harmless("all projections have adapters, which is the default of lora.targets")
    known, unknown = _named("lora.targets", names, PROJECTIONS, source)
    if not known:
        return lost("lora.targets only supports projections of attention and feed-forward blocks")
    return honoured(
        {"lora.targets": known}, f"adapters are not supported for {', '.join(unknown)}" if unknown else ""
    )


def modules_to_save(value: Any, source: ImportedFile) -> Verdict:
    """Map the modules that are trained in full, in a list or separated by commas."""
    known, unknown = _named("lora.modules_to_save", value, SAVED, source)
    if not known:
        return lost("lora.modules_to_save only supports embedding, head and norms")
    return honoured({"lora.modules_to_save": known}, f"not {', '.join(unknown)}" if unknown else "")


def epochs(limit: str) -> KeyRule:
    """Return the row of the number of epochs, which is overridden by the number of steps in `limit`."""

    def judge(value: Any, source: ImportedFile) -> Verdict:
        return harmless(f"overridden by {limit}") if source.size(limit) else honoured({"train.epochs": value})

    return KeyRule(judge, "train.epochs")


def share(value: Any) -> dict[str, Any]:
    """Return the options of a warm-up given as a fraction of the steps."""
    return {"optimizer.warmup_steps": f"{100 * value:.6g}%" if type(value) in (int, float) else value}


def warmup_steps(value: Any, source: ImportedFile) -> Verdict:
    """Return a number of steps, or below 1 a share of them."""
    return honoured(
        share(value) if type(value) is float and 0 < value < 1 else {"optimizer.warmup_steps": value}
    )


def warmup_ratio(value: Any, source: ImportedFile) -> Verdict:
    return harmless("overridden by warmup_steps") if source.number("warmup_steps") else honoured(share(value))


def decay(value: Any, source: ImportedFile) -> Verdict:
    name = DECAYS.get(word(value))
    return (
        honoured({"optimizer.decay": name})
        if name
        else lost("optimizer.decay must be cosine, linear, wsd or constant: set the closest one")
    )


def optimizer(value: Any, source: ImportedFile) -> Verdict:
    name = word(value)
    if name in ADAMS:
        return harmless("AdamW is the default")
    if name in OPTIMIZERS:
        return honoured(OPTIMIZERS[name])
    if name.startswith(("ADAMW", "PAGED")):
        return lost("use optimizer.moments or parallel.offload to save device memory")
    if name == "MUON":
        return honoured(muon(source))
    return lost("optimizer.name must be adamw, muon, lion or ademamix: set optimizer.* for the closest one")


def muon(source: ImportedFile) -> dict[str, Any]:
    """Return Muon options as used by axolotl and LLaMA-Factory.

    All tensors use one learning rate, and updates of matrices are as large as AdamW's.
    """
    options = {
        "muon.lr": source.number("learning_rate"),
        "muon.weight_decay": source.number("weight_decay") or 0.0,
    }
    given = {option: value for option, value in options.items() if value is not None}
    return {"optimizer.name": "muon", "muon.adjust_lr": "match_rms_adamw"} | given


def betas(first: str, second: str) -> KeyRule:
    def judge(value: Any, source: ImportedFile) -> Verdict:
        return honoured({"optimizer.betas": [source.get(first, 0.9), source.get(second, 0.999)]})

    return KeyRule(judge, "optimizer.betas")


def steps(option: str, per_epoch: bool = False) -> KeyRule:
    """Return a row for a number of steps.

    A fraction of the steps and a number per epoch are left open.
    """

    def judge(value: Any, source: ImportedFile) -> Verdict:
        if per_epoch and value:
            return left(f"set {option} to the number of steps per epoch / {value}")
        if type(value) is float and 0 < value < 1:
            return left(f"set {option} to {value} * train.steps")
        return harmless("disabled") if word(value) in ("-1", "0", "FALSE") else honoured({option: value})

    return KeyRule(judge, option)


def _holds_out(source: ImportedFile) -> bool:
    """Return whether validation data is configured: a fraction of the training data, or other data."""
    return any(0 < (source.number(key) or 0) < 1 for key in HELD_OUT) or any(
        source.get(key) for key in VALIDATED
    )


def _eval_strategy(value: Any, source: ImportedFile) -> Verdict:
    if word(value) in ("NO", "FALSE"):
        return harmless("no validation without validation.interval")
    if not _holds_out(source):
        return left(f"use validation.interval; {VALIDATION}")
    return (
        harmless("overridden by eval_steps")
        if word(value) == "STEPS"
        else left("set validation.interval to the number of steps per epoch")
    )


def _eval_steps(value: Any, source: ImportedFile) -> Verdict:
    strategy = source.word("eval_strategy", source.get("evaluation_strategy", "steps"))
    if strategy != "STEPS":
        return harmless(f"eval_strategy is {strategy.lower()}")
    return (
        steps("validation.interval").judge(value, source)
        if _holds_out(source)
        else left(f"use validation.interval; {VALIDATION}")
    )


def switch(option: str, on: Any) -> KeyRule:
    """Return a row for a switch that sets the option to `on`."""
    return KeyRule(
        lambda value, source: honoured({option: on}) if word(value) == "TRUE" else harmless("disabled"),
        option,
    )


def recompute(value: Any, source: ImportedFile) -> Verdict:
    """Map activation checkpointing, which other projects combine with offloading."""
    if word(value) in ("FALSE", "NONE"):
        return honoured({"train.recompute": "none"})
    return honoured(
        {"train.recompute": "full"},
        "" if word(value) in ("TRUE", "UNSLOTH") else "activations are recomputed instead of offloaded",
    )


DORA = sets("lora.dora")
RSLORA = sets(
    "lora.scaling", {"TRUE": "rslora", "FALSE": "standard"}, "lora.scaling must be standard or rslora"
)
TEMPLATE = to_do(
    "the template of the tokenizer is used; pass another with `megalite prepare --chat_template FILE`"
)


def _deepspeed(value: Any, source: ImportedFile) -> Verdict:
    command = f"megalite import-config deepspeed {shlex.quote(str(value))} > deepspeed.yaml"
    return left(f"also convert that file with `{command}` and pass both with --config")


def _least_rate(value: Any, source: ImportedFile) -> Verdict:
    """Return the learning rate at the end, as a share of the first one."""
    lr = source.number("learning_rate")
    if lr is None or type(value) not in (int, float):
        return left(f"set optimizer.min_lr to {value} * optimizer.lr")
    return honoured({"optimizer.min_lr": rounded(value * lr)})


def _decay_steps(value: Any, source: ImportedFile) -> Verdict:
    steps = source.size("max_steps")
    if not steps or type(value) is not int:
        return left(f"set optimizer.wsd_decay_fraction to {value} / train.steps")
    return honoured({"optimizer.wsd_decay_fraction": rounded(value / steps)})


def _trackers(value: Any, source: ImportedFile) -> Verdict:
    names = str(value)
    options = {f"logging.{name}": True for name in ("tensorboard", "wandb", "mlflow") if name in names}
    options |= {"logging.trackio": source.get("project") or True} if "trackio" in names else {}
    return honoured(options) if options else harmless("all metrics are written to metrics.jsonl")


def _timeout(value: Any, source: ImportedFile) -> Verdict:
    """Map the timeout of collectives in seconds, which some files set to years to have none."""
    seconds = plain(value)
    if type(seconds) in (int, float) and seconds > LONGEST_TIMEOUT:
        return lost(
            "above 24 hours a run that hangs would not end: run.timeout keeps its default, 10 minutes, of "
            "which saves and loads may take more"
        )
    return honoured({"run.timeout": f"{value}s"})


LONGEST_TIMEOUT = 24 * 3600
"""Seconds of a timeout that still ends a run."""
SCHEDULE = "lr_scheduler_kwargs."
TRAINER: Table = {
    f"{SCHEDULE}min_lr": sets("optimizer.min_lr"),
    **each(SCHEDULE, "min_lr_rate min_lr_ratio", KeyRule(_least_rate, "optimizer.min_lr")),
    f"{SCHEDULE}num_decay_steps": KeyRule(_decay_steps, "optimizer.wsd_decay_fraction"),
    f"{SCHEDULE}num_stable_steps": never("the start of the decay is set by optimizer.wsd_decay_fraction"),
    f"{SCHEDULE}decay_type": only("LINEAR", "the wsd decay is always linear"),
    f"{SCHEDULE}*": missing("optimizer.decay has no further options"),
    "learning_rate": sets("optimizer.lr"),
    "weight_decay": sets("optimizer.weight_decay"),
    "max_grad_norm": sets("train.grad_clip"),
    "adam_epsilon": sets("optimizer.eps"),
    **each("", "adam_beta1 adam_beta2", betas("adam_beta1", "adam_beta2")),
    "max_steps": steps("train.steps"),
    "warmup_steps": KeyRule(warmup_steps, "optimizer.warmup_steps"),
    "warmup_ratio": KeyRule(warmup_ratio, "optimizer.warmup_steps"),
    "seed": sets("run.seed"),
    "output_dir": sets("run.dir", roughly="the run directory is run.dir/run.name"),
    "logging_steps": steps("logging.interval"),
    "save_steps": steps("checkpoint.interval"),
    "save_total_limit": sets("checkpoint.keep"),
    "save_strategy": never("use checkpoint.interval or checkpoint.minutes; the last step is always saved"),
    "save_only_model": missing(
        "checkpoints always contain the full training state; use `megalite convert export` to save only "
        "the model"
    ),
    "eval_steps": KeyRule(_eval_steps, "validation.interval"),
    **each("", "eval_strategy evaluation_strategy", KeyRule(_eval_strategy, "validation.interval")),
    "eval_on_start": missing("use validation.interval"),
    **each(
        "",
        "per_device_eval_batch_size eval_batch_size eval_accumulation_steps",
        never("validation uses the batch size of training"),
    ),
    "resume_from_checkpoint": KeyRule(
        lambda value, _: (
            harmless("checkpoint.load: auto resumes from the run directory")
            if type(value) is bool
            else left(
                "checkpoints of other projects cannot be loaded: export the model to Hugging Face format "
                "and set model.init_from: hf:DIR"
            )
        )
    ),
    "overwrite_output_dir": sets("run.overwrite"),
    "ddp_timeout": KeyRule(_timeout, "run.timeout"),
    "run_name": sets("run.name"),
    "report_to": KeyRule(_trackers),
    "project": never("a project of Trackio, which report_to selects"),
    "trackio_space_id": to_do("set the environment variable TRACKIO_SPACE_ID, which Trackio reads"),
    "deepspeed": KeyRule(_deepspeed),
    "neftune_noise_alpha": missing("not supported: the closest option is model.embedding_dropout"),
    "label_smoothing_factor": sets("train.label_smoothing"),
    "group_by_length": missing("use data.packing, which does not depend on the lengths"),
    "tf32": never("the setting of PyTorch is used"),
    "torch_compile": KeyRule(
        lambda value, _: honoured({"train.compile": word(value) in ("TRUE", "AUTO")}), "train.compile"
    ),
    "torch_compile_*": never("train.compile has no further options"),
    **each(
        "",
        "dataloader_* remove_unused_columns ddp_find_unused_parameters include_* push_to_hub hub_*",
        never("no corresponding option"),
    ),
    "load_best_model_at_end": missing(
        "requires validation data: set data.validation, then checkpoint.keep_best"
    ),
}
"""Keys of transformers' TrainingArguments that the projects take unchanged."""
TRAINING_ARGUMENTS: Table = {
    **TRAINER,
    "num_train_epochs": epochs("max_steps"),
    "lr_scheduler_type": KeyRule(decay, "optimizer.decay"),
    "optim": KeyRule(optimizer),
    "bf16": switch("train.precision", "bf16"),
    "fp16": switch("train.precision", "fp16"),
}
"""The same, and keys that axolotl has under other names."""
