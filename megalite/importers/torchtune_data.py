"""torchtune's datasets. Meanings and defaults are those of its datasets/*.py."""

from __future__ import annotations

from typing import Any

from megalite.config.rule import show
from megalite.importers import data
from megalite.importers.data import ImportedDataset
from megalite.importers.verdict import ImportedFile, Verdict, lost

TEXTS: dict[str, dict[str, Any]] = {
    "text_completion_dataset": {"column": "text"},
    "wikitext_dataset": {
        "source": "EleutherAI/wikitext_document_level",
        "subset": "wikitext-103-v1",
        "column": "page",
    },
    "cnn_dailymail_articles_dataset": {"source": "ccdv/cnn_dailymail", "column": "article"},
}
CHATS: dict[str, dict[str, Any]] = {
    "alpaca_dataset": {"source": "tatsu-lab/alpaca", "train_on_input": True},
    "alpaca_cleaned_dataset": {"source": "yahma/alpaca-cleaned", "train_on_input": True},
    "slimorca_dataset": {"source": "Open-Orca/SlimOrca-Dedup"},
    "chat_dataset": {},
    "instruct_dataset": {"column_map": {"input": "input", "output": "output"}},
    "samsum_dataset": {"source": "Samsung/samsum", "column_map": {"input": "dialogue", "output": "summary"}},
    "grammar_dataset": {"source": "liweili/c4_200m", "column_map": {"input": "input", "output": "output"}},
}
"""Component → its defaults."""
ALPACA = ("alpaca_dataset", "alpaca_cleaned_dataset")
EXPRESSED = {
    *(
        "_component_",
        "source",
        "data_files",
        "split",
        "column",
        "subset",
        "name",
        "conversation_column",
        "conversation_style",
        "column_map",
    ),
    *("train_on_input", "packed", "split_across_pack", "trust_remote_code", "max_seq_len"),
}
"""Keys of a dataset that the command has, or that the run has."""


def training(value: Any, source: ImportedFile) -> Verdict:
    """Return a dataset, or a list of them."""
    return _prepared(_sections(source, "dataset"), source, "data.train", "PREFIX")


def validation(value: Any, source: ImportedFile) -> Verdict:
    return _prepared(_sections(source, "dataset_val"), source, "data.validation", "VALIDATION")


def is_text(source: ImportedFile) -> bool:
    return any(_name(section) in TEXTS for section in _sections(source, "dataset"))


def packed(source: ImportedFile) -> Any:
    """Return whether the datasets are packed, or None if this is not set."""
    return next((section["packed"] for section in _sections(source, "dataset") if "packed" in section), None)


def _sections(source: ImportedFile, name: str) -> list[dict[str, Any]]:
    """Return the keys of each dataset in a section of the file, which may be a list."""
    whole = source.get(name)
    if isinstance(whole, list):
        return [part for part in whole if isinstance(part, dict)]
    keys = [key for key in source.leaves if key.startswith(f"{name}.")]
    tree: dict[str, Any] = {}
    for key in keys:
        *path, last = key.removeprefix(f"{name}.").split(".")
        place = tree
        for part in path:
            place = place.setdefault(part, {})
        place[last] = source.get(key)
    return [tree]


def _name(section: dict[str, Any]) -> str:
    return str(section.get("_component_", "")).split(".")[-1]


def _prepared(sections: list[dict[str, Any]], source: ImportedFile, option: str, output: str) -> Verdict:
    others = [_name(section) for section in sections if _name(section) not in TEXTS | CHATS]
    if others:
        return lost(
            f"data of {', '.join(map(show, others))} is not supported: convert it to conversations or text "
            "first"
        )
    return data.prepared(
        [*map(_dataset, sections)] or [ImportedDataset()],
        source.get("checkpointer.checkpoint_dir"),
        (),
        option,
        output,
    )


def _dataset(section: dict[str, Any]) -> ImportedDataset:
    name, text = _name(section), _name(section) in TEXTS
    given = (TEXTS | CHATS)[name] | {key: value for key, value in section.items() if value is not None}
    others = [
        f"{key} = {show(value)}"
        for key, value in section.items()
        if key not in EXPRESSED and value not in (None, False, {}, [])
    ]
    return ImportedDataset(
        data.located(given.get("source"), given.get("data_files"), given.get("subset") or given.get("name")),
        text=text,
        text_key=str(given.get("column", "text")),
        keys=() if text else _keys(name, given),
        split=str(given.get("split", "train")),
        loss_on_all=given.get("train_on_input") is True,
        without=f"without {', '.join(others)}" if others else "",
    )


def _keys(name: str, given: dict[str, Any]) -> tuple[str, ...]:
    """Return the key names in records: in messages of a conversation, or in instructions.

    Instructions are mapped to the names of Alpaca.
    """
    if name == "chat_dataset":
        ours = "messages" if given.get("conversation_style") == "openai" else "conversations"
        column = given.get("conversation_column", ours)
        return () if column in ("messages", "conversations") else (f"{ours}={column}",)
    columns = given.get("column_map") or {}
    if name in ALPACA:
        return tuple(f"{ours}={theirs}" for ours, theirs in columns.items() if ours != theirs)
    return tuple(
        f"{ours}={columns[key]}"
        for ours, key in (("instruction", "input"), ("output", "output"))
        if columns.get(key, ours) != ours
    )
