"""Synchronous and asynchronous saving of checkpoints during training.

A background save blocks training only while it copies this rank's rectangles. A thread then writes them, and
communicates through a process group of its own (`mesh.saving`), so that its collectives do not interleave
with the collectives of training. At most one save is in progress.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from time import perf_counter
from typing import TYPE_CHECKING, Any

from megalite import checkpoint
from megalite.checkpoint.agreement import on_rank_0
from megalite.checkpoint.directories import TIMED_KEPT
from megalite.config.sections.checkpoint import CheckpointConfig

if TYPE_CHECKING:
    from megalite.checkpoint.staging import Staging
    from megalite.checkpoint.uploads import RunUploads
    from megalite.mesh.mesh import Mesh
    from megalite.parallel.spec import Rectangle


@dataclass
class Save:
    """Timing and outcome of one save on this rank.

    Attributes:
        started: value of `perf_counter` at its start.
        held: seconds for which it blocked training.
        durable: seconds from its start until it was published.
        bytes: number of bytes of all ranks.
        error: the reason why it was not published.
        rollback_safe: whether a run may roll back to it.
        best: whether it has the lowest validation loss so far.
    """

    directory: Path
    started: float
    held: float = 0.0
    durable: float = 0.0
    bytes: int = 0
    error: Exception | None = None
    rollback_safe: bool = True
    best: bool = False


class Saver:
    """Saves checkpoints and removes old ones.

    Without `checkpoint.keep`, only checkpoints that were saved by time are removed.

    Attributes:
        newest: the checkpoint to roll back to: the last rollback-safe one saved here, or the one that the run
            resumed from.
        best_failed: whether the last save of a best checkpoint failed; the same on all ranks once it has
            ended.
        saving: the checkpoint of the last save, which is in progress, or has ended.
        saving_best: whether the last save is of a best checkpoint.
        uploads: uploads what is saved, if run.dir is a store.
    """

    def __init__(self, mesh: Mesh, options: CheckpointConfig):
        self.mesh, self.options = mesh, options
        self.newest: Path | None = None
        self.saving: Path | None = None
        self.uploads: RunUploads | None = None
        self.best_failed = self.saving_best = False
        self._staging: Staging | None = None
        self._thread: Thread | None = None
        self._ended: list[Save] = []

    @property
    def under_way(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def reserve(self, rectangles: Sequence[Rectangle]) -> None:
        """Allocate and touch the staging memory.

        Otherwise, the first save would block training several times as long as a copy does.
        """
        if self.options.async_save:
            self._staged(rectangles)

    def _staged(self, rectangles: Sequence[Rectangle]) -> list[Rectangle]:
        from megalite.checkpoint.staging import Staging  # imports torch

        self._staging = self._staging or Staging()
        return self._staging.copied(rectangles)

    def begin(
        self,
        directory: Path,
        rectangles: Sequence[Rectangle],
        state: dict[str, Any],
        rollback_safe: bool = True,
        best: bool = False,
    ) -> Save:
        """Start saving the current content of the rectangles, which may change once this returns.

        Collective. Errors are in the result of `take_ended`.
        """
        save = Save(directory, perf_counter(), rollback_safe=rollback_safe, best=best)
        self.wait()
        self.saving, self.saving_best = directory, best
        if self.options.async_save:
            self._thread = Thread(
                target=self._write, args=(save, self._staged(rectangles), state), daemon=True, name="save"
            )
            self._thread.start()
        else:
            self._write(save, rectangles, state)
        save.held = perf_counter() - save.started
        return save

    def wait(self) -> None:
        """Wait until no save is in progress."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def take_ended(self) -> list[Save]:
        """Return the saves that have ended since the last call, in order, successful or with an error."""
        ended = self._ended[:]
        del self._ended[: len(ended)]
        return ended

    def _write(self, save: Save, rectangles: Sequence[Rectangle], state: dict[str, Any]) -> None:
        options, checkpoints = self.options, save.directory.parent
        self.best_failed |= save.best
        uploads, removed = self.uploads, list[str]()
        try:
            if uploads is not None:
                on_rank_0(self.mesh, uploads.check)
            save.bytes = checkpoint.save(
                save.directory, rectangles, state, self.mesh, spooled=uploads is not None
            )
            save.durable = perf_counter() - save.started
            if save.rollback_safe:
                self.newest = save.directory
            if save.best:
                checkpoint.mark_best(save.directory, self.mesh)
                self.best_failed = False
            spare, used = self.newest, None if uploads is None else uploads.uploading
            if options.keep is not None:
                removed = checkpoint.prune(
                    checkpoints, options.keep, self.mesh, options.keep_every, spare, used
                )
            elif options.interval is None and options.minutes is not None:
                removed = checkpoint.prune(checkpoints, TIMED_KEPT, self.mesh, None, spare, used, timed=True)
            if uploads is not None:
                uploads.saved(save.directory, removed)
        except Exception as error:  # reported by the caller of `take_ended`: this may run on the thread
            save.error = error
        self._ended.append(save)
