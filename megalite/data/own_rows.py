"""Rows of a data source of the user (`config.extensions.DataSource`), as a dataset."""

from __future__ import annotations

import json

import numpy as np

from megalite.config.extensions import source_of
from megalite.config.samples import DataError, Member
from megalite.data.dataset import Sample, ShuffledRows, digest


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
        whole = tokens.astype(np.int64)
        return Sample(whole[:-1], whole[1:])
