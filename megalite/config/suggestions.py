"""What an unknown option or value is likely to mean."""

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from megalite.config.errors import ConfigError
from megalite.config.rule import SIMILAR, nearest_name, similarity
from megalite.config.schema import OPTIONS, SECTIONS

SURE = 0.8
"""From this ratio on, a name is another one's misspelling although its section, or the program that knows it,
is another."""

OTHER_VALUES: dict[str, dict[str, str]] = {
    "train.precision": {
        "bfloat16": "bf16",
        "float16": "fp16",
        "half": "fp16",
        "float32": "fp32",
        "float": "fp32",
        "float64": "fp64",
    },
    "model.hidden_act": {
        "swiglu": "silu",
        "geglu": "gelu",
        "squared_relu": "relu2",
        "gelu_tanh": "gelu_pytorch_tanh",
        "swish": "silu",
    },
    "model.position": {
        "rotary": "rope",
        "learned_absolute": "learned",
        "absolute": "learned",
        "nope": "none",
    },
    "optimizer.name": {"adam": "adamw"},
    "optimizer.decay": {"constant_with_warmup": "constant", "none": "constant", "warmup_stable_decay": "wsd"},
    "parallel.schedule": {"interleaved1f1b": "interleaved", "zbvzerobubble": "zb-v", "zerobubble": "zb-h1"},
    "parallel.context": {"p2p": "ring", "a2a": "ulysses", "all_gather": "gather", "allgather": "gather"},
}
"""Option → what other programs call one of its values → ours."""


def nearest_value(option: str, value: str, choices: Sequence[str]) -> str | None:
    """The choice that a value of an option is likely to mean; None if no choice is similar."""
    known = OTHER_VALUES.get(option, {"0": "false", "no": "false", "off": "false", "1": "true"})
    named = known.get(value.lower().rpartition(".")[2])  # torch.bfloat16
    return named if named is not None and named in choices else nearest_name(value, choices)


@cache
def other_names() -> dict[str, str]:
    """What other projects call an option → what to write here."""
    import yaml

    table = yaml.safe_load(Path(__file__).with_name("other_names.yaml").read_text(encoding="utf-8"))
    return {name: here for here, *names in table for name in names}


def unknown(name: str, source: str, known: Iterable[str], dashes: str = "") -> ConfigError:
    """The error for an unknown key: names the options with the same last part, the one that other projects
    call so, or the most similar.

    Args:
        name: the key, with its section if it has one.
        source: where it was, for the message.
        known: names besides those of the options that are valid there, such as --config.
        dashes: what precedes an option's name there.
    """
    said = f"{dashes}{name} {source} is not a known option."
    section, _, last = name.rpartition(".")
    same = _in_section(section, [option for option in OPTIONS if _bare(option) == _plain(last)])
    if same:
        return ConfigError(f"{said} Nearest: {' or '.join(f'{dashes}{option}' for option in same)}.")
    others = other_names()
    called = last.replace("-", "_").lower()
    if (here := others.get(f"{section}.{called}", others.get(called))) is not None:
        return ConfigError(f"{said} The option is called {_written(here, dashes)}.")
    # a name that other programs use in one section counts where this section is meant
    there = (
        other
        for other in others
        if "." not in other or similarity(section, other.partition(".")[0]) >= SIMILAR
    )
    nearest = _most_similar(section, last, [*known, *OPTIONS, *there])
    if nearest is None:
        return ConfigError(f"{said} See megalite train --help{f' {section}' if section in SECTIONS else ''}.")
    if nearest in others:
        return ConfigError(
            f"{said} Nearest: {_written(others[nearest], dashes)}, called {nearest} in other programs."
        )
    return ConfigError(f"{said} Nearest: {dashes}{nearest}.")


def _written(here: str, dashes: str) -> str:
    """An entry of `other_names` where options begin with dashes; an explanation has none."""
    return here if " = " in here else f"{dashes}{here}"


def _plain(word: str) -> str:
    return word.replace("-", "").replace("_", "").lower()


def _bare(option: str) -> str:
    """The last part of an option without underscores."""
    return _plain(option.rpartition(".")[2])


def _in_section(section: str, options: Sequence[str]) -> Sequence[str]:
    """The options whose section a misspelled one means; all of them if it means none of theirs."""
    scores = {option: similarity(section, option.partition(".")[0]) for option in options}
    near = [option for option in options if section and scores[option] == max(scores.values()) >= SIMILAR]
    return near or options


def _most_similar(section: str, last: str, names: Sequence[str]) -> str | None:
    """The name whose last part is the most similar; the same section and an abbreviation count in addition.
    Of equal ones the first. None if none is similar: a name of another section than the one that was written,
    or of another program, must be so beyond doubt."""
    others, options = other_names(), frozenset(OPTIONS)

    def place(name: str) -> str:
        return (name if name in options else others.get(name, "")).partition(".")[0]

    def needed(name: str) -> float:
        return SURE if name in others or (section in SECTIONS and place(name) != section) else SIMILAR

    def begins(name: str) -> bool:
        here = section not in SECTIONS or place(name) == section
        return here and name not in others and _bare(name).startswith(_plain(last))  # an abbreviation

    def score(name: str) -> float:
        same = similarity(section, place(name)) if section and place(name) else 0.0
        return similarity(_plain(last), _bare(name)) + 0.1 * same + 0.2 * begins(name)

    return max(
        (name for name in names if begins(name) or score(name) >= needed(name)), key=score, default=None
    )
