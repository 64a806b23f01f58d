"""The errors that checkpoints raise."""

from pathlib import Path


class CheckpointError(RuntimeError):
    """A checkpoint can not be written, found or used; the message names the file, what was expected and what was found."""


class DamagedError(CheckpointError):
    """A checkpoint is not what was saved: something of it is missing, cut off or changed. An older one may be used in its place."""


def damaged(path: Path, expected: str, found: str) -> DamagedError:
    return DamagedError(f"{path} is damaged: expected {expected}, found {found}")
