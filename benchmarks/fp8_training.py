"""Validation loss of training in fp8 against bf16, with several seeds, on a CPU.

    python -m benchmarks.fp8_training --text FILE [--seeds 3] [--output benchmarks/results]

A Llama of 3.1M parameters reads the text by bytes: 2,000 steps of 4 × 128, AdamW, 2 % of the text for
validation. The operands of its layers' matmuls are rounded to bf16, or to fp8 with a scale per block, and
multiplied in fp32 (`fp8_training_run`); with `--operands block mxfp8 fp32` also to others, with one seed:
those that are not rounded (fp32) show how far runs differ that differ in rounding alone. Runs with one seed
start with the same weights and read the same samples. Completed runs are not repeated, and interrupted
ones resume: remove the directory of the runs to start over. Writes MACHINE-fp8-training.json with versions
and all losses, and a picture for the manual.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks import report
from megalite.commands import demo
from megalite.commands.parser import Parser, positive

OPERANDS = ("block", "mxfp8", "fp32")
"""What is compared with bf16."""
FIRST_SEED = 1234
STEPS = 2000
SMALL = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1}
"""The model of --smoke, which trains for four steps."""
PICTURE = report.ROOT / "docs" / "pictures" / "fp8-training.svg"
COLORS = {"bf16": "tab:blue", "block": "tab:orange", "mxfp8": "tab:green", "fp32": "tab:gray"}
TABLE = {
    "operands": "operands",
    "seed": "seed:d",
    "validation loss": "loss:.4f",
    "of bf16": "relative:+.2%",
}


def configuration(
    directory: Path, operands: str, seed: int, steps: int, model: dict[str, int]
) -> dict[str, Any]:
    """Return the configuration of a run."""
    sizes = {"hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 4, **model}
    heads = sizes["hidden_size"] // 64
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": heads}
    return {
        "run": {"dir": str(directory), "name": f"{operands}-seed{seed}", "seed": seed},
        "model": {**sizes, "max_position_embeddings": 128, "vocab_size": 257, "tie_word_embeddings": True},
        "parallel": {"dp": 1},
        "data": {"train": str(directory / "text"), "validation": 0.02, "sequence_length": 128},
        "train": {
            "steps": steps,
            "global_batch_size": 4,
            "micro_batch_size": 4,
            "precision": "fp32",
            "fp8": "none" if operands in ("bf16", "fp32") else operands,
        },
        "optimizer": {
            "lr": 1e-3,
            "min_lr": 1e-4,
            "warmup_steps": max(steps // 20, 1),
            "decay": "cosine",
            "betas": [0.9, 0.99],
            "weight_decay": 0.1,
        },
        "validation": {"interval": max(steps // 20, 1)},
        "logging": {"interval": max(steps // 20, 1)},
        "checkpoint": {"interval": max(steps // 10, 1), "keep": 1},
    }


def curve(config: dict[str, Any], operands: str, threads: int) -> dict[int, float]:
    """Train unless the run is complete, and return its validation losses by step.

    Raises:
        BenchmarkError: the run failed.
    """
    metrics = Path(config["run"]["dir"], config["run"]["name"], "metrics.jsonl")
    if not (metrics.exists() and config["train"]["steps"] in demo.read_losses(metrics)[1]):
        print(config["run"]["name"], file=sys.stderr, flush=True)
        spec = {"config": config, "operands": operands}
        report.launch("benchmarks.fp8_training_run", spec, threads=threads, limit_s=4 * 3600.0)
    return demo.read_losses(metrics)[1]


def compare(curves: dict[str, dict[int, dict[int, float]]]) -> dict[str, Any]:
    """Compare final losses with those of bf16.

    Args:
        curves: operands → seed → step → validation loss.

    Returns:
        a row for each run, whose `relative` is its distance from bf16 with the same seed; the standard
        deviation of bf16's losses over the seeds; and for each of the others the difference of the mean
        losses of the seeds that it has, relative to bf16 and in standard deviations.
    """
    final = {name: {seed: loss[max(loss)] for seed, loss in each.items()} for name, each in curves.items()}
    baseline = final["bf16"]
    spread = stdev(baseline.values()) if len(baseline) > 1 else None
    rows, means = [], {}
    for name, losses in final.items():
        for seed, loss in losses.items():
            relative = None if name == "bf16" else loss / baseline[seed] - 1
            rows.append({"operands": name, "seed": seed, "loss": loss, "relative": relative})
        if name != "bf16":
            own = mean(baseline[seed] for seed in losses)
            away = mean(losses.values()) - own
            means[name] = {
                "loss": mean(losses.values()),
                "bf16": own,
                "relative": away / own,
                "spreads": None if not spread else away / spread,
            }
    return {"results": rows, "spread_of_bf16": spread, "means": means}


def draw(curves: dict[str, dict[int, dict[int, float]]], path: Path) -> None:
    """Plot the validation losses, and how much those in fp8 are above bf16 with the same seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "megalite"  # the same file for the same numbers
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for name, each in curves.items():
        for number, (seed, losses) in enumerate(each.items()):
            label, steps = None if number else name, list(losses)
            left.plot(steps, list(losses.values()), color=COLORS[name], linewidth=1, label=label)
            if name != "bf16":
                above = [100 * (losses[step] / curves["bf16"][seed][step] - 1) for step in steps]
                right.plot(steps, above, color=COLORS[name], linewidth=1, label=label)
    left.set(xlabel="step", ylabel="validation loss (nats per byte)")
    right.set(xlabel="step", ylabel="above bf16 with the same seed (%)")
    right.axhline(0, color=COLORS["bf16"], linewidth=1)
    for panel in (left, right):
        panel.grid(alpha=0.3)
        panel.legend()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> None:
    tool = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tool.add_argument("--text", type=Path, required=True, metavar="FILE", help="a text file to train on")
    tool.add_argument("--seeds", type=positive, default=3, help="runs in bf16, and with block (default 3)")
    tool.add_argument(
        "--operands",
        nargs="+",
        choices=OPERANDS,
        default=["block"],
        help="what is compared with bf16 (default block); all but the first have one run",
    )
    tool.add_argument("--threads", type=positive, default=1, help="threads of a run (default 1)")
    tool.add_argument("--smoke", action="store_true", help="four steps of a tiny model, as a test")
    tool.add_argument(
        "--runs", type=Path, default=Path("runs/fp8_training"), metavar="DIR", help="directory of the runs"
    )
    tool.add_argument(
        "--output", type=Path, default=report.RESULTS, metavar="DIR", help="directory of the results"
    )
    tool.add_argument("--picture", type=Path, default=PICTURE, metavar="FILE", help="file of the picture")
    options = tool.parse_args(argv)
    steps, model = (4, SMALL) if options.smoke else (STEPS, {})
    seeds = range(FIRST_SEED, FIRST_SEED + options.seeds)
    wanted = [("bf16", seed) for seed in seeds]
    wanted += [
        (operands, seed)
        for operands in options.operands
        for seed in (seeds if operands == options.operands[0] else seeds[:1])
    ]
    curves: dict[str, dict[int, dict[int, float]]] = {}
    try:
        prepare(options.text, options.runs / "text")
        for operands, seed in sorted(wanted, key=lambda run: run[1]):
            config = configuration(options.runs, operands, seed, steps, model)
            curves.setdefault(operands, {})[seed] = curve(config, operands, options.threads)
    except (report.BenchmarkError, subprocess.CalledProcessError) as error:
        tool.exit(1, f"{tool.prog}: {error}\n")
    content = {
        "protocol": {"steps": steps, "seeds": options.seeds, "threads": options.threads},
        "config": configuration(Path("runs"), "block", FIRST_SEED, steps, model),
        **compare(curves),
        "curves": {
            name: {seed: {"steps": list(each), "losses": list(each.values())} for seed, each in runs.items()}
            for name, runs in curves.items()
        },
    }
    path = report.write("fp8-training", content, options.output, None)
    draw(curves, options.picture)
    print(report.table(content["results"], TABLE))
    print(json.dumps(content["means"]), f"written to {path}", sep="\n")


def prepare(text: Path, prefix: Path) -> None:
    """Write the token file, unless it exists."""
    if not prefix.with_suffix(".bin").exists():
        prefix.parent.mkdir(parents=True, exist_ok=True)
        command = ["prepare", "--input", str(text), "--tokenizer", "byte", "--output", str(prefix)]
        subprocess.run([sys.executable, "-m", "megalite", *command], check=True)


if __name__ == "__main__":
    main()
