"""Losses of AdamW with moments in bf16 and in 8 bits beside fp32 (`optimizer.moments`).

    python -m benchmarks.moments [--steps 2000] [--seeds 2] [--output benchmarks/results]

A small Llama reads the bytes of the Python standard library, with two second betas: the default, and 0.999,
whose changes of the second moment are below the spacing of bf16. Completed runs are not repeated: remove the
directory of the runs to start over. Writes MACHINE-moments.json with all losses, and a plot.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks import report
from benchmarks.training_runs import Curve, prepare_bytes, trained
from megalite.commands.parser import Parser, positive

BETAS = (0.95, 0.999)
VARIANTS = ("fp32", "bf16", "8bit")
COLORS = ("black", "tab:blue", "tab:green")
FIRST_SEED = 1234
MODEL = {
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 64,
}
RUN = {
    "data.sequence_length": 64,
    "data.validation": 0.01,
    "train.global_batch_size": 8,
    "train.micro_batch_size": 8,
    "optimizer.lr": 3e-3,
    "optimizer.min_lr": 3e-4,
    "optimizer.warmup_steps": "5%",
    "validation.batches": 16,
}


def curve(runs: Path, name: str, beta: float, seed: int, steps: int, threads: int) -> Curve:
    """Return the run of a variant, or find it if it is complete."""
    label = f"{name}-{beta}-{seed}"
    options: dict[str, object] = {f"model.{key}": value for key, value in MODEL.items()} | RUN
    options |= {"data.train": runs / "bytes", "run.seed": seed, "validation.interval": max(steps // 10, 1)}
    options |= {"optimizer.betas": f"[0.9, {beta}]", "optimizer.moments": name}
    return trained(runs, label, options, steps=steps, threads=threads)


def measure(runs: Path, steps: int, seeds: int, threads: int) -> dict[str, Any]:
    """Run all variants, and return their losses."""
    curves: dict[str, dict[str, list[Curve]]] = {}
    numbers = range(FIRST_SEED, FIRST_SEED + seeds)
    for beta in BETAS:
        for name in VARIANTS:
            own = [curve(runs, name, beta, seed, steps, threads) for seed in numbers]
            curves.setdefault(str(beta), {})[name] = own
    return {
        "protocol": {"steps": steps, "seeds": seeds, "threads": threads, "model": MODEL, "run": RUN},
        "final_loss": {
            beta: {name: mean(each.losses[-1] for each in runs) for name, runs in names.items()}
            for beta, names in curves.items()
        },
        "curves": {
            beta: {name: [vars(each) for each in runs] for name, runs in names.items()}
            for beta, names in curves.items()
        },
    }


def draw(content: dict[str, Any], path: Path) -> None:
    """Plot the differences of the validation losses to fp32 with the same seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(BETAS), figsize=(10, 4), layout="constrained")
    for panel, (beta, names) in zip(panels, content["curves"].items(), strict=True):
        for (name, curves), color in zip(names.items(), COLORS, strict=True):
            for number, (own, base) in enumerate(zip(curves, names["fp32"], strict=True)):
                gaps = [a - b for a, b in zip(own["losses"], base["losses"], strict=True)]
                panel.plot(own["steps"], gaps, color=color, linewidth=1, label=None if number else name)
        panel.set(xlabel="steps", title=f"betas: [0.9, {beta}]", ylim=(-0.1, 0.1))
        panel.grid(alpha=0.3)
    panels[0].set(ylabel="validation loss beside fp32 (nats per byte)")
    panels[0].legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main() -> None:
    tool = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tool.add_argument("--steps", type=positive, default=2000, help="steps of every run (default 2000)")
    tool.add_argument("--seeds", type=positive, default=2, help="runs of each variant (default 2)")
    tool.add_argument("--threads", type=positive, default=1, help="threads of a run (default 1)")
    tool.add_argument(
        "--runs", type=Path, default=Path("runs/moments"), metavar="DIR", help="directory of the runs"
    )
    tool.add_argument(
        "--output", type=Path, default=report.RESULTS, metavar="DIR", help="directory of the results"
    )
    options = tool.parse_args()
    try:
        prepare_bytes(options.runs / "bytes")
        content = measure(options.runs, options.steps, options.seeds, options.threads)
    except report.BenchmarkError as error:
        tool.exit(1, f"{tool.prog}: {error}\n")
    options.output.mkdir(parents=True, exist_ok=True)
    path = report.write("moments", content, options.output, None)
    draw(content, path.with_suffix(".png"))
    for beta, losses in content["final_loss"].items():
        print(f"betas [0.9, {beta}]: {', '.join(f'{name} {loss:.4f}' for name, loss in losses.items())}")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
