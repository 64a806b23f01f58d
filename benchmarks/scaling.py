"""Strong and weak scaling: the same training on growing numbers of ranks, compared with the ideal speed.

    strong    the batch of a step is constant: on w times the ranks, a step would ideally take 1 / w of the
    time
    weak      the batch grows with the ranks, up to that of strong scaling: a step would ideally take the same
    time

Efficiency is tokens per second per rank, relative to the smallest world. Every rank of every world has the
same number of threads, and needs a core for each, or its own GPU: if ranks share cores, the speed shows the
cost of a layout, not its scaling, and no efficiency is reported.

Without torchrun the worlds are started here, one after the other. Under torchrun, as on a cluster, only the
started world is measured, and its figures are added to those of other worlds measured under the same
conditions in the same file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import report
from benchmarks.step import MODEL, SMOKE_MODEL
from megalite.config.errors import ConfigError
from megalite.config.load import from_dict
from megalite.config.rules import check
from megalite.families.presets import preset

AXES = ("tp", "pp", "dp")
ROWS = 4  # default number of microbatches per rank in weak scaling
COLUMNS = {
    "scaling": "mode",
    "layout": "layout",
    "ranks": "ranks",
    "cores/rank": "cores_per_rank:.3g",
    "threads/rank": "threads_per_rank",
    "batch": "global_batch_size",
    "ms/step": "ms_per_step:,.1f",
    "tokens/s": "tokens_per_second:,.0f",
    "speed-up": "speed_up:.2f",
    "efficiency": "efficiency:.0%",
}
SHARED = "Where ranks share cores there is no efficiency: a rank needs a core for each of its threads."


@dataclass(frozen=True)
class ScalingLayout:
    """Axes of fixed size, and the one that grows with the world: `tp2xdp` has two tp ranks in every world."""

    fixed: Mapping[str, int]
    growing: str

    @staticmethod
    def of(text: str) -> ScalingLayout:
        """Parse a layout. Raises ConfigError if `text` is not one."""
        parts = [
            part
            for part in (re.fullmatch(rf"({'|'.join(AXES)})([1-9]\d*)?", part) for part in text.split("x"))
            if part
        ]
        sizes = {part[1]: part[2] for part in parts}
        growing = [axis for axis, size in sizes.items() if size is None]
        if len(sizes) < len(text.split("x")) or len(growing) != 1:
            raise ConfigError(
                f"--layout {text} is no layout. Give the axis that grows, tp, pp or dp, and with it any of "
                "fixed size: tp2xdp."
            )
        return ScalingLayout(
            {axis: int(size) for axis, size in sizes.items() if size is not None}, growing[0]
        )

    def sizes(self, world: int) -> dict[str, int]:
        """The size of every axis. Raises ConfigError if the fixed ones do not divide the world."""
        rest = prod(self.fixed.values())
        if world % rest:
            raise ConfigError(f"--worlds {world} is no multiple of {rest}, which --layout {self} needs.")
        return {axis: self.fixed.get(axis, world // rest if axis == self.growing else 1) for axis in AXES}

    def __str__(self) -> str:
        return "x".join([*(f"{axis}{size}" for axis, size in self.fixed.items()), self.growing])


@dataclass(frozen=True)
class ScalingPlan:
    """The training, and the worlds it runs on.

    Attributes:
        batch: rows per step in strong scaling, and of the largest world in weak scaling.
        threads: per rank.
    """

    layout: ScalingLayout
    worlds: list[int]
    model: dict[str, Any]
    length: int
    batch: int
    micro_batch: int
    threads: int
    device: str

    def rows(self, world: int) -> dict[str, int]:
        """Rows per step, for each kind of scaling."""
        return {"strong": self.batch, "weak": self.batch * world // max(self.worlds)}

    def write_tokens(self, scratch: Path) -> str:
        return report.write_random_tokens(scratch, self.model["vocab_size"], 4 * self.batch * self.length)

    def configs(self, world: int, prefix: str) -> list[dict[str, Any]]:
        """A world's configuration for each kind of scaling. Raises ConfigError if one is invalid."""
        train = {
            "steps": 1000,
            "micro_batch_size": self.micro_batch,
            "precision": "bf16" if self.device == "cuda" else "fp32",
        }
        configurations = [
            {
                "run": {"dir": str(Path(prefix).parent), "name": "scaling"},
                "model": self.model,
                "parallel": self.layout.sizes(world),
                "data": {"train": prefix, "sequence_length": self.length},
                "train": {**train, "global_batch_size": rows},
                "checkpoint": {"load": "none"},
            }
            for rows in self.rows(world).values()
        ]
        for each in configurations:
            check(from_dict(each), world)
        return configurations

    def shape(self) -> dict[str, Any]:
        """The conditions that figures must share to be compared."""
        batch = {
            "global_batch_size": self.batch,
            "largest_world": max(self.worlds),
            "micro_batch_size": self.micro_batch,
        }
        return {
            "layout": str(self.layout),
            "model": self.model,
            "sequence_length": self.length,
            **batch,
            "threads_per_rank": self.threads,
        }


