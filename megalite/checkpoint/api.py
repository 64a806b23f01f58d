"""Topology-independent checkpoints.

Tensors are stored by global name and coordinates, so that any mesh can read what another mesh has written.

A checkpoint is a directory with files of tensor data and a manifest that lists which bytes are which
rectangle of which global tensor (`manifest`). It is renamed to its name only when all of it is on disk, so a
run killed at any moment leaves the previous one intact.

    checkpoints/step_00000100/     complete; damage by a disk or a user is detected when it is read
    checkpoints/latest             text: step_00000100
    checkpoints/best               the checkpoint with the lowest validation loss (`checkpoint.keep_best`)
    checkpoints/.step_…            saves in progress, or interrupted: removed by the next save

`save`, `history` and `prune` are collective: rank 0 changes names in the file system, and every rank learns
its result or its error.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalite.checkpoint import directories
from megalite.checkpoint.agreement import on_rank_0
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.manifest import Manifest, encode
from megalite.config import run_files
from megalite.stores.url import is_url

if TYPE_CHECKING:
    from megalite.mesh.mesh import Mesh
    from megalite.parallel.spec import Rectangle


def save(
    directory: Path,
    rectangles: Sequence[Rectangle],
    state: dict[str, Any],
    mesh: Mesh,
    spooled: bool = False,
) -> int:
    """Write a checkpoint and publish it as `directory`, replacing an existing one. Collective over the world.

    If `directory` has the name of a step (`step_name`), `latest` in the same directory is updated to name it.

    Args:
        rectangles: those of this rank; over all ranks they cover each element of each tensor exactly once.
        state: JSON data, stored as rank 0 passes it.
        spooled: whether it is uploaded to a store. The names of its files are then different in every save,
            so that an upload replaces the checkpoint of an earlier save with one request, that of the
            manifest; and nodes may have disks of their own.

    Returns:
        The number of bytes of all ranks.

    Raises:
        CheckpointError: on every rank, if any rank could not write; nothing is published, and its files are
            removed.
    """
    from megalite.checkpoint import tensors  # imports torch

    def publish() -> tuple[int, str]:
        stored = tensors.merged(outcomes)
        manifest = encode(state, stored)
        directories.publish(temporary, directory, manifest)
        size = sum(chunk.bytes for tensor in stored.values() for chunk in tensor.chunks)
        return size, manifest if spooled else ""

    try:
        suffix = f"-{os.urandom(4).hex()}" if spooled else ""
        temporary, suffix = on_rank_0(mesh, lambda: (directories.begin(directory), suffix))
        try:
            outcomes = tensors.write(temporary, rectangles, mesh, suffix)
            size, manifest = on_rank_0(mesh, publish)
        except BaseException:
            if mesh.world.rank == 0:
                directories.discard(temporary, directory)
            raise
        if spooled and mesh.world.rank:
            directories.adopt(temporary, directory, tensors.file_name(mesh.world.rank, suffix), manifest)
        return size
    except CheckpointError as error:
        raise CheckpointError(f"failed to save {directory}: {error}") from error


def load(source: Path | Manifest, rectangles: Sequence[Rectangle], convert: bool = False) -> None:
    """Fill every rectangle from a checkpoint.

    Reads and verifies only the stored chunks that overlap the rectangles. Not collective.

    Args:
        source: the checkpoint's directory, or its manifest if that has been read already.
        convert: convert tensors of another dtype, as for the initial weights of a run; a resumed run must not
            change its precision.

    Raises:
        DamagedError: naming the damaged file; some rectangles may be filled already.
        CheckpointError: naming each tensor that is missing, or has another global shape or dtype.
    """
    from megalite.checkpoint import tensors

    tensors.read(source if isinstance(source, Manifest) else manifest_of(source), rectangles, convert)


def manifest_of(directory: Path) -> Manifest:
    """Return the manifest of a checkpoint.

    Raises DamagedError if the directory is not a checkpoint or its manifest is damaged.
    """
    directories.check(directory)
    return Manifest.of(directory)


def history(checkpoints: Path, mesh: Mesh) -> tuple[list[Path], str | None]:
    """Return the checkpoints that a run may resume from, newest first, and a warning about `latest`, or None.

    Collective.

    Rank 0 lists them and broadcasts the result, since a shared file system may show older content on other
    hosts. No other process may use the directory: a checkpoint that an interrupted save had moved away is
    renamed back.
    """

    def restore_and_list() -> tuple[list[Path], str | None]:
        directories.restore(checkpoints)
        return directories.history(checkpoints)

    return on_rank_0(mesh, restore_and_list)


def latest(checkpoints: Path) -> Path | None:
    """Return the newest published checkpoint, or None.

    Changes nothing, so a run may be using the directory.
    """
    steps, _ = directories.history(checkpoints)
    return steps[0] if steps else None


def find(path: Path) -> Path:
    """Return the checkpoint at `path`.

    `path` can be a checkpoint, a file `latest` or `best`, a run directory, or its checkpoints/ directory.
    For a directory of checkpoints, the newest one is returned. For the URL of a store, it is the
    checkpoint's stub.

    Raises CheckpointError if a URL names no checkpoint, or the store cannot be reached.
    """
    if is_url(path):
        from megalite.checkpoint.stored_data import fetched

        return fetched(path)
    if path.name in (run_files.LATEST, run_files.BEST) and path.is_file():
        return path.with_name(path.read_text(errors="replace", encoding="utf-8").strip())
    for directory in (path, path / run_files.CHECKPOINTS):
        if (directory / run_files.LATEST).is_file() and (newest := latest(directory)) is not None:
            return newest
    return path


def mark_best(directory: Path, mesh: Mesh) -> None:
    """Make the file `best` name a checkpoint: `prune` keeps it until another one is the best. Collective."""
    on_rank_0(mesh, lambda: directories.mark_best(directory))


def prune(
    checkpoints: Path,
    keep: int,
    mesh: Mesh,
    keep_every: int | None = None,
    spare: Path | None = None,
    in_use: Path | None = None,
    *,
    timed: bool = False,
) -> list[str]:
    """Remove old checkpoints, except the newest `keep`, multiples of `keep_every`, `spare` and the best.
    Return the names of those that were removed. Collective.

    Only checkpoints up to `latest` of which no file is missing or truncated count towards `keep`: the last
    usable one is never removed.

    Args:
        in_use: a checkpoint that stays for now, and is among the names all the same.
        timed: count and remove only checkpoints with `directories.TIMED` in their state.
    """
    if keep < 1:
        raise ValueError(
            f"checkpoint.keep must be at least 1, got {keep}. To keep all checkpoints, leave it unset."
        )
    return on_rank_0(mesh, lambda: directories.prune(checkpoints, keep, keep_every, spare, in_use, timed))
