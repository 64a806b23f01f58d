"""Runs on the pool's ranks that save while something goes on: training, a disk that is full, a kill."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from megalite.checkpoint import tensors
from megalite.checkpoint.copies import DIRECTORY
from megalite.monitoring.observers import Observer
from megalite.training.fit import fit
from megalite.training.watchdog import Watchdog
from tests.support.jobs import make_trainer

SLOW_S = 0.08


def fit_to_the_end(context: Any, config: dict[str, Any]) -> int:
    """What pretrain.py does; returns the step at which it ended."""
    trainer = make_trainer(context, config)
    try:
        with Watchdog(trainer.config, trainer.mesh, trainer.run_dir):
            fit(trainer)
    finally:
        gc.unfreeze()
        gc.enable()
    trainer.close()
    return trainer.step_done


class Steps(Observer):
    """A clock by which every step takes an hour, from a start of its own."""

    def __init__(self, start: float):
        self.now = start

    def after(self, step: int) -> None:
        self.now += 3600

    def __call__(self) -> float:
        return self.now


def fit_by_a_clock_of_its_own(context: Any, config: dict[str, Any]) -> list[tuple[str, bool]]:
    """A run by clocks that differ: on all ranks but the first it is always time. Returns what this rank has saved."""
    trainer, clock = make_trainer(context, config), Steps(1e6 * context.rank)
    saved: list[tuple[str, bool]] = []
    begin_save = trainer.begin_save

    def begin(best: bool = False, timed: bool = False) -> Any:
        save = begin_save(best, timed)
        saved.append((save.directory.name, timed))
        return save

    trainer.begin_save = begin  # type: ignore[method-assign]
    try:
        fit(trainer, [clock], clock=clock if context.rank == 0 else lambda: 1e9 * (clock() + 1))
    finally:
        gc.unfreeze()
        gc.enable()
    trainer.close()
    return saved


def fit_with_full_disk(context: Any, config: dict[str, Any], full: int, at: int, last: int) -> tuple[int, str, bool]:
    """On one rank no file may be longer than a little while the steps from `at` to `last` are trained.

    Returns the step at which it ended, the error if it did not end well, and whether rank 0 saw that a failed save had
    left something.
    """
    trainer = make_trainer(context, config)
    train_step, folder, left = trainer.train_step, trainer.run_dir / "checkpoints", []

    def limited(stop: bool = False, wait: bool = False) -> Any:
        if trainer.step_done in (at - 1, last):
            trainer.saver.wait()  # the limit is for what is saved after these steps
        if context.rank == full:
            limit = 20_000 if at <= trainer.step_done + 1 <= last else resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        if context.rank == 0 and trainer.step_done + 1 > at and not trainer.saver.under_way:
            left.extend(path.name for path in folder.glob(".step*"))
        return train_step(stop, wait)

    trainer.train_step = limited  # type: ignore[method-assign]
    problem = ""
    try:
        fit(trainer)
    except Exception as error:
        problem = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        gc.unfreeze()
        gc.enable()
        trainer.close()
    return trainer.step_done, problem, bool(left)


@contextlib.contextmanager
def slow_disk(ready: threading.Event | None = None) -> Iterator[None]:
    """Every file takes a while to reach the disk, and none does before it is ready."""
    original = os.fsync

    def slow(descriptor: int) -> None:
        if ready is not None:
            ready.wait(60)
        time.sleep(SLOW_S)
        original(descriptor)

    with patch("os.fsync", slow):
        yield


def save_while_training(context: Any, config: dict[str, Any], steps: int, others: int) -> dict[str, Any]:
    """Begin a save, train on before the disk takes anything, and begin another one at once."""
    disk = threading.Event()
    trainer = make_trainer(context, config)
    try:
        for _ in range(steps):
            trainer.step()
        with slow_disk(disk):
            first = trainer.begin_save()
            for _ in range(others):
                trainer.step()
            under_way = trainer.saver.under_way
            disk.set()
            second = trainer.begin_save()
            trainer.saver.wait()
    finally:
        trainer.close()
    ended = [save.directory.name for save in trainer.saver.take_ended()]
    return {"under_way": under_way, "ended": ended, "first": vars(first), "second": vars(second)}


def await_a_slow_writer(context: Any, config: dict[str, Any], go_on: Path) -> tuple[int, bool]:
    """A save in which rank 1 writes only when rank 0 was seen to wait for it, as if both had a GPU.

    Returns for rank 0 how many collectives it had started by then, and whether its watchdog would have ended it after
    hours.
    """
    trainer = make_trainer(context, config)
    dog = Watchdog(trainer.config, trainer.mesh, trainer.run_dir)
    started: list[str] = []
    seen: list[tuple[int, bool]] = []

    def look() -> None:
        time.sleep(0.2)  # in which a rank that did not wait would begin its collective
        ended: list[str] = []
        peers = SimpleNamespace(look=lambda: None, origin=lambda peer: None)
        with (
            patch.object(dog, "_end", lambda verdict, what: ended.append(what)),
            patch("torch.cuda.is_initialized", lambda: True),
        ):
            dog._look(peers, 1e9)  # type: ignore[arg-type]
        seen.append((len(started), bool(ended)))
        go_on.touch()

    def waits(what: Any) -> None:
        if "what to save" in str(what):
            threading.Thread(target=look).start()

    def append(*args: Any) -> Any:
        while not go_on.exists():
            time.sleep(0.01)
        return original(*args)

    original, gather = tensors.append_chunk, dist.gather_object
    listeners = trainer.mesh.activity.listeners
    if context.rank == 0:
        trainer.mesh.activity.listeners = (*listeners, waits)
    slow = patch.object(tensors, "append_chunk", append if context.rank == 1 else original)
    with (
        slow,
        patch.object(
            dist, "gather_object", lambda *args, **options: [started.append("gather"), gather(*args, **options)]
        ),
    ):
        trainer.save()
    trainer.mesh.activity.listeners = listeners
    trainer.close()
    return seen[0] if seen else (0, False)


def fit_until_killed(
    context: Any, config: dict[str, Any], seconds: float | None, victims: list[int], memory: Path
) -> int:
    """A run of which some ranks are killed after a while, unless it has ended by then.

    Args:
        memory: each rank is a node, whose copies in memory, if there are any, are in a directory in here.
    """
    done = threading.Event()

    def kill() -> None:
        if not done.wait(seconds):
            os.kill(os.getpid(), signal.SIGKILL)

    if seconds is not None and context.rank in victims:
        threading.Thread(target=kill, daemon=True).start()
    try:
        with patch.dict(os.environ, {DIRECTORY: str(memory / str(context.rank))}):
            return fit_to_the_end(context, config)
    finally:
        done.set()


def content_of(directory: Path) -> dict[str, Any]:
    """All that a checkpoint holds, to be compared with another: bytes, tables and state, but for the options that a
    test varies."""
    files: dict[str, Any] = {path.name: path.read_bytes() for path in sorted(directory.iterdir())}
    manifest = json.loads(files.pop("manifest.json"))
    state = {name: value for name, value in manifest["state"].items() if name != "config"}
    return {**files, "files": manifest["files"], "tensors": manifest["tensors"], "state": state}
