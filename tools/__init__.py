"""The command lines, the parser that they share, and beside each that needs more than its own file a package of what it alone uses."""

import argparse
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Ends with one message and exit status 2, without the usage; a description keeps its line breaks."""

    def __init__(self, **options: object):
        super().__init__(**{"formatter_class": argparse.RawDescriptionHelpFormatter, **options})  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")
