"""Check of weights for NaN and infinite values."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from megalite.checkpoint.errors import CheckpointError, listing


def nonfinite(values: Tensor) -> int:
    """Return the number of values that are NaN or infinite.

    Without any, it takes one pass over the data and no memory.
    """
    # both extremes of values with a NaN are NaN
    if not values.numel() or all(extreme.isfinite() for extreme in values.aminmax()):
        return 0
    return int(values.numel() - values.isfinite().sum())


def reject(source: str, counts: Mapping[str, int]) -> None:
    """Raise CheckpointError if tensors have values that are not finite.

    Args:
        source: the file or directory of the tensors, for the message.
        counts: name of a tensor → number of its values that are NaN or infinite.
    """
    problems = [f"{name}: {count:,}" for name, count in counts.items() if count]
    if problems:
        raise CheckpointError(
            f"{source} contains NaN or infinite values and cannot be used for training. Number of such "
            f"values in each tensor:{listing(problems, 'tensors')}\nUse an earlier checkpoint, or download "
            "or convert the weights again."
        )
