"""Saves on the disk what only memory has: copies of a run's state that are newer than its checkpoints.

A launcher does so when its ranks have ended. A copy has the format of a checkpoint, so its files are copied.
With several nodes, each launcher adds the files that its node has, and the one that adds the last publishes.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

from megalite.checkpoint import directories
from megalite.checkpoint.api import latest, manifest_of
from megalite.checkpoint.errors import CheckpointError, DamagedError, reason
from megalite.checkpoint.manifest import Manifest
from megalite.config import run_files
from megalite.config.run_files import step_number
from megalite.system.files import replacing, unique_name

Published = tuple[Path, int]


def newest_published(checkpoints: Path) -> Published | None:
    """Return the newest checkpoint and when it was published, or None."""
    newest = latest(checkpoints)
    if newest is None:
        return None
    manifest = newest / run_files.MANIFEST
    return newest, manifest.stat().st_mtime_ns if manifest.is_file() else 0


def save_newest(copies: Path, checkpoints: Path, before: Published | None) -> list[str]:
    """Make the newest copy that can be completed a checkpoint, if the newest checkpoint is older.

    If that fails, the copies are renamed, so that nobody removes them.

    Args:
        copies: the directory in memory; no rank uses it any more.
        before: the newest checkpoint before any of the copies was made: all copies are newer, also of earlier
            steps, if the run has started from an earlier checkpoint.

    Returns:
        lines for the user.
    """
    newest, lines = newest_published(checkpoints), list[str]()
    saved = -1 if newest is None or newest == before else step_number(newest[0].name) or 0
    for step, copy in sorted(directories.numbered(copies).items(), reverse=True):
        if step <= saved or not (copy / run_files.MANIFEST).exists():
            continue
        target = checkpoints / copy.name
        try:
            missing = _save(manifest_of(copy), target)
        except (CheckpointError, OSError) as error:
            if latest(checkpoints) == target:  # another launcher was faster
                break
            directories.restore(checkpoints)
            kept = copies.rename(copies.with_name(f"megalite-kept-{copies.name}"))
            lines.append(
                f"the copy in memory of {copy.name} could not be saved: {reason(error)}\nit stays in "
                f"memory: make room, move {kept / copy.name} to {checkpoints}, and repeat the command with "
                f"--checkpoint.load {target}"
            )
            break
        if not missing:
            lines.append(f"saved the copy in memory of {copy.name}: {target}")
            break
        lines.append(
            f"saved this node's files of the copy in memory of {copy.name}; it is a checkpoint as soon as "
            f"another node has added {', '.join(missing[:3])}{' …' * (len(missing) > 3)}"
        )
    return lines


def _save(copy: Manifest, target: Path) -> list[str]:
    """Add the files that are here to a checkpoint, and publish it once it is complete. Returns the names of
    files that are missing."""
    fresh = directories.hidden(target, "saving")
    fresh.mkdir(parents=True, exist_ok=True)
    here = [name for name, size in copy.files.items() if _has(copy.directory / name, size)]
    for name in here:
        path = fresh / name
        with replacing(path, path.with_name(unique_name(path))) as new:
            shutil.copyfile(copy.directory / name, new)
            with open(new, "rb") as file:
                os.fsync(file.fileno())
    missing = [name for name, size in copy.files.items() if not _has(fresh / name, size)]
    if missing:
        return missing
    others = [name for name in copy.files if name not in here]
    try:
        if others:
            replace(copy, directory=fresh).verify()
    except DamagedError:  # an interrupted save has left one
        for name in others:
            (fresh / name).unlink()
        return others
    text = (copy.directory / run_files.MANIFEST).read_text(encoding="utf-8")
    directories.publish(fresh, target, text)
    return []


def _has(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size
