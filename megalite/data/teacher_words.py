"""The most probable words of a teacher at every position of the rows of token files, in a directory.

words.json has the teacher, the temperature, k, and for each set of rows how many are done. NAME.words has
int32 [rows, seq, k], NAME.log_p float32 [rows, seq, k], NAME.rest float64 [rows, seq]. A teacher's
distribution depends on all that is in its row, so they are found by what determines rows: the tokens, their
length and packing (`TokenFiles.rows`), but not their order.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megalite.config.errors import ConfigError
from megalite.config.rule import show
from megalite.config.samples import held_out_fraction
from megalite.config.sections.data import DataConfig
from megalite.data.dataset import Dataset, TokenFiles
from megalite.data.stored_record import WORDS, WORDS_FORMAT, words_record
from megalite.system.files import replace_synced, reserve

CHECKED = 64  # rows whose probabilities are checked when a run starts
ARRAYS = {"words": "<i4", "log_p": "<f4", "rest": "<f8"}


class TopRow(NamedTuple):
    """What a teacher said of a row: [seq, k], [seq, k] and [seq]. See `parallel.top_words.TopWords`."""

    words: NDArray[np.int32]
    log_p: NDArray[np.float32]
    rest: NDArray[np.float64]

    def row(self, number: int) -> TopRow:
        """Return one of several rows."""
        return TopRow(*(each[number] for each in self))


@dataclass(frozen=True)
class RowSet:
    """Rows in a directory.

    Attributes:
        name: of the token file, for messages.
        rows, done: their number, and how many are done.
        packing, held_out: data.packing, and the fraction that data.validation holds out, for messages.
    """

    name: str
    rows: int
    sequence_length: int
    reset_positions: bool = False
    packing: bool = False
    held_out: float = 0.0
    done: int = 0

    def __str__(self) -> str:
        return (
            f"{self.name} (data.sequence_length {self.sequence_length}, data.packing "
            f"{show(self.packing)}, {self.held_out:g} held out)"
        )


class TeacherWords:
    """A directory of words.

    Args:
        model: the name of the teacher.
        weights, architecture: what identifies it (`huggingface.weights_identity`); the latter is None in
            older records.
        number: k.
        vocabulary: number of words of the teacher.
        sets: by `TokenFiles.rows`.
        precision: in which the teacher has computed; None: not known, as in records of older versions.
    """

    def __init__(
        self,
        directory: Path,
        model: str,
        weights: str,
        number: int,
        temperature: float,
        vocabulary: int,
        architecture: dict[str, Any] | None = None,
        sets: dict[str, RowSet] | None = None,
        precision: str | None = None,
    ):
        self.directory, self.model, self.weights = directory, model, weights
        self.number, self.temperature, self.vocabulary = number, temperature, vocabulary
        self.architecture, self.sets, self.precision = architecture, sets or {}, precision

    @staticmethod
    def of(directory: Path, option: str = "") -> TeacherWords:
        """Read the record of a directory.

        Args:
            option: the option that names it, with its value, for messages.

        Raises:
            ConfigError: it has none, or a damaged one.
        """
        with words_record(directory, option) as record:
            sets = {rows: RowSet(**each) for rows, each in record.pop("sets").items()}
            return TeacherWords(directory, **record, sets=sets)

    def facts(self) -> dict[str, Any]:
        """Return what all words of the directory have in common, besides the name of the model."""
        names = ("weights", "number", "temperature", "vocabulary")
        return {name: getattr(self, name) for name in names}

    def save(self) -> None:
        sets = {rows: asdict(each) for rows, each in self.sets.items()}
        known = {"model": self.model, "architecture": self.architecture, "precision": self.precision}
        record = {"format": WORDS_FORMAT, **known, **self.facts(), "sets": sets}
        replace_synced(self.directory / WORDS, json.dumps(record, indent=2) + "\n")

    def begin(self, rows: str, new: RowSet) -> int:
        """Record rows that are to be scored, from the first if their files are missing or damaged.

        Returns:
            the number of rows that are done.

        Raises:
            ConfigError: they are there with the other `reset_positions`, or there is no room for them.
        """
        known = self.sets.get(rows, new)
        if not self._whole(rows, new):
            known = new
            self._reserve(rows, new)
        elif known.reset_positions != new.reset_positions:
            way_out = "Leave out" if new.reset_positions else "Pass"
            raise ConfigError(
                f"--output {self.directory} has words of {known.name} with --reset_positions = "
                f"{show(known.reset_positions)}, and they would be replaced by those with "
                f"{show(new.reset_positions)}. {way_out} --reset_positions, or choose another directory."
            )
        self.sets[rows] = replace(known, name=new.name)
        self.save()
        return known.done

    def _reserve(self, rows: str, new: RowSet) -> None:
        """Create the files of rows, with their space on the disk.

        A disk that is full later would end the process with a bus error, as the files are written through
        maps.
        """
        sizes = {
            self.directory / f"{rows}.{array}": self._bytes(array, ARRAYS[array], new) for array in ARRAYS
        }
        for path in sizes:
            path.unlink(missing_ok=True)
        try:
            for path, size in sizes.items():
                with open(path.with_name(f"{path.name}.partial"), "wb") as file:
                    reserve(file.fileno(), size)
        except OSError as error:
            for path in sizes:
                path.with_name(f"{path.name}.partial").unlink(missing_ok=True)
            free = shutil.disk_usage(self.directory).free
            raise ConfigError(
                f"--output {self.directory} has no room for the words of {new.name}, which take "
                f"{sum(sizes.values()):,} bytes: {free:,} are free ({error.strerror}). Free some space, "
                "choose a directory on a larger disk, or set --top_k to less."
            ) from None
        for path in sizes:
            os.replace(path.with_name(f"{path.name}.partial"), path)

    def arrays(self, rows: str, mode: Literal["r", "r+"] = "r+") -> TopRow:
        """Return maps of the files of rows: [rows, seq, k], [rows, seq, k], [rows, seq]."""
        known = self.sets[rows]
        shapes = {array: self._shape(array, known) for array in ARRAYS}
        files = {array: self.directory / f"{rows}.{array}" for array in ARRAYS}
        return TopRow(
            *(np.memmap(files[array], kind, mode, shape=shapes[array]) for array, kind in ARRAYS.items())
        )

    def of_rows(self, data: TokenFiles, options: DataConfig, option: str) -> TopRow:
        """Return the complete words of a dataset.

        Args:
            options: those of the run. Conversations do not depend on reset_positions.

        Raises:
            ConfigError: they are of other rows, end early, or are damaged.
        """
        known = self.sets.get(data.rows)
        if known is None:
            others = list(dict.fromkeys(map(str, self.sets.values())))
            wanted = str(rows_of(data, options))
            changed = ", whose tokens were others" if wanted in others else ""
            raise ConfigError(
                f"{option} has no words for the rows of {wanted}: it has those of "
                f"{', '.join(others) or 'no data'}{changed}. Run `{self._command(data, options)}`, or set "
                "the options of the run to those."
            )
        if known.reset_positions != options.reset_positions and not data.chat:
            raise ConfigError(
                f"{option} has words of {data.names} with data.reset_positions = {known.reset_positions}. "
                "Set it so, or score the data again."
            )
        if known.done < known.rows:
            raise ConfigError(
                f"{option} ends early: {known.done:,} of {known.rows:,} rows of {data.names} are done. Run "
                "`megalite score` again with the same options: it continues where it stopped."
            )
        if not self._whole(data.rows, known):
            raise ConfigError(
                f"{option} is damaged: the files {data.rows}.* of {data.names} are missing or truncated. Run "
                "`megalite score` again with the same options: it starts again."
            )
        arrays = self.arrays(data.rows, "r")
        for row in np.linspace(0, known.rows - 1, CHECKED).astype(int):
            if not _are_probabilities(arrays.row(row)):
                raise ConfigError(
                    f"{option} is damaged: row {row} of {data.names} has no probabilities. Remove the "
                    "directory and score the data again."
                )
        return arrays

    def _command(self, data: TokenFiles, options: DataConfig) -> str:
        """Return the command that adds the words of a dataset to the directory."""
        held_out = held_out_fraction(options)
        return " ".join(
            [
                f"megalite score {self.model} --data {data.names.replace(', ', ' ')} --top_k {self.number}",
                f"--sequence_length {options.sequence_length}",
                *([f"--temperature {self.temperature:g}"] if self.temperature != 1 else []),
                *(["--packing"] if options.packing else []),
                *(["--reset_positions"] if options.reset_positions else []),
                *([f"--held_out {held_out:g}"] if held_out else []),
                f"--output {self.directory}",
            ]
        )

    def _shape(self, array: str, rows: RowSet) -> tuple[int, ...]:
        positions = rows.rows, rows.sequence_length
        return positions if array == "rest" else (*positions, self.number)

    def _bytes(self, array: str, kind: str, rows: RowSet) -> int:
        return int(np.prod(self._shape(array, rows))) * np.dtype(kind).itemsize

    def _whole(self, rows: str, known: RowSet) -> bool:
        paths = {array: self.directory / f"{rows}.{array}" for array in ARRAYS}
        return all(
            path.exists() and path.stat().st_size == self._bytes(array, ARRAYS[array], known)
            for array, path in paths.items()
        )


def rows_of(data: TokenFiles, options: DataConfig) -> RowSet:
    """Return what determines the rows of a dataset."""
    return RowSet(
        data.names,
        data.samples_per_epoch,
        options.sequence_length,
        options.reset_positions,
        options.packing,
        held_out_fraction(options),
    )


def _are_probabilities(row: TopRow) -> bool:
    """Return whether words of each position are distinct, and their probabilities sum to 1 with the rest."""
    sums = np.exp(row.log_p.astype(np.float64)).sum(-1) + row.rest
    words = np.sort(row.words, axis=-1)
    distinct = (words[..., 1:] != words[..., :-1]).all() and (words >= 0).all()
    return bool(distinct and (row.rest >= 0).all() and (np.abs(sums - 1) < 1e-3).all())


def attach_words(dataset: Dataset, words: Callable[[TokenFiles], TopRow]) -> None:
    """Let the rows of a dataset have `Sample.top`, also those of a blend.

    Raises:
        ConfigError: a part of it is not made of token files.
    """
    for each in dataset.parts:
        if not isinstance(each, TokenFiles):
            raise ConfigError("distillation.teacher with stored words needs token files, not a data source.")
        each.top = words(each)
