"""axolotl's datasets. Meanings are those of its utils/schemas/datasets.py and prompt_strategies."""

from __future__ import annotations

import dataclasses
from typing import Any

from megalite.config.rule import show
from megalite.importers import data
from megalite.importers.data import ImportedDataset
from megalite.importers.preferences import GENERATES
from megalite.importers.preferences import limits as limits_of
from megalite.importers.verdict import ImportedFile, Verdict, lost, word

TEXTS = ("completion", "pretrain")
KEYS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (
            "chat_template",
            "sharegpt",
            "messages",
            "alpaca",
            "alpaca_w_system",
            "alpaca_instruct",
            "alpaca_chat",
            "orcamini",
        ),
        (),
    ),
    "alpaca_chat.load_qa": ("instruction=question", "output=answer"),
    "alpaca_chat.load_camel_ai": ("instruction=message_1", "output=message_2"),
    "gpteacher": ("output=response",),
}
"""Type of conversations that can be prepared → names of the keys in its records."""
PREFERENCE_KEYS: dict[str, tuple[str, ...]] = {
    "argilla": ("chosen=chosen_response", "rejected=rejected_response"),
    "argilla_chat": (),
    "default": (),
    "icr": ("instruction=input",),
    "intel": ("instruction=question",),
    "prompt_pairs": ("instruction=prompt",),
    "ultra": (),
}
"""What follows the name of a template in the type of pairs → names of the keys in its records."""
LABELLED_KEYS: dict[str, tuple[str, ...]] = {
    "argilla": (),
    "intel": ("instruction=question",),
    "prompt_pairs": ("instruction=prompt",),
    "ultra": ("instruction=prompt",),
}
"""The same of completions with a label."""
PREFERENCES = {**dict.fromkeys(("DPO", "IPO", "ORPO", "SIMPO"), PREFERENCE_KEYS), "KTO": LABELLED_KEYS}
"""Values of `rl` whose data can be prepared."""
REWARD_KEYS: dict[str, tuple[str, ...]] = {"chat_template": (), "default": (), "llama3": ()}
"""What follows bradley_terry in the type of pairs of a reward model."""
EXPRESSED = {
    *(
        "path",
        "type",
        "split",
        "name",
        "data_files",
        "ds_type",
        "field",
        "text_column",
        "field_messages",
        "message_property_mappings",
        "message_field_training",
    ),
    *(
        "message_field_role",
        "message_field_content",
        "trust_remote_code",
        "conversation",
        "preprocess_shards",
    ),
}
"""Keys of an entry that the command has, or that change nothing."""
USUAL = {
    "roles_to_train": (["assistant"], ["gpt"], ["assistant", "gpt"]),
    "train_on_eos": ("turn",),
    "train_on_eot": ("turn",),
    "chat_template": ("tokenizer_default",),
    "field_tools": ("tools",),
}
"""Key of an entry → values that are so here."""


def training(value: Any, source: ImportedFile) -> Verdict:
    return _prepared(value, source, "data.train", "PREFIX")


def validation(value: Any, source: ImportedFile) -> Verdict:
    return _prepared(value, source, "data.validation", "VALIDATION")


def is_text(source: ImportedFile) -> bool:
    """Return whether the training data is plain text."""
    entries = _entries(source.get("datasets"))
    return bool(_entries(source.get("pretraining_dataset"))) or any(
        _type(entry) in TEXTS for entry in entries
    )


def _prepared(value: Any, source: ImportedFile, option: str, output: str) -> Verdict:
    if (objective := source.word("rl")) not in ("NONE", "FALSE", ""):
        if objective not in PREFERENCES:
            return lost(GENERATES)
        return _preferences(value, source, PREFERENCES[objective], option, output, objective == "KTO")
    if source.on("reward_model"):
        return _preferences(value, source, REWARD_KEYS, option, output, False)
    entries, pretraining = _entries(value), value == source.get("pretraining_dataset")
    unknown = [_type(entry) for entry in entries if not pretraining and not _is_known(entry)]
    if unknown:
        return lost(
            f"data of type {', '.join(map(show, unknown))} is not supported: convert it to conversations or "
            "text first"
        )
    datasets = [_dataset(entry, source, pretraining) for entry in entries] or [ImportedDataset()]
    return data.prepared(datasets, source.get("base_model"), _of_conversations(source), option, output)


def _preferences(
    value: Any,
    source: ImportedFile,
    forms: dict[str, tuple[str, ...]],
    option: str,
    output: str,
    labelled: bool,
) -> Verdict:
    entries = _entries(value)
    datasets = [_preference_dataset(entry, source, forms) for entry in entries]
    known = [dataset for dataset in datasets if dataset is not None]
    if len(known) < len(entries):
        types = ", ".join(
            show(entry.get("type")) for entry, dataset in zip(entries, datasets, strict=True) if not dataset
        )
        return lost(f"data of type {types} is not supported: convert it to TRL's records first")
    cut = "truncate" if source.word("excess_length_strategy") == "TRUNCATE" else "drop"
    limits = limits_of(source.size("sequence_len"), cut)
    verdict = data.prepared(known, source.get("base_model"), limits, option, output)
    rows = "a row holds both completions of a pair with their prompts"
    return verdict if labelled else verdict._replace(why=f"{verdict.why}; {rows}")


