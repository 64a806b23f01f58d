"""Metrics of an objective over sequences: rewards, their margins, log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from megalite.mesh.mesh import Mesh
from megalite.objectives.objective import Objective
from megalite.parallel.spec import Rectangle

STATISTIC, TERMS = "objective", "objective_terms"


class ObjectiveStatistics:
    """The sum of each metric and what it is divided by, as `ModelStatistics`."""

    def __init__(self, objective: Objective, mesh: Mesh, device: torch.device):
        self._names, self.size = objective.metrics, 2 * len(objective.metrics)
        # tp and cp ranks have the same sequences
        self._counts = mesh.tp.rank == 0 and mesh.cp.rank == 0
        self._zeros = torch.zeros(self.size, dtype=torch.float64, device=device)

    def own(self, statistics: Mapping[str, Tensor]) -> Tensor:
        return statistics[STATISTIC].flatten() if self._counts and STATISTIC in statistics else self._zeros

    def learn(self, totals: Tensor, tokens: int, applied: bool) -> dict[str, Any]:
        sums = totals.view(-1, 2).tolist()  # [metrics, 2]
        return {name: total / count for name, (total, count) in zip(self._names, sums, strict=True) if count}

    def learned(self) -> list[Rectangle]:
        return []

    def rectangles(self) -> Iterator[Rectangle]:
        return iter(())
