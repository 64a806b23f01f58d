"""What a run on any number of ranks would take, without starting one: `megalite train --dry_run --world_size W …`.

Every distinct rank is built on the meta device, and its states must have the bytes that the planner computes from specs alone; the rest is
the planner's. Reads no data and needs no GPU; nothing is written.
"""

from __future__ import annotations

import argparse
import json
import sys

from megalite.checkout import command
from megalite.commands.parser import Parser, positive
from megalite.config.load import exit_with
from megalite.config.schema import ConfigError
from megalite.training import dry_run


def main(argv: list[str] | None = None) -> None:
    options, rest = parser().parse_known_args(sys.argv[1:] if argv is None else argv)
    try:
        config = dry_run.read(rest, options.world_size)
        ranks = dry_run.distinct(config, options.ranks)
    except ConfigError as error:
        exit_with(str(error))
    from megalite.training.meta_device import Disagreement  # imports torch, which a wrong configuration need not wait for

    try:
        content = dry_run.calculate(config, ranks, options.device)
    except Disagreement as error:
        exit_with(str(error), status=1)
    print(json.dumps(content) if options.json else "\n".join(dry_run.describe(config, content)), flush=True)


def parser() -> Parser:
    made = Parser(prog=f"{command('train')} --dry_run", description=__doc__, allow_abbrev=False)
    made.add_argument("--dry_run", action="store_true", required=True)
    made.add_argument("--world_size", type=positive, metavar="W", help="ranks of the run (default tp * pp * cp * dp)")
    made.add_argument("--ranks", type=numbers, metavar="R,R,…", help="build these on the meta device (default two of each pipeline rank)")
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="what the ranks compute on (default cuda)")
    made.add_argument("--json", action="store_true", help="print one JSON object, and nothing else, on stdout")
    return made


def numbers(text: str) -> list[int]:
    if not all(part.strip().isdecimal() for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of ranks such as 0,7")
    return [int(part) for part in text.split(",")]
