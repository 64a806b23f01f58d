"""Names of checkpoints and their atomic publication. Everything here runs on one rank.

Each visible change is one rename, after the content has been synced to disk:

    .NAME.saving   → NAME             a save becomes a checkpoint; its manifest is written last
    NAME           → .NAME.replaced   just before, if NAME is saved again; renamed back if the save is
    interrupted in between
    NAME           → .NAME.deleted    pruned: a partly removed directory never has the name of a checkpoint,
    nor a manifest
    .latest.new    → latest           and .best.new → best, which names the checkpoint with the lowest
    validation loss
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from megalite.checkpoint.errors import CheckpointError, DamagedError
from megalite.checkpoint.manifest import MANIFEST, Manifest
from megalite.system.files import replacing, write_synced

LATEST, BEST = "latest", "best"
TIMED, TIMED_KEPT = "timed", 2
"""The key of a manifest's state that a save by time has (`checkpoint.minutes`), and how many of these stay
without `checkpoint.keep`."""
_STEP = re.compile(r"step_(\d{8,})")
_OURS = re.compile(r"manifest\.json|rank_\d{5,}\.bin")
_LEFTOVER = re.compile(r"\.(.+)\.(saving|replaced|deleted)")


def step_name(step: int) -> str:
    return f"step_{step:08d}"


def step_number(name: str) -> int | None:
    """The step in a checkpoint's name, or None if it is not the name of a step."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def _hidden(directory: Path, kind: str) -> Path:
    return directory.with_name(f".{directory.name}.{kind}")


def check(directory: Path) -> None:
    """Raise DamagedError if the directory is not a checkpoint."""
    if not (directory / MANIFEST).is_file():
        why = f"it has no {MANIFEST}" if directory.is_dir() else "there is no such directory"
        raise DamagedError(f"{directory} is not a checkpoint: {why}")


def check_free(directory: Path) -> None:
    """Raise CheckpointError if there is something already where a command would write a directory."""
    if directory.exists():
        raise CheckpointError(f"{directory} exists already. Give another name, or remove it.")


def begin(directory: Path) -> Path:
    """Remove what interrupted saves have left, and create the directory to write into until it is
    published."""
    if directory.exists() and not (directory / MANIFEST).is_file() and not _is_ours(directory):
        raise CheckpointError(
            f"{directory} exists and is not a checkpoint: save under another name, or remove it"
        )
    directory.parent.mkdir(parents=True, exist_ok=True)
    _clear_leftovers(directory)
    temporary = _hidden(directory, "saving")
    temporary.mkdir()
    return temporary


def _is_ours(directory: Path) -> bool:
    """Whether the directory has only files of a checkpoint: the remains of one, which may be overwritten."""
    return directory.is_dir() and all(_OURS.fullmatch(path.name) for path in directory.iterdir())


def _clear_leftovers(directory: Path) -> None:
    """Remove leftovers of this name and, if it is a step, of every step; other files in the parent directory
    are not ours."""
    for path in list(directory.parent.iterdir()):
        match = _LEFTOVER.fullmatch(path.name)
        if match and (
            match[1] == directory.name
            or (step_number(match[1]) is not None and step_number(directory.name) is not None)
        ):
            _restore(directory.with_name(match[1]))
            remove(path)


def _restore(directory: Path) -> None:
    """Rename back a checkpoint that an interrupted save had moved away."""
    replaced = _hidden(directory, "replaced")
    if replaced.exists() and not directory.exists():
        replaced.rename(directory)


def restore(checkpoints: Path) -> None:
    """Rename back all checkpoints that interrupted saves had moved away."""
    for path in list(checkpoints.glob(".*.replaced")):
        _restore(path.with_name(path.name.removeprefix(".").removesuffix(".replaced")))


def discard(temporary: Path, directory: Path) -> None:
    """Undo a failed save: remove its files, and rename back the checkpoint that it was to replace."""
    remove(temporary)
    _restore(directory)


def publish(temporary: Path, directory: Path, manifest: str) -> None:
    """Rename a completely written save to its name, and update `latest` if it is a step."""
    write_synced(temporary / MANIFEST, manifest)  # last: a directory without a manifest is not a checkpoint
    _sync_directory(temporary)
    replaced = _hidden(directory, "replaced")
    if directory.exists():
        directory.rename(replaced)
    temporary.rename(directory)
    _sync_directory(directory.parent)
    if step_number(directory.name) is not None:
        _name(directory, LATEST)
    remove(replaced)


def mark_best(directory: Path) -> None:
    """Let `best` name a checkpoint, which `prune` then keeps."""
    _name(directory, BEST)


def best(checkpoints: Path) -> Path | None:
    """The checkpoint that `best` names, or None."""
    file = checkpoints / BEST
    found = checkpoints / (
        file.read_text(errors="replace", encoding="utf-8").strip() if file.is_file() else BEST
    )
    return found if step_number(found.name) is not None and found.is_dir() else None


def _name(directory: Path, file: str) -> None:
    """Let a file next to a checkpoint name it."""
    with replacing(directory.with_name(file)) as fresh:
        write_synced(fresh, directory.name + "\n")
    _sync_directory(directory.parent)


def history(checkpoints: Path) -> tuple[list[Path], str | None]:
    """The checkpoint that `latest` names and all earlier ones, newest first; and a warning about `latest`, or
    None.

    Later steps were abandoned when the run resumed from an earlier one; they are ignored until they are
    overwritten.
    """
    file, warning = checkpoints / LATEST, None
    steps = {
        number: path for path in checkpoints.glob("step_*") if (number := step_number(path.name)) is not None
    }
    if not steps and not file.exists():
        return [], None
    try:
        name = file.read_text(errors="replace", encoding="utf-8").strip()
    except OSError as error:
        name = error.strerror or str(error)
    newest = step_number(name)
    if newest not in steps:
        warning, newest = (
            f"{file} is damaged: expected the name of an existing checkpoint, found {name!r}",
            None,
        )
    elif newest < max(steps):
        warning = f"{file} names {name}: newer checkpoints, up to {step_name(max(steps))}, are ignored"
    return [
        steps[number] for number in sorted(steps, reverse=True) if newest is None or number <= newest
    ], warning


def prune(
    checkpoints: Path, keep: int, keep_every: int | None, spare: Path | None = None, timed: bool = False
) -> None:
    """Remove checkpoints older than the newest `keep` that are complete, except multiples of `keep_every`,
    `spare` and the best.

    timed: only those that were saved by time count, and are removed.
    """
    whole, spared = 0, (spare, best(checkpoints))
    for path in filter(_is_timed if timed else None, history(checkpoints)[0]):
        if whole < keep:
            whole += _looks_whole(path)
        elif path not in spared and (not keep_every or (step_number(path.name) or 0) % keep_every):
            deleted = _hidden(path, "deleted")
            path.rename(deleted)
            remove(deleted)


def _is_timed(directory: Path) -> bool:
    try:
        return bool(Manifest.of(directory).state.get(TIMED))
    except CheckpointError:
        return False


def _looks_whole(directory: Path) -> bool:
    try:
        Manifest.of(directory).check_files()
    except CheckpointError:
        return False
    return True


def remove(directory: Path) -> None:
    """Remove a directory tree, its manifest first; what cannot be removed now is removed by the next save."""
    with suppress(OSError):
        (directory / MANIFEST).unlink()
    shutil.rmtree(directory, ignore_errors=True)


def _sync_directory(directory: Path) -> None:
    """Wait until the names in a directory are on disk: syncing a file does not sync its name."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
