"""Amounts as people write them, 10B, 5%, 25MB or 1h30m, and which of them options accept."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

_NUMBER = r"([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)"
_COUNT = re.compile(rf"{_NUMBER}\s?([kmbt]?)", re.IGNORECASE)
_SIZE = re.compile(rf"{_NUMBER}\s?([kmgt]i?b|b)?", re.IGNORECASE)
_PERCENT = re.compile(rf"{_NUMBER}\s?%", re.IGNORECASE)
_DURATION = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")
_THOUSANDS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_BYTES = {"b": 1, **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", 1)}}
_BYTES |= {f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", 1)}


def count(text: str) -> int | None:
    """The whole number of 10B, 1.5e9, 300M or 20k; None if it is not one."""
    match = _COUNT.fullmatch(text.strip().replace("_", ""))
    number = _exact(match[1]) if match else None
    if match is None or number is None:
        return None
    value = number * _THOUSANDS[match[2].lower()]
    return int(value) if value.denominator == 1 else None


def _exact(number: str) -> Fraction | None:
    """The number; None for one that a float cannot hold, such as 1e400, of which a Fraction would be of any
    length."""
    value = float(number)
    if not math.isfinite(value) or (value == 0 and re.search("[1-9]", number.lower().partition("e")[0])):
        return None
    return Fraction(number)


def byte_size(text: str) -> int | None:
    """Bytes of 5GB, 512MB, 1GiB or a plain number; None if it is not a size."""
    match = _SIZE.fullmatch(text.strip())
    number = _exact(match[1]) if match else None
    return int(number * _BYTES[(match[2] or "b").lower()]) if match and number is not None else None


def duration_seconds(text: str) -> int | None:
    """Seconds of a duration such as 3h50m, 90m or 30s; None if it is not a duration."""
    match = _DURATION.fullmatch(text)
    if match is None or not text:
        return None
    hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return 3600 * hours + 60 * minutes + seconds


def percentage(text: str) -> Fraction | None:
    """5% as a fraction; None if it is not a percentage."""
    match = _PERCENT.fullmatch(text.strip())
    number = _exact(match[1]) if match else None
    return None if number is None else number / 100


def share_text(value: Any) -> Any:
    """A share of the steps as it is written, 5%; anything else as it is."""
    return f"{float(100 * value):.15g}%" if isinstance(value, Fraction) else value


def _steps_or_share(text: str) -> int | Fraction | None:
    """A number of steps; or a share of train.steps, 5% or a number below 1."""
    if (share := percentage(text)) is not None:
        return share
    match = _COUNT.fullmatch(text.strip())
    if match is not None and not match[2] and (number := _exact(match[1])) is not None and 0 < number < 1:
        return number
    return count(text)


def _fraction_or(text: str) -> float | str:
    """A percentage as a number; anything else is left for its option's type."""
    share = percentage(text)
    return text if share is None else float(share)


def _megabytes(text: str) -> float | None:
    """A plain number is one of MB."""
    size = byte_size(text)
    return None if size is None else size / 1e6 if text.strip()[-1] in "bB" else float(text)


def _size_or_share(text: str) -> float | None:
    """Bytes; or a share, a percentage or a number up to 1."""
    if (share := percentage(text)) is not None:
        return float(share) if share <= 1 else None
    size = byte_size(text)
    number = float(text) if size is not None and text.strip()[-1] not in "bB" else None
    return number if number is not None and number <= 1 else None if size is None else float(size)


@dataclass(frozen=True)
class AmountKind:
    """A kind of amount: how it is read (None: it cannot be), and the words of the message."""

    read: Callable[[str], Any]
    what: str = ""
    forms: str = ""


STEPS = AmountKind(count, "a number of steps", "300, 20k or 1.5M")
TOKENS = AmountKind(count, "a number of tokens", "300M, 10B, 1.5T or 1.5e9")
STEPS_OR_SHARE = AmountKind(
    _steps_or_share, "a number of steps", "200, 2k, or a share of train.steps: 5% or 0.05"
)
PERCENTAGE = AmountKind(_fraction_or)
SIZE_OR_SHARE = AmountKind(_size_or_share, "a size or a share of the device", "20GB, 64GiB, 0.9 or 90%")
MEGABYTES = AmountKind(_megabytes, "a size", "25MB, 32MiB, or 25, which is in MB")
DURATION = AmountKind(
    lambda text: text if duration_seconds(text) else None,
    "a duration",
    "hours, minutes and seconds in this order: 3h50m, 90m or 30s",
)
