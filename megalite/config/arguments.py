"""The words of a command line: which files, options and switches they give."""

import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from megalite.config import migrations
from megalite.config.errors import ConfigError
from megalite.config.files import shipped_configs
from megalite.config.rule import suggestion
from megalite.config.schema import OPTIONS, SECTIONS, SHORT
from megalite.config.values import takes, without_brackets

if TYPE_CHECKING:
    pass


LAUNCH = {
    "nproc": "Start N ranks on this machine; gpu: one for each GPU; MIN:MAX: the run goes on with fewer, "
    "down to MIN, when some are lost. Without it this process is the only one, or one of torchrun's.",
    "nnodes": "Number of nodes (default 1), each of which runs this command with the same --nproc; MIN:MAX: "
    "nodes may be lost and return.",
    "node_rank": "Place of this node, from 0. Default: the nodes' order of arrival.",
    "rdzv_endpoint": "HOST:PORT where several nodes meet: an address of the first one, and a free port "
    "there.",
    "max_restarts": "Start all ranks again up to K times after one has failed (default 0).",
    "return_after": "With MIN:MAX, time after which a lost place for a rank is tried again (default 30s); it "
    "doubles each time that the place is lost.",
}
"""What `megalite.commands.start_ranks` takes, which is no part of the configuration → help."""
DRY_RUN = ("world_size", "ranks", "device")
"""Options of `megalite train --dry_run` alone."""


@dataclass
class Arguments:
    """The parsed command line.

    Attributes:
        overrides: option, by the name that was written, → value.
        mistakes: messages about words that could not be read, which `resolve` reports with all others.
    """

    files: list[str] = field(default_factory=list)
    overrides: dict[str, str] = field(default_factory=dict)
    help: bool = False
    section: str | None = None  # the only one to explain
    print_config: bool = False
    list_configs: bool = False
    mistakes: list[str] = field(default_factory=list)


def read_arguments(argv: list[str], own: Sequence[str] = ()) -> Arguments:
    """Parse `--name VALUE` and `--name=VALUE`. A word that is not an option, or an option without a value, is
    one of the mistakes.

    Args:
        own: names of other options that the command takes itself, for messages about misspelled ones.
    """
    arguments, words = Arguments(), deque(argv)
    while words:
        word = words.popleft()
        if word in ("-h", "--help"):
            arguments.help = True
            if words and not words[0].startswith("-"):
                arguments.section = _section(words.popleft(), arguments.mistakes)
        elif word == "--print_config":
            arguments.print_config = True
        elif word == "--list_configs":
            arguments.list_configs = True
        elif not word.startswith("--"):
            arguments.mistakes.append(f"{word} on the command line belongs to no option. {_as_option(word)}")
            if word.startswith("-") and words and not words[0].startswith("-"):
                words.popleft()  # its value
        else:
            _read_option(word, words, arguments, own)
    return arguments


def _read_option(word: str, words: deque[str], arguments: Arguments, own: Sequence[str]) -> None:
    """Read an option, and take its value from the words that follow it."""
    name, equals, value = word.removeprefix("--").partition("=")
    written = SHORT.get(name, name)
    option = migrations.NAMES.get(written, written)
    if option != "config" and option not in OPTIONS:
        arguments.mistakes += _not_here(name, own).messages
        while not equals and words and not words[0].startswith("--"):  # its value
            words.popleft()
        return
    if not equals and (not words or words[0].startswith("--")):
        example = "true" if option in OPTIONS and OPTIONS[option].type is bool else "VALUE"
        arguments.mistakes.append(f"--{name} on the command line has no value. Write --{name} {example}.")
        return
    following = value if equals else words.popleft()
    if option == "config":
        arguments.files.append(following)
    else:
        words_of_value = [following, *_more_entries(option, words)]
        arguments.overrides[written] = without_brackets(option, words_of_value)


def _section(word: str, mistakes: list[str]) -> str | None:
    """The section that --help is asked about: its name, or an option in it."""
    section = SHORT.get(word, word).partition(".")[0]
    if section in SECTIONS and (section == word or SHORT.get(word, word) in OPTIONS):
        return section
    mistakes.append(
        f"--help {word}: there is no such section.{suggestion(section, SECTIONS)} Sections: "
        f"{', '.join(SECTIONS)}."
    )
    return None


def _as_option(word: str) -> str:
    """What a word without dashes was likely meant to be: a configuration, or an option."""
    if os.path.isfile(word) or Path(word).suffix in (".yaml", ".yml"):
        return f"Write --config {word}."
    name, equals, value = word.lstrip("-").partition("=")
    if name in OPTIONS or name in SHORT:
        return f"Write --{name} {value if equals else 'VALUE'}."
    if near := get_close_matches(word, shipped_configs(), n=1):
        return f"Write --config {near[0]}."
    return "Write --section.key VALUE."


def _not_here(name: str, own: Sequence[str]) -> ConfigError:
    """The error for a name on the command line that is no option of a run."""
    if name in DRY_RUN and name not in own:
        return ConfigError(f"--{name} is only valid for a dry run. Add --dry_run or remove it.")
    if name in LAUNCH:  # `megalite train` takes them itself
        return ConfigError(
            f"--{name} is only valid when starting ranks. Remove it: a dry run "
            "starts none and takes their number "
            "by --world_size, and verify starts those that --tp, --pp, --dp and --cp need."
        )
    from megalite.config.suggestions import unknown

    known = [*SHORT, *own, *LAUNCH, "config", "list_configs", "print_config", "help"]
    return unknown(name, "on the command line", known, dashes="--")


def _more_entries(option: str, words: deque[str]) -> Iterator[str]:
    """Take the words that follow a list's first one and belong to it, up to the next option."""
    while takes(list, option) and words and not words[0].startswith("-"):
        yield words.popleft()
