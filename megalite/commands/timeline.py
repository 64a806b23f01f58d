"""Compare the steps that a run recorded (`--profiling.timeline true`) with the simulator.

    megalite timeline runs/run

Prints the measured and the predicted bubble, and writes traces/timeline.json for ui.perfetto.dev into the
run's directory. A run does the same when it ends.
"""

import json

from megalite.commands.parser import Parser, as_path, progress_of
from megalite.config.errors import ConfigError


def main(argv: list[str] | None = None) -> None:
    tool = parser()
    options = tool.parse_args(argv)
    from megalite.monitoring.timeline import TIMELINE, compare, describe, written

    try:
        with progress_of(options.json) as progress:
            progress("simulating the recorded steps")
            comparison = compare(options.run)
    except (ConfigError, OSError) as error:
        tool.error(error)
    if options.json:
        print(
            json.dumps(
                {
                    **{name: value for name, value in comparison.items() if name != "traceEvents"},
                    "written": str(options.run / TIMELINE),
                }
            )
        )
    else:
        print("\n".join([*describe(comparison), written(options.run)]))


def parser() -> Parser:
    tool = Parser(description=__doc__)
    tool.add_argument("run", type=as_path, metavar="RUN_DIR", help="run directory")
    tool.add_argument("--json", action="store_true", help="print only one JSON object on stdout")
    return tool
