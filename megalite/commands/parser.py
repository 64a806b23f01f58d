"""Shared by the commands: a parser whose errors are one message, and the printing of answers."""

import argparse
import errno
import json
import os
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NoReturn

from megalite.config.checkout import CHECKOUT
from megalite.config.help import help_width
from megalite.config.rule import nearest_legal, nearest_name, suggestion, why_not_written
from megalite.system.files import os_error_text, replacing
from megalite.system.messages import say
from megalite.system.progress import Progress

Answer = tuple[dict[str, Any], list[str], int]  # content for --json, lines of text, exit status
Command = Callable[[argparse.Namespace], Answer]
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # no room is left: on the disk, for this user, in a file


class HelpFormatter(argparse.HelpFormatter):
    """Fills the paragraphs of a description to the width of the terminal. An indented line, as of an example,
    stays a line."""

    def __init__(self, prog: str, **options: Any):
        super().__init__(prog, **{"width": help_width(), **options})

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return fill(text, width, indent)


def fill(text: str, width: int, indent: str = "") -> str:
    """Fill paragraphs to a width.

    An indented line is kept; a remark after a wide gap goes below it if both are too long.
    """

    def wrapped(words: str, first: str, others: str) -> list[str]:
        return textwrap.wrap(
            words,
            width,
            initial_indent=first,
            subsequent_indent=others,
            break_long_words=False,
            break_on_hyphens=False,
        )

    lines: list[str] = []
    for indented, block in groupby(
        text.strip().splitlines(), key=lambda line: line[:1].isspace() or not line
    ):
        if not indented:
            lines += wrapped(" ".join(block), indent, indent)
            continue
        for line in block:
            margin = indent + line[: len(line) - len(line.lstrip())]
            command, *remark = re.split(r"\s{2,}", line.strip(), maxsplit=1)
            if len(indent + line) <= width:
                lines.append(indent + line)
            else:
                lines += wrapped(command, margin, f"{margin}    ") + wrapped(
                    "".join(remark), f"{margin}    ", f"{margin}    "
                )
    return "\n".join(lines)


class Parser(argparse.ArgumentParser):
    """An argument parser that exits with status 2 and one message, without the usage, on an error."""

    def __init__(self, **options: object):
        super().__init__(**{"formatter_class": HelpFormatter, **options})  # type: ignore[arg-type]

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse as usual, and suggest the nearest option for an unknown argument."""
        options, others = self.parse_known_args(args, namespace)
        if others:
            known = sorted(self._names())
            named = (
                nearest_name(word.strip("-").partition("=")[0], known)
                for word in others
                if word.startswith("--")
            )
            near = [f"--{name}" for name in named if name is not None]
            self.error(
                f"unrecognized arguments: {' '.join(others)}"
                + (f". Nearest: {', '.join(near)}." if near else "")
            )
        return options

    def _names(self) -> set[str]:
        """Return the long options, without dashes, of this parser and its subcommands."""
        below = [
            parser
            for action in self._actions
            if isinstance(action.choices, dict)
            for parser in action.choices.values()
        ]
        own = {
            name.removeprefix("--")
            for action in self._actions
            for name in action.option_strings
            if name.startswith("--")
        }
        return own.union(*(parser._names() for parser in below if isinstance(parser, Parser)))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Check as usual, and suggest the nearest choice for an invalid value."""
        if action.choices is not None and value not in action.choices:
            legal = list(action.choices)
            if isinstance(action, argparse._SubParsersAction):
                commands = f"Commands: {', '.join(legal)}.{suggestion(value, legal)}"
                raise argparse.ArgumentError(None, f"{value!r} is not a {self.prog} command. {commands}")
            listed = ", ".join(map(repr, legal))
            raise argparse.ArgumentError(
                action, f"invalid choice: {value!r} (choose from {listed}).{nearest_legal(value, legal)}"
            )

    def error(self, message: str | Exception, output: Path | None = None) -> NoReturn:
        """Exit with a message, or the message of an exception.

        Args:
            output: the path that the command writes, for operating system errors.
        """
        self.exit(2, f"{self.prog}: {message if isinstance(message, str) else said(message, output)}\n")

    def enter_checkout(self, what: str = "it") -> Path:
        """The checkout that contains this package; makes its benchmarks/ importable. Exits with an error if
        there is none."""
        if CHECKOUT is None:
            self.error(
                f"{what} requires files that are not installed with the package. Run it from a source "
                "checkout."
            )
        if str(CHECKOUT) not in sys.path:
            sys.path.insert(0, str(CHECKOUT))
        return CHECKOUT


