"""Compare a layout with one process: runs both and prints the first step, tensor and rank that differ.

    megalite verify --config configs/quickstart.yaml --tp 2 --pp 2 --dp 2 [--steps 5] [--section.key VALUE …]
    megalite verify --fp8 [5] --config … --train.fp8 block
    megalite verify --coordinates [6] --config … [--widths 64 128 256] [--seeds 3] [--draw FILE.svg]

The second form compares a run in fp8 with the same run in its compute dtype, on the same layout, and prints
their losses, and the first matmul whose difference is not explained by the rounding of its operands.
The third form trains the model at several widths on one process, and prints by which power of the width
activations have changed; with model.mup it should be 0.
It takes the options of megalite train, too, as --zero and --ep.
Exit status: 0 if equal within the tolerances, 1 if different, 2 for an invalid configuration. With `--json`,
stdout is one JSON object.
"""

from __future__ import annotations

import json
import math
import tempfile
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from megalite.commands.parser import Parser, positive, progress_of
from megalite.config.arguments import read_arguments
from megalite.config.errors import ConfigError
from megalite.config.load import exit_with, load_config
from megalite.config.mup import broken_heads
from megalite.config.schema import Config

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
    if own.coordinates is not None:
        return compare_widths(own, rest)
    check_no_widths(own)
    if own.fp8 is not None and own.steps is not None:
        exit_with(f"--steps = {own.steps} has no effect with --fp8. Give the number of steps as --fp8 N.")
    steps = own.fp8 or (5 if own.steps is None else own.steps)
    if steps < 1:
        exit_with(f"--steps must be at least 1, got {steps}.")
    overrides = read_arguments(rest).overrides  # --parallel.tp means the same as --tp
    layout = {axis: getattr(own, axis) or size_of(overrides.get(f"parallel.{axis}", "1")) for axis in AXES}
    rest += [word for axis, size in layout.items() for word in (f"--{axis}", str(size))]
    # the proof settings
    defaults = ["--checkpoint.load", "none", "--optimizer.lr", "3e-4", "--optimizer.warmup_steps", "0"]
    world = math.prod(layout.values())
    config = load_config([*defaults, *rest], world_size=world, own=("steps", "json", "fp8"))
    layout |= {"ep": config.parallel.ep} if config.parallel.ep > 1 else {}
    if own.fp8 is not None and config.train.fp8 == "none":
        exit_with("--fp8 requires a run in fp8, but train.fp8 = none. Set --train.fp8 block or mxfp8.")
    import torch

    from megalite.training.objective_trial import try_objective
    from megalite.training.optimizer_trial import try_optimizer
    from megalite.training.verify import compare, run_ranks, single_process

    try:
        try_objective(config)
        try_optimizer(config)
    except ConfigError as error:
        exit_with(str(error))
    on_cpu = torch.cuda.device_count() < world  # both runs use the same kind of device
    if own.fp8 is not None:
        return compare_fp8(config, steps, layout, on_cpu, own.json)

    with tempfile.TemporaryDirectory(prefix="megalite_verify_") as scratch, progress_of(own.json) as progress:
        try:
            run_ranks(config, steps, Path(scratch, "layout"), on_cpu, progress)
            run_ranks(single_process(config), steps, Path(scratch, "single"), on_cpu, progress)
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
                    "steps": steps,
                    "layout": layout,
                    "difference": difference and asdict(difference),
                }
            )
        )
    elif difference is None:
        print(
            f"equal: {steps} steps on {sizes_of(layout)} match one process: losses and norms within "
            f"{relative:g}, weights within {absolute:g}"
        )
    else:
        print(f"different: {difference}")
    return int(difference is not None)


def sizes_of(layout: Mapping[str, int]) -> str:
    return " × ".join(f"{axis} {size}" for axis, size in layout.items() if size > 1) or "one process"


def compare_fp8(config: Config, steps: int, layout: Mapping[str, int], on_cpu: bool, as_json: bool) -> int:
    """Run both, print the result, and return the exit status."""
    from megalite.assembly.fp8_matrices import describe_fp8, fp8_matrices
    from megalite.training.fp8_comparison import compare, without_fp8
    from megalite.training.verify import run_ranks

    (about,) = describe_fp8(config)
    if not fp8_matrices(config):
        exit_with(f"--fp8 has nothing to compare: {about.removeprefix('WARNING: ')}.")
    module = "megalite.training.fp8_comparison"
    with tempfile.TemporaryDirectory(prefix="megalite_verify_") as scratch, progress_of(as_json) as progress:
        directories = Path(scratch, "fp8"), Path(scratch, "plain")
        try:
            for each, directory in zip((config, without_fp8(config)), directories, strict=True):
                run_ranks(each, steps, directory, on_cpu, progress, module)
        except ConfigError as error:
            exit_with(str(error))
        comparison = compare(*directories, steps)
    difference = comparison.difference
    if as_json:
        facts = {"equal": difference is None, "steps": steps, "layout": layout, "fp8": config.train.fp8}
        print(json.dumps(facts | comparison.as_json()))
        return int(difference is not None)
    print(about)
    precision = config.train.precision
    print(f"step      loss in fp8      loss in {precision}      difference")
    for step, (loss, plain) in enumerate(comparison.losses, start=1):
        print(f"{step:<4}  {loss:15.6f}  {plain:16.6f}  {loss - plain:14.2e}")
    if difference is not None:
        print(f"different: {difference}")
        return 1
    print(
        f"equal up to rounding: {steps} steps on {sizes_of(layout)}: all codes are the nearest ones, and all "
        "products are those of their codes"
    )
    if comparison.errors:  # unknown where ZeRO-3 gathers codes
        largest, matrix, product = comparison.largest_error
        where = f"{matrix}, {product.replace('_', ' ')}"
        print(f"A product differs from that in {precision} by at most {largest:.2%} ({where})")
    return 0


