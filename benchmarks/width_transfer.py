"""The best learning rate at three widths, with and without model.mup, on bytes of Python sources.

    python -m benchmarks.width_transfer [--widths 128 256 512] [--steps 200] [--output benchmarks/results]

A Llama with heads of 32 channels, on one process. Each width and parametrization is trained at every rate of
one grid, at factors of two; the base of mup is the smallest width, at which both are one. Completed runs are
not repeated: remove the directory of the runs to start over. Writes MACHINE-width-transfer.json with all
losses, and a plot.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.training_runs import prepare_bytes, trained
from megalite.commands.parser import Parser, positive

NAMES = ("mup", "standard")
RATES = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)
HEAD = 32  # channels
RUN = {
    "data.sequence_length": 64,
    "data.validation": 0.01,
    "train.global_batch_size": 16,
    "train.micro_batch_size": 16,
    "optimizer.eps": 1e-12,
    "optimizer.warmup_steps": "10%",
    "validation.batches": 32,
}


@dataclass(frozen=True)
class WidthRunner:
    """Starts runs, or finds completed ones."""

    directory: Path
    steps: int
    layers: int
    base: int
    initializer_range: float

    def loss(self, width: int, rate: float, mup: bool) -> float:
        """Return the last validation loss.

        Raises:
            BenchmarkError: the run failed.
        """
        label = f"{'mup' if mup else 'standard'}-{width}-{rate:g}"
        heads = width // HEAD
        model = {
            "hidden_size": width,
            "intermediate_size": width * 11 // 4,
            "num_hidden_layers": self.layers,
            "num_attention_heads": heads,
            "num_key_value_heads": max(heads // 2, 1),
            "max_position_embeddings": RUN["data.sequence_length"],
            "initializer_range": self.initializer_range,
            "mup": json.dumps({"base_width": self.base} if mup else None),
        }
        options: dict[str, object] = {f"model.{name}": value for name, value in model.items()} | RUN
        options |= {"optimizer.lr": rate, "optimizer.min_lr": rate / 10, "validation.interval": self.steps}
        options |= {"data.train": self.directory / "bytes"}
        return trained(self.directory, label, options, steps=self.steps).losses[-1]


def sweep(
    runner: WidthRunner, names: Sequence[str], widths: Sequence[int], rates: Sequence[float]
) -> dict[str, Any]:
    """Return the losses of all runs, and the best rate of each width and parametrization."""
    rows = [
        {
            "parametrization": name,
            "width": width,
            "losses": (
                losses := {
                    rate: runner.loss(width, rate, name == "mup" or width == runner.base) for rate in rates
                }
            ),
            "best": min(losses, key=lambda rate: losses[rate]),
        }
        for name in names
        for width in widths
    ]
    protocol = {"steps": runner.steps, "layers": runner.layers, "base_width": runner.base, "run": RUN}
    protocol |= {"initializer_range": runner.initializer_range}
    return {"protocol": protocol, "rates": list(rates), "results": rows}


def draw(content: dict[str, Any], path: Path) -> None:
    """Plot the losses over the rates, and mark the best rate of each width."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row["parametrization"] for row in content["results"]))
    figure = Figure(figsize=(5 * len(names), 4), layout="constrained")
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    for panel, name in zip(panels, names, strict=True):
        for row in content["results"]:
            if row["parametrization"] == name:
                losses = {float(rate): loss for rate, loss in row["losses"].items()}
                (line,) = panel.plot(
                    list(losses), list(losses.values()), marker=".", label=f"width {row['width']}"
                )
                panel.plot(row["best"], losses[row["best"]], marker="o", color=line.get_color())
        panel.set(xscale="log", xlabel="optimizer.lr", title="model.mup" if name == "mup" else "without it")
        panel.set_xticks(content["rates"], [f"{rate:g}" for rate in content["rates"]])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    lowest = min(min(row["losses"].values()) for row in content["results"])
    panels[0].set(ylabel="validation loss (nats per token)", ylim=(lowest - 0.05, lowest + 0.7))
    panels[0].legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    tool = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tool.add_argument("--widths", type=positive, nargs="+", default=[128, 256, 512], metavar="W")
    tool.add_argument("--steps", type=positive, default=200, help="steps of every run (default 200)")
    tool.add_argument("--layers", type=positive, default=2, help="layers of every model (default 2)")
    tool.add_argument("--rates", type=float, nargs="+", default=RATES, metavar="LR", help="the grid")
    tool.add_argument("--initializer_range", type=float, default=0.02, metavar="STD", help="default 0.02")
    tool.add_argument("--only", choices=NAMES, help="one of the parametrizations (default both)")
    tool.add_argument("--runs", type=Path, default=Path("runs/width-transfer"), metavar="DIR")
    tool.add_argument("--output", type=Path, default=report.RESULTS, metavar="DIR")
    options = tool.parse_args()
    prepare_bytes(options.runs / "bytes")
    base, names = min(options.widths), [options.only] if options.only else NAMES
    runner = WidthRunner(options.runs, options.steps, options.layers, base, options.initializer_range)
    try:
        content = sweep(runner, names, options.widths, options.rates)
    except report.BenchmarkError as error:
        tool.exit(1, f"{tool.prog}: {error}\n")
    options.output.mkdir(parents=True, exist_ok=True)
    path = report.write("width-transfer", content, options.output, None)
    draw(content, path.with_suffix(".png"))
    for row in content["results"]:
        losses = ", ".join(f"{rate:g}: {loss:.3f}" for rate, loss in row["losses"].items())
        print(f"{row['parametrization']}, width {row['width']}: best {row['best']:g} ({losses})")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
