"""Rules for the ranges of numbers, from the bounds that the fields of the sections declare."""

import math
from functools import partial
from operator import attrgetter
from types import NoneType
from typing import Any, get_args

from megalite.config.option import Bounds
from megalite.config.rule import Rule
from megalite.config.rules.context import RuleContext
from megalite.config.schema import OPTIONS

_TOO_LARGE = 1e300
"""Below the largest float: an integer can have more digits than calculations with it can bear."""


def _bounds_rule(option: str, bounds: Bounds) -> Rule:
    """The rule that an option, or every number of a list or mapping, is in range.

    null is in range; infinities, NaN and integers of any length are not.
    """
    return Rule(
        f"{option} in range",
        option,
        partial(_out_of_range, option, bounds),
        message=partial(_reason, option, bounds),
        legal=partial(_way_out, option, bounds),
    )


def _out_of_range(option: str, bounds: Bounds, context: RuleContext) -> bool:
    return not all(
        abs(number) < _TOO_LARGE and bounds.contains(number) for number in _numbers(option, context)
    )


def _reason(option: str, bounds: Bounds, context: RuleContext) -> str:
    too_large = any(_TOO_LARGE <= number < math.inf for number in _numbers(option, context))
    return "is too large" if too_large else bounds.reason


def _way_out(option: str, bounds: Bounds, context: RuleContext) -> str:
    """The legal values, and the one that was likely meant.

    That is null for 0 and -1, with which other programs say so, and for a size its value without the sign.
    """
    value, nullable = attrgetter(option)(context), NoneType in get_args(OPTIONS[option].type)
    legal = f"Legal values: {bounds.legal}{', or null' if nullable else ''}."
    if not isinstance(value, int | float) or not abs(value) < _TOO_LARGE:
        return legal
    if nullable and value in (0, -1):
        return f"{legal} Nearest: null."
    nearest = -value if bounds.nearest == 1 and value < -1 else bounds.nearest
    return legal if nearest is None else f"{legal} Nearest: {nearest}."


def _numbers(option: str, context: RuleContext) -> list[Any]:
    """The numbers that an option holds; none for null."""
    value = attrgetter(option)(context)
    if value is None:
        return []
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else [value]


RULES: tuple[Rule, ...] = tuple(
    _bounds_rule(option, key.metadata["bounds"])
    for option, key in OPTIONS.items()
    if key.metadata.get("bounds")
)
