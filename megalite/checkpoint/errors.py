"""The errors that checkpoints raise."""

from pathlib import Path


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, found or used; the message names the file, what was expected and what
    was found."""


class DamagedError(CheckpointError):
    """A part of a checkpoint is missing, truncated or changed. An older checkpoint may be used instead."""


def reason(error: Exception) -> str:
    """Why something failed: a message of ours as it is, the system's without its number, others with their
    kind."""
    if isinstance(error, OSError) and error.strerror is not None:
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return str(error) if isinstance(error, CheckpointError | OSError) else f"{type(error).__name__}: {error}"


def damaged(path: Path, expected: str, found: str) -> DamagedError:
    return DamagedError(f"{path} is damaged: expected {expected}, found {found}")
