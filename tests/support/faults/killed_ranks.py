"""Kills a run repeatedly at random moments: nothing that was published is lost, and the run ends with the same
weights."""

from __future__ import annotations

import json
import random
import time
from itertools import count
from pathlib import Path
from typing import Any

from megalite import checkpoint
from tests.support import jobs_saving
from tests.support.configs import SINGLE, config_of
from tests.support.pool import RankError, RankPool
from tests.support.spaces.layouts import Case

MODEL: Case = {**SINGLE, "tied": False, "kv_heads": 2, "vocab_size": 96, "layers": 2, "masked": False, "dropout": 0.1}
LAYOUTS: dict[str, Case] = {
    "dp2-zero1": {**MODEL, "dp": 2, "zero": 1, "microbatches": 2},
    "pp2": {**MODEL, "pp": 2, "microbatches": 2},
}
STEPS, INTERVAL = 10, 2


def configuration(
    layout: str, prefix: str, directory: Path, *, background: bool, copies: bool = False
) -> dict[str, Any]:
    saves = {"load": "auto", "interval": INTERVAL, "keep": 2, "async_save": background}
    saves["copy_interval"] = 1 if copies else None
    config = config_of(LAYOUTS[layout], prefix, run={"dir": str(directory), "name": "killed"}, checkpoint=saves)
    config["train"]["steps"] = STEPS
    return config


class Kills:
    """Kills runs of one layout; the uninterrupted run is computed once."""

    def __init__(
        self,
        layout: str,
        prefix: str,
        directory: Path,
        ranks: RankPool,
        *,
        background: bool,
        copies: bool = False,
    ):
        self.layout, self.prefix, self.directory = layout, prefix, directory
        self.ranks, self.options = ranks, {"background": background, "copies": copies}
        config = configuration(layout, prefix, directory / "straight", **self.options)
        began = time.monotonic()
        ranks.run(2, jobs_saving.fit_to_the_end, config)
        self.seconds = time.monotonic() - began
        self.expected = jobs_saving.content_of(
            directory / "straight" / "killed" / "checkpoints" / checkpoint.step_name(STEPS)
        )

    def prove(self, kills: int, seed: int) -> None:
        """Kill one rank or both, `kills` times in total; a run that survives to its end is followed by another."""
        draw, runs = random.Random(seed), count()
        directory = self.directory / f"seed{seed}"
        while kills:
            killed = self._run(directory / str(next(runs)), kills, draw)
            assert killed > 0 or next(runs) < 100, "no kill comes in time"
            kills -= killed

    def _run(self, directory: Path, most: int, draw: random.Random) -> int:
        """One run to its end, with a limited number of kills; returns how many there were."""
        config = configuration(self.layout, self.prefix, directory, **self.options)
        run = directory / "killed"
        for kills in range(most + 1):
            seconds, victims = draw.uniform(0.0, self.seconds), draw.choice([[0], [1], [0, 1]])
            began = time.monotonic()
            try:
                after, memory = seconds if kills < most else None, directory / "memory"
                self.ranks.run(2, jobs_saving.fit_until_killed, config, after, victims, memory)
                self.seconds = min(self.seconds, time.monotonic() - began)  # ranks that have run before are faster
                break
            except RankError as error:
                assert "died with exit code -9" in str(error), error
            trained, published = steps_of(run), newest(run)
            # A save in flight is lost, with the steps since the previous one; with background saves, also the steps
            # after it.
            most_lost = INTERVAL * (3 if self.options["background"] else 2)
            assert published >= max(trained, default=0) - most_lost, (trained, published)
        assert steps_of(run) == list(range(1, STEPS + 1))
        assert jobs_saving.content_of(run / "checkpoints" / checkpoint.step_name(STEPS)) == self.expected
        return kills


def steps_of(run: Path) -> list[int]:
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return [json.loads(line)["step"] for line in lines if line.endswith("}")]


def newest(run: Path) -> int:
    """The step from which the run will resume: every published checkpoint must be whole."""
    steps = [0]
    for path in (run / "checkpoints").glob("step_*"):
        checkpoint.manifest_of(path).verify()
        steps.append(checkpoint.step_number(path.name) or 0)
    return max(steps)
