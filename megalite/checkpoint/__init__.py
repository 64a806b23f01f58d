"""The topology-free checkpoint: global tensors by name and coordinates, whatever mesh wrote them or reads them.

A checkpoint is a directory: `state.json` (configuration, step, data position …) and the tensors, stored by torch.distributed.checkpoint as
rectangles of global tensors. It appears under its name only when all of it is on disk, so a run killed at any moment leaves the one before.

    checkpoints/step_00000100/     whole, always
    checkpoints/latest             text: step_00000100
    checkpoints/.step_…            saves under way, or dead: removed by the next save

`save`, `latest` and `prune` are collective: rank 0 touches names and every rank learns its result or its error.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalite.checkpoint import directories
from megalite.checkpoint.agreement import on_rank_0
from megalite.checkpoint.directories import step_name, step_number
from megalite.checkpoint.errors import CheckpointError

if TYPE_CHECKING:
    from megalite.mesh import Mesh
    from megalite.parallel.spec import Rectangle

__all__ = ["CheckpointError", "latest", "load", "prune", "read_state", "save", "shapes", "step_name", "step_number"]


def save(directory: Path, rectangles: Sequence[Rectangle], state: dict[str, Any], mesh: Mesh) -> None:
    """Write a checkpoint and publish it under `directory`, replacing the one that is there. Collective over the world.

    Where `directory` is named as a step (`step_name`), `latest` beside it then names it.

    Args:
        rectangles: this rank's; over all ranks each element of each tensor exactly once.
        state: what json can hold; that of rank 0 is stored.

    Raises:
        CheckpointError: on every rank, when any of them could not write; nothing is published then.
    """
    from megalite.checkpoint import tensors  # torch.distributed.checkpoint costs 0.65 s: imported on first use

    text = json.dumps(state, indent=1)
    temporary = on_rank_0(mesh, lambda: directories.begin(directory))
    try:
        tensors.write(temporary, rectangles, mesh.world.group)
        on_rank_0(mesh, lambda: directories.publish(temporary, directory, text))
    except BaseException:
        if mesh.world.rank == 0:
            directories.remove(temporary)
        raise


def load(directory: Path, rectangles: Sequence[Rectangle]) -> None:
    """Fill every rectangle from a checkpoint, reading only the stored chunks that it overlaps. Not collective.

    Raises:
        CheckpointError: naming each tensor that is missing, or has another global shape or dtype.
    """
    from megalite.checkpoint import tensors

    directories.check(directory)
    tensors.read(directory, rectangles)


def shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """The global shape of every stored tensor, by name."""
    from megalite.checkpoint import tensors

    directories.check(directory)
    return tensors.shapes(directory)


def read_state(directory: Path) -> dict[str, Any]:
    """The state that `save` was given."""
    directories.check(directory)
    state: dict[str, Any] = json.loads((directory / directories.STATE).read_text())
    return state


def latest(checkpoints: Path, mesh: Mesh | None = None) -> Path | None:
    """The newest published checkpoint, or None.

    With a mesh rank 0 looks and tells the others, to whom a shared file system may show something older.
    """
    name = on_rank_0(mesh, lambda: directories.read_latest(checkpoints))
    return None if name is None else checkpoints / name


def prune(checkpoints: Path, keep: int, mesh: Mesh | None = None) -> None:
    """Remove all but the newest `keep` checkpoints up to `latest`, which itself always stays."""
    if keep < 1:
        raise ValueError(f"checkpoint.keep = {keep}: at least one checkpoint must stay. Leave the option out to keep all.")
    on_rank_0(mesh, lambda: directories.prune(checkpoints, keep))
