"""Runs on the pool's ranks that copy their state to memory, end as if they were killed, and go on elsewhere."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from torch import Tensor

from megalite import checkpoint
from megalite.checkpoint import copies, staging, tensors
from megalite.config.errors import ConfigError
from megalite.config.load import from_dict
from megalite.monitoring import size_changes
from megalite.monitoring.observers import Observer
from megalite.optimizer.registry import STATE
from megalite.training import memory_copies
from megalite.training.fit import fit
from megalite.training.trainer import StepResult, Trainer
from megalite.training.verify import global_tensors
from tests.support.jobs import mesh_of


class Killed(Exception):
    """What ends a rank here at the place of a signal."""


class Events(Observer):
    """Records the state from step 3 on, ends the run before one, or asks it to stop for another number of ranks.

    Optimistic steps end without being told to when the state is read.
    """

    def __init__(self, trainer: Trainer, killed: int | None, stop_before: int | None):
        self.trainer, self.killed, self.stop_before = trainer, killed, stop_before
        self.states: dict[int, dict[str, Tensor]] = {}

    def before(self, step: int) -> None:
        if step > 3:
            self.trainer.drain()
            self.states[step - 1] = global_tensors(self.trainer, STATE)
        if step == self.killed:
            raise Killed
        if step == self.stop_before:
            os.kill(os.getpid(), signal.SIGUSR2)


@contextmanager
def node(context: Any, nodes: Sequence[Path] | Path) -> Iterator[None]:
    """On the node of this rank, whose launcher keeps its copies, or on the only one, where a user names the place."""
    of_user = isinstance(nodes, Path)
    named = {copies.PLACE_VARIABLE: str(nodes)} if of_user else {copies.DIRECTORY: str(nodes[context.rank])}
    with patch.dict(os.environ, named):
        yield


def fitted(
    context: Any,
    config: dict[str, Any],
    nodes: Sequence[Path] | Path = Path("/dev/shm"),
    killed: int | None = None,
    stop_before: Sequence[int | None] = (),
    torn_by: int | None = None,
    torn_at: int | None = None,
    restarted: bool = True,
    slow_save: bool = False,
) -> dict[str, Any]:
    """A run up to its end, or to the step before which it is killed. Its staging memory is there before the first step.

    Args:
        nodes: the directory for copies of each rank's node, or where a user wants those of the only node.
        stop_before: for each rank, the step before which it is asked to stop, if at all.
        torn_by, torn_at: a rank that fails in the middle of its file, and the step of the copy.
        slow_save: a save in the background ends after all steps.

    Returns:
        where the run has resumed and ended, and on rank 0 its tensors at the start of each step and at its end.
    """
    parsed = from_dict(config)
    read = SimpleNamespace(history=checkpoint.history) if context.rank else checkpoint  # others may see older content
    with node(context, nodes), patch.object(memory_copies, "checkpoint", read):
        trainer = Trainer(parsed, mesh_of(context, parsed), restarted=restarted)
        report: dict[str, Any] = {
            "origin": size_changes.origin(trainer),
            "resumed": trainer.step_done,
            "notes": "\n".join(trainer.notes),
            "rollback": trainer.saver.newest,
        }
        events = Events(trainer, killed, stop_before[context.rank] if stop_before else None)
        done, save = threading.Event(), checkpoint.save

        def saved(*args: Any, **options: Any) -> int:
            done.wait(60 if slow_save else 0)
            return save(*args, **options)

        try:
            with (
                tearing(trainer, torn_at if torn_by == context.rank else None, torn_at),
                patch.object(staging, "allocate", side_effect=MemoryError),
                patch.object(checkpoint, "save", saved),
            ):
                report["status"] = fit(trainer, [events])
        except Killed:
            report["status"] = None
        finally:
            done.set()
            gc.unfreeze()
            gc.enable()
            trainer.close()
            if trainer.copies is not None:
                trainer.copies.close()
        events.states[trainer.step_done] = global_tensors(trainer, STATE)
    return report | {"ended": trainer.step_done, "states": {} if context.rank else events.states}


@contextmanager
def tearing(trainer: Trainer, own: int | None, step: int | None) -> Iterator[None]:
    """A rank writes half of its file, and no rank says that the copy has failed: a killed run leaves it as it is."""
    if step is None:
        yield
        return
    append, remove = tensors.append_chunk, shutil.rmtree

    def half(file: Any, *args: Any) -> Any:
        chunk = append(file, *args)
        if f".step_{own or 0:08d}" in file.name:
            file.truncate(chunk.offset + chunk.bytes // 2)
            file.flush()
            raise OSError("killed")
        return chunk

    def keep(path: Any, **options: Any) -> None:
        if f".step_{step:08d}" not in str(path):
            remove(path, **options)

    with patch.object(tensors, "append_chunk", half), patch.object(copies.shutil, "rmtree", keep):
        yield


def without_room(context: Any, config: dict[str, Any], nodes: Sequence[Path]) -> tuple[str, str | None]:
    """The error of a run whose directory has hardly any room, or what it says, and where its state came from."""
    parsed = from_dict(config)
    usage = SimpleNamespace(free=1000)
    with node(context, nodes), patch.object(copies.shutil, "disk_usage", lambda path: usage):
        try:
            trainer = Trainer(parsed, mesh_of(context, parsed))
        except ConfigError as error:
            return str(error), None
        assert memory_copies.copy(trainer) is None
    trainer.close()
    return "\n".join(trainer.notes), size_changes.origin(trainer)


def left_by_a_rollback(context: Any, config: dict[str, Any], nodes: Sequence[Path]) -> list[tuple[list[str], ...]]:
    """The copies on this rank's node before and after each rollback of a run."""
    parsed, seen = from_dict(config), list[tuple[list[str], ...]]()
    with node(context, nodes):
        trainer = Trainer(parsed, mesh_of(context, parsed))
        roll_back = trainer.roll_back

        def names() -> list[str]:
            return sorted(path.name for path in nodes[context.rank].glob("step_*"))

        def recorded(bad: StepResult) -> None:
            before = names()
            roll_back(bad)
            seen.append((before, names()))

        trainer.roll_back = recorded  # type: ignore[method-assign]
        try:
            fit(trainer)
        finally:
            gc.unfreeze()
            gc.enable()
            trainer.close()
    return seen
