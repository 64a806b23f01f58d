"""Muon against AdamW on the corpus of `megalite demo`.

The result is the number of steps and the time until Muon reaches the final validation loss of AdamW.

    python -m benchmarks.optimizers [--steps 300] [--seeds 3] [--output benchmarks/results]

The model is configs/quickstart.yaml on one process. The rates of both optimizers are tuned on equal grids,
with one seed: first those of AdamW; then those of Muon for the matrices, with AdamW's best rate for all other
tensors. Then both run alternately with every seed, with the best rates. Each grid has 5 values at factors of
two; a best rate at the end of its grid is reported. Completed runs are not repeated: remove the directory of
the runs to start over. Writes MACHINE-optimizers.json with versions and all losses, and a plot.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks import report
from benchmarks.training_runs import Curve, trained
from megalite.commands import demo
from megalite.commands.demo import CONFIG
from megalite.commands.parser import Parser, positive

GRIDS = {"adamw": (7.5e-4, 1.5e-3, 3e-3, 6e-3, 1.2e-2), "muon": (5e-3, 1e-2, 2e-2, 4e-2, 8e-2)}
TUNED = {"adamw": "optimizer.lr", "muon": "muon.lr"}
FIRST_SEED = 1234


@dataclass(frozen=True)
class Runner:
    """Runner that starts runs of the quickstart's model, or finds completed ones."""

    directory: Path
    steps: int
    interval: int
    threads: int

    def curve(self, name: str, rates: dict[str, float], seed: int) -> Curve:
        """Return the run with an optimizer, its rates by option, and a seed.

        Raises:
            BenchmarkError: the run failed.
        """
        label = "-".join(
            [name, *(f"{option.partition('.')[0]}{rate:g}" for option, rate in rates.items()), f"seed{seed}"]
        )
        options = {"optimizer.name": name, **rates, "optimizer.min_lr": 0.0, "run.seed": seed}
        options |= {"validation.interval": self.interval, "parallel.sequence_parallel": "false"}
        return trained(self.directory, label, options, steps=self.steps, config=CONFIG, threads=self.threads)


def tune(
    runner: Runner, name: str, fixed: dict[str, float], rates: tuple[float, ...]
) -> tuple[float, list[dict[str, float]]]:
    """Return the rate with the lowest final loss, and the loss of each."""
    rows = [
        {"rate": rate, "loss": runner.curve(name, fixed | {TUNED[name]: rate}, FIRST_SEED).losses[-1]}
        for rate in rates
    ]
    return min(rows, key=lambda row: row["loss"])["rate"], rows


def compare(runner: Runner, seeds: int, grids: dict[str, tuple[float, ...]]) -> dict[str, Any]:
    """Tune both, run both with every seed, and determine when Muon reaches AdamW's final loss."""
    grid: dict[str, Any] = {}
    best, grid["adamw"] = tune(runner, "adamw", {}, grids["adamw"])
    rates = {"adamw": {"optimizer.lr": best}}
    best, grid["muon"] = tune(runner, "muon", rates["adamw"], grids["muon"])
    rates["muon"] = rates["adamw"] | {"muon.lr": best}
    curves: dict[str, list[Curve]] = {name: [] for name in rates}
    for seed in range(FIRST_SEED, FIRST_SEED + seeds):
        for name, chosen in rates.items():
            curves[name].append(runner.curve(name, chosen, seed))
    rows = [
        _row(seed, one, other)
        for seed, (one, other) in enumerate(zip(curves["adamw"], curves["muon"], strict=True), FIRST_SEED)
    ]
    ends = {
        name: chosen[TUNED[name]] in (min(grids[name]), max(grids[name])) for name, chosen in rates.items()
    }
    return {
        "protocol": {"steps": runner.steps, "seeds": seeds, "threads": runner.threads, "config": str(CONFIG)},
        "grids": grid,
        "rates": rates,
        "best_rate_ends_its_grid": ends,
        "results": rows,
        "final_loss": {name: mean(curve.losses[-1] for curve in each) for name, each in curves.items()},
        "curves": {name: [vars(curve) for curve in each] for name, each in curves.items()},
    }


