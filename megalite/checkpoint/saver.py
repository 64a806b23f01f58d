"""Saves of a run: at once, or in the background while training goes on.

A save in the background holds training up only for a copy of this rank's rectangles. One thread then does what a save does, and talks to
the other ranks through a group of its own (`mesh.saving`), so that nothing meets what training says. One is under way at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread
from time import perf_counter
from typing import TYPE_CHECKING, Any

from megalite import checkpoint
from megalite.config.schema import CheckpointConfig

if TYPE_CHECKING:
    from torch import Tensor

    from megalite.mesh import Mesh
    from megalite.parallel.spec import Rectangle

ALIGNMENT = 64  # bytes, for copies


@dataclass
class Save:
    """One save of this rank. Times are in seconds since it began."""

    directory: Path
    started: float
    held: float = 0.0  # how long training stood still
    durable: float = 0.0  # until it was published
    error: Exception | None = None  # why it was not
    rollback_safe: bool = True  # whether a run may return to it


class Saver:
    """Saves, and then removes what `checkpoint.keep` does not keep. `newest` is the last sound one published here, or that resumed from."""

    def __init__(self, mesh: Mesh, options: CheckpointConfig):
        self.mesh, self.options = mesh, options
        self.newest: Path | None = None
        self._memory: Tensor | None = None  # staging, used again by every save
        self._thread: Thread | None = None
        self._ended: list[Save] = []

    @property
    def under_way(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def reserve(self, rectangles: Sequence[Rectangle]) -> None:
        """Take and touch the memory for copies now: at the first save that would hold training up for several times as long as a copy."""
        if self.options.async_save:
            self._staged(rectangles)

    def begin(self, directory: Path, rectangles: Sequence[Rectangle], state: dict[str, Any], rollback_safe: bool = True) -> Save:
        """Save what is in the rectangles now, which may change once this returns. Collective. Errors are those of `take_ended`."""
        save = Save(directory, perf_counter(), rollback_safe=rollback_safe)
        if self.options.async_save:
            self.wait()
            self._thread = Thread(target=self._write, args=(save, self._staged(rectangles), state), daemon=True, name="save")
            self._thread.start()
        else:
            self._write(save, rectangles, state)
        save.held = perf_counter() - save.started
        return save

    def wait(self) -> None:
        """Return when no save is under way."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def take_ended(self) -> list[Save]:
        """The saves that have ended since the last call, in order, well or with an error."""
        ended = self._ended[:]
        del self._ended[: len(ended)]
        return ended

    def _write(self, save: Save, rectangles: Sequence[Rectangle], state: dict[str, Any]) -> None:
        options, checkpoints = self.options, save.directory.parent
        try:
            checkpoint.save(save.directory, rectangles, state, self.mesh)
            save.durable = perf_counter() - save.started
            if save.rollback_safe:
                self.newest = save.directory
            if options.keep is not None:
                checkpoint.prune(checkpoints, options.keep, self.mesh, options.keep_every, spare=self.newest)
        except Exception as error:  # told by whoever asks what has ended
            save.error = error
        self._ended.append(save)

    def _staged(self, rectangles: Sequence[Rectangle]) -> list[Rectangle]:
        """Copies of the rectangles that nobody changes until the next save, complete when this returns."""
        import torch

        starts, total = [], 0
        for part in rectangles:
            starts.append(total)
            total += -(-part.tensor.nbytes // ALIGNMENT) * ALIGNMENT
        on_gpu = any(part.tensor.is_cuda for part in rectangles)
        if self._memory is None or self._memory.numel() < total:
            self._memory = torch.empty(total, dtype=torch.uint8, pin_memory=on_gpu)
        copies = []
        for part, start in zip(rectangles, starts, strict=True):
            room = self._memory[start : start + part.tensor.nbytes].view(part.tensor.dtype).view(part.tensor.shape)
            copies.append(replace(part, tensor=room.copy_(part.tensor.detach(), non_blocking=True)))
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        return copies
