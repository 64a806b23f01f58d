"""Print the memory, traffic and bubble of a run on any number of ranks without starting it: `megalite train
--dry_run --world_size W …`.

Every distinct rank is built on the meta device, and the bytes of its states must equal those that the planner
computes from specs; all other numbers are the planner's. Reads no data, needs no GPU and writes nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from megalite.commands.parser import Parser, positive
from megalite.config.elastic import describe, table
from megalite.config.errors import ConfigError
from megalite.config.load import exit_with
from megalite.config.schema import Config
from megalite.planner.api import DeviceType
from megalite.system.progress import Progress
from megalite.training import dry_run


def main(argv: list[str] | None = None) -> None:
    options, rest = parser().parse_known_args(sys.argv[1:] if argv is None else argv)
    try:
        config = dry_run.read(rest, options.world_size, options.device)
        ranks = dry_run.distinct(config, options.ranks)
        # with --world_size the configuration has that size's layout, and not the largest one
        layouts = dry_run.by_size(config) if options.world_size is None else {}
    except ConfigError as error:
        exit_with(str(error))
    with Progress(quiet=options.json and not sys.stderr.isatty()) as progress:
        progress(f"building {len(ranks)} rank{'s' * (len(ranks) > 1)} on the meta device")
        content = calculated(config, ranks, options.device)
    if layouts:
        content["layouts"] = {size: describe(layout) for size, layout in layouts.items()}
    lines = [*dry_run.describe(config, content), *(["", *table(layouts)] if layouts else [])]
    print(json.dumps(content) if options.json else "\n".join(lines), flush=True)


def calculated(config: Config, ranks: list[int], device: DeviceType) -> dict[str, Any]:
    """Return all figures. Exits with status 1 if a rank that was built differs from its plan."""
    # imports torch, so only after the configuration is checked
    from megalite.training.meta_device import Disagreement

    try:
        return dry_run.calculate(config, ranks, device)
    except Disagreement as error:
        exit_with(str(error), status=1)


def parser() -> Parser:
    parser = Parser(prog="megalite train --dry_run", description=__doc__, allow_abbrev=False)
    parser.add_argument("--dry_run", action="store_true", required=True)
    parser.add_argument(
        "--world_size", type=positive, metavar="W", help="number of ranks (default tp * pp * cp * dp)"
    )
    parser.add_argument(
        "--ranks",
        type=numbers,
        metavar="R,R,…",
        help="ranks to build on the meta device (default: two per pipeline rank)",
    )
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="device type to plan for (default cuda)",
    )
    parser.add_argument("--json", action="store_true", help="print only one JSON object on stdout")
    return parser


def numbers(text: str) -> list[int]:
    if not all(part.strip().isdecimal() for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of ranks such as 0,7")
    return [int(part) for part in text.split(",")]
