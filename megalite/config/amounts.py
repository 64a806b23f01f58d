"""Amounts as people write them: 10B tokens, 5% of the steps, 3 epochs, 25MB, 1h30m.

`plain` turns an amount with a unit into the number that its option holds. `resolve_steps` replaces what
depends on other options (train.tokens, train.epochs, a warm-up that is a share of the steps) by numbers of
steps: a resolved configuration has nothing else. Imports no torch; reads the index of the training data, and
only for train.epochs.
"""

import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from megalite.config.rampup import position, resume_at, steps_for
from megalite.config.rule import show
from megalite.config.schema import BatchSizeStep, Config, ConfigError, Finished, Horizon
from megalite.config.token_files import prefixes

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
    """The number; None for one that a float can not hold, such as 1e400, of which a Fraction would be of any
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
    """A kind of amount: how it is read (None: it can not be), and the words of the message."""

    read: Callable[[str], Any]
    what: str = ""
    forms: str = ""


_STEPS = AmountKind(count, "a number of steps", "300, 20k or 1.5M")
_WAIT = AmountKind(
    lambda text: text if duration_seconds(text) else None,
    "a duration",
    "hours, minutes and seconds in this order: 3h50m, 90m or 30s",
)
_FRACTION = AmountKind(_fraction_or)
KINDS = {
    **dict.fromkeys(
        ("train.steps", "checkpoint.interval", "checkpoint.keep_every", "validation.interval"), _STEPS
    ),
    "train.tokens": AmountKind(count, "a number of tokens", "300M, 10B, 1.5T or 1.5e9"),
    "optimizer.warmup_steps": AmountKind(
        _steps_or_share, "a number of steps", "200, 2k, or a share of train.steps: 5% or 0.05"
    ),
    **dict.fromkeys(("optimizer.wsd_decay_fraction", "data.validation"), _FRACTION),
    "train.memory_budget": AmountKind(
        _size_or_share, "a size or a share of the device", "20GB, 64GiB, 0.9 or 90%"
    ),
    "parallel.bucket_mb": AmountKind(_megabytes, "a size", "25MB, 32MiB, or 25, which is in MB"),
    **dict.fromkeys(("run.timeout", "train.stop_after", "train.watchdog"), _WAIT),
}
"""Option → the kind of amount that it takes."""


def plain(option: str, value: Any, source: str) -> Any:
    """The value as its option's type takes it: the number of an amount with a unit, a Fraction for a share of
    the steps.

    What is no amount is returned as it is. Raises ConfigError on one that can not be read; `source` says
    where it was.
    """
    kind = KINDS.get(option)
    if kind is None or isinstance(value, bool) or not isinstance(value, str | int | float) or value == "null":
        return value
    text = value if isinstance(value, str) else repr(value)
    found = kind.read(text)
    if found is None:
        forms = (
            f"it with a unit: {text}s, {text}m or {text}h"
            if kind is _WAIT and re.fullmatch("[1-9][0-9]*", text)
            else kind.forms
        )
        raise ConfigError(f"{option} = {show(value)} {source} is not {kind.what}. Write {forms}.")
    return value if found == text else found


def resolve_steps(config: Config) -> None:
    """Replace train.tokens or train.epochs by train.steps, and a share of the steps by their number.

    Rounds up. What can not be resolved because another option is wrong, or because the training data is not
    there, is left as it is, a share of unknown steps as a Fraction: the rules say why. Raises DataError if
    the data is damaged.
    """
    train, optimizer = config.train, config.optimizer
    sizes = min(train.global_batch_size, config.data.sequence_length)
    warmup: Any = optimizer.warmup_steps
    share, samples = warmup if isinstance(warmup, Fraction) else None, None
    if train.tokens is not None and train.tokens > 0 and sizes > 0:
        samples = math.ceil(Fraction(train.tokens, config.data.sequence_length))
        train.tokens = None
    if (
        train.epochs is not None
        and math.isfinite(train.epochs)
        and train.epochs > 0
        and sizes > 0
        and _can_be_counted(config)
    ):
        # numpy, which a run of a given number of steps need not load here
        from megalite.config.samples import samples_per_epoch

        samples = math.ceil(Fraction(repr(train.epochs)) * samples_per_epoch(config.data))
        train.epochs = None
    train.horizon = Horizon(samples, share if train.epochs is None else None)
    _count_steps(config)


def _count_steps(config: Config) -> None:
    """Set the numbers of steps that were given as amounts."""
    train, horizon = config.train, config.train.horizon
    if horizon.samples is not None:
        train.steps = steps_for(train, horizon.samples)
    if horizon.warmup is not None:
        config.optimizer.warmup_steps = math.ceil(horizon.warmup * Fraction(position(train, train.steps)))


def batches_done(config: Config) -> dict[str, Any]:
    """What a checkpoint keeps of the batches of a run that was resumed with other ones; nothing for most
    runs."""
    return {} if config.train.finished is None else {"batches": config.train.finished}


def with_batches(saved: Config, state: dict[str, Any]) -> Config:
    """A checkpoint's configuration with the batches that its run has had."""
    if (batches := state.get("batches")) is not None:
        step, samples, levels = batches
        saved.train.finished = Finished(step, samples, tuple(BatchSizeStep(*level) for level in levels))
    return saved


def resume_steps(config: Config, saved: Config, step: int) -> None:
    """Count the steps again after those that a checkpoint's run has done, if its batches were others: the
    finished samples, and the rest.

    saved: the checkpoint's configuration, as of `with_batches`.
    """
    resume_at(config.train, saved.train, step)
    _count_steps(config)


def _can_be_counted(config: Config) -> bool:
    """Whether the training data and the options that say how it is read keep their rules."""
    data = config.data
    weights = data.train.values() if isinstance(data.train, dict) else ()
    held_out = data.validation if isinstance(data.validation, float | int) else 0.0
    files = [f"{prefix}{end}" for prefix in prefixes(data.train) for end in (".idx", ".bin")]
    return (
        bool(files)
        and all(map(os.path.isfile, files))
        and all(0 < each < math.inf for each in weights)
        and 0 <= held_out < 1
    )
