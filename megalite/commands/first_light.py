"""Prove and measure this machine's GPUs in one command: kernels, a training step, layouts, links,
predictions.

    megalite first-light --short          every part, in eight minutes
    megalite first-light                  the same with three times the time
    megalite first-light --rehearse       the same code on the CPU, at sizes whose figures mean nothing
    megalite first-light --parts links kernels      some parts again: the file keeps the others

Results are written after every row to benchmarks/results/first-light-<gpu>.json. An error or a hang costs one
part. Exit status: 0 if no proof has failed, whatever is missing; 1 if one has, in a rehearsal also if
anything is missing; 2 for invalid options.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from megalite.commands.parser import Parser, as_new_file


def main(argv: list[str] | None = None) -> int:
    tool = parser()
    options = tool.parse_args(argv)
    tool.enter_checkout()
    from benchmarks import report
    from benchmarks.first_light import run, show
    from benchmarks.first_light.parts import NAMES

    if unknown := [name for name in options.parts if name not in NAMES]:
        tool.error(f"--parts {unknown[0]} does not exist. Legal values: {', '.join(NAMES)}.")
    gpus = [] if options.rehearse else report.gpus()
    if not gpus and not options.rehearse:
        tool.error("no NVIDIA GPU found. Pass --rehearse to run the same code on the CPU.")
    if options.calibrate is not None and "predictions" not in (options.parts or NAMES):
        tool.error(
            "--calibrate requires the part predictions. Add predictions to --parts or remove --calibrate."
        )
    output: Path = options.output or run.default_output(gpus)
    order = run.Order(options.parts or NAMES, output, gpus, options.short, options.calibrate)
    try:
        content = run.run(order, lambda line: print(line, file=sys.stderr, flush=True))
    except OSError as error:
        tool.error(f"--output {output}: {error.strerror or error}")
    if options.json:
        print(json.dumps(content))
    else:
        show.show(content, str(output))
    verdict = content["verdict"]
    return int(bool(verdict["failed"] or (options.rehearse and verdict["missing"])))


def parser() -> Parser:
    tool = Parser(description=__doc__)
    add = tool.add_argument
    add("--short", action="store_true", help="takes about eight minutes")
    add("--rehearse", action="store_true", help="run on the CPU with gloo (about two minutes)")
    add(
        "--parts",
        nargs="+",
        default=[],
        metavar="NAME",
        help="machine, values, step, layouts, links, kernels, predictions (default all)",
    )
    add(
        "--calibrate",
        type=as_new_file,
        metavar="FILE",
        help="write the measurements as a device file for megalite plan --gpu",
    )
    add(
        "--output",
        type=as_new_file,
        metavar="FILE",
        help="output file (default benchmarks/results/first-light-<gpu>.json)",
    )
    add("--json", action="store_true", help="print only the JSON on stdout")
    return tool
