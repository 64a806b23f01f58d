"""Saves on one layout and loads on another: the same tensors bit for bit, the same samples and the same metrics."""

from __future__ import annotations

from collections import Counter
from itertools import chain, permutations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megalite.optimizer.registry import STATE
from megalite.training.verify import global_tensors
from tests.support.configs import SINGLE, config_of
from tests.support.jobs import make_trainer
from tests.support.pool import RankPool
from tests.support.spaces import layouts
from tests.support.spaces.layouts import Case

BATCH = 24
MODEL: Case = {**SINGLE, "tied": True, "kv_heads": 2, "vocab_size": 101, "layers": 8, "masked": True, "dropout": 0.1}
LAYOUTS: dict[str, Case] = {
    "tp2-pp2-dp2-zero1": {"tp": 2, "pp": 2, "dp": 2, "zero": 1, "microbatches": 2},
    "tp4": {"tp": 4, "microbatches": 2},
    "pp4-interleaved": {"pp": 4, "schedule": "interleaved-2", "microbatches": 4},
    "dp3-zero3": {"dp": 3, "zero": 3, "microbatches": 2},
    "cp4-ring": {"cp": 4, "context": "ring", "zero": 1, "microbatches": 2},
    "dp4": {"dp": 4, "zero": 1, "microbatches": 2},
    "tp2-sequence": {"tp": 2, "sequence_parallel": True, "microbatches": 2},
    "one process": {"microbatches": 2},
}
PAIRS = list(permutations(LAYOUTS, 2))
SAVED_AFTER = 2


def world(layout: str) -> int:
    return layouts.world({**SINGLE, **LAYOUTS[layout]})


def configuration(layout: str, prefix: str, directory: Path, steps: int, load: str) -> dict[str, Any]:
    case = {**MODEL, **LAYOUTS[layout]}
    train = {
        "global_batch_size": BATCH,
        "micro_batch_size": BATCH // (case["dp"] * case["microbatches"]),
        "steps": SAVED_AFTER + steps,
    }
    changes: dict[str, Any] = {
        "run": {"dir": str(directory), "name": layout},
        "train": train,
        "checkpoint": {"load": load},
    }
    return config_of(case, prefix, **changes)


def train(context: Any, config: dict[str, Any], until: int) -> dict[str, Any]:
    """Train from step 0 with a save, or from a checkpoint: losses, samples of each step, on rank 0 global tensors."""
    trainer = make_trainer(context, config)
    losses, samples, state = [], [], {}
    try:
        while trainer.step_done < until:
            if trainer.step_done == SAVED_AFTER:
                state = {"tensors": global_tensors(trainer, STATE)}
                if config["checkpoint"]["load"] == "none":
                    state["directory"] = str(trainer.save())
            samples.append(_consumed(trainer))
            losses.append(trainer.step().loss)
    finally:
        trainer.close()
    return {"losses": losses, "samples": samples, **(state if context.rank == 0 else {})}


def _consumed(trainer: Any) -> list[tuple[int, int]]:
    """The samples of the next step over all ranks, each with a sum of its tokens."""
    rows, mesh = [], trainer.mesh
    for microbatch in trainer.loader.step(trainer.samples):
        weighted = microbatch.tokens * (microbatch.positions + 1)
        # the others of a replica read the same; of cp ranks each reads a part of the row
        if mesh.tp.rank == mesh.pp.rank == 0:
            rows += list(zip(microbatch.samples.tolist(), weighted.sum(0).tolist(), strict=True))
    gathered = [rows]
    if trainer.mesh.world.size > 1:
        gathered = [rows] * trainer.mesh.world.size
        dist.all_gather_object(gathered, rows)
    sums: Counter[int] = Counter()
    for sample, weight in chain.from_iterable(gathered):
        sums[sample] += weight
    return sorted(sums.items())


class Resharding:
    """Compares resumed with uninterrupted runs, which are computed once per layout."""

    def __init__(self, prefix: str, directory: Path, ranks: RankPool, steps: int):
        self.prefix, self.directory, self.ranks, self.steps = prefix, directory, ranks, steps
        self._straight: dict[str, dict[str, Any]] = {}

    def straight(self, layout: str) -> dict[str, Any]:
        if layout not in self._straight:
            config = configuration(layout, self.prefix, self.directory / "straight", self.steps, "none")
            self._straight[layout] = self.ranks.run(world(layout), train, config, SAVED_AFTER + self.steps)[0]
        return self._straight[layout]

    def prove(self, saved: str, loaded: str) -> None:
        expected = self.straight(saved)
        config = configuration(loaded, self.prefix, self.directory / "resumed", self.steps, expected["directory"])
        got = self.ranks.run(world(loaded), train, config, SAVED_AFTER + self.steps)[0]
        assert got["tensors"].keys() == expected["tensors"].keys()
        assert not [name for name, value in got["tensors"].items() if not torch.equal(value, expected["tensors"][name])]
        assert got["samples"] == expected["samples"][SAVED_AFTER:]
        assert all(len(step) == BATCH for step in got["samples"])
        assert got["losses"] == pytest.approx(expected["losses"][SAVED_AFTER:], rel=1e-5, abs=0)
