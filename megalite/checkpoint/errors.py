"""The errors that checkpoints raise."""

from pathlib import Path


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, found or used; the message names the file, what was expected and what was found."""


class DamagedError(CheckpointError):
    """A part of a checkpoint is missing, truncated or changed. An older checkpoint may be used instead."""


def damaged(path: Path, expected: str, found: str) -> DamagedError:
    return DamagedError(f"{path} is damaged: expected {expected}, found {found}")
