"""NaN and infinite values among weights that a run or an import reads: training from them is useless, so they
are rejected."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from megalite.checkpoint.errors import CheckpointError

NAMED = 5  # tensors listed in a message


def nonfinite(values: Tensor) -> int:
    """Number of values that are NaN or infinite. If there are none, it takes one pass over the data and no
    memory."""
    # a NaN is both extremes
    if not values.numel() or all(extreme.isfinite() for extreme in values.aminmax()):
        return 0
    return int(values.numel() - values.isfinite().sum())


def reject(shown: str, found: Mapping[str, int]) -> None:
    """Raise CheckpointError if tensors have values that are not finite.

    Args:
        shown: where the tensors were read from.
        found: name of a tensor → number of its values that are NaN or infinite.
    """
    wrong = {name: number for name, number in found.items() if number}
    if not wrong:
        return
    listed = [f"{name}: {number:,}" for name, number in list(wrong.items())[:NAMED]]
    more = f"\n  … and {len(wrong) - NAMED} more tensors" if len(wrong) > NAMED else ""
    raise CheckpointError(
        f"{shown} has values that are NaN or infinite, from which nothing can be learned; tensor and number "
        "of such values:\n  "
        + "\n  ".join(listed)
        + f"{more}\nTake the weights from an earlier checkpoint, or download or convert them again."
    )
