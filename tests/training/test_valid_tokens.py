"""The number of valid tokens is known before the backward, without a look at the device."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from megalite.config.schema import Config
from megalite.parallel.collectives import Pending
from megalite.parallel.microbatch import IGNORE_INDEX, Microbatch
from megalite.training import trainer as training


def test_the_count_stays_in_cpu_memory(monkeypatch):
    """A tensor on the meta device has no values: reading one would raise."""
    summed = []

    def all_reduce(x: torch.Tensor, axis: str) -> Pending:
        summed.append((x.device.type, axis))
        return Pending([], lambda: x + 5)  # the other rank has five

    monkeypatch.setattr(training, "all_reduce", all_reduce)
    targets = torch.tensor([[1, IGNORE_INDEX], [2, 3]])
    microbatch = Microbatch.of(targets, targets, torch.arange(2))
    data = SimpleNamespace(chat=True)
    rank = SimpleNamespace(
        config=Config(), train_data=data, device=torch.device("meta"), mesh=SimpleNamespace(counting="counting")
    )
    assert training.Trainer._count_targets(rank, [microbatch, microbatch]) == 3 + 3 + 5
    assert summed == [("cpu", "counting")]
