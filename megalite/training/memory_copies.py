"""Copies of a run's state in memory (`checkpoint.copies`): made between steps, and read by a restart.

The functions take a trainer and are collective.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from megalite import checkpoint
from megalite.checkpoint import CheckpointError, DamagedError, Manifest
from megalite.checkpoint.agreement import gathered, raise_on_all_ranks
from megalite.checkpoint.copies import DIRECTORY, KEPT, Copies, Copy, directory_of
from megalite.checkpoint.errors import reason
from megalite.config import run_files
from megalite.config.amounts import duration_seconds
from megalite.config.errors import ConfigError
from megalite.config.run_files import step_name, step_number
from megalite.parallel.sharding.offload import OffloadError
from megalite.system.activity import SAVING
from megalite.system.progress import amount
from megalite.training import checkpointing, resume_checks

if TYPE_CHECKING:
    from pathlib import Path

    from megalite.training.trainer import Trainer


def open_copies(trainer: Trainer) -> Copies:
    """Return the run's copies, those of an earlier start included."""
    config = trainer.config
    return Copies(
        directory_of(config.run.directory),
        trainer.mesh,
        background=config.checkpoint.async_save,
        timeout=duration_seconds(config.run.timeout) or None,
    )


def resume_from_memory(trainer: Trainer, restarted: bool) -> bool:
    """Resume from the newest usable copy, if this is a restart and the disk has no newer checkpoint.

    Says in `trainer.notes` which copy is used, or why none is. Copies that are not used are removed.

    Args:
        restarted: whether the job was started again. A launcher that names the directory of the copies keeps
            it over the starts of one job only, so copies in it are read in any case.

    Returns:
        whether the run has resumed.
    """
    copies, notes = trainer.copies, list[str]()
    assert copies is not None
    used = None
    copies.of_restart = any(gathered(restarted or DIRECTORY in os.environ, trainer.mesh))
    if copies.of_restart:
        published = _published(trainer)
        newest = step_number(published[0].name) or 0 if published else 0
        for candidate in copies.found():
            name = f"the copy in memory of {step_name(candidate.step)}"
            if candidate.step < newest:
                notes.append(f"{name} is not used: {published[0]} is newer")
                break
            problem = candidate.problem or _problem(trainer, candidate.manifest)
            if not problem:
                assert candidate.manifest is not None
                try:
                    if not published:  # a load that fails would leave half of a state to start with
                        _verify(trainer, candidate.manifest)
                    checkpointing.resume(trainer, candidate.manifest)
                except DamagedError as error:
                    problem = str(error)
            if not problem:
                used = copies.resumed = candidate.step
                notes.append(f"continuing from {name}")
                trainer.saver.newest = _rollback_target(published)
                break
            notes.append(f"{name} is not used: {problem}")
    copies.remove(keep=used)
    trainer.notes[:0] = notes
    return used is not None


def _published(trainer: Trainer) -> list[Path]:
    """Return the checkpoints of the run on the disk, newest first."""
    directories, _ = checkpoint.history(trainer.run_dir / run_files.CHECKPOINTS, trainer.mesh)
    return directories


def _problem(trainer: Trainer, manifest: Manifest | None) -> str:
    """Return why a copy cannot be used, or an empty string. The same on every rank."""
    assert manifest is not None
    config, saved = trainer.config, manifest.state["config"]
    if config.train.memory_budget is not None:  # what is recomputed depends on the layout
        config = replace(config, train=replace(config.train, recompute=saved["train"]["recompute"]))
    return "" if resume_checks.is_same_run(config, saved) else "it was made with other options"


def _verify(trainer: Trainer, manifest: Manifest) -> None:
    with raise_on_all_ranks(trainer.mesh, DamagedError):
        manifest.verify(trainer.mesh.world.rank, trainer.mesh.world.size)


def _rollback_target(published: list[Path]) -> Path | None:
    """Return the newest checkpoint that was not saved among skipped steps."""
    for directory in published:
        with suppress(CheckpointError):
            if checkpoint.manifest_of(directory).state["guard"]["streak"] == 0:
                return directory
    return None


def check_room(trainer: Trainer) -> None:
    """Check that the copies fit into their directory.

    A job that continues on fewer nodes, each with more of the state, goes on without copies if they do not.

    Raises:
        ConfigError: on every rank, if they do not on a node.
    """
    copies = trainer.copies
    assert copies is not None
    need, room = copies.room(checkpointing.to_save(trainer))
    every = trainer.config.checkpoint.copy_interval
    message = (
        f"checkpoint.copy_interval = {every}: {KEPT} copies of the state of this node's ranks, and of those "
        f"of its neighbor, take {amount(need, 'B')}, but {copies.directory} has room for {amount(room, 'B')}"
        ". Give it more memory (in a container --shm-size), leave checkpoint.copy_interval unset, or "
        f"name another directory in memory with {DIRECTORY}."
    )
    try:
        with raise_on_all_ranks(trainer.mesh):
            if need > room:
                raise ConfigError(message)
    except ConfigError as error:
        if not (copies.of_restart and trainer.step_done):
            raise
        trainer.notes.append(f"{error}\ncontinuing without copies in memory")
        copies.remove()
        copies.close()
        trainer.copies = None


def copy(trainer: Trainer, wait: bool = False) -> Copy | None:
    """Start a copy of the state after the last step.

    Among skipped steps there is none: the run may go back, and a restart could not.

    Args:
        wait: return when the copy is complete or has failed.
    """
    copies = trainer.copies
    assert copies is not None
    trainer.drain()  # an unconfirmed step must not be copied
    if trainer.bad_steps.streak:
        return None
    trainer.mesh.activity.enter(SAVING)
    with raise_on_all_ranks(trainer.mesh, OffloadError):
        trainer.store.state.sync()
    begun = copies.begin(trainer.step_done, checkpointing.to_save(trainer), checkpointing.state_of(trainer))
    trainer.store.state.release()
    if wait:
        copies.wait()
    return begun


def report(copies: Copies) -> list[str]:
    """Return lines about copies that have ended: the first complete one of this start, and failures.

    Raises the error of a copy that the memory is not the reason of.
    """
    lines = []
    for ended in copies.take_ended():
        if ended.error is not None:
            if not isinstance(ended.error, CheckpointError | OSError):
                raise ended.error
            lines.append(
                f"failed to copy the state of step {ended.step} to {copies.directory}: "
                f"{reason(ended.error)}\ncontinuing training; the next copy will try again"
            )
        elif ended.number == 1:
            lines.append(
                f"copied {amount(ended.bytes, 'B')} of state to memory in {ended.complete:.2f} s (training "
                f"paused for {ended.held:.2f} s); further copies are not reported"
            )
    return lines