def _preference_dataset(
    entry: dict[str, Any], source: ImportedFile, forms: dict[str, tuple[str, ...]]
) -> ImportedDataset | None:
    """Return the dataset of an entry, or None if its type is not among the forms."""
    kind = entry.get("type")
    template, _, form = str(kind).partition(".")
    keys = forms.get(form or "default")
    if not isinstance(kind, str) or template == "user_defined" or keys is None:
        return None
    halves = {f"field_{half}": half for half in ("chosen", "rejected")}
    names = [f"{half}={entry[field]}" for field, half in halves.items() if entry.get(field, half) != half]
    dataset = _dataset({key: each for key, each in entry.items() if key not in halves}, source, False)
    replaced = (
        f"the tokenizer's template is used instead of {template}" if template != "chat_template" else ""
    )
    return dataclasses.replace(
        dataset,
        preference=True,
        loss_on_all=False,
        keys=(*dataset.keys, *names, *keys),
        without="; ".join(part for part in (replaced, dataset.without) if part),
    )


def _entries(value: Any) -> list[dict[str, Any]]:
    entries = value if isinstance(value, list) else [] if value is None else [value]
    return [entry if isinstance(entry, dict) else {"path": entry} for entry in entries]


def _type(entry: dict[str, Any]) -> Any:
    """Return the type without what follows a colon, which is a style of prompts."""
    kind = entry.get("type")
    return kind.split(":")[0] if isinstance(kind, str) else kind


def _is_known(entry: dict[str, Any]) -> bool:
    kind = _type(entry)
    return kind is None or isinstance(kind, dict) or kind in (*TEXTS, *KEYS) or kind.split(".")[0] in KEYS


def _dataset(entry: dict[str, Any], source: ImportedFile, pretraining: bool) -> ImportedDataset:
    text = pretraining or _type(entry) in TEXTS
    text_key = entry.get("text_column" if "text_column" in entry else "field") or "text"
    inputs = data.located(entry.get("path"), entry.get("data_files"), entry.get("name"))
    others = [
        f"{key} = {show(value)}"
        for key, value in entry.items()
        if key not in EXPRESSED and not _is_usual(key, value)
    ]
    if isinstance(entry.get("type"), dict) and {"format", "no_input_format"} & entry["type"].keys():
        others.append("the format of its type, which is replaced by the tokenizer's chat template")
    if entry.get("data_files") and inputs[0].startswith("hf:"):
        others.append(f"data_files = {show(entry['data_files'])}")
    return ImportedDataset(
        inputs,
        text=text,
        text_key=str(text_key),
        keys=() if text else _keys(entry),
        split=str(entry.get("split") or "train"),
        loss_on_all=source.on("train_on_inputs"),
        without=f"without {', '.join(others)}" if others else "",
    )


def _is_usual(key: str, value: Any) -> bool:
    return value in (None, [], {}, False) or value in USUAL.get(key, ())


def _keys(entry: dict[str, Any]) -> tuple[str, ...]:
    """Return the key names in records and messages that `megalite prepare` does not recognize by itself."""
    kind = entry.get("type")
    if isinstance(kind, dict):
        pairs = {ours: kind.get(f"field_{ours}") for ours in ("system", "instruction", "input", "output")}
        return tuple(f"{ours}={theirs}" for ours, theirs in pairs.items() if theirs and theirs != ours)
    mapping = entry.get("message_property_mappings") or {}
    role = mapping.get("role") or entry.get("message_field_role")
    content = mapping.get("content") or entry.get("message_field_content")
    usual = (role or "role", content or "content") in (("role", "content"), ("from", "value"))
    messages = entry.get("field_messages")
    keys = [f"messages={messages}"] if messages not in (None, "messages", "conversations") else []
    if (training := entry.get("message_field_training")) not in (None, "train"):
        keys.append(f"train={training}")
    if not usual:
        keys += [f"{ours}={theirs}" for ours, theirs in (("role", role), ("content", content)) if theirs]
    return (*keys, *KEYS.get(str(_type(entry)), ()))


def _of_conversations(source: ImportedFile) -> list[str]:
    """Map the preparation of conversations. By default, longer ones are dropped, as in megalite."""
    length = source.size("sequence_len")
    cut = word(source.get("excess_length_strategy")) == "TRUNCATE" and length
    return ["--max_length", str(length + 1), "--too_long", "truncate"] if cut and length else []
