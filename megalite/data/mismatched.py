"""Prompts with the completions of other examples.

KTO estimates from them how far a model is from its reference.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from megalite.data.conversations import RowSequences
from megalite.data.dataset import Sample
from megalite.parallel.microbatch import IGNORE_INDEX


def mismatched(read: Callable[[int], Sample], first: int, count: int, sample: int) -> Sample:
    """Return the prompt of a sample with the completion of the sample before it, in a batch cyclically.

    Samples with the same prompt are passed over: the completions of a pair, which data has side by side, are
    of one prompt. A batch with a single prompt has no other, and the completion is of the sample before.

    Args:
        read: returns a row with a single document.
        first: the first sample of the global batch.
        count: the number of its samples.
    """
    prompt, _ = _parts(read(sample))
    before = [first + (sample - first - back) % count for back in range(1, count + 1)]
    others = (row for row in map(read, before) if not np.array_equal(_parts(row)[0], prompt))
    row = next(others, None) or read(before[0])
    _, completion = _parts(row)
    assert row.sequences is not None, "preferences have sequences"
    length = len(row.tokens)
    text = np.concatenate([prompt, completion])[: length + 1]  # a row's length is the longest
    tokens, targets = np.zeros_like(row.tokens), np.full_like(row.targets, IGNORE_INDEX)
    end, place = len(text) - 1, np.arange(length)
    tokens[:end], targets[:end] = text[:-1], text[1:]
    return Sample(
        tokens,
        targets,
        starts=np.where(place < end, 0, end),
        sequences=RowSequences(
            index=np.where(place < end, 0, -1),
            completion=(place >= len(prompt) - 1) & (place < end),
            documents=row.sequences.documents,
            labels=row.sequences.labels,
        ),
    )


def _parts(row: Sample) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of the prompt and of the completion of a row with a single document."""
    sequences = row.sequences
    assert sequences is not None and len(sequences.documents) == 1, "rows are not packed"
    end = int((sequences.index == 0).sum())
    text = np.concatenate([row.tokens[:end], row.targets[end - 1 : end]])
    prompt = int(sequences.completion.argmax()) + 1
    return text[:prompt], text[prompt:]
