"""Checkpoint errors and the formatting of their messages."""

from collections.abc import Sequence
from pathlib import Path

from megalite.system.files import os_error_text

LISTED = 5  # problems that a message lists


class CheckpointError(RuntimeError):
    """Raised if a checkpoint cannot be written, found or used.

    The message names the file, the expected content and the actual content.
    """


class DamagedError(CheckpointError):
    """Raised if a part of a checkpoint is missing, truncated or changed.

    A run can fall back to an older checkpoint.
    """


def reason(error: Exception) -> str:
    """Return the message of an exception: a CheckpointError's as it is, others with their type."""
    if isinstance(error, OSError):
        return os_error_text(error)
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def listing(problems: Sequence[str], noun: str = "") -> str:
    """Return the first problems, one on an indented line, and the number of the others.

    Args:
        noun: what is counted, for example tensors.
    """
    lines = list(problems[:LISTED])
    if len(problems) > LISTED:
        lines.append(f"… and {len(problems) - LISTED} more {noun}".rstrip())
    return "".join(f"\n  {line}" for line in lines)


def damaged(path: Path | str, expected: str, actual: str) -> DamagedError:
    return DamagedError(f"{path} is damaged: expected {expected}, found {actual}")
