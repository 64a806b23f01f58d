"""Rejects weights with NaN or infinite values, which neither a run nor an import can use."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from megalite.checkpoint.errors import CheckpointError, listing


def nonfinite(values: Tensor) -> int:
    """Returns the number of values that are NaN or infinite. Without any, it takes one pass over the data and
    no memory."""
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
            f"{source} has values that are NaN or infinite, from which nothing can be learned; tensor and "
            f"number of such values:{listing(problems, 'tensors')}\n"
            "Take the weights from an earlier checkpoint, or download or convert them again."
        )
