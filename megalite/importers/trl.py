"""The YAML of TRL's command line, `trl dpo --config FILE`.

Meanings and defaults are those of its configurations, of its scripts' arguments and of transformers'
Trainer. A file does not say which of TRL's trainers reads it, so each is a project of its own.
"""

from __future__ import annotations

from typing import Any

from megalite.importers import data, finetuning, preferences, quantization
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

BATCH = Batch("", "per_device_train_batch_size", "gradient_accumulation_steps")
UNLIMITED = "nothing is cut: set data.sequence_length to the length of rows that `megalite prepare` prints"
TOO_LONG = {"KEEP_START": "truncate", "KEEP_END": "keep_end"}


def _adapter(row: KeyRule) -> KeyRule:
    """Return a row that counts only with use_peft."""
    off = harmless("no adapter is trained")
    return KeyRule(
        lambda value, source: row.judge(value, source) if source.on("use_peft") else off,
        row.option,
    )


def _lora_dropout(value: Any, source: ImportedFile) -> Verdict:
    if source.on("disable_dropout") and value:
        return honoured({"lora.dropout": 0.0}, "disable_dropout turns it off")
    return honoured({"lora.dropout": value})


def _rank(value: Any, source: ImportedFile) -> Verdict:
    return honoured({"lora.rank": source.get("lora_r") if word(value) == "TRUE" else 0})


def _datasets(value: Any, source: ImportedFile, preference: bool) -> list[ImportedDataset]:
    """Return dataset_name, or the entries of datasets, in the form of TRL or of the alignment handbook."""
    if not isinstance(value, list):
        inputs = data.located(value, None, source.get("dataset_config"))
        split = str(source.get("dataset_train_split", "train"))
        return [ImportedDataset(inputs, preference=preference, split=split)]
    datasets = []
    for entry in value:
        entry = entry if isinstance(entry, dict) else {"path": entry}
        name = entry.get("name") or entry.get("config")
        inputs = data.located(entry.get("path") or entry.get("id"), entry.get("data_files"), name)
        weight = entry.get("fraction", entry.get("weight"))
        without = "without data_dir" if entry.get("data_dir") else ""
        if type(entry.get("weight")) in (int, float):  # a share of its records, and not of the samples
            without = "multiply each weight by the number of records that `megalite prepare` prints"
        split = str(entry.get("split") or "train")
        datasets.append(
            ImportedDataset(
                inputs,
                preference=preference,
                split=split,
                weight=weight if type(weight) in (int, float) else None,
                without=without,
            )
        )
    return datasets


def _cpo(value: Any, source: ImportedFile) -> Verdict:
    name = word(value)
    if name == "SIMPO":
        return honoured({"train.objective": "simpo"})
    if name in ("SIGMOID", "HINGE"):
        return honoured({"train.objective": "cpo", "preference.loss": name.lower()})
    return preferences.without_loss(
        "cpo", "set train.objective to cpo or simpo: CPO's ipo and alphapo are not supported"
    )


def _kto(value: Any, source: ImportedFile) -> Verdict:
    if word(value) == "KTO":
        return honoured({"train.objective": "kto"})
    return preferences.without_loss("kto", f"the loss {value} is not supported: kto's own is the closest")


def _gamma(value: Any, source: ImportedFile) -> Verdict:
    if source.word("loss_type") != "SIMPO":
        return harmless("only used with loss_type: simpo")
    return honoured({"preference.gamma": value})


def _on_policy(value: Any, source: ImportedFile) -> Verdict:
    """Check GKD's share of generated completions."""
    return harmless("completions are those of the data") if not value else lost(preferences.GENERATES)


def _divergence(value: Any, source: ImportedFile) -> Verdict:
    """Map GKD's beta, whose ends are the two KL divergences."""
    ends = {"0": "forward", "1": "reverse"}
    if word(value) in ends:
        return honoured({"distillation.divergence": ends[word(value)]})
    return honoured({"distillation.divergence": "jsd", "distillation.beta": value})


def _always(options: dict[str, Any]) -> KeyRule:
    """Return the row of `method`, which is no key of TRL: the trainer decides the objective."""
    return KeyRule(lambda *_: honoured(options), "train.objective")


