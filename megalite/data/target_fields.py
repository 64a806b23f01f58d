"""Fields of a microbatch with more about its targets: weights of messages, documents of preferences."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megalite.data.conversations import RowSequences
from megalite.data.dataset import Dataset, Sample
from megalite.data.loader import sequence_first
from megalite.parallel.microbatch import IGNORE_INDEX
from megalite.parallel.sequences import Sequences
from megalite.parallel.top_words import TopWords


def target_fields(
    dataset: Dataset, rows: Sequence[Sample], targets: NDArray[np.int64], past_end: NDArray[np.bool_]
) -> dict[str, Any]:
    """Return the fields of a microbatch of weighted messages, of preferences, or with a teacher's words.

    Args:
        targets: [batch, seq], those that count.
        past_end: [batch], whether a row is past the end of the data.
    """
    fields: dict[str, Any] = {}
    if dataset.weighted:  # a dataset of a blend may have no weights
        weights = [np.ones(targets.shape[1]) if row.weights is None else row.weights for row in rows]
        counted = np.where(targets == IGNORE_INDEX, 0, np.stack(weights)).astype(np.float32)
        fields["weights"] = sequence_first(counted)
    if dataset.preference is not None:
        fields["sequences"] = _sequences(
            [_without_documents(row) if past else row for row, past in zip(rows, past_end, strict=True)]
        )
    if dataset.has_top:
        each = zip(*(row.top for row in rows if row.top is not None), strict=True)
        fields["top"] = TopWords(*(torch.from_numpy(np.stack(part, axis=1)) for part in each))
    return fields


def _without_documents(row: Sample) -> Sample:
    """Return a row that is all padding, in place of a row past the end."""
    none = np.empty(0, np.int64)
    sequences = row.sequences
    scores = None if sequences is None or sequences.reference is None else np.empty(0)
    empty = RowSequences(np.full_like(row.tokens, -1), np.zeros_like(row.tokens, bool), none, none, scores)
    return row._replace(sequences=empty)


def _sequences(rows: Sequence[Sample]) -> Sequences:
    """Return the documents of all rows, which are numbered row after row."""
    each = [row.sequences for row in rows if row.sequences is not None]
    *earlier, count = accumulate((len(row.documents) for row in each), initial=0)
    index = [np.where(row.index < 0, -1, row.index + first) for row, first in zip(each, earlier, strict=True)]
    scores = [row.reference for row in each if row.reference is not None]
    return Sequences(
        index=sequence_first(np.stack(index)),
        completion=sequence_first(np.stack([row.completion for row in each])),
        documents=torch.from_numpy(np.concatenate([row.documents for row in each])),
        labels=torch.from_numpy(np.concatenate([row.labels for row in each])),
        count=count,
        reference=torch.from_numpy(np.concatenate(scores)) if len(scores) == len(each) > 0 else None,
    )