def check_no_widths(own: Namespace) -> None:
    """Exit with a message if options of the coordinate check are given without it."""
    if used := next((name for name in ("widths", "seeds", "draw") if getattr(own, name) is not None), None):
        exit_with(f"--{used} has an effect only with --coordinates. Remove it, or add --coordinates.")


def compare_widths(own: Namespace, rest: list[str]) -> int:
    """Run the coordinate check, print the result, and return the exit status."""
    others = ("steps", "fp8", *AXES)
    if given := next((name for name in others if getattr(own, name) is not None), None):
        exit_with(
            f"--{given} = {getattr(own, given)} has no effect with --coordinates, which trains on one "
            "process for --coordinates N steps. Remove it."
        )
    names = ("coordinates", "widths", "seeds", "draw", "json")
    config = load_config(["--checkpoint.load", "none", *rest], world_size=1, own=names)
    from megalite.training.coordinates import BOUND, WIDTHS, check_coordinates, draw

    widths = sorted(set(own.widths or WIDTHS))
    if len(widths) < 2:
        exit_with(f"--widths = {widths[0]} is a single width. Give at least two, as 64 128 256.")
    for width in widths:
        if name := broken_heads(config.model, width):
            exit_with(
                f"--widths contains {width}, at which model.{name} = {getattr(config.model, name)} of "
                f"model.hidden_size = {config.model.hidden_size} is no whole number. Choose other --widths, "
                "or more heads."
            )
    if own.draw and find_spec("matplotlib") is None:
        exit_with("--draw requires matplotlib. Install it: pip install 'megalite[demo]'.")
    with progress_of(own.json) as progress:
        coordinates = check_coordinates(config, widths, own.coordinates, own.seeds or 3, progress)
    broken = [each for each in coordinates if not each.kept]
    if own.draw:
        draw(coordinates, own.draw)
    if own.json:
        activations = [each.as_json() for each in coordinates]
        print(json.dumps({"equal": not broken, "bound": BOUND, "activations": activations}))
        return int(bool(broken))
    print(f"change of activations, rms, after {own.coordinates} steps")
    print(f"{'':32}" + "".join(f"{width:>10}" for width in widths) + "  exponent of the width")
    for each in coordinates:
        values = "".join(f"{steps[-1]:10.3g}" for steps in each.rms.values())
        print(f"{each.name:32}{values}  {each.exponent(each.steps):+.3f}")
    if not broken:
        print(f"equal: no exponent is beyond ±{BOUND:g}: learning rates carry over from width to width")
        return 0
    worst = max(broken, key=lambda each: abs(each.exponent(each.steps)))
    print(
        f"different: {len(broken)} of {len(coordinates)} exponents are beyond ±{BOUND:g}, the largest that "
        f"of {worst.name}" + ("" if config.model.mup else "; model.mup is not set")
    )
    return 1


def size_of(word: str) -> int:
    """Parse a number of ranks; 1 if it is invalid, which the configuration reports."""
    return max(1, int(word)) if word.strip().isdecimal() else 1


def parser() -> Parser:
    tool = Parser(description=__doc__, allow_abbrev=False)
    for axis, what in AXES.items():
        tool.add_argument(f"--{axis}", type=positive, metavar="N", help=f"{what} of the layout (default 1)")
    tool.add_argument("--steps", type=int, help="optimizer steps to compare (default 5)")
    tool.add_argument(
        "--fp8",
        type=positive,
        nargs="?",
        const=5,
        metavar="N",
        help="compare N steps in fp8 with the same steps in the compute dtype (default 5)",
    )
    tool.add_argument(
        "--coordinates",
        type=positive,
        nargs="?",
        const=6,
        metavar="N",
        help="compare the changes of activations over N steps at several widths (default 6)",
    )
    tool.add_argument(
        "--widths", type=positive, nargs="+", metavar="W", help="widths (default 64 128 256 512 1024)"
    )
    tool.add_argument("--seeds", type=positive, metavar="N", help="initializations of each width (default 3)")
    tool.add_argument("--draw", type=Path, metavar="FILE", help="draw the changes against the width")
    tool.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    return tool