_METHODS: dict[str, tuple[Table, dict[str, Any]]] = {
    "dpo": (
        {
            **preferences.REFERENCES,
            "loss_type": KeyRule(
                lambda value, source: preferences.dpo(value, source.get("loss_weights")), "train.objective"
            ),
            "loss_weights": never("included in preference.nll_weight"),
            "label_smoothing": preferences.smoothing("loss_type"),
            "precompute_ref_log_probs": preferences.precomputed("model_name_or_path"),
            "rpo_alpha": sets("preference.nll_weight"),
        },
        {"loss_type": ["sigmoid"], "beta": 0.1, "label_smoothing": 0.0},
    ),
    "kto": (
        {
            **preferences.REFERENCES,
            "loss_type": KeyRule(_kto, "train.objective"),
            "desirable_weight": sets("preference.desirable_weight"),
            "undesirable_weight": sets("preference.undesirable_weight"),
            "precompute_ref_log_probs": missing("kto also scores prompts with other completions"),
        },
        {"loss_type": "kto", "beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0},
    ),
    "cpo": (
        {
            **preferences.REFERENCES,
            "loss_type": KeyRule(_cpo, "train.objective"),
            "label_smoothing": sets("preference.label_smoothing"),
            "cpo_alpha": sets("preference.nll_weight"),
            "simpo_gamma": KeyRule(_gamma, "preference.gamma"),
            "alpha": missing("the rewards of AlphaPO are not supported"),
        },
        {"loss_type": "sigmoid", "beta": 0.1, "label_smoothing": 0.0, "cpo_alpha": 1.0, "simpo_gamma": 0.5},
    ),
    "orpo": (
        {**preferences.REFERENCES, "method": _always({"train.objective": "orpo"})},
        {"method": "orpo", "beta": 0.1},
    ),
    "reward": (
        {
            "method": _always(preferences.REWARD),
            "center_rewards_coefficient": sets("preference.center_rewards"),
        },
        {"method": "reward", "center_rewards_coefficient": 0.0},
    ),
    "gkd": (
        {
            "truncation_mode": never("included in the `megalite prepare` command"),
            "dataset_text_field": never("data is conversations"),
            "method": _always({"train.objective": "distillation"}),
            "teacher_model_name_or_path": KeyRule(
                lambda value, _: honoured({"distillation.teacher": f"hf:{value}"}), "distillation.teacher"
            ),
            "teacher_model_init_kwargs.*": never("the teacher computes in the precision of the run"),
            "lmbda": KeyRule(_on_policy),
            "seq_kd": missing(preferences.GENERATES),
            "beta": KeyRule(_divergence, "distillation.divergence"),
            "temperature": sets("distillation.temperature"),
            "max_new_tokens": never("only used to generate"),
        },
        {"method": "distillation", "lmbda": 0.5, "beta": 0.5, "temperature": 0.9},
    ),
}
"""Method → its own rows, and its defaults."""
TABLE: Table = {
    **finetuning.TRAINING_ARGUMENTS,
    **BATCH.table(),
    "beta": sets("preference.beta"),
    "disable_dropout": preferences.DROPOUT,
    "model_name_or_path": KeyRule(finetuning.base_model, "model.from_hf"),
    "model_revision": only("MAIN", "download that revision and set model.from_hf to its directory"),
    "model_init_kwargs.*": to_do("set model.* to change the architecture"),
    **each(
        "",
        "trust_remote_code dtype torch_dtype attn_implementation ignore_bias_buffers",
        never("config.json and the model files are read directly"),
    ),
    "load_in_4bit": KeyRule(quantization.trl_in_4_bits, "lora.base"),
    "load_in_8bit": KeyRule(quantization.trl_in_8_bits, "lora.base"),
    **each("", "bnb_4bit_quant_* use_bnb_nested_quant", quantization.part_of("load_in_4bit")),
    "use_peft": KeyRule(_rank, "lora.rank"),
    "lora_r": _adapter(sets("lora.rank")),
    "lora_alpha": _adapter(sets("lora.alpha")),
    "lora_dropout": _adapter(KeyRule(_lora_dropout, "lora.dropout")),
    "lora_target_modules": _adapter(KeyRule(finetuning.targets, "lora.targets")),
    "lora_target_parameters": missing("use lora.targets, which also includes the projections of experts"),
    "lora_modules_to_save": _adapter(KeyRule(finetuning.modules_to_save, "lora.modules_to_save")),
    "use_rslora": _adapter(finetuning.RSLORA),
    "use_dora": _adapter(finetuning.DORA),
    "lora_task_type": never("determined by train.objective"),
    **each("", "dataset_config dataset_train_split", never("included in the `megalite prepare` command")),
    "dataset_test_split": KeyRule(
        lambda value, source: (
            harmless("only used to validate")
            if source.word("eval_strategy", "no") in ("NO", "FALSE")
            else left("prepare this split in the same way and set data.validation")
        ),
        "data.validation",
    ),
    **each("", "dataset_streaming streaming", never("token files are always memory-mapped")),
    **each(
        "",
        "dataset_num_proc pad_token tokenizer_name eos_token pad_to_multiple_of padding_free "
        "padding_value is_encoder_decoder",
        never("data is preprocessed by `megalite prepare`"),
    ),
    **each("", "test_split_size dataset_mixture.test_split_size", sets("data.validation")),
    **each("dataset_mixture.", "streaming seed", never("token files are read in an order of run.seed")),
    "chat_template_path": finetuning.TEMPLATE,
    "train_sampling_strategy": sets(
        "data.shuffle",
        {"SEQUENTIAL": False, "RANDOM": True},
        "rows are shuffled or in order",
    ),
    "packing": sets("data.packing"),
    "gradient_checkpointing": KeyRule(finetuning.recompute, "train.recompute"),
    "gradient_checkpointing_kwargs.*": never("train.recompute has no further options"),
    "activation_offloading": missing("offloading activations is not supported: use train.recompute: full"),
    "router_aux_loss_coef": sets("model.router_aux_loss_coef"),
    **each("", "use_liger_kernel use_liger_loss liger_kernel_config.*", never(finetuning.KERNELS)),
    "generate_during_eval": missing("use `megalite generate` with a checkpoint"),
    **each("", "logging_* log_level disable_tqdm", never("all metrics are written to metrics.jsonl")),
    "logging_steps": finetuning.TRAINER["logging_steps"],
}


class TRL:
    """The project of one of TRL's trainers."""

    def __init__(self, method: str):
        self.method, self.NAME = method, f"TRL ({method})"
        self.TABLE: Table = {
            **TABLE,
            "max_length": KeyRule(self._length, "data.sequence_length", left(UNLIMITED)),
            "dataset_name": KeyRule(self._dataset, "data.train"),
            **each("", "datasets dataset_mixture.datasets", KeyRule(self._datasets, "data.train")),
            **_METHODS[method][0],
        }

    def recognizes(self, leaves: dict[str, Any]) -> bool:
        """The keys of a file are not those of one trainer alone."""
        return False

    def ranks(self, source: ImportedFile) -> int | None:
        return source.dp

    def table(self, source: ImportedFile) -> Table:
        return self.TABLE

    def defaults(self, source: ImportedFile) -> dict[str, Any]:
        """Return the defaults of TRL and of transformers' Trainer that differ from ours."""
        adapter = {
            **{"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05},
            "lora_target_modules": ["q_proj", "v_proj"],  # those of PEFT for Llama and its relatives
        }
        return {
            **_METHODS[self.method][1],
            "max_length": 1024,
            "truncation_mode": "keep_start",
            "disable_dropout": True,
            "use_peft": False,
            **(adapter if source.on("use_peft") else {}),
            "packing": False,
            "learning_rate": {"reward": 1e-4, "gkd": 2e-5}.get(self.method, 1e-6),
            **({"train_sampling_strategy": "sequential"} if self.method == "kto" else {}),
            "num_train_epochs": 3.0,
            "weight_decay": 0.0,
            "adam_beta1": 0.9,
            "lr_scheduler_type": "linear",
            BATCH.micro: 8,
            "gradient_checkpointing": True,
            "logging_steps": 10,
            **({} if source.on("fp16") else {"bf16": True}),
        }

    def _length(self, value: Any, source: ImportedFile) -> Verdict:
        return honoured(preferences.row_length(value, self.method in preferences.PAIRS))

    def _datasets(self, value: Any, source: ImportedFile) -> Verdict:
        length, chats = source.size("max_length"), self.method == "gkd"
        cut = TOO_LONG.get(source.word("truncation_mode"), "truncate")
        cut = "drop" if self.method == "reward" else cut
        limits = preferences.limits(length + 1 if chats and length else length, cut)
        datasets = _datasets(value, source, preference=not chats)
        return data.prepared(datasets, source.get("model_name_or_path"), limits)

    def _dataset(self, value: Any, source: ImportedFile) -> Verdict:
        """Map dataset_name, which datasets replaces."""
        for key in ("datasets", "dataset_mixture.datasets"):
            if source.get(key):
                return harmless(f"overridden by {key}")
        return self._datasets(value, source)


PROJECTS = {f"trl-{method}": TRL(method) for method in _METHODS}
