"""Log-probabilities of completions that a model was asked for once, in a directory.

scores.json has the model and, for each token file, its numbers of documents and of those that are scored;
NAME.f64 has one fp64 value for each document, little-endian, in the order of the token file. They are found
by the content of a token file, so that a run may read it in any blend, order and packing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.config.errors import ConfigError
from megalite.data.dataset import Dataset, digest
from megalite.data.indexed import IndexedTokens
from megalite.data.stored_record import record_errors
from megalite.system.files import replace_synced

RECORD, FORMAT = "scores.json", 1


@dataclass(frozen=True)
class ScoredFile:
    """A token file in a directory of scores.

    Attributes:
        prefix: its name when it was scored, for messages.
        documents: number of its documents.
        rows: number of its rows, at the length with which it is scored.
        done: number of rows whose documents are scored.
        sequence_length: of the rows.
    """

    prefix: str
    documents: int
    rows: int
    sequence_length: int
    done: int = 0


class SequenceScores:
    """A directory of scores.

    Args:
        model: the name of the model that they are of.
        weights, architecture: what identifies it (`huggingface.weights_identity`); the latter is None in
            older records.
        files: by the content of the token file (`content_of`).
        precision: in which the model has computed them; None: not known, as in records of older versions.
    """

    def __init__(
        self,
        directory: Path,
        model: str,
        weights: str,
        architecture: dict[str, Any] | None = None,
        files: dict[str, ScoredFile] | None = None,
        precision: str | None = None,
    ):
        self.directory, self.model, self.weights, self.files = directory, model, weights, files or {}
        self.architecture, self.precision = architecture, precision

    @staticmethod
    def of(directory: Path, option: str = "") -> SequenceScores:
        """Read the record of a directory.

        Args:
            option: the option that names it, with its value, for messages.

        Raises:
            ConfigError: it has none, or a damaged one.
        """
        with record_errors(directory, RECORD, option or str(directory)) as path:
            record = json.loads(path.read_text(encoding="utf-8"))
            if record["format"] != FORMAT:
                raise ConfigError(f"{path} has format {record['format']}, which this version does not read.")
            files = {content: ScoredFile(**file) for content, file in record["files"].items()}
            known = (record["model"], record["weights"], record.get("architecture"))
            return SequenceScores(directory, *known, files, record.get("precision"))

    def save(self) -> None:
        """Write the record."""
        files = {content: asdict(file) for content, file in self.files.items()}
        known = {"model": self.model, "weights": self.weights, "architecture": self.architecture}
        known["precision"] = self.precision
        record = {"format": FORMAT, **known, "files": files}
        replace_synced(self.directory / RECORD, json.dumps(record, indent=2) + "\n")

    def path(self, content: str) -> Path:
        """Return the file of the values of a token file."""
        return self.directory / f"{content}.f64"

    def size(self, content: str) -> int:
        """Return the number of bytes of this file; 0: there is none."""
        path = self.path(content)
        return path.stat().st_size if path.exists() else 0

    def begin(self, content: str, new: ScoredFile) -> int:
        """Record a token file that is to be scored, from its start if its values are missing or damaged.

        Args:
            new: what it is if nothing of it is done.

        Returns:
            the number of its rows that are done.
        """
        known = self.files.get(content, new)
        whole = self.size(content) == 8 * new.documents
        if whole and known.done == known.rows:  # at this length or another
            return new.rows
        if not whole or known.sequence_length != new.sequence_length:
            known, empty = new, self.directory / f"{content}.partial"
            np.full(new.documents, np.nan, "<f8").tofile(empty)
            os.replace(empty, self.path(content))
        self.files[content] = replace(known, prefix=new.prefix)
        self.save()
        return known.done

    def writable(self, content: str) -> np.memmap[tuple[int], np.dtype[np.float64]]:
        """Return the values of a token file as a writable map of its file."""
        return np.memmap(self.path(content), "<f8", "r+", shape=(self.files[content].documents,))

    def of_file(self, file: IndexedTokens, option: str) -> NDArray[np.float64]:
        """Return the complete values of a token file.

        Raises:
            ConfigError: they are of other data, end early, or are no log-probabilities.
        """
        content = content_of(file)
        known = self.files.get(content)
        again = f"Run `megalite score` with --data {file.prefix} and --output {self.directory}"
        if known is None:
            others = ", ".join(each.prefix for each in self.files.values()) or "no data"
            raise ConfigError(
                f"{option} has no scores of {file.prefix}, as it is now: it has those of {others}. {again}, "
                "or use the data that was scored."
            )
        if known.done < known.rows:
            raise ConfigError(
                f"{option} ends early: {known.done:,} of {known.rows:,} rows of {file.prefix} are scored. "
                f"{again}: it continues where it stopped."
            )
        path, count = self.path(content), known.documents
        if (size := self.size(content)) != 8 * count:
            raise ConfigError(
                f"{option} is damaged: {path} has {size:,} bytes where {count:,} documents have "
                f"{8 * count:,}. {again}: it starts again."
            )
        values = np.memmap(path, "<f8", "r", shape=(count,))
        if (wrong := no_log_probabilities(values)).size:
            raise ConfigError(
                f"{option} is damaged: document {wrong[0]} of {file.prefix} has the score "
                f"{values[wrong[0]]}, which is no log-probability. Remove the directory and score the data "
                "again."
            )
        return values


def no_log_probabilities(values: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the indices of values that are not finite or positive."""
    return np.flatnonzero(~(np.isfinite(values) & (values <= 0)))


def content_of(file: IndexedTokens) -> str:
    """Return a hash of the content of a token file (`IndexedTokens.digest_parts`)."""
    return digest(*file.digest_parts())


def attach_scores(dataset: Dataset, scores: Callable[[IndexedTokens], NDArray[np.float64]]) -> None:
    """Let the rows of preferences have `RowSequences.reference`, also those of a mixture of datasets."""
    from megalite.data.conversations import Preferences

    for each in dataset.parts:
        if isinstance(each, Preferences):
            each.attach(scores)
