"""Runs of `megalite train` whose losses are compared. Completed ones are found again by their names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

from benchmarks import report
from megalite.commands import demo


@dataclass(frozen=True)
class Curve:
    """One run: steps, seconds of training and losses of its validations."""

    steps: list[int]
    seconds: list[float]
    losses: list[float]

    def reaches(self, loss: float) -> tuple[float, float] | None:
        """Return step and seconds at which the loss is reached, or None.

        Between validations they are interpolated linearly.
        """
        points = list(zip(self.losses, self.steps, self.seconds, strict=True))
        for (high, *before), (low, *after) in pairwise(points):
            if low <= loss < high:
                share = (high - loss) / (high - low)
                step, second = (old + share * (new - old) for old, new in zip(before, after, strict=True))
                return step, second
        return None


def read_curve(metrics: Path) -> Curve:
    """Return the validations of a run, from its metrics.jsonl."""
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    times = [line["step_time_s"] for line in lines if "step_time_s" in line]
    seconds = list(accumulate(times))
    _, losses = demo.read_losses(metrics)
    return Curve(list(losses), [seconds[step - 1] for step in losses], list(losses.values()))


def prepare_bytes(tokens: Path) -> None:
    """Write the bytes of the Python standard library as a token file, unless it exists."""
    if tokens.with_suffix(".json").exists():
        return
    tokens.parent.mkdir(parents=True, exist_ok=True)
    exclude = [f"*/{name}/*" for name in demo.NO_SOURCE]
    library = sysconfig.get_paths()["stdlib"]
    source = ["--input", f"{library}/*.py", "--exclude", *exclude]
    call(["prepare", *source, "--tokenizer", "byte", "--output", str(tokens)])


def trained(
    directory: Path,
    label: str,
    options: dict[str, object],
    *,
    steps: int,
    config: Path | None = None,
    threads: int = 1,
) -> Curve:
    """Train directory/label for a number of steps, with a validation at the end, unless it is complete.

    Args:
        options: of the run, besides its place and length.

    Raises:
        BenchmarkError: the run failed.
    """
    metrics = directory / label / "metrics.jsonl"
    if not (metrics.exists() and steps in demo.read_losses(metrics)[1]):
        print(label, file=sys.stderr, flush=True)
        place = {"run.dir": directory, "run.name": label, "train.steps": steps, "checkpoint.load": "none"}
        words = [word for name, value in (options | place).items() for word in (f"--{name}", str(value))]
        call(["train", *([] if config is None else ["--config", str(config)]), *words], threads)
    return read_curve(metrics)


def call(arguments: Sequence[str], threads: int = 1) -> None:
    """Run a command of megalite. Raises BenchmarkError if it fails."""
    run = subprocess.run(
        [sys.executable, "-m", "megalite", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        capture_output=True,
        text=True,
        check=False,
        encoding="utf-8",
        errors="replace",
    )
    if run.returncode:
        raise report.BenchmarkError(f"{' '.join(arguments)} failed:\n{run.stderr[-2000:]}{run.stdout[-500:]}")
