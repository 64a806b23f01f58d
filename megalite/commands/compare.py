"""Compare runs: their final figures and the options in which they differ, as a table and as a page with their
curves.

    megalite compare runs/a runs/b
    megalite compare runs/a runs/b runs/c --output comparison.html

The page has the loss over steps, over tokens and over time, and all else that `megalite report` shows. Runs
may still be training.
"""

from __future__ import annotations

import json

from megalite.commands.parser import Parser, as_new_file, as_path
from megalite.commands.report import write_page
from megalite.monitoring.report import figures
from megalite.monitoring.report.run import RecordedRun
from megalite.system.text import aligned

WIDEST = 48  # characters of a cell; the page and --json have the whole values


def main(argv: list[str] | None = None) -> None:
    tool = parser()
    options = tool.parse_args(argv)
    if len(options.runs) < 2:
        tool.error("at least two runs are required. Use `megalite report` for a single run.")
    runs = write_page(tool, options.runs, options.output, options.json)
    if options.json:
        written = options.output and str(options.output)
        print(
            json.dumps(
                {
                    "runs": [figures.as_json(run) for run in runs],
                    "differences": figures.differences(runs),
                    "report": written,
                }
            )
        )
        return
    print("\n".join([*lines_of(runs), *([f"\n{options.output}"] if options.output else [])]))


def parser() -> Parser:
    tool = Parser(description=__doc__)
    add = tool.add_argument
    add("runs", type=as_path, nargs="+", metavar="RUN_DIR", help="run directories")
    add("--output", type=as_new_file, metavar="FILE.html", help="also write a page with the curves")
    add("--json", action="store_true", help="print only one JSON object on stdout")
    return tool


def lines_of(runs: list[RecordedRun]) -> list[str]:
    """Format the figures and the differing options as aligned lines."""
    options = figures.difference_rows(runs) or [["the configurations do not differ", *("" for _ in runs)]]
    rows = [["", *(run.name for run in runs)], *figures.summary(runs), [""] * (len(runs) + 1), *options]
    cells = [[cell if len(cell) <= WIDEST else f"{cell[: WIDEST - 1]}…" for cell in row] for row in rows]
    return aligned(cells, left=len(runs) + 1)