def _row(seed: int, adamw: Curve, muon: Curve) -> dict[str, Any]:
    """Return the result of one seed: both final losses and times, and where Muon reaches AdamW's loss."""
    reached = muon.reaches(adamw.losses[-1])
    return {
        "seed": seed,
        "adamw": {"loss": adamw.losses[-1], "steps": adamw.steps[-1], "seconds": adamw.seconds[-1]},
        "muon": {"loss": muon.losses[-1], "steps": muon.steps[-1], "seconds": muon.seconds[-1]},
        "muon_reaches_adamws_loss": None
        if reached is None
        else dict(zip(("steps", "seconds"), reached, strict=True)),
    }


def draw(content: dict[str, Any], path: Path) -> None:
    """Plot the validation losses of all seeds over steps and over seconds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained", sharey=True)
    for panel, unit in zip(panels, ("steps", "seconds"), strict=True):
        for name, color in (("adamw", "tab:blue"), ("muon", "tab:orange")):
            for number, curve in enumerate(content["curves"][name]):
                panel.plot(
                    curve[unit], curve["losses"], color=color, linewidth=1, label=None if number else name
                )
        panel.set(xlabel=unit)
        panel.grid(alpha=0.3)
    panels[0].set(ylabel="validation loss (nats per token)")
    panels[0].legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def describe(content: dict[str, Any]) -> str:
    """Return the result of each seed in one line."""
    lines = [f"rates: {content['rates']}, at the end of the grid: {content['best_rate_ends_its_grid']}"]
    for row in content["results"]:
        adamw, muon, reached = row["adamw"], row["muon"], row["muon_reaches_adamws_loss"]
        when = (
            "does not reach AdamW's loss"
            if reached is None
            else f"has AdamW's loss after {reached['steps']:.0f} steps"
        )
        when += "" if reached is None else f", {reached['seconds']:.1f} s"
        lines.append(
            f"seed {row['seed']}: AdamW {adamw['loss']:.4f} after {adamw['steps']} steps, "
            f"{adamw['seconds']:.1f} s; "
            f"Muon {when}, and ends at {muon['loss']:.4f}, {muon['seconds']:.1f} s"
        )
    return "\n".join(lines)


def main() -> None:
    tool = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tool.add_argument("--steps", type=positive, default=300, help="steps of every run (default 300)")
    tool.add_argument(
        "--seeds", type=positive, default=3, help="runs of each optimizer with its best rate (default 3)"
    )
    tool.add_argument(
        "--rates", type=positive, default=5, help="rates of each grid, from its middle (default 5)"
    )
    tool.add_argument("--threads", type=positive, default=2, help="threads of a run (default 2)")
    tool.add_argument(
        "--runs", type=Path, default=Path("runs/optimizers"), metavar="DIR", help="directory of the runs"
    )
    tool.add_argument(
        "--output", type=Path, default=report.RESULTS, metavar="DIR", help="directory of the results"
    )
    options = tool.parse_args()
    demo.prepare()
    margin = (len(GRIDS["muon"]) - min(options.rates, len(GRIDS["muon"]))) // 2
    grids = {name: rates[margin : len(rates) - margin] for name, rates in GRIDS.items()}
    runner = Runner(options.runs, options.steps, max(options.steps // 20, 1), options.threads)
    try:
        content = compare(runner, options.seeds, grids)
    except report.BenchmarkError as error:
        tool.exit(1, f"{tool.prog}: {error}\n")
    options.output.mkdir(parents=True, exist_ok=True)
    path = report.write("optimizers", content, options.output, None)
    draw(content, path.with_suffix(".png"))
    print(f"{describe(content)}\nwritten to {path}")


if __name__ == "__main__":
    main()
