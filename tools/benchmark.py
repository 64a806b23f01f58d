"""Measure this machine: speed and memory beside a peer or beside the matrix products alone, written to benchmarks/results/.

    python tools/benchmark.py step [--precision fp32 bf16] [--compile]     a 25M Llama against transformers
    python tools/benchmark.py overhead                                     small models on one process and on up to 8 ranks
    python tools/benchmark.py comm                                         data parallelism on 4 ranks against torch's

Leave the machine alone meanwhile: everything that is compared is measured in one run, but each figure is only as quiet as the machine.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import comm, overhead, report, step
from megalite.config.arguments import Parser

COLUMNS = {"step": step.COLUMNS, "overhead": overhead.COLUMNS, "comm": comm.COLUMNS}
TARGETS = {"target": "target", "measured": "measured:.2f", "wanted": "wanted", "met": "met"}


def main(argv: list[str] | None = None) -> None:
    tool = parser()
    options = tool.parse_args(argv)
    for name in ("rounds", "threads"):
        if getattr(options, name) < 1:
            tool.error(f"--{name} {getattr(options, name)}: there must be at least one.")
    if options.machine is not None and not re.fullmatch(r"[\w.-]+", options.machine):
        tool.error(f"--machine {options.machine} becomes a part of a file name. Give letters, digits, dots and dashes.")
    if options.output.exists() and not options.output.is_dir():
        tool.error(
            f"--output {options.output} is not a directory. Give one, or leave it out for {report.RESULTS.relative_to(report.ROOT)}."
        )
    try:
        path = report.write(options.benchmark, measure(options), options.output, options.machine)
    except (report.BenchmarkError, OSError) as error:
        tool.exit(1, f"{tool.prog}: {error}\n")
    show(options.benchmark, path, options.json)


def parser() -> Parser:
    made = Parser(prog="benchmark.py", description=__doc__)
    common = Parser(add_help=False)
    common.add_argument("--rounds", type=int, default=3, help="how often the compared runs take turns (default 3)")
    common.add_argument("--threads", type=int, default=2, help="threads of a run that is one process (default 2)")
    common.add_argument(
        "--output", type=Path, default=report.RESULTS, metavar="DIR", help="where the JSON goes (default benchmarks/results)"
    )
    common.add_argument("--machine", metavar="NAME", help="name of the machine in the file's name (default: its processor)")
    common.add_argument("--json", action="store_true", help="print the JSON, and nothing else, on stdout")
    common.add_argument("--smoke", action="store_true", help=argparse.SUPPRESS)  # tiny sizes, whose figures mean nothing: for the tests
    commands = made.add_subparsers(dest="benchmark", required=True, metavar="step|overhead|comm")
    of_step = commands.add_parser("step", parents=[common], help="a training step against transformers, side by side")
    of_step.add_argument("--precision", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"], help="(default both)")
    of_step.add_argument("--compile", action="store_true", help="also with torch.compile, both sides")
    commands.add_parser("overhead", parents=[common], help="small models on several layouts, against their matrix products alone")
    commands.add_parser("comm", parents=[common], help="data-parallel steps on four ranks against torch's DDP and FSDP2")
    return made


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run the benchmark that was asked for."""
    common: dict[str, Any] = {"rounds": options.rounds, "threads": options.threads, "smoke": options.smoke}

    def progress(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    if options.benchmark == "step":
        precisions = list(dict.fromkeys(options.precision))
        return step.compare(**common, precisions=precisions, compiled=options.compile, progress=progress)
    return (overhead if options.benchmark == "overhead" else comm).compare(**common, progress=progress)


def show(benchmark: str, path: Path, as_json: bool) -> None:
    text = path.read_text()
    if as_json:
        print(text, end="")
        return
    content = json.loads(text)
    print(report.table(content["results"], COLUMNS[benchmark]))
    if content["targets"]:
        print("\n" + report.table([{**row, "met": "yes" if row["met"] else "no"} for row in content["targets"]], TARGETS))
    print(f"\n{content['machine']['cpu']}, {content['machine']['cores']} cores: {path}")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the processes that are being measured end with this one
    main()
