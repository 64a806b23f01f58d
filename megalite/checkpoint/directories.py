"""Names of checkpoints and their atomic publication. Everything here runs on one rank.

Each visible change is one rename, after the content has been synced to disk:

    .NAME.saving → NAME             a save becomes a checkpoint; its manifest is written last
    NAME         → .NAME.replaced   just before, if NAME is saved again; renamed back after an interruption
    NAME         → .NAME.deleted    pruned: a partly removed directory never has the name of a checkpoint
    .latest.new  → latest           names the newest checkpoint
    .best.new    → best             names the checkpoint with the lowest validation loss
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from megalite.checkpoint.errors import CheckpointError, DamagedError
from megalite.checkpoint.manifest import Manifest
from megalite.config import run_files
from megalite.config.run_files import step_name, step_number
from megalite.system.files import replacing, unique_name, write_synced

TIMED, TIMED_KEPT = "timed", 2
"""The key that marks a save by time (`checkpoint.minutes`) in a manifest's state, and the number of such
checkpoints that stay without `checkpoint.keep`."""
_CHECKPOINT_FILE = re.compile(r"manifest\.json|origin|rank_\d{5,}(-[0-9a-f]{8})?\.bin")
_LEFTOVER = re.compile(r"\.(.+)\.(saving|replaced|deleted)")


def hidden(directory: Path, kind: str) -> Path:
    """Return the path at which a checkpoint is while it is being saved, replaced or deleted (`kind`)."""
    return directory.with_name(f".{directory.name}.{kind}")


def check(directory: Path) -> None:
    """Raise DamagedError if the directory is not a checkpoint."""
    if not (directory / run_files.MANIFEST).is_file():
        why = f"{run_files.MANIFEST} is missing" if directory.is_dir() else "the directory does not exist"
        raise DamagedError(f"{directory} is not a checkpoint: {why}")


def check_free(directory: Path) -> None:
    """Raise CheckpointError if the directory that a command would write exists."""
    if directory.exists():
        raise CheckpointError(f"{directory} already exists. Choose another path or remove it.")


def begin(directory: Path) -> Path:
    """Remove the remains of interrupted saves. Return a new directory to write into until it is published."""
    if directory.exists() and not (directory / run_files.MANIFEST).is_file() and not _is_remains(directory):
        raise CheckpointError(
            f"{directory} already exists and is not a checkpoint. Choose another path or remove it"
        )
    directory.parent.mkdir(parents=True, exist_ok=True)
    _clear_leftovers(directory)
    temporary = hidden(directory, "saving")
    temporary.mkdir()
    return temporary


def _is_remains(directory: Path) -> bool:
    """Return whether the directory contains only files of an unfinished checkpoint and may be overwritten."""
    return directory.is_dir() and all(_CHECKPOINT_FILE.fullmatch(path.name) for path in directory.iterdir())


def _clear_leftovers(directory: Path) -> None:
    """Remove the temporary directories of this checkpoint or, if its name is a step, of every step.

    Other files in the parent directory may belong to the user.
    """
    is_step = step_number(directory.name) is not None
    for path in list(directory.parent.iterdir()):
        match = _LEFTOVER.fullmatch(path.name)
        if match and (match[1] == directory.name or (is_step and step_number(match[1]) is not None)):
            _restore(directory.with_name(match[1]))
            remove(path)


def _restore(directory: Path) -> None:
    """Rename back a checkpoint that an interrupted save had moved away."""
    replaced = hidden(directory, "replaced")
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
    # last: a directory without a manifest is not a checkpoint
    write_synced(temporary / run_files.MANIFEST, manifest)
    _sync_directory(temporary)
    replaced = hidden(directory, "replaced")
    if directory.exists():
        directory.rename(replaced)
    temporary.rename(directory)
    _sync_directory(directory.parent)
    if step_number(directory.name) is not None:
        _name(directory, run_files.LATEST)
    remove(replaced)


def adopt(temporary: Path, directory: Path, file: str, manifest: str) -> None:
    """Publish this rank's file on a node whose disk rank 0 does not see. Does nothing on the same disk.

    Args:
        file: the name of the rank's file; it may have none.
        manifest: the text of the published one.
    """
    own = directory / run_files.MANIFEST
    if own.exists() and own.read_text(encoding="utf-8") == manifest and not (temporary / file).exists():
        return
    directory.mkdir(parents=True, exist_ok=True)
    (directory / run_files.ORIGIN).unlink(missing_ok=True)  # of an earlier save of the step
    with suppress(FileNotFoundError):
        (temporary / file).rename(directory / file)
    with replacing(own, own.with_name(unique_name(own))) as fresh:
        write_synced(fresh, manifest)
    latest = directory.with_name(run_files.LATEST)
    with replacing(latest, latest.with_name(unique_name(latest))) as fresh:
        write_synced(fresh, directory.name + "\n")
    with suppress(OSError):  # another rank of the node has yet to move its file
        temporary.rmdir()


def mark_best(directory: Path) -> None:
    """Point `best` to a checkpoint, which `prune` then keeps."""
    _name(directory, run_files.BEST)


def best(checkpoints: Path) -> Path | None:
    """Return the checkpoint that `best` names, or None."""
    file = checkpoints / run_files.BEST
    if not file.is_file():
        return None
    directory = checkpoints / file.read_text(errors="replace", encoding="utf-8").strip()
    return directory if step_number(directory.name) is not None and directory.is_dir() else None


def _name(directory: Path, file: str) -> None:
    """Write the name of a checkpoint to a file next to it."""
    with replacing(directory.with_name(file)) as fresh:
        write_synced(fresh, directory.name + "\n")
    _sync_directory(directory.parent)


def history(checkpoints: Path) -> tuple[list[Path], str | None]:
    """Return the checkpoints up to `latest`, newest first, and a warning about `latest` or None.

    Later steps were abandoned when the run resumed from an earlier one; they are ignored until they are
    overwritten.
    """
    file, warning = checkpoints / run_files.LATEST, None
    steps = numbered(checkpoints)
    if not steps and not file.exists():
        return [], None
    try:
        name = file.read_text(errors="replace", encoding="utf-8").strip()
    except OSError as error:
        name = error.strerror or str(error)
    newest = step_number(name)
    if newest not in steps:
        warning = f"{file} is damaged: expected the name of an existing checkpoint, found {name!r}"
        newest = None
    elif newest < max(steps):
        warning = f"{file} points to {name}; ignoring newer checkpoints up to {step_name(max(steps))}"
    numbers = [number for number in sorted(steps, reverse=True) if newest is None or number <= newest]
    return [steps[number] for number in numbers], warning


def numbered(checkpoints: Path) -> dict[int, Path]:
    """Return the directories with the name of a step, by its number."""
    steps = ((step_number(path.name), path) for path in checkpoints.glob("step_*"))
    return {number: path for number, path in steps if number is not None}


def prune(
    checkpoints: Path,
    keep: int,
    keep_every: int | None,
    spare: Path | None = None,
    in_use: Path | None = None,
    timed: bool = False,
) -> list[str]:
    """Remove all but the newest `keep` complete checkpoints, multiples of `keep_every`, `spare` and the best.
    Return the names of those that were removed.

    Args:
        in_use: a checkpoint that stays for now, and is among the names all the same.
        timed: count and remove only checkpoints that were saved by time.
    """
    steps, _ = history(checkpoints)
    complete, spared, removed = 0, (spare, best(checkpoints)), list[str]()
    for path in steps:
        if timed and not _is_timed(path):
            continue
        if complete < keep:
            complete += _looks_complete(path)
        elif path not in spared and (not keep_every or (step_number(path.name) or 0) % keep_every):
            removed.append(path.name)
            if path != in_use:
                deleted = hidden(path, "deleted")
                path.rename(deleted)
                remove(deleted)
    return removed


def _is_timed(directory: Path) -> bool:
    try:
        return bool(Manifest.of(directory).state.get(TIMED))
    except CheckpointError:
        return False


def _looks_complete(directory: Path) -> bool:
    if (directory / run_files.ORIGIN).exists():  # published in a store, whose objects are not asked for
        return True
    try:
        Manifest.of(directory).check_files()
    except CheckpointError:
        return False
    return True


def remove(directory: Path) -> None:
    """Remove a directory tree, its manifest first. The next save removes files that cannot be removed now."""
    with suppress(OSError):
        (directory / run_files.MANIFEST).unlink()
    shutil.rmtree(directory, ignore_errors=True)


def _sync_directory(directory: Path) -> None:
    """Wait until the names in a directory are on disk: syncing a file does not sync its name."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
