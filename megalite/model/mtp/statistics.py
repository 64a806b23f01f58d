"""Metrics of the losses of MTP modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from megalite.mesh.mesh import Mesh
from megalite.parallel.spec import Rectangle

STATISTIC = "mtp"


class MtpStatistics:
    """The sum of token losses and the number of targets of each module, as `ModelStatistics`."""

    def __init__(self, modules: int, mesh: Mesh, device: torch.device):
        # tp ranks have the same losses
        self.size, self.counts = 2 * modules, mesh.tp.rank == 0
        self._zeros = torch.zeros(2 * modules, dtype=torch.float64, device=device)

    def own(self, statistics: Mapping[str, Tensor]) -> Tensor:
        return statistics[STATISTIC].flatten() if self.counts and STATISTIC in statistics else self._zeros

    def learn(self, totals: Tensor, tokens: int, applied: bool) -> dict[str, Any]:
        own = totals.view(-1, 2)  # [modules, 2]
        losses = (own[:, 0] / own[:, 1].clamp(min=1)).tolist()
        metrics: dict[str, Any] = {"mtp_loss": sum(losses) / len(losses)}
        if len(losses) > 1:
            metrics["mtp_losses"] = losses
        return metrics

    def learned(self) -> list[Rectangle]:
        return []

    def rectangles(self) -> Iterator[Rectangle]:
        return iter(())
