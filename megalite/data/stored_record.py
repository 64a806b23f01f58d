"""The record of a directory of stored results: a JSON file that says what is in it and how much is done."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megalite.config.errors import ConfigError

WORDS, WORDS_FORMAT = "words.json", 1
"""The record of a teacher's most probable words (`data.teacher_words`)."""
RECORDS = {
    "scores.json": ("log-probabilities of completions", "megalite score"),
    WORDS: ("the words of a teacher", "megalite score --top_k K"),
}
"""File → what a directory with it has, and the command that makes it."""


@contextmanager
def record_errors(directory: Path, record: str, option: str) -> Iterator[Path]:
    """Raise ConfigError for a record that is missing or damaged.

    Args:
        record: name of its file, one of RECORDS.
        option: the option that names the directory, with its value, or the directory alone.

    Yields:
        its path.
    """
    (what, command), path = RECORDS[record], directory / record
    try:
        yield path
    except FileNotFoundError:
        raise ConfigError(f"{option}: {_missing(directory, record)}") from None
    except OSError as error:
        raise ConfigError(f"{option}: {path} cannot be read: {error.strerror}.") from None
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise ConfigError(
            f"{option}: {path} is not a record of {what} ({error!r}). Make it again with `{command}`."
        ) from None


def _missing(directory: Path, record: str) -> str:
    """Say what a directory without a record is, and the way out."""
    what, command = RECORDS[record]
    source = f"`{command}` makes a directory with {what}"
    if not directory.is_dir():
        return f"there is no directory {directory}. Correct its path: {source}."
    for other, (present, _) in RECORDS.items():
        if (directory / other).is_file():
            return f"{directory} has {present}, not {what}. Use another directory: {source}."
    if (directory / "config.json").is_file():
        return f"{directory} is a model, whose name begins with hf:. Use hf:{directory}; {source}."
    return f"{directory} has no {record}. Correct its path: {source}."


def is_new(output: Path, record: str, what: str) -> bool:
    """Return whether a directory is new, and create it; it otherwise has the record.

    Raises:
        ConfigError: it has other files.
    """
    if not output.exists() or not any(output.iterdir()):
        output.mkdir(parents=True, exist_ok=True)
        return True
    if not (output / record).exists():
        raise ConfigError(f"--output {output} is not empty and has no {what}. Choose another directory.")
    return False


@contextmanager
def words_record(directory: Path, option: str = "") -> Iterator[dict[str, Any]]:
    """Give the block the record of a directory of a teacher's words, without its format.

    Args:
        option: the option that names the directory, with its value, for messages.

    Raises:
        ConfigError: there is none, or the block finds it damaged.
    """
    with record_errors(directory, WORDS, option or str(directory)) as path:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record.pop("format") != WORDS_FORMAT:
            raise ConfigError(f"{path} has a format that this version does not read.")
        yield record


def check_precision(option: str, stored: str | None, precision: str | None) -> None:
    """Raise ConfigError if a directory would get results in two precisions.

    Args:
        stored, precision: those in the directory, and of the command; None: not known.
    """
    if stored is not None and precision is not None and stored != precision:
        raise ConfigError(
            f"{option} has results of --precision {stored}, not {precision}. Pass --precision {stored}, or "
            "choose another directory."
        )
