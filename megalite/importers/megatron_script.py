"""The training command of Megatron-LM in a command line or a script, and its arguments."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Collection
from typing import Any

from megalite.config.errors import ConfigError
from megalite.importers.shell.script import ScriptCommand, ScriptResult, commands
from megalite.importers.shell.values import Unknown, Word, has_unknown
from megalite.importers.verdict import ImportedFile, KeyRule, Table, Verdict, left, never

LAUNCH, SCRIPT = "torchrun.", "script."
LAUNCHERS = frozenset(("torchrun", "deepspeed", "accelerate", "python", "python3", "mpirun", "srun"))
MODULES = frozenset(
    (
        "torch.distributed.run",
        "torch.distributed.launch",
        "accelerate.commands.launch",
        "deepspeed.launcher.runner",
    )
)
DATA_PATHS = frozenset(("data-path", "train-data-path", "valid-data-path", "test-data-path"))
_FURTHER = re.compile(
    r"\[[@*]\]|\$[@*]|(ARGS?|ARGUMENTS?|OPTS?|OPTIONS?|PARAMS?|FLAGS?|EXTRAS?|MORE|CONFIGS?)\}?$",
    re.IGNORECASE,
)
"""Variables that hold further arguments, by their names."""
_SWITCH = ("no-", "use-", "disable-", "enable-", "overlap-")


def parse(
    text: str, marks: Collection[str], switches: Collection[str], read: Callable[[str], str | None], name: str
) -> dict[str, Any]:
    """Return the arguments of the training command: name → value.

    The value is true for a switch, and a list for several values. A value with a part that is not known is a
    Word, which has the reason. Arguments that are not known at all are keys, such as ${MORE}.

    Args:
        marks: arguments by which the training command is found.
        switches: arguments without a value.
        read, name: as in `shell.script.commands`.

    Raises:
        ConfigError: the text has no training command.
    """
    result = commands(text, lambda words: _start(words, marks) is not None, read, name)
    runs = [run for run in result.runs if any(word.startswith("--") for word in run.words)]
    if not runs:
        runs = _of_variables(result, marks)
    if not runs:
        sources = result.unread.get("source", [])
        why = (
            f" It runs {', '.join(sources)}, which was not found: pass that script instead."
            if sources
            else ""
        )
        given = ", ".join(part.source for run in result.runs for word in run.words for part in word.unknown)
        why += f" Its command uses {given}, which the script does not set." if given else ""
        raise ConfigError(
            f"No training command (a .py file with --options) found.{why} Pass the command or the script "
            "that contains it."
        )
    best = max(reversed(runs), key=lambda run: _score(run.words, marks))
    arguments = _arguments(best, marks, switches)
    notes = {
        kind: texts
        for kind, texts in result.unread.items()
        if kind != "source" or any(word.unknown for word in best.words)
    }
    others = [run for run in runs if 2 * _score(run.words, marks) >= _score(best.words, marks) > 0]
    kinds = [_arguments(run, marks, switches) for run in others]
    differing = [
        key
        for key in {key: None for each in kinds for key in each}
        if any(each.get(key) != arguments.get(key) for each in kinds)
    ]
    if differing:
        lines = ", ".join(dict.fromkeys(str(run.line) for run in others if run is not best))
        notes["command"] = [
            f"line {best.line}; the commands in line {lines} differ in {', '.join(differing[:8])}"
        ]
    return arguments | {
        f"{SCRIPT}{kind}": texts if len(texts) > 1 else texts[0] for kind, texts in notes.items()
    }


def _of_variables(result: ScriptResult, marks: Collection[str]) -> list[ScriptCommand]:
    """Return the arguments in the variables of a script that only sets them, for others to read."""
    scores = {name: _score(words, marks) for name, words in result.variables.items()}
    names = [name for name, score in scores.items() if score] if max(scores.values(), default=0) > 1 else []
    if names:
        result.unread["variables"] = names
    return [ScriptCommand([word for name in names for word in result.variables[name]], 0)] if names else []


def _arguments(run: ScriptCommand, marks: Collection[str], switches: Collection[str]) -> dict[str, Any]:
    start = _start(run.words, marks) or 0
    launch = _options(run.words[: max(start - 1, 0)], switches)
    arguments = {
        f"{LAUNCH}{name}": value[0] if isinstance(value, list) else value for name, value in launch.items()
    }
    return arguments | _options(run.words[start:], switches)


def _score(words: Collection[str], marks: Collection[str]) -> int:
    return len({_name(word) for word in words if word.startswith("--")} & {*marks})


def _name(word: str) -> str:
    return word[2:].partition("=")[0].replace("_", "-")


def _start(words: list[str] | list[Word], marks: Collection[str]) -> int | None:
    """Return the place of the first argument of the program, or None if the words are no training command.

    The program is the last .py file that is no option's value, a module, or what a launcher starts from a
    variable.
    """
    files = [place for place, word in enumerate(words) if word.endswith(".py")]
    files = [place for place in files if place == files[0] or not words[place - 1].startswith("-")]
    if files:
        start = files[-1] + 1
        return start if any(word.startswith("--") or _unknown(word) for word in words[start:]) else None
    modules = [
        place for place, word in enumerate(words[:-1]) if word == "-m" and words[place + 1] not in MODULES
    ]
    if modules and any(word.startswith("--") for word in words[modules[0] + 2 :]):
        return modules[0] + 2
    if words[0].startswith("--"):
        return 0
    if posixpath.basename(words[0]) in LAUNCHERS:
        lone = [
            place
            for place, word in enumerate(words)
            if place and _unknown(word) and not words[place - 1].startswith("-")
        ]
        after = [place + 1 for place in lone if _score(words[place + 1 :], marks) or place == lone[-1]]
        if after and any(word.startswith("--") for word in words[after[0] :]):
            return after[0]
    first = next((place for place, word in enumerate(words) if word.startswith("--")), None)
    return first if _score(words, marks) > 1 else None


def _unknown(word: str) -> bool:
    return has_unknown(word) if not isinstance(word, Word) else bool(word.unknown)


def _options(words: list[Word], switches: Collection[str]) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    name: str | None = None
    for given in _separated(words):
        whole = len(given.unknown) == 1 and given.unknown[0].source == given
        if given.startswith("--"):
            name, equals, value = given[2:].partition("=")
            name = name.replace("_", "-")
            arguments[name] = [_value(_with(value, given.unknown))] if equals else []
            name = None if equals else name
        elif whole and (name is None or _is_further(name, arguments[name], given, switches)):
            arguments[f"$({given[1:-1]})" if given.startswith("`") else given] = [given]
        elif name is not None:
            arguments[name].append(_value(given))
    return {
        name: True if not values else values[0] if len(values) == 1 else values
        for name, values in arguments.items()
    }


def _separated(words: list[Word]) -> list[Word]:
    """Return the words, with "--name value" in one word split in two as its author intended."""
    result: list[Word] = []
    for word in words:
        parts = word.split() if re.match(r"--[\w-]+\s", word) else [word]
        result += [_with(part.strip("'\"") if len(parts) > 1 else part, word.unknown) for part in parts]
    return result


def _with(text: str, unknown: tuple[Unknown, ...]) -> Word:
    word = Word(text)
    word.unknown = tuple(part for part in unknown if part.source in text)
    return word


def _is_further(name: str, values: list[Any], given: Word, switches: Collection[str]) -> bool:
    """Return whether a variable holds further arguments, and not the value of the argument before it."""
    if name in DATA_PATHS and values and type(values[-1]) in (int, float):
        return False
    return (
        bool(values)
        or name in switches
        or name.startswith(_SWITCH)
        or bool(_FURTHER.search(given.unknown[0].source))
    )


def _value(text: Word) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text if text.unknown else str(text)


def of_mapping(given: dict[Any, Any]) -> dict[str, Any]:
    """Return the arguments --name: value of a mapping; false leaves a switch out.

    Other keys are kept, as unknown ones.
    """
    arguments: dict[str, Any] = {}
    for key, value in given.items():
        name = str(key)[2:].replace("_", "-") if str(key).startswith("--") else str(key)
        parts = [
            _of_text(part)
            for part in (
                str(value).split()
                if isinstance(value, str)
                else value
                if isinstance(value, list)
                else [value]
            )
        ]
        if value is not False:
            arguments[name] = parts[0] if len(parts) == 1 else parts
    return arguments


def _of_text(part: Any) -> Any:
    if not isinstance(part, str):
        return part
    variables = re.findall(r"\$\{?\w+\}?", part)
    return _value(_with(part, tuple(Unknown(name, "not set in the file") for name in variables)))


def unknown_parts(value: Any) -> tuple[Unknown, ...]:
    """Return the unknown parts of a value."""
    values = value if isinstance(value, list) else [value]
    return tuple(dict.fromkeys(part for each in values if isinstance(each, Word) for part in each.unknown))


def explained(value: Any) -> str:
    """Return the reason why a value is unknown."""
    parts = unknown_parts(value)
    return (
        "; ".join(part.why if part.source == value else f"{part.source}: {part.why}" for part in parts)
        or "unknown"
    )


def open_row(row: KeyRule, value: Any) -> KeyRule:
    """Return the row of a key with an unknown value.

    It is left open unless the key has no effect with any value.
    """

    def judge(_: Any, source: ImportedFile) -> Verdict:
        verdict = row.judge(value, source)
        if verdict.kind == "harmless" and row.option is None:
            return verdict
        return left(
            f"{explained(value)}: "
            + (f"set {row.option}" if row.option else verdict.why or "its meaning depends on its value")
        )

    return KeyRule(judge, row.option)


def _further(value: Any, source: ImportedFile) -> Verdict:
    return left(f"{explained(value)}: its arguments are not imported")


CUT = "bash does not pass these arguments because a comment ends the command before them: remove the comment"
TABLE: Table = {
    **{f"{begin}*": KeyRule(_further) for begin in "$<"},
    f"{SCRIPT}source": KeyRule(
        lambda value, source: left(
            "this script was not found and may set missing values: pass its variables, or put it next to "
            "the file"
        )
    ),
    f"{SCRIPT}line": KeyRule(
        lambda value, source: left("could not be parsed as bash: check which arguments it sets")
    ),
    f"{SCRIPT}cut": KeyRule(lambda value, source: left(CUT)),
    f"{SCRIPT}variables": KeyRule(
        lambda value, source: left("no training command found: the arguments in these variables are imported")
    ),
    f"{SCRIPT}command": KeyRule(
        lambda value, source: left("several training commands found: this one is imported")
    ),
    f"{LAUNCH}*": never(
        "launcher option: use --nproc, --nnodes and --rdzv-endpoint of megalite train or torchrun"
    ),
}
