"""The text of `megalite train --help`; the width of the help of all commands."""

import shutil
import textwrap
from dataclasses import fields
from typing import TYPE_CHECKING

from megalite.config.arguments import LAUNCH
from megalite.config.schema import OPTIONS, Config
from megalite.config.values import add_options

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser


USAGE = (
    "megalite train [--nproc N] --config FILE.yaml|NAME [--tp N --pp N --dp N --cp N --ep N --zero N] "
    "[--section.key VALUE ...], "
    "or: torchrun --nproc-per-node N -m megalite train --config ..."
)


SWITCHES = {
    "list_configs": "Print the configurations shipped with megalite, and exit.",
    "print_config": "Print the resolved configuration as YAML, and exit.",
    "dry_run": "Print what --world_size W ranks would need, and exit.",
}
HELP = "Show this text, or that of the section whose name follows, and exit."
WIDEST = 100
"""The largest width of a help text."""


def help_width() -> int:
    """The width of the help of all commands: the columns of the terminal, at most WIDEST."""
    return min(shutil.get_terminal_size().columns, WIDEST)


def help_text(section: str | None = None) -> str:
    """The text of --help, or the part about one section."""
    text = _help_parser().format_help()
    if section is None:
        return text
    return next(part for part in text.split("\n\n") if part.startswith(f"{section}:\n"))


def _help_parser() -> "ArgumentParser":
    """A parser with all words of the command line, for their help alone."""
    from jsonargparse import ArgumentParser

    usage = textwrap.fill(
        USAGE, help_width() - len("usage: "), subsequent_indent=" " * 7, break_on_hyphens=False
    )
    parser = ArgumentParser(prog="megalite train", usage=usage, exit_on_error=False, add_help=False)
    config = (
        "YAML file of sections and keys, or a name from --list_configs. "
        "Options on the command line override it."
    )
    parser.add_argument("--config", metavar="FILE|NAME", help=config)
    for name, text in SWITCHES.items():
        parser.add_argument(f"--{name}", action="store_true", help=text)
    parser.add_argument("--help", "-h", action="store_true", help=HELP)
    launcher = parser.add_argument_group("launcher")
    for name, text in LAUNCH.items():
        launcher.add_argument(f"--{name}", help=text)
    add_options(parser, tuple(OPTIONS), field_docs())
    return parser


def field_docs() -> dict[str, str]:
    """Option → docstring: the string after the field, read from the source of its class, since Python does
    not store it."""
    import ast
    import inspect
    from itertools import pairwise

    sources = map(inspect.getsource, {inspect.getmodule(section.type) for section in fields(Config)})  # type: ignore[arg-type]
    bodies = {
        node.name: node.body
        for source in sources
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef)
    }
    return {
        f"{section.name}.{ast.unparse(key.target)}": ast.literal_eval(doc.value)
        for section in fields(Config)
        for key, doc in pairwise(bodies[section.type.__name__])  # type: ignore[union-attr]
        if isinstance(key, ast.AnnAssign) and isinstance(doc, ast.Expr)
    }
