"""Print a script with which a shell completes the commands, options and choices of megalite, and files.

    bash    megalite completion bash > ~/.local/share/bash-completion/completions/megalite
    zsh     megalite completion zsh > DIR/_megalite                 DIR: one of $fpath, for example ~/.zfunc
    fish    megalite completion fish > ~/.config/fish/completions/megalite.fish

The script holds everything, so that completing starts no Python. Print it again after an update.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import Literal, get_args, get_origin

from megalite.commands.parser import Parser
from megalite.commands.start import COMMANDS

SHELLS = ("bash", "zsh", "fish")
MODELS = ("--model", "--from")  # options that take a preset or a shipped configuration, besides files
ELSEWHERE = ("benchmark", "demo")  # commands of a checkout: their options are not part of the package


@dataclass
class Grammar:
    """The words that may follow a command.

    `options` maps each option to its values (None: takes none; empty: a file). `words` are subcommands.
    """

    what: str = ""
    options: dict[str, list[str] | None] = field(default_factory=dict)
    words: dict[str, Grammar] = field(default_factory=dict)


def main(argv: list[str] | None = None) -> int:
    options = parser().parse_args(argv)
    print({"bash": bash, "zsh": zsh, "fish": fish}[options.shell](commands()), end="")
    return 0


def parser() -> Parser:
    tool = Parser(description=__doc__)
    tool.add_argument("shell", choices=SHELLS, help="the shell")
    return tool


def commands() -> dict[str, Grammar]:
    """Return what may follow each command."""
    grammars = {}
    for name, what in COMMANDS.items():
        make_parser = (
            getattr(import_module(f"megalite.commands.{name.replace('-', '_')}"), "parser", None)
            if name not in ELSEWHERE
            else None
        )
        grammars[name] = (
            training()
            if name == "train"
            else of_parser(make_parser())
            if make_parser
            else Grammar(options={"--help": None})
        )
        grammars[name].what = what
    grammars["verify"].options |= {
        name: values
        for name, values in grammars["train"].options.items()
        if "." in name or name == "--config"
    }
    return grammars


def of_parser(parser: argparse.ArgumentParser) -> Grammar:
    grammar = Grammar()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            grammar.words |= {name: of_parser(sub) for name, sub in action.choices.items()}
        elif action.option_strings:
            named = model_names() if set(action.option_strings) & set(MODELS) else action.choices or ()
            values = None if action.nargs == 0 else [str(each) for each in named]
            grammar.options |= {name: values for name in action.option_strings if name.startswith("--")}
        elif action.choices:
            grammar.words |= {str(each): Grammar() for each in action.choices}
    return grammar


def model_names() -> list[str]:
    from megalite.config.files import shipped_configs
    from megalite.families.presets import presets

    return list(dict.fromkeys([*presets(), *shipped_configs()]))


def training() -> Grammar:
    """Return the options of the configuration, the launcher and dry runs."""
    from megalite.commands.dry_run import parser as dry_run
    from megalite.config.arguments import LAUNCH
    from megalite.config.files import shipped_configs
    from megalite.config.schema import OPTIONS, SHORT

    flags = ("--help", "--print_config", "--list_configs", "--dry_run")
    options: dict[str, list[str] | None] = {**dict.fromkeys(flags), "--config": list(shipped_configs())}
    options |= {f"--{name}": [] for name in LAUNCH}
    options |= {f"--{name}": choices(key.type) for name, key in OPTIONS.items()}
    options |= {f"--{short}": options[f"--{name}"] for short, name in SHORT.items()}
    return Grammar(options=of_parser(dry_run()).options | options)


def choices(hint: object) -> list[str]:
    """Return the values of a configuration option, if they can be listed."""
    if hint is bool:
        return ["true", "false"]
    return [
        str(each)
        for part in (hint, *get_args(hint))
        if get_origin(part) is Literal
        for each in get_args(part)
    ]


# ---- scripts


def cases(grammars: dict[str, Grammar]) -> Iterator[tuple[str, Grammar]]:
    """Yield every command and subcommand with what may follow it."""
    for name, grammar in grammars.items():
        yield name, grammar
        yield from ((f"{name} {word}", sub) for word, sub in grammar.words.items())


def bash(grammars: dict[str, Grammar]) -> str:
    """A function that looks up `COMMAND [SUBCOMMAND]` for the words, and `COMMAND --option` for the
    values."""
    words = [
        f"    {shlex.quote(name)}) words={shlex.quote(' '.join(grammar.words))} "
        f"options={shlex.quote(' '.join(grammar.options))} ;;"
        for name, grammar in cases(grammars)
    ]
    values = [
        f"    {shlex.quote(f'{name} {option}')}) values={shlex.quote(' '.join(known or []))} ;;"
        for name, grammar in cases(grammars)
        for option, known in grammar.options.items()
        if known is not None
    ]
    top = " ".join([*grammars, "--help", "--version"])
    return BASH.format(top=shlex.quote(top), words="\n".join(words), values="\n".join(values))


def zsh(grammars: dict[str, Grammar]) -> str:
    """Wrap the bash completion for zsh."""
    return f"#compdef megalite\nautoload -U +X bashcompinit && bashcompinit\n{bash(grammars)}"


def fish(grammars: dict[str, Grammar]) -> str:
    lines = [
        "complete -c megalite -f -n __fish_use_subcommand -l help",
        "complete -c megalite -f -n __fish_use_subcommand -l version",
    ]
    for name, grammar in grammars.items():
        lines.append(
            f"complete -c megalite -f -n __fish_use_subcommand -a {name} -d {shlex.quote(grammar.what)}"
        )
        seen = f"__fish_seen_subcommand_from {name}"
        first = (
            shlex.quote(f"{seen}; and not __fish_seen_subcommand_from {' '.join(grammar.words)}")
            if grammar.words
            else ""
        )
        lines += [f"complete -c megalite -n {first} -a {word}" for word in grammar.words]
        every = {"": grammar.options, **{word: sub.options for word, sub in grammar.words.items()}}
        for word, options in every.items():
            where = shlex.quote(f"{seen}; and __fish_seen_subcommand_from {word}" if word else seen)
            for option, known in options.items():
                takes = "" if known is None else f" -r -a {shlex.quote(' '.join(known))}" if known else " -r"
                lines.append(f"complete -c megalite -n {where} -l {option.removeprefix('--')}{takes}")
    return "\n".join(lines) + "\n"


BASH = """# completion of megalite
_megalite() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}" command="${{COMP_WORDS[1]}}"
  local words="" options="" values=""
  COMPREPLY=()
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W {top} -- "$current"))
    return
  fi
  if [ "$COMP_CWORD" -gt 2 ]; then
    _megalite_words "$command ${{COMP_WORDS[2]}}"
    [ -n "$options" ] && command="$command ${{COMP_WORDS[2]}}"
  fi
  words="" options=""
  _megalite_words "$command"
  if _megalite_values "$command $previous"; then
    words="$values"
  else
    case "$current" in
      -*) COMPREPLY=($(compgen -W "$options" -- "$current")); return ;;
    esac
  fi
  [ -n "$words" ] && COMPREPLY=($(compgen -W "$words" -- "$current"))
  [ "${{#COMPREPLY[@]}}" -eq 0 ] && COMPREPLY=($(compgen -f -- "$current"))
}}
_megalite_words() {{
  case "$1" in
{words}
  esac
}}
_megalite_values() {{
  case "$1" in
{values}
    *) return 1 ;;
  esac
}}
complete -o filenames -F _megalite megalite
"""
