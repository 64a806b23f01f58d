"""The topology-free checkpoint: global tensors by name and coordinates, whatever mesh wrote them or reads them.

A checkpoint is a directory: files with the bytes of tensors, and a manifest that says which bytes are which rectangle of which global
tensor (`manifest`). It appears under its name only when all of it is on disk, so a run killed at any moment leaves the one before.

    checkpoints/step_00000100/     whole, unless a disk or a hand has damaged it: then it says so
    checkpoints/latest             text: step_00000100
    checkpoints/.step_…            saves under way, or dead: removed by the next save

`save`, `history` and `prune` are collective: rank 0 touches names and every rank learns its result or its error.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalite.checkpoint import directories
from megalite.checkpoint.agreement import named, on_rank_0
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.manifest import Manifest, encode

if TYPE_CHECKING:
    from megalite.mesh import Mesh
    from megalite.parallel.spec import Rectangle


def save(directory: Path, rectangles: Sequence[Rectangle], state: dict[str, Any], mesh: Mesh) -> None:
    """Write a checkpoint and publish it under `directory`, replacing the one that is there. Collective over the world.

    Where `directory` is named as a step (`step_name`), `latest` beside it then names it.

    Args:
        rectangles: this rank's; over all ranks each element of each tensor exactly once.
        state: what json can hold; that of rank 0 is stored.

    Raises:
        CheckpointError: on every rank, when any of them could not write; nothing is published then, and nothing of it stays on the disk.
    """
    from megalite.checkpoint import tensors  # torch.distributed.checkpoint costs 0.65 s: imported on first use

    try:
        temporary = on_rank_0(mesh, lambda: directories.begin(directory))
        try:
            with named("the exchange of what to save", mesh):
                written = tensors.write(temporary, rectangles, mesh.saving)
            on_rank_0(mesh, lambda: directories.publish(temporary, directory, encode(state, written)))
        except BaseException:
            if mesh.world.rank == 0:
                directories.discard(temporary, directory)
            raise
    except CheckpointError as error:
        raise CheckpointError(f"could not save {directory}: {error}") from error


def load(source: Path | Manifest, rectangles: Sequence[Rectangle], convert: bool = False) -> None:
    """Fill every rectangle from a checkpoint, reading and checking only the stored chunks that it overlaps. Not collective.

    source: its directory, or its manifest where that has been read already.
    convert: also from tensors of another dtype, as for weights that start a run; one that is resumed must not change its precision.

    Raises:
        DamagedError: naming the file that is not what was saved; some rectangles may have been filled by then.
        CheckpointError: naming each tensor that is missing, or has another global shape or dtype.
    """
    from megalite.checkpoint import tensors

    tensors.read(source if isinstance(source, Manifest) else manifest_of(source), rectangles, convert)


def manifest_of(directory: Path) -> Manifest:
    """What a checkpoint holds. Raises DamagedError where it is none or its manifest is not what was saved."""
    directories.check(directory)
    return Manifest.of(directory)


def history(checkpoints: Path, mesh: Mesh) -> tuple[list[Path], str | None]:
    """The checkpoints that a run may continue from, newest first, and what is strange about `latest`, if anything is.

    Rank 0 looks and tells the others, to whom a shared file system may show something older. Nobody else may use the directory: a
    checkpoint that a dead save had moved aside gets its name back.
    """

    def look() -> tuple[list[Path], str | None]:
        directories.restore(checkpoints)
        return directories.history(checkpoints)

    return on_rank_0(mesh, look)


def latest(checkpoints: Path) -> Path | None:
    """The newest published checkpoint, or None, for who only looks: a run may be using the directory."""
    found, _ = directories.history(checkpoints)
    return found[0] if found else None


def prune(checkpoints: Path, keep: int, mesh: Mesh, keep_every: int | None = None, spare: Path | None = None) -> None:
    """Remove checkpoints older than the newest `keep`, but for steps that are multiples of `keep_every`, and for `spare`.

    Counted are those of which no file is missing or cut off, up to `latest`: the last one that can be used is never removed.
    """
    if keep < 1:
        raise ValueError(f"checkpoint.keep = {keep}: at least one checkpoint must stay. Leave the option out to keep all.")
    on_rank_0(mesh, lambda: directories.prune(checkpoints, keep, keep_every, spare))
