"""LLaMA-Factory's datasets, which its dataset_info.json lists. Meanings are those of its data/parser.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megalite.data.chat.record_hints import KNOWN_ROLES, ROLES
from megalite.importers import data
from megalite.importers.data import FILE, ImportedDataset
from megalite.importers.preferences import listed
from megalite.importers.verdict import ImportedFile

PREFERENCES = ("DPO", "KTO", "RM")
"""Values of `stage` whose data is preferences."""
ALPACA = {"prompt": "instruction", "query": "input", "response": "output"}
"""Column of a record with an instruction → the name of its key here, which is also its default."""
SHARED = {name: name for name in ("system", "tools", "chosen", "rejected")} | {"kto_tag": "label"}
"""The same of columns that records of any formatting may have."""
USUAL_TAGS = (("from", "value"), ("role", "content"))
ROLE_TAGS = ("user_tag", "assistant_tag", "observation_tag", "function_tag", "system_tag")
ONLINE = "ONLINE"
"""The dataset_dir whose datasets are named as the Hub names them."""


def is_text(source: ImportedFile) -> bool:
    return source.word("stage") == "PT"


def datasets(value: Any, source: ImportedFile) -> tuple[list[ImportedDataset], str]:
    """Return the datasets with these names, and what is left to be said about those that are not listed.

    dataset_info.json is in dataset_dir, relative to the working directory, as for LLaMA-Factory.
    """
    names = [str(name).strip() for name in listed(value)]
    directory = str(source.get("dataset_dir", "data"))
    preference = source.word("stage", "sft") in PREFERENCES
    if directory == ONLINE:
        entries: dict[str, Any] = {name: {"hf_hub_url": name} for name in names}
    else:
        entries = _entries(Path(directory) / "dataset_info.json")
    known = {name: entries[name] for name in names if isinstance(entries.get(name), dict)}
    named = [_dataset(known[name], directory, source, preference) for name in names if name in known]
    missing = [name for name in names if name not in known]
    if not missing:
        return named, ""
    columns = " and the keys of its columns with --keys" if preference else ""
    hint = (
        f"replace {FILE} with the files or hf:NAME that {directory}/dataset_info.json lists for "
        f"{', '.join(missing)}, separated by spaces{columns}"
    )
    return [*named, ImportedDataset(text=is_text(source), preference=preference)], hint


def _entries(path: Path) -> dict[str, Any]:
    """Return the entries of dataset_info.json, or none if it cannot be read."""
    try:
        entries = json.loads(path.expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return entries if isinstance(entries, dict) else {}


def _section(entry: dict[str, Any], name: str) -> dict[str, Any]:
    section = entry.get(name)
    return section if isinstance(section, dict) else {}


def _dataset(
    entry: dict[str, Any], directory: str, source: ImportedFile, preference: bool
) -> ImportedDataset:
    columns, tags = _section(entry, "columns"), _section(entry, "tags")
    text = is_text(source)
    others = [key for key in ("folder", "num_samples", "script_url", "cloud_file_name") if entry.get(key)]
    others += [key for key in ("history", "images", "videos", "audios") if columns.get(key) and not text]
    others += [key for key in ROLE_TAGS if tags.get(key, "user") not in (*ROLES, *KNOWN_ROLES)]
    return ImportedDataset(
        _inputs(entry, directory),
        text=text,
        preference=preference,
        text_key=str(columns.get("prompt", ALPACA["prompt"])),
        keys=() if text else _keys(entry, columns, preference),
        split=str(entry.get("split") or "train"),
        without=f"without {', '.join(others)}" if others else "",
    )


def _inputs(entry: dict[str, Any], directory: str) -> tuple[str, ...]:
    if entry.get("hf_hub_url"):
        subset = entry.get("subset")
        return (f"hf:{entry['hf_hub_url']}{f':{subset}' if subset else ''}",)
    name = entry.get("file_name")
    if not name:
        return (FILE,)
    path = f"{directory.rstrip('/')}/{name}"
    return data.located(path, ["*"] if Path(path).is_dir() else None)


def _keys(entry: dict[str, Any], columns: dict[str, Any], preference: bool) -> tuple[str, ...]:
    """Return the names of keys in the records that `megalite prepare` does not recognize by itself."""
    conversations = entry.get("formatting", "alpaca") != "alpaca"
    names = ({} if conversations else ALPACA) | SHARED
    keys = [f"{names[key]}={columns[key]}" for key in names if columns.get(key, names[key]) != names[key]]
    keys = [key for key in keys if key != "label=kto_tag"]  # which is recognized
    if entry.get("ranking"):
        keys = [key for key in keys if not key.startswith(("output=", "label="))]
    elif not preference:
        keys = [key for key in keys if not key.startswith(("chosen=", "rejected=", "label="))]
    if not conversations:
        return tuple(keys)
    messages = columns.get("messages", "conversations")
    tags = _section(entry, "tags")
    role, content = tags.get("role_tag", "from"), tags.get("content_tag", "value")
    if (role, content) not in USUAL_TAGS:
        keys = [f"role={role}", f"content={content}", *keys]
    return tuple(keys) if messages in ("messages", "conversations") else (f"messages={messages}", *keys)
