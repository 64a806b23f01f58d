"""The command lines, the parser that they share, and beside each that needs more than its own file a package of what it alone uses."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

Answer = tuple[dict[str, Any], list[str], int]  # for --json, for people, exit status
Command = Callable[[argparse.Namespace], Answer]


class Parser(argparse.ArgumentParser):
    """Ends with one message and exit status 2, without the usage; a description keeps its line breaks."""

    def __init__(self, **options: object):
        super().__init__(**{"formatter_class": argparse.RawDescriptionHelpFormatter, **options})  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def positive(text: str) -> int:
    """The type of an option that counts something."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 up")
    return int(text)


def answer(tool: Parser, options: argparse.Namespace, commands: Mapping[str, Command], *errors: type[Exception]) -> int:
    """Run the subcommand that was asked for and print its answer; returns the exit status. `errors` and OSErrors are the tool's message."""
    expected: tuple[type[Exception], ...] = (OSError, *errors)
    try:
        content, lines, status = commands[options.command](options)
    except expected as error:
        tool.error(str(error))
    try:
        print(json.dumps(content) if options.json else "\n".join(lines), flush=True)
    except BrokenPipeError:  # who reads it has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return status
