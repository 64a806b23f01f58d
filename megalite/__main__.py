"""The console command: `megalite NAME …`, or `python -m megalite NAME …`."""

from __future__ import annotations

import signal
import sys
from typing import NoReturn

USAGE = "megalite COMMAND [--option VALUE …]; `megalite COMMAND --help` lists the options of a command."


def main() -> NoReturn:
    """Run the command that the first argument names."""
    # Python's own handler prints a traceback, from an import as well
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from megalite.commands.start import COMMANDS, start
    from megalite.launch.output import outlive_readers

    name, *arguments = sys.argv[1:] or ["--help"]
    if name in COMMANDS:
        start(name, arguments)
    outlive_readers()
    if name in ("--version", "-V"):
        from megalite.commands.version import main as version

        version(arguments)
        sys.exit(0)
    if name in ("--help", "-h"):
        print("\n".join([USAGE, "", *(f"  {command:14} {what}" for command, what in COMMANDS.items())]))
        sys.exit(0)
    from megalite.config.rule import suggestion

    print(
        f"megalite: {name} is not a command.{suggestion(name, COMMANDS)} See megalite --help.",
        file=sys.stderr,
    )
    sys.exit(2)


if __name__ == "__main__":
    main()
