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


@contextmanager
def words_record(directory: Path) -> Iterator[dict[str, Any]]:
    """Give the block the record of a directory of a teacher's words, without its format.

    Raises:
        ConfigError: there is none, or the block finds it damaged.
    """
    path = directory / WORDS
    with record_errors(path, "words", "megalite score --top_k K"):
        record = json.loads(path.read_text(encoding="utf-8"))
        if record.pop("format") != WORDS_FORMAT:
            raise ConfigError(f"{path} has a format that this version does not read.")
        yield record
