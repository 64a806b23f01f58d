"""The record of a directory of stored results: a JSON file that says what is in it and how much is done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megalite.config.errors import ConfigError

RECORDS = {
    "scores.json": ("log-probabilities of completions", "megalite score"),
    "words.json": ("the words of a teacher", "megalite score --top_k K"),
}
"""File → what a directory with it has, and the command that makes it."""


@contextmanager
def record_errors(path: Path, what: str, command: str) -> Iterator[None]:
    """Raise ConfigError for a record that is missing or damaged.

    Args:
        what: what the directory has.
        command: the command that makes it.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}. Make it with `{command}`.") from None
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise ConfigError(f"{path} is not a record of {what} ({error!r}). Score the data again.") from None


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
