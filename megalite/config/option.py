"""Fields of sections: an option declares its bounds, its amounts, and whether it names files."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from megalite.config.amounts import AmountKind

T = TypeVar("T")

NO_OPTION = {"option": False}
"""Metadata of a field that is part of a section's state and no option."""


@dataclass(frozen=True)
class Bounds:
    """The range of a number, or of every number of a list or mapping; null is always in range.

    Attributes:
        contains: whether a number is in range.
        reason: what a number out of range is, for the message.
        legal: the range in words.
        nearest: the legal value to suggest; None: no suggestion.
    """

    contains: Callable[[float], bool]
    reason: str
    legal: str
    nearest: float | None = None


SIZE = Bounds(lambda n: n >= 1, "is not a positive size", "1 and above", 1)
POSITIVE = Bounds(lambda n: n > 0, "is not a positive number", "every number above 0")
NOT_NEGATIVE = Bounds(lambda n: n >= 0, "is negative or not finite", "0 and above", 0)
PROBABILITY = Bounds(lambda p: 0 <= p <= 1, "is not a probability", "0 to 1")
FRACTION = Bounds(lambda n: 0 <= n < 1, "is out of range", "at least 0 and below 1")
SHARE_OF_STEPS = Bounds(lambda n: 0 < n <= 1, "is not a fraction of the steps", "above 0, up to 1")


def option(
    default: T,
    bounds: Bounds | None = None,
    *,
    amount: AmountKind | None = None,
    path: bool = False,
    kinds: tuple[str, ...] = (),
) -> T:
    """A dataclass field of a section.

    Args:
        default: the default value; every instance gets a copy of a list.
        bounds: the range of its numbers.
        amount: the amounts with a unit that it accepts.
        path: whether it names files, in which ~ is the home directory.
        kinds: the kinds of blocks whose computation it belongs to (or mtp); only these read it, besides
            configuration and conversion. (): it belongs to the model.

    Returns:
        A `dataclasses.Field`, typed as the value so that the annotation of the field is checked against it.
    """
    metadata = {"bounds": bounds, "amount": amount, "path": path, "kinds": kinds}
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)  # type: ignore[return-value]
    return field(default=default, metadata=metadata)
