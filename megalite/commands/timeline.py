"""Compare the steps that a run recorded (`--profiling.timeline true`) with the simulator.

    megalite timeline runs/run

Prints the measured and the predicted bubble, and writes traces/timeline.json for ui.perfetto.dev into the run's directory. A run does the
same when it ends.
"""

from megalite.commands.parser import Parser, as_path
from megalite.config.schema import ConfigError
from megalite.monitoring.timeline import compare


def main(argv: list[str] | None = None) -> None:
    tool = parser()
    options = tool.parse_args(argv)
    try:
        print("\n".join(compare(options.run)))
    except ConfigError as error:
        tool.error(str(error))


def parser() -> Parser:
    made = Parser(description=__doc__)
    made.add_argument("run", type=as_path, metavar="RUN_DIR", help="run directory")
    return made
