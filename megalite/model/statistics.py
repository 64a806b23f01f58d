"""What blocks and MTP modules report of a step besides the loss, and the states that they learn from it.

Each rank's statistics are summed over all ranks together with the gradient norm. Every rank then learns the
same from the sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from megalite.parallel.spec import Rectangle

CAUSE = "cause"
"""Key of the metrics of a step that was not applied: what was not finite first, if that is known."""


class ModelStatistics(Protocol):
    """Statistics of one kind of block, or of MTP modules.

    Attributes:
        size: number of values that `own` returns.
    """

    size: int

    def own(self, statistics: Mapping[str, Tensor]) -> Tensor:
        """Return the statistics of this rank, flattened; zeros if it has none.

        Args:
            statistics: those that its forwards recorded (`ForwardState.statistics`).
        """
        ...

    def learn(self, totals: Tensor, tokens: int, applied: bool) -> dict[str, Any]:
        """Learn from a step, and return its metrics.

        Args:
            totals: `own`, summed over all ranks.
            tokens: number of valid tokens of the global batch.
            applied: whether the step was applied; a skipped one changes nothing.
        """
        ...

    def learned(self) -> list[Rectangle]:
        """Return the states that the model computes with."""
        ...

    def rectangles(self) -> Iterator[Rectangle]:
        """Yield all states, to save or to fill."""
        ...


class JoinedStatistics:
    """The statistics of a model, as one `ModelStatistics`."""

    def __init__(self, parts: Sequence[ModelStatistics]):
        self.parts, self.size = parts, sum(part.size for part in parts)

    def own(self, statistics: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([part.own(statistics) for part in self.parts])

    def learn(self, totals: Tensor, tokens: int, applied: bool) -> dict[str, Any]:
        metrics: dict[str, Any] = {}
        for part, own in zip(self.parts, totals.split([part.size for part in self.parts]), strict=True):
            metrics |= part.learn(own, tokens, applied)
        return metrics

    def learned(self) -> list[Rectangle]:
        return [rectangle for part in self.parts for rectangle in part.learned()]

    def rectangles(self) -> Iterator[Rectangle]:
        for part in self.parts:
            yield from part.rectangles()
