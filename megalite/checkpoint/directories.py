"""Names of checkpoints and their atomic publication. Everything here runs on one rank.

Each change that others could see is one rename, after what it shows has reached the disk:

    .NAME.saving   → NAME             a save becomes a checkpoint
    NAME           → .NAME.replaced   (moved aside just before, where NAME is saved again; moved back if the save dies in between)
    NAME           → .NAME.deleted    pruned: a half-removed directory never carries the name of a checkpoint
    .latest.new    → latest
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from megalite.checkpoint.errors import CheckpointError

STATE = "state.json"
LATEST = "latest"
_STEP = re.compile(r"step_(\d{8,})")
_LEFTOVER = re.compile(r"\.(.+)\.(saving|replaced|deleted)")


def step_name(step: int) -> str:
    return f"step_{step:08d}"


def step_number(name: str) -> int | None:
    """The step in a checkpoint's name, or None where it has none."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def _hidden(directory: Path, kind: str) -> Path:
    return directory.with_name(f".{directory.name}.{kind}")


def check(directory: Path) -> None:
    """Raise where there is no checkpoint."""
    if not (directory / STATE).is_file():
        why = f"it has no {STATE}" if directory.is_dir() else "there is no such directory"
        raise CheckpointError(f"{directory} is not a checkpoint: {why}")


def begin(directory: Path) -> Path:
    """Clear what dead saves have left and make the directory that is written into until it is published."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())) and not (directory / STATE).is_file():
        raise CheckpointError(f"{directory} exists and is not a checkpoint: save under another name, or remove it")
    directory.parent.mkdir(parents=True, exist_ok=True)
    _clear_leftovers(directory)
    temporary = _hidden(directory, "saving")
    temporary.mkdir()
    return temporary


def _clear_leftovers(directory: Path) -> None:
    """Only those of this name, and of every step where this is one: other files beside a checkpoint are not ours."""
    for path in list(directory.parent.iterdir()):
        match = _LEFTOVER.fullmatch(path.name)
        if match and (match[1] == directory.name or (step_number(match[1]) is not None and step_number(directory.name) is not None)):
            _restore(directory.with_name(match[1]))
            remove(path)


def _restore(directory: Path) -> None:
    """Put back a checkpoint that a save had moved aside before it died."""
    replaced = _hidden(directory, "replaced")
    if replaced.exists() and not directory.exists():
        replaced.rename(directory)


def publish(temporary: Path, directory: Path, state: str) -> None:
    """Give a completely written save its name, and make `latest` name it where it is a step."""
    write_synced(temporary / STATE, state)
    _sync_directory(temporary)
    replaced = _hidden(directory, "replaced")
    if directory.exists():
        directory.rename(replaced)
    temporary.rename(directory)
    _sync_directory(directory.parent)
    if step_number(directory.name) is not None:
        fresh = directory.with_name(f".{LATEST}.new")
        write_synced(fresh, directory.name + "\n")
        fresh.replace(directory.with_name(LATEST))
        _sync_directory(directory.parent)
    remove(replaced)


def read_latest(checkpoints: Path) -> str | None:
    """The name that `latest` holds, or None where nothing has been published."""
    file = checkpoints / LATEST
    if not file.is_file():
        return None
    name = file.read_text().strip()
    if step_number(name) is None:
        raise CheckpointError(f"{file} holds {name!r}, not the name of a checkpoint such as {step_name(100)}")
    _restore(checkpoints / name)
    try:
        check(checkpoints / name)
    except CheckpointError as error:
        raise CheckpointError(f"{file} names {name}, but {error}. Write another name into it, or remove it to start afresh.") from None
    return name


def prune(checkpoints: Path, keep: int) -> None:
    """Steps after `latest` belong to a future that was abandoned by resuming earlier: they are left to be overwritten."""
    newest = read_latest(checkpoints)
    if newest is None:
        return
    steps = sorted((number, path) for path in checkpoints.iterdir() if (number := step_number(path.name)) is not None)
    past = [path for number, path in steps if number <= (step_number(newest) or 0)]
    for path in past[:-keep]:
        deleted = _hidden(path, "deleted")
        path.rename(deleted)
        remove(deleted)


def remove(directory: Path) -> None:
    """Remove a directory tree; what can not be removed now is left to the next save."""
    shutil.rmtree(directory, ignore_errors=True)


def write_synced(path: Path, text: str) -> None:
    """Write a file and wait until its content, though not yet its name, is on the disk."""
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(directory: Path) -> None:
    """Names reach the disk with their directory, not with their files."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
