"""The `megalite prepare` commands that make token files of another project's data, as they can be run."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from megalite.importers.verdict import Verdict, harmless, honoured, left, lost, word

LOADERS = ("json", "csv", "parquet", "text")
"""Names of datasets that mean the format of files which another key names."""
SUFFIXES = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".txt", ".md")
FILE, HF_DIR = "FILE", "HF_DIR"
"""What a command has where the configuration does not say it."""


@dataclass(frozen=True)
class ImportedDataset:
    """A dataset as `megalite prepare` reads it.

    Attributes:
        inputs: values of --input.
        text: it has plain text, and no conversations.
        text_key: key of the text in a record.
        preference: it has preferences, instead of conversations.
        keys: `OURS=THEIRS`, names of keys in the records of conversations or preferences.
        split: split of a dataset of the Hub.
        loss_on_all: prompts count in the loss, too.
        weight: its share of the samples of a run; None: all of its records count.
        without: what the command does not express.
    """

    inputs: tuple[str, ...] = (FILE,)
    text: bool = False
    preference: bool = False
    text_key: str = "text"
    keys: tuple[str, ...] = ()
    split: str = "train"
    loss_on_all: bool = False
    weight: float | None = None
    without: str = ""

    @property
    def options(self) -> tuple[str, ...]:
        """All options but --input; datasets with the same ones are prepared together."""
        options = [] if self.text else ["--preference" if self.preference else "--chat"]
        if self.text and any(name.endswith(".json") for name in self.inputs):
            options += ["--format", "jsonl"]  # a .json is one text by its suffix
        if self.text and self.text_key != "text":
            options += ["--text_key", self.text_key]
        if self.keys and not self.text:
            options += ["--keys", ",".join(self.keys)]
        if self.split != "train":
            options += ["--split", self.split]
        if self.loss_on_all and not self.text:
            options += ["--loss_on", "all"]
        return tuple(options)


def located(name: object, files: object = None, configuration: object = None) -> tuple[str, ...]:
    """Return the values of --input for a path, a Hub dataset, or the files of a loader such as json."""
    paths = [str(path) for path in (files if isinstance(files, list) else [files])] if files else []
    if name in (None, "", *LOADERS):
        return tuple(paths) or (FILE,)
    path = str(name)
    if "://" in path:
        return (FILE,)  # to be fetched first
    if path.endswith(SUFFIXES):
        return (path,)
    if path.startswith((".", "/", "~")) or path.count("/") > 1 or Path(path).exists():
        return tuple(f"{path.rstrip('/')}/{part}" for part in (paths or ["*"]))
    return (f"hf:{path}:{configuration}" if configuration else f"hf:{path}",)


def _groups(datasets: Sequence[ImportedDataset]) -> list[list[ImportedDataset]]:
    """Return the datasets that are prepared together. One with a weight has token files of its own."""
    if any(dataset.weight is not None for dataset in datasets):
        return [[dataset] for dataset in datasets]
    return [[*group] for _, group in groupby(datasets, lambda dataset: dataset.options)]


def _prefixes(datasets: Sequence[ImportedDataset], output: str) -> str:
    """Return the value of data.train for the prefixes that the commands write."""
    groups = _groups(datasets)
    if len(groups) == 1:
        return output
    names = [f"{output}-{number}" for number in range(1, len(groups) + 1)]
    if all(group[0].weight is None for group in groups):
        return f"[{', '.join(names)}]"
    weights = (1 if group[0].weight is None else group[0].weight for group in groups)
    return f"{{{', '.join(f'{name}: {weight}' for name, weight in zip(names, weights, strict=True))}}}"


def commands(
    datasets: Sequence[ImportedDataset],
    tokenizer: object,
    chat_options: Sequence[str] = (),
    output: str = "PREFIX",
) -> list[str]:
    """Return a command for each group of datasets with the same options, or for each one with a weight.

    Args:
        chat_options: additional options for conversations.
    """
    groups = _groups(datasets)
    lines = []
    for number, group in enumerate(groups, 1):
        inputs = [shlex.quote(name) for dataset in group for name in dataset.inputs]
        options = [
            shlex.quote(part) for part in (*group[0].options, *(() if group[0].text else chat_options))
        ]
        prefix = output if len(groups) == 1 else f"{output}-{number}"
        known = HF_DIR if tokenizer is None or "$" in str(tokenizer) else shlex.quote(str(tokenizer))
        words = [*options, "--input", *inputs, "--tokenizer", known, "--output", prefix]
        lines.append(" ".join(["megalite prepare", *words]))
    return lines


def prepared(
    datasets: Sequence[ImportedDataset],
    tokenizer: object,
    chat_options: Sequence[str] = (),
    option: str = "data.train",
    output: str = "PREFIX",
) -> Verdict:
    """Return the verdict on a key of the data: the commands, and what to set `option` to."""
    lines = commands(datasets, tokenizer, chat_options, output)
    shown = " and ".join(f"`{command}`" for command in lines)
    without = "; ".join(dict.fromkeys(dataset.without for dataset in datasets if dataset.without))
    remark = f"; {without}" if without else ""
    if len({dataset.text for dataset in datasets}) > 1:
        return lost(f"conversations and text cannot be mixed in one run: choose between {shown}{remark}")
    prefixes = _prefixes(datasets, output)
    return left(f"prepare token files with {shown}, then set {option} to {prefixes}{remark}")


def packing(value: object, text: bool, document_mask: bool = True) -> Verdict:
    """Return the verdict on a packing switch.

    Args:
        document_mask: packed documents do not attend to each other in the project.
    """
    on = word(value) == "TRUE"
    if not text:
        return honoured(
            {"data.packing": on},
            "" if document_mask or not on else "packed conversations never attend to each other",
        )
    if not on:
        return Verdict(
            "approximate",
            {},
            "documents are concatenated to fill every row instead of padded",
        )
    return (
        honoured({"data.reset_positions": True})
        if document_mask
        else harmless("documents are always concatenated to fill every row")
    )
