"""Values as files and the command line give them, converted to the types of their options by jsonargparse."""

import re
from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields
from fractions import Fraction
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from megalite.config import amounts
from megalite.config.errors import ConfigError
from megalite.config.rule import Mistakes, show
from megalite.config.schema import OPTIONS, SHORT, Config

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser


def takes(kind: type, option: str) -> bool:
    """Whether values of a kind, list or str, are among those that an option's type lists."""
    hint = OPTIONS[option].type
    return any(
        kind in (each, get_origin(each))
        for each in (hint, *(get_args(hint) if get_origin(hint) is not list else ()))
    )


def without_brackets(option: str, words: list[str]) -> str:
    """The words of an option's value as one; a list may be written as `a b` or `a,b`."""
    if not takes(list, option) or words[0][:1] in "[{" or words == ["null"]:
        return " ".join(words)
    if takes(str, option):  # a path may hold a comma
        return words[0] if len(words) == 1 else f"[{', '.join(words)}]"
    return f"[{', '.join(part.strip() for word in words for part in word.split(',') if part.strip())}]"


def nest(options: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """{section.key: value} → {section: {key: value}}."""
    tree: dict[str, dict[str, Any]] = {}
    for option, value in options.items():
        section, key = option.split(".")
        tree.setdefault(section, {})[key] = value
    return tree


def amount_value(option: str, value: Any, source: str) -> Any:
    """The value as its option's type takes it: the number of an amount with a unit, a Fraction for a share of
    the steps.

    A value that is not an amount is returned as it is. Raises ConfigError on an amount that cannot be read;
    `source` says where it was.
    """
    kind = OPTIONS[option].metadata.get("amount") if option in OPTIONS else None
    if kind is None or isinstance(value, bool) or not isinstance(value, str | int | float) or value == "null":
        return value
    text = value if isinstance(value, str) else repr(value)
    amount = kind.read(text)
    if amount is None:
        forms = kind.forms
        if kind is amounts.DURATION and re.fullmatch("[1-9][0-9]*", text):
            forms = f"it with a unit: {text}s, {text}m or {text}h"
        raise ConfigError(f"{option} = {show(value)} {source} is not {kind.what}. Expected {forms}.")
    return value if amount == text else amount


def build_parser(options: Collection[str] = tuple(OPTIONS)) -> "ArgumentParser":
    """A parser with one argument per option."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(prog="megalite train", exit_on_error=False, add_help=False)
    add_options(parser, options)
    return parser


def add_options(
    parser: "ArgumentParser", options: Collection[str], docs: Mapping[str, str] | None = None
) -> None:
    """Add one argument per option, of the type of its field, in a group for each section.

    Args:
        docs: option → help text.
    """
    # a section is a name, too
    short = {option: [f"--{name}"] for name, option in SHORT.items() if not option.startswith(f"{name}.")}
    groups = {section.name: parser.add_argument_group(section.name) for section in fields(Config)}
    for option in options:
        key = OPTIONS[option]
        default = key.default if key.default_factory is MISSING else key.default_factory()
        names = [f"--{option}", *short.get(option, [])]
        groups[option.split(".")[0]].add_argument(
            *names, type=key.type, default=default, help=docs and docs[option]
        )


def parse_values(values: dict[str, Any], source: str, words: bool = False) -> dict[str, Any]:
    """Values, or words of a command line, converted to their options' types. Raises ConfigError naming all
    that do not fit.

    A share of the steps, which no type holds, is returned as a Fraction, for `run_length.resolve_steps`.
    """
    mistakes = Mistakes()
    parsed = parse_all(values, source, mistakes, words)
    mistakes.report()
    return parsed


def parse_all(values: dict[str, Any], source: str, mistakes: Mistakes, words: bool = False) -> dict[str, Any]:
    """The same; those that do not fit are mistakes, and left out."""
    numbers: dict[str, Any] = {}
    for option, value in values.items():
        with mistakes.collected():
            numbers[option] = amount_value(option, value, source)
    shares = {option: value for option, value in numbers.items() if isinstance(value, Fraction)}
    others = {option: value for option, value in numbers.items() if option not in shares}
    parsed: dict[str, Any] = {}
    try:
        parsed = _parsed(others, source, words)
    except ConfigError:  # the parser stops at the first: each by itself
        for option, value in others.items():
            with mistakes.collected():
                parsed |= _parsed({option: value}, source, words)
    return parsed | shares


def _parsed(values: dict[str, Any], source: str, words: bool) -> dict[str, Any]:
    """The values in their options' types. Raises ConfigError naming one that does not fit."""
    from argparse import ArgumentError

    if not values:
        return {}
    parser, argv = build_parser(options=values), [f"--{option}={word}" for option, word in values.items()]
    try:
        parsed = (
            parser.parse_args(argv, defaults=False)
            if words
            else parser.parse_object(nest(values), defaults=False)
        )
    except OverflowError:  # an integer that no float holds, where a float is expected
        wrong = next(name for name, value in values.items() if re.fullmatch(r"[-+]?\d{300,}", str(value)))
        raise ConfigError(wrong_type(wrong, values[wrong], source)) from None
    except (ArgumentError, TypeError, ValueError) as error:
        option = next(
            (option for option in re.findall(r'key "([\w.]+)"', str(error)) if option in values), None
        )
        raise ConfigError(
            wrong_type(option, values[option], source) if option else f"A value {source} is wrong: {error}"
        ) from None
    # the parser accepts null for every type, and keys of every type in a mapping
    for option, value in values.items():
        result = parsed[option]
        for key in result if isinstance(result, dict) else ():
            if not isinstance(key, str):
                raise ConfigError(
                    f"{option} {source} has the name {show(key)}, which is not a string. Quote it: "
                    f"'{show(key)}'."
                )
        if result is None and NoneType not in get_args(OPTIONS[option].type):
            raise ConfigError(wrong_type(option, value, source))
    return {option: parsed[option] for option in values}


def wrong_type(option: str, value: Any, source: str) -> str:
    """The message for a value that does not match the type of its option."""
    from megalite.config.suggestions import nearest_value

    hint = OPTIONS[option].type
    message = f"{option} = {show(value)} {source} is not {describe_type(hint)}."
    if isinstance(value, (int, float)) and str in (hint, *get_args(hint)):
        return f"{message} Write it in quotes: '{show(value)}'."
    literal = next((each for each in (hint, *get_args(hint)) if get_origin(each) is Literal), None)
    choices = (
        list(map(str, get_args(literal)))
        if literal is not None
        else ["true", "false"]
        if hint is bool
        else []
    )
    near = nearest_value(option, show(value), choices)
    return message if near is None else f"{message} Nearest: {near}."


def describe_type(hint: Any) -> str:
    """A type in words."""
    words = {int: "an integer", float: "a number", bool: "true or false", str: "text", NoneType: "null"}
    if hint in words:
        return words[hint]
    inner, origin = get_args(hint), get_origin(hint)
    if origin is Literal:
        return f"one of {', '.join(map(str, inner))}"
    if origin is list:
        return f"a list [a, b] with each entry {describe_type(inner[0])}"
    if origin is dict:
        return "a mapping {name: value}" + (
            f" with each value {describe_type(inner[1])}" if inner[1] is not Any else ""
        )
    return ", or ".join(describe_type(part) for part in inner)
