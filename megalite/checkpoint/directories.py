"""Names of checkpoints and their atomic publication. Everything here runs on one rank.

Each change that others could see is one rename, after what it shows has reached the disk:

    .NAME.saving   → NAME             a save becomes a checkpoint; its manifest has been written last
    NAME           → .NAME.replaced   (moved aside just before, where NAME is saved again; moved back if the save dies in between)
    NAME           → .NAME.deleted    pruned: a half-removed directory never carries the name of a checkpoint, nor has it a manifest
    .latest.new    → latest
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from megalite.checkpoint.errors import CheckpointError, DamagedError
from megalite.checkpoint.manifest import MANIFEST, Manifest

LATEST = "latest"
_STEP = re.compile(r"step_(\d{8,})")
_OURS = re.compile(r"manifest\.json|rank_\d{5,}\.bin")
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
    """Raise DamagedError where there is no checkpoint."""
    if not (directory / MANIFEST).is_file():
        why = f"it has no {MANIFEST}" if directory.is_dir() else "there is no such directory"
        raise DamagedError(f"{directory} is not a checkpoint: {why}")


def begin(directory: Path) -> Path:
    """Clear what dead saves have left and make the directory that is written into until it is published."""
    if directory.exists() and not (directory / MANIFEST).is_file() and not _is_ours(directory):
        raise CheckpointError(f"{directory} exists and is not a checkpoint: save under another name, or remove it")
    directory.parent.mkdir(parents=True, exist_ok=True)
    _clear_leftovers(directory)
    temporary = _hidden(directory, "saving")
    temporary.mkdir()
    return temporary


def _is_ours(directory: Path) -> bool:
    """Whether nothing but what is left of a checkpoint is in it."""
    return directory.is_dir() and all(_OURS.fullmatch(path.name) for path in directory.iterdir())


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


def restore(checkpoints: Path) -> None:
    """Put back what saves that died had moved aside."""
    for path in list(checkpoints.glob(".*.replaced")):
        _restore(path.with_name(path.name.removeprefix(".").removesuffix(".replaced")))


def discard(temporary: Path, directory: Path) -> None:
    """Undo a save that failed: its room on the disk is free again, and what it was to replace has its name again."""
    remove(temporary)
    _restore(directory)


def publish(temporary: Path, directory: Path, manifest: str) -> None:
    """Give a completely written save its name, and make `latest` name it where it is a step."""
    write_synced(temporary / MANIFEST, manifest)
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


def history(checkpoints: Path) -> tuple[list[Path], str | None]:
    """What a run may continue from, newest first: the checkpoint that `latest` names and all before it; and what is strange about `latest`.

    Steps after it belong to a future that was abandoned by resuming earlier: they are left to be overwritten.
    """
    file, warning = checkpoints / LATEST, None
    steps = {number: path for path in checkpoints.glob("step_*") if (number := step_number(path.name)) is not None}
    if not steps and not file.exists():
        return [], None
    try:
        name = file.read_text(errors="replace").strip()
    except OSError as error:
        name = error.strerror or str(error)
    newest = step_number(name)
    if newest not in steps:
        warning, newest = f"{file} is damaged: expected the name of a checkpoint that is there, found {name!r}", None
    elif newest < max(steps):
        warning = f"{file} names {name}: what is newer, up to {step_name(max(steps))}, is left aside"
    return [steps[number] for number in sorted(steps, reverse=True) if newest is None or number <= newest], warning


def prune(checkpoints: Path, keep: int, keep_every: int | None, spare: Path | None = None) -> None:
    """Remove what is older than the newest `keep` that look whole, but for multiples of `keep_every`, and for `spare`."""
    whole = 0
    for path in history(checkpoints)[0]:
        if whole < keep:
            whole += _looks_whole(path)
        elif path != spare and (not keep_every or (step_number(path.name) or 0) % keep_every):
            deleted = _hidden(path, "deleted")
            path.rename(deleted)
            remove(deleted)


def _looks_whole(directory: Path) -> bool:
    try:
        Manifest.of(directory).check_files()
    except CheckpointError:
        return False
    return True


def remove(directory: Path) -> None:
    """Remove a directory tree, its manifest first; what can not be removed now is left to the next save."""
    with suppress(OSError):
        (directory / MANIFEST).unlink()
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
