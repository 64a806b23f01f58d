"""Where the documents of a microbatch's rows start and end: what attention and positions need to keep them
apart. Computed on the CPU."""

import numpy as np
import torch
from numpy.typing import NDArray

from megalite.parallel.microbatch import Boundaries


def starts(tokens: NDArray[np.int64], eos: int) -> NDArray[np.int64]:
    """The position in the row at which each token's document starts, [batch, seq], of tokens [batch, seq].

    EOS belongs to the document that it ends; a row's first token starts a document.
    """
    found = np.zeros_like(tokens)
    # own position after an EOS, else 0
    found[:, 1:] = np.where(tokens[:, :-1] == eos, np.arange(1, tokens.shape[1]), 0)
    return np.maximum.accumulate(found, axis=1)  # carried on to the document's other tokens


def boundaries(starts: NDArray[np.int64]) -> Boundaries:
    """The boundaries of the documents that start at `starts` [batch, seq]: a token whose document starts at
    its own position is a first."""
    first = np.flatnonzero(starts == np.arange(starts.shape[1]))
    offsets = np.append(first, starts.size).astype(np.int32)
    return Boundaries(torch.from_numpy(offsets), int(np.diff(offsets).max()))