def said(error: Exception, output: Path | None = None) -> str:
    """The message of an exception, for users: of the system's errors the reason and the path, without numbers
    and names of hidden files.

    Args:
        output: what was being written. The system does not say in which file a disk was full.
    """
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    if error.errno in FULL and output is not None:
        return f"{output} cannot be written: {error.strerror}. Free some space or choose another path."
    if error.filename is None:
        return os_error_text(error)
    path = Path(os.fsdecode(error.filename))
    shown = path.parent if path.name.startswith(".") else path
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) and (
        not path.exists() or os.access(path, os.R_OK)
    ):
        return f"{shown} cannot be written: {error.strerror}. Check its permissions or choose another path."
    return os_error_text(error, shown)


def warn(line: str) -> None:
    """Print a line on stderr, on rank 0 only."""
    if os.environ.get("RANK", "0") == "0":
        say(line)


def progress_of(as_json: bool) -> Progress:
    """Return the progress display of a command.

    With --json it is a bar on a terminal only, so that no lines are mixed with the object.
    """
    return Progress(quiet=as_json and not sys.stderr.isatty())


def positive(text: str) -> int:
    """Argparse type for a positive integer."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def as_tokens(text: str) -> int:
    """Argparse type for a number of tokens: 300M, 10B or 15e12."""
    from megalite.config.amounts import count

    number = count(text) or 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens such as 300M, 10B or 15e12")
    return number


def as_path(text: str) -> Path:
    """Argparse type for a file or directory; ~ is the home directory."""
    return Path(os.path.expanduser(text))


def as_output(text: str) -> Path:
    """Argparse type for an output file or directory, whose parents are created.

    Checked before any work is done.
    """
    path = as_path(text)
    why = None if path.exists() and not path.is_file() else why_not_written(path.parent)
    if why is not None:
        raise argparse.ArgumentTypeError(f"{text} cannot be written: {why}. Choose another path.")
    return path


def as_new_file(text: str) -> Path:
    """Argparse type for an output file in an existing directory."""
    path = as_output(text)
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"{text} cannot be written: the directory {path.parent} does not exist. Create it first."
        )
    return path


def as_name(text: str) -> str:
    """Argparse type for PATH, hf:PATH or a name; ~ is the home directory."""
    scheme = "hf:" if text.startswith("hf:") else ""
    return scheme + os.path.expanduser(text.removeprefix(scheme))


def as_tokenizer(text: str) -> str:
    """Argparse type for a tokenizer: byte, FILE.model, a directory, or org/name on the Hugging Face Hub.

    A name on the Hub is resolved to a directory.
    """
    from megalite.config.errors import ConfigError
    from megalite.families import hub

    try:
        return hub.directory(as_name(text).removeprefix("hf:"), "tokenizer")
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically. If the path is not a file, such as /dev/stdout, write to it directly."""
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    with replacing(path) as fresh:
        fresh.write_text(text, encoding="utf-8")


def answer(
    tool: Parser, options: argparse.Namespace, commands: Mapping[str, Command], *errors: type[Exception]
) -> int:
    """Run the chosen subcommand and print its answer; returns the exit status. `errors` and OSError end with
    their message."""
    expected: tuple[type[Exception], ...] = (OSError, *errors)
    try:
        content, lines, status = commands[options.command](options)
    except expected as error:
        tool.error(error, getattr(options, "file", None))
    print(json.dumps(content) if options.json else "\n".join(lines), flush=True)
    return status
