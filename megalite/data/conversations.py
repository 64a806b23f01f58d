"""Rows of whole documents: conversations, and preferences, which have labels of their completions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.config.samples import Documents, Member, inputs_of, rows_of, whole_documents
from megalite.data.dataset import Sample, TokenFiles, TokenRange
from megalite.data.indexed import CHOSEN, IndexedTokens
from megalite.parallel.microbatch import IGNORE_INDEX


@dataclass(frozen=True)
class RowSequences:
    """The documents of a row of preferences, in the order of their positions.

    Attributes:
        index: [seq] int64, the number of each token's document in the row; −1 for padding.
        completion: [seq] bool, whether the target is a token of the completion.
        documents: int64, the ordinal of each document in the dataset.
        labels: int64, 1 for a chosen or good completion, 0 for a rejected or bad one.
        reference: fp64, the log-probabilities of their completions in a reference model; None: not known.
    """

    index: NDArray[np.int64]
    completion: NDArray[np.bool_]
    documents: NDArray[np.int64]
    labels: NDArray[np.int64]
    reference: NDArray[np.float64] | None = None


class Conversations(TokenFiles):
    """Dataset of conversations: one document per row or, with `packing`, as many as fit.

    A document's targets are all its tokens except the first, so none predicts the next document's first
    token. Its inputs are all except the last; of pairs they include it. Raises DataError also if there is no
    document, or one that is longer than a row.
    """

    chat = True

    def __init__(
        self,
        parts: list[TokenRange],
        sequence_length: int,
        *options: object,
        packing: bool,
        shuffle: bool,
        seed: int,
    ):
        super().__init__(parts, sequence_length, packing, *options, shuffle=shuffle, seed=seed)
        self._loss = [
            part.file.loss.tokens[part.start : part.stop] for part in parts if part.file.loss is not None
        ]
        self.weighted = any(loss.dtype.kind == "f" for loss in self._loss)
        documents = [whole_documents(part.file, part.start, part.stop) for part in parts]
        self._place(documents, packing)
        self.members = [Member(self.names, self.samples_per_epoch)]

    def _place(self, parts: list[Documents], packing: bool, together: int = 1) -> None:
        """Choose the documents of each row, of which `together` consecutive ones stay in one row."""
        self._together = together
        self._sizes = np.concatenate([part.sizes for part in parts])
        self._starts = self._sizes.cumsum() - self._sizes
        rows = rows_of(parts, self._length, packing, self.names, together).repeat(together)
        # sorted by row
        self._documents, self._last = np.argsort(rows, kind="stable"), np.bincount(rows).cumsum()
        self.samples_per_epoch = len(self._last)

    def _sample(self, sample: int) -> Sample:
        # what no document fills: token 0
        tokens, starts = np.zeros((2, self._length), np.int64)
        targets, index = np.full(self._length, IGNORE_INDEX), np.full(self._length, -1)
        loss = np.zeros(self._length, np.float32 if self.weighted else np.uint8)
        documents = self._documents[self._last[sample - 1] if sample else 0 : self._last[sample]]
        at = 0
        for number, document in enumerate(documents):
            first, size = self._starts[document], self._sizes[document]
            text, counts = (
                self._read(self._tokens, first, size),
                self._read(self._loss, first, size, loss.dtype),
            )
            own = slice(at, at + int(inputs_of(size, self._together)))
            tokens[own], starts[own], index[own] = text[: own.stop - at], at, number
            predicting = slice(at, at + len(text) - 1)
            targets[predicting], loss[predicting] = text[1:], counts[1:]
            at = own.stop
        starts[at:] = at  # the padding is a document of its own: no token attends from it to the others
        return self._counted(Sample(tokens, targets, starts), loss, index, documents)

    def _counted(
        self, row: Sample, loss: NDArray[Any], index: NDArray[np.int64], documents: NDArray[np.int64]
    ) -> Sample:
        """Return a row with the targets that count.

        Args:
            row: with all targets.
            loss: [seq], the values of PREFIX.loss of the targets.
            index: [seq], the number of each token's document in the row; −1 for padding.
            documents: the ordinals of these documents.
        """
        targets = np.where(loss != 0, row.targets, IGNORE_INDEX)
        return row._replace(targets=targets, weights=loss if self.weighted else None)


class Preferences(Conversations):
    """Dataset of preferences: conversations whose rows have all targets, with labels of their completions.

    Documents 2i and 2i + 1 of pairs are in one row. Raises DataError also for a pair that is longer than a
    row.
    """

    def __init__(
        self,
        parts: list[TokenRange],
        sequence_length: int,
        *,
        preference: str,
        packing: bool,
        shuffle: bool,
        seed: int,
    ):
        self.preference, self._parts = preference, parts
        self._scores: NDArray[np.float64] | None = None
        super().__init__(parts, sequence_length, preference, packing=packing, shuffle=shuffle, seed=seed)
        self.documents = len(self._sizes)

    def _place(self, parts: list[Documents], packing: bool, together: int = 1) -> None:
        super()._place(parts, packing, 2 if self.preference == "pairs" else 1)

    def documents_of(self, sample: int) -> NDArray[np.int64]:
        """Return the ordinals of the documents in a row of an unshuffled epoch."""
        return self._documents[self._last[sample - 1] if sample else 0 : self._last[sample]]

    def attach(self, scores: Callable[[IndexedTokens], NDArray[np.float64]]) -> None:
        """Give the rows the scores of their documents.

        Args:
            scores: returns those of all documents of a token file.
        """
        own = []
        for part in self._parts:
            first, sizes = whole_documents(part.file, part.start, part.stop)[1:]
            own.append(scores(part.file)[first : first + len(sizes)])
        self._scores = np.concatenate(own)

    def _counted(
        self, row: Sample, loss: NDArray[Any], index: NDArray[np.int64], documents: NDArray[np.int64]
    ) -> Sample:
        labels = np.array([(loss[index == number] == CHOSEN).any() for number in range(len(documents))])
        reference = None if self._scores is None else self._scores[documents]
        sequences = RowSequences(index, loss != 0, documents, labels.astype(np.int64), reference)
        return row._replace(sequences=sequences)


def rows_of_documents(
    parts: list[TokenRange], sequence_length: int, packing: bool, shuffle: bool, seed: int
) -> Conversations:
    """Return the dataset of token files with documents that stay whole."""
    options: dict[str, Any] = {"packing": packing, "shuffle": shuffle, "seed": seed}
    if (preference := parts[0].file.preference) is not None:
        return Preferences(parts, sequence_length, preference=preference, **options)
    return Conversations(parts, sequence_length, **options)
