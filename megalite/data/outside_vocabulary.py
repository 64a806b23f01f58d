"""The message about a token id that the model's vocabulary does not have."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megalite.data.dataset import Dataset, Sample
from megalite.data.indexed import DataError
from megalite.data.own_rows import OwnRows


def outside(
    dataset: Dataset, samples: Sequence[int] | NDArray[np.int64], rows: Sequence[Sample], vocab_size: int
) -> DataError:
    """Return the error about the first row with a token id outside of the vocabulary.

    Args:
        samples: the index in the dataset of each row.
    """
    largest = [max(row.tokens.max(), row.targets.max()) for row in rows]
    first = next(number for number, token in enumerate(largest) if token >= vocab_size)
    what = f"contains token id {largest[first]}, which is out of range for model.vocab_size={vocab_size}"
    if isinstance(dataset, OwnRows):
        return DataError(
            f"{dataset.place(int(samples[first]))} {what}. Correct {dataset.kind}.row, or set "
            "model.vocab_size to the number of its ids."
        )
    return DataError(f"the data {what}. Set model.vocab_size to the size of the tokenizer.")
