"""Compare a layout with one process: runs both and prints the first step, tensor and rank that differ.

    megalite verify --config configs/quickstart.yaml --tp 2 --pp 2 --dp 2 [--steps 5] [--section.key VALUE …]

It takes the options of megalite train, too, as --zero and --ep.
Exit status: 0 if equal within the tolerances, 1 if different, 2 for an invalid configuration. With `--json`,
stdout is one JSON object.
"""

from __future__ import annotations

import json
import math
import tempfile
from dataclasses import asdict
from pathlib import Path

from megalite.commands.parser import Parser, positive, progress_of
from megalite.config.arguments import read_arguments
from megalite.config.errors import ConfigError
from megalite.config.load import exit_with, load_config

AXES = {
    "tp": "tensor-parallel ranks",
    "pp": "pipeline stages",
    "dp": "data-parallel ranks",
    "cp": "context-parallel ranks",
}
TOLERANCES = {  # relative (loss, norm), absolute (weights)
    "fp32": (1e-5, 2e-5),
    "fp64": (1e-9, 1e-9),
    "bf16": (2e-2, 2e-2),
    "fp16": (5e-3, 5e-3),
}


def main(argv: list[str] | None = None) -> int:
    own, rest = parser().parse_known_args(argv)
    if own.steps < 1:
        exit_with(f"--steps = {own.steps}: there must be at least one step to compare.")
    overrides = read_arguments(rest).overrides  # --parallel.tp means the same as --tp
    layout = {axis: getattr(own, axis) or size_of(overrides.get(f"parallel.{axis}", "1")) for axis in AXES}
    rest += [word for axis, size in layout.items() for word in (f"--{axis}", str(size))]
    # the proof settings
    defaults = ["--checkpoint.load", "none", "--optimizer.lr", "3e-4", "--optimizer.warmup_steps", "0"]
    world = math.prod(layout.values())
    config = load_config([*defaults, *rest], world_size=world, own=("steps", "json"))
    layout |= {"ep": config.parallel.ep} if config.parallel.ep > 1 else {}
    import torch

    from megalite.training.verify import compare, run_ranks, single_process

    on_cpu = torch.cuda.device_count() < world  # both runs use the same kind of device

    with tempfile.TemporaryDirectory(prefix="megalite_verify_") as scratch, progress_of(own.json) as progress:
        try:
            run_ranks(config, own.steps, Path(scratch, "layout"), on_cpu, progress)
            run_ranks(single_process(config), own.steps, Path(scratch, "single"), on_cpu, progress)
        except ConfigError as error:
            exit_with(str(error))
        progress("comparing")
        relative, absolute = TOLERANCES[config.train.precision]
        difference = compare(Path(scratch, "layout"), Path(scratch, "single"), relative, absolute)
    if own.json:
        print(
            json.dumps(
                {
                    "equal": difference is None,
                    "steps": own.steps,
                    "layout": layout,
                    "difference": difference and asdict(difference),
                }
            )
        )
    elif difference is None:
        sizes = " × ".join(f"{axis} {size}" for axis, size in layout.items() if size > 1) or "one process"
        print(
            f"equal: {own.steps} steps on {sizes} give one process's losses and norms within {relative:g}, "
            f"weights within {absolute:g}"
        )
    else:
        print(f"different: {difference}")
    return int(difference is not None)


def size_of(word: str) -> int:
    """A number of ranks; 1 for what is none, which the configuration reports."""
    return max(1, int(word)) if word.strip().isdecimal() else 1


def parser() -> Parser:
    tool = Parser(description=__doc__, allow_abbrev=False)
    for axis, what in AXES.items():
        tool.add_argument(f"--{axis}", type=positive, metavar="N", help=f"{what} of the layout (default 1)")
    tool.add_argument("--steps", type=int, default=5, help="optimizer steps to compare (default 5)")
    tool.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    return tool