def plan(
    layout: str,
    worlds: list[int],
    *,
    name: str | None,
    length: int | None,
    batch: int | None,
    micro: int,
    threads: int | None,
    smoke: bool,
) -> ScalingPlan:
    """A plan with all its configurations checked. Raises ConfigError."""
    largest = max(worlds)
    model: dict[str, Any] = SMOKE_MODEL if smoke else MODEL if name is None else preset(name)
    batch = batch or ROWS * micro * largest
    if batch % largest:
        raise ConfigError(
            f"--global_batch_size {batch} does not divide by the largest of --worlds, {largest}, as weak "
            "scaling needs it to."
        )
    if started() not in (None, *worlds):
        raise ConfigError(
            f"--worlds has no {started()}, which is the number of ranks that were started. Give all that are "
            "to be compared."
        )
    scaling = ScalingPlan(
        layout=ScalingLayout.of(layout),
        worlds=sorted(set(worlds)),
        model=model,
        length=length or min(model["max_position_embeddings"], 256),
        batch=batch,
        micro_batch=micro,
        threads=threads or max(1, report.cores() // int(os.environ.get("LOCAL_WORLD_SIZE", largest))),
        device="cpu" if smoke or report.gpu() is None else "cuda",
    )
    with TemporaryDirectory(prefix="megalite_benchmark_") as scratch:
        prefix = scaling.write_tokens(Path(scratch))
        for world in scaling.worlds:
            scaling.configs(world, prefix)
    return scaling


def started() -> int | None:
    """The number of ranks that torchrun started; None without torchrun."""
    return int(os.environ["WORLD_SIZE"]) if "WORLD_SIZE" in os.environ else None


def compare(
    planned: ScalingPlan,
    earlier: dict[str, Any] | None,
    *,
    rounds: int,
    smoke: bool,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Measure every world, and return the figures with their conditions. Under torchrun those of `earlier`,
    the file so far, are kept."""
    protocol = {"rounds": rounds, "warmup_steps": 1 if smoke else 2, "steps": 2 if smoke else 6}
    here = started()
    worlds = planned.worlds if here is None else [here]
    # of strong and of weak scaling
    seconds: dict[int, list[list[float]]] = {world: [[], []] for world in worlds}
    with TemporaryDirectory(prefix="megalite_benchmark_") as scratch:
        prefix = planned.write_tokens(Path(scratch))
        for number in range(1, rounds + 1):
            for world in worlds:
                progress(f"round {number} of {rounds}: {world} ranks")
                spec = {
                    **protocol,
                    "device": planned.device,
                    "threads": planned.threads,
                    "configs": planned.configs(world, prefix),
                }
                of_round = measure_ranks(spec, world) if here is None else measure_here(spec)
                for total, measured in zip(seconds[world], of_round, strict=True):
                    total += measured
    rows = [
        _row(planned, mode, world, each)
        for world in worlds
        for mode, each in zip(planned.rows(world), seconds[world], strict=True)
    ]
    if here is not None and earlier is not None and earlier.get("config") == planned.shape():
        rows += [row for row in earlier["results"] if row["ranks"] != here]
    compared = _compared(rows)
    note = {"convention": SHARED} if any(row["efficiency"] is None for row in compared) else {}
    return {"config": planned.shape(), "protocol": protocol, "results": compared, "targets": [], **note}


def measure_ranks(spec: dict[str, Any], ranks: int) -> list[list[float]]:
    """Seconds of the steps of each configuration, on newly started ranks."""
    seconds: list[list[float]] = report.launch(
        "benchmarks.scaling_run", spec, ranks=ranks, threads=spec["threads"]
    )["seconds"]
    return seconds


def measure_here(spec: dict[str, Any]) -> list[list[float]]:
    """The same on the ranks that torchrun started; this process is one of them."""
    from benchmarks.scaling_run import measure, prepare

    return measure(spec, prepare(spec))


def _row(planned: ScalingPlan, mode: str, world: int, seconds: list[float]) -> dict[str, Any]:
    """Figures of a world; `_compared` adds those that compare it with others."""
    rows, local = planned.rows(world)[mode], int(os.environ.get("LOCAL_WORLD_SIZE", world))
    return {
        "mode": mode,
        "layout": "×".join(
            f"{axis.upper()}{size}" for axis, size in planned.layout.sizes(world).items() if size > 1
        )
        or "one process",
        "ranks": world,
        "device": planned.device,
        "cores_per_rank": report.cores() / local,
        "threads_per_rank": planned.threads,
        "global_batch_size": rows,
        "ms_per_step": 1e3 * median(seconds),
        "tokens_per_second": rows * planned.length / median(seconds),
        "step_ms": [1e3 * value for value in seconds],
    }


def _compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with speed-up and efficiency against the smallest world of their kind, in order."""
    compared = []
    for row in sorted(rows, key=lambda each: (each["mode"], each["ranks"])):
        base = min((each for each in rows if each["mode"] == row["mode"]), key=lambda each: each["ranks"])
        speed_up = row["tokens_per_second"] / base["tokens_per_second"]
        alone = row["device"] == "cuda" or row["cores_per_rank"] >= row["threads_per_rank"]
        compared.append(
            row
            | {"speed_up": speed_up, "efficiency": speed_up * base["ranks"] / row["ranks"] if alone else None}
        )
    return compared


def draw(content: dict[str, Any], path: Path) -> None:
    """Plot speed-up over ranks, measured and ideal; markers are hollow where ranks share cores."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5, 4), layout="constrained")
    worlds = sorted({row["ranks"] for row in content["results"]})
    axes.plot(worlds, [world / worlds[0] for world in worlds], color="gray", linestyle=":", label="ideal")
    for mode, color in (("strong", "C0"), ("weak", "C1")):
        rows = [row for row in content["results"] if row["mode"] == mode]
        axes.plot([row["ranks"] for row in rows], [row["speed_up"] for row in rows], color=color, label=mode)
        for row in rows:
            axes.plot(
                row["ranks"],
                row["speed_up"],
                "o",
                color=color,
                markerfacecolor="white" if row["efficiency"] is None else color,
            )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(worlds, [str(world) for world in worlds])
    axes.set_xlabel("ranks (hollow: they share cores)")
    axes.set_ylabel(f"tokens per second, over those of {worlds[0]}")
    axes.set_title(f"scaling of {content['config']['layout']}")
    axes.legend()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
