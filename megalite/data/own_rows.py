"""Rows of a data source of the user (`config.extensions.DataSource`), as a dataset."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from megalite.config.extensions import is_source, source_of
from megalite.config.samples import DataError, Member, held_out_fraction, held_out_rows
from megalite.config.sections.data import DataConfig
from megalite.data.dataset import Dataset, Sample, ShuffledRows, digest, whole


class OwnRows(ShuffledRows):
    """The rows of a data source, in order or shuffled in each epoch.

    Args:
        source: NAME:ARGUMENT.
        without: number of rows that are left out at the end.
        alone: read only these.
    """

    def __init__(
        self,
        source: str,
        sequence_length: int,
        *,
        shuffle: bool,
        seed: int,
        without: int = 0,
        alone: bool = False,
    ):
        self._name, self._source = source, source_of(source, sequence_length)
        self._length, self._shuffle, self._seed = sequence_length, shuffle, seed
        rows = len(self._source)
        self._first = rows - without if alone else 0
        self.samples_per_epoch = without if alone else rows - without
        self.members = [Member(source, self.samples_per_epoch)]
        self.vocab_size, self.eos = self._source.vocab_size, None
        self._content = digest(source.encode(), self._source.fingerprint.encode())
        options = [
            self._content,
            self._first,
            self.samples_per_epoch,
            sequence_length,
            seed if shuffle else None,
        ]
        self.fingerprint = digest(json.dumps(options).encode())

    @property
    def kind(self) -> str:
        """Return the name of the source's class."""
        return type(self._source).__name__

    def place(self, index: int) -> str:
        """Return which row of the source a sample is."""
        return f"row {self._row(index)} of {self._name}"

    def _row(self, index: int) -> int:
        return self._first + self._unshuffled(index)

    def __getitem__(self, index: int) -> Sample:
        tokens = np.asarray(self._source.row(self._row(index)))
        if tokens.shape != (self._length + 1,) or tokens.dtype.kind not in "iu" or tokens.min() < 0:
            raise DataError(
                f"{self.place(index)} has shape {list(tokens.shape)} and type {tokens.dtype}. "
                f"{self.kind}.row must return {self._length + 1} token ids (data.sequence_length + 1), "
                "integers from 0."
            )
        row = tokens.astype(np.int64)
        return Sample(row[:-1], row[1:])


def with_own_rows(config: DataConfig, seed: int) -> tuple[Dataset, Dataset | None]:
    """Build the datasets where training or validation data is a source of the user."""
    options: dict[str, Any] = {"sequence_length": config.sequence_length, "seed": seed}
    if held_out_fraction(config):
        assert isinstance(config.train, str)
        options["without"] = held_out_rows(config, len(source_of(config.train, config.sequence_length)))
        train = OwnRows(config.train, shuffle=config.shuffle, **options)
        return train, OwnRows(config.train, shuffle=False, alone=True, **options)

    def dataset(source: Any, shuffle: bool) -> Dataset:
        if is_source(source):
            return OwnRows(source, shuffle=shuffle, **options)
        return whole(source, config, shuffle, seed)

    validation = None if config.validation is None else dataset(config.validation, False)
    return dataset(config.train, config.shuffle), validation
