"""Document boundaries from EOS tokens, used for the document mask of attention.

`document_starts` gives positions and masks per token, `boundaries` the offsets ("cu_seqlens") that attention
kernels read. Computed on the CPU.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from megalite.parallel.microbatch import Boundaries


def document_starts(tokens: NDArray[np.int64], eos: int) -> NDArray[np.int64]:
    """Return the position in the row at which each token's document starts: [batch, seq] → [batch, seq].

    EOS belongs to the document that it ends; a row's first token starts a document.
    """
    starts = np.zeros_like(tokens)
    # a token after an EOS: its own position; every other token: 0
    starts[:, 1:] = np.where(tokens[:, :-1] == eos, np.arange(1, tokens.shape[1]), 0)
    return np.maximum.accumulate(starts, axis=1)  # carried on to the document's other tokens


def boundaries(starts: NDArray[np.int64]) -> Boundaries:
    """Return the offsets and the longest length of the documents that start at `starts` [batch, seq].

    A token whose document starts at its own position is the first of its document.
    """
    first = np.flatnonzero(starts == np.arange(starts.shape[1]))
    offsets = np.append(first, starts.size).astype(np.int32)
    return Boundaries(torch.from_numpy(offsets), int(np.diff(offsets).max()))
