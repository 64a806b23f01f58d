"""What a run has recorded of a few steps (`--profiling.timeline true`), beside what the simulator says.

    megalite timeline runs/run

Prints the bubble measured and the one predicted, and writes traces/timeline.json into the run's directory, which ui.perfetto.dev opens.
A run does the same when it ends.
"""

from pathlib import Path

from megalite.commands.parser import Parser
from megalite.config.schema import ConfigError
from megalite.monitoring.timeline import compare


def main(argv: list[str] | None = None) -> None:
    tool = Parser(description=__doc__)
    tool.add_argument("run", type=Path, metavar="RUN_DIR", help="directory of a run")
    options = tool.parse_args(argv)
    try:
        print("\n".join(compare(options.run)))
    except ConfigError as error:
        tool.error(str(error))
