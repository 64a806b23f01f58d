"""Write one HTML page about a run, or a comparison of several.

    megalite report runs/run
    megalite report runs/a runs/b --output comparison.html

Writes report.html into the (first) run's directory: loss, learning rate, gradient norm, throughput, memory, the pipeline's timeline,
predictions and measurements, configuration and environment. The page is self-contained; a run may still be training.
"""

from __future__ import annotations

import json

from megalite.commands.parser import Parser, as_path, write_whole
from megalite.monitoring.report.page import page
from megalite.monitoring.report.run import ReportError, read


def main(argv: list[str] | None = None) -> None:
    tool = parser()
    options = tool.parse_args(argv)
    output = options.output or options.runs[0] / "report.html"
    try:
        found = [read(directory) for directory in options.runs]
        write_whole(output, page(found))
    except ImportError as error:
        tool.error(f"a report needs the package {error.name}: pip install {error.name}.")
    except ReportError as error:
        tool.error(str(error))
    except OSError as error:
        tool.error(f"{output} can not be written: {error.strerror}. Choose another with --output.")
    print(json.dumps({"report": str(output), "runs": [run.name for run in found]}) if options.json else output)


def parser() -> Parser:
    made = Parser(description=__doc__)
    add = made.add_argument
    add("runs", type=as_path, nargs="+", metavar="RUN_DIR", help="run directories; several are compared")
    add("--output", type=as_path, metavar="FILE.html", help="output file (default: report.html in the first run's directory)")
    add("--json", action="store_true", help="print only one JSON object, with the page's path, on stdout")
    return made
