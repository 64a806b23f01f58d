"""Copies of a run's state in memory (`checkpoint.copies`): made between steps, and read by a restart.

The functions take a trainer and are collective.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalite import checkpoint
from megalite.checkpoint import CheckpointError, DamagedError, Manifest
from megalite.checkpoint.agreement import gathered, on_rank_0, raise_on_all_ranks
from megalite.checkpoint.copies import DIRECTORY, KEPT, PLACE_VARIABLE, Copies, Copy, directory_of
from megalite.checkpoint.errors import reason
from megalite.config import run_files
from megalite.config.amounts import duration_seconds
from megalite.config.errors import ConfigError
from megalite.config.run_files import step_name
from megalite.parallel.sharding.offload import OffloadError
from megalite.system.activity import SAVING
from megalite.system.progress import amount
from megalite.training import checkpointing, resume_checks

if TYPE_CHECKING:
    from megalite.training.trainer import Trainer

LINEAGE = "lineage"
"""Key of the state of a copy: what the disk had of the run when it was made (`_lineage`)."""


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
    """Resume from the newest usable copy, if this is a restart and no checkpoint was published after it.

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
        disk = on_rank_0(trainer.mesh, lambda: _lineage(trainer))
        for candidate in copies.found():
            name = f"the copy in memory of {step_name(candidate.step)}"
            problem = candidate.problem or _problem(trainer, candidate.manifest, disk)
            if not problem:
                assert candidate.manifest is not None
                try:
                    if not published:  # a load that fails would leave half of a state to start with
                        _verify(trainer, candidate.manifest)
                    checkpointing.resume(trainer, candidate.manifest)
                except DamagedError as error:
                    problem = str(error)
            if not problem:
                assert candidate.manifest is not None
                used = copies.resumed = candidate.step
                notes.append(f"continuing from {name}")
                trainer.saver.newest = _rollback_target(trainer, candidate.manifest.state[LINEAGE], disk)
                break
            notes.append(f"{name} is not used: {problem}")
    copies.remove(keep=used)
    trainer.notes[:0] = notes
    return used is not None


def _published(trainer: Trainer) -> list[Path]:
    """Return the checkpoints of the run on the disk, newest first."""
    directories, _ = checkpoint.history(trainer.run_dir / run_files.CHECKPOINTS, trainer.mesh)
    return directories


def _lineage(trainer: Trainer) -> dict[str, Any]:
    """Return what the disk has of the run, as JSON data. Not collective: that of rank 0 counts.

    Keys:
        run: what identifies the run, also among earlier ones in its directory; None: nothing does.
        saving: the name of a checkpoint whose save is in progress, or None.
        latest: the name of the newest checkpoint and the end of its manifest, which has its checksum, or
            None.
        rollback: the checkpoint to roll back to, by its name if it is the run's own, or None.
    """
    saver, run, latest, rollback = trainer.saver, None, None, None
    checkpoints = trainer.run_dir / run_files.CHECKPOINTS
    saving = saver.saving if saver.under_way else None  # first: the save may end now
    with suppress(OSError), open(trainer.run_dir / run_files.STARTS, "rb") as file:
        run = hashlib.sha256(file.readline()).hexdigest()
    if (newest := checkpoint.latest(checkpoints)) is not None:
        latest = [newest.name, _end_of_manifest(newest)]
    if (target := saver.newest) is not None:
        rollback = target.name if target.parent == checkpoints else str(target.absolute())
    return {"run": run, "saving": saving and saving.name, "latest": latest, "rollback": rollback}


def _end_of_manifest(directory: Path) -> str:
    with suppress(OSError), open(directory / run_files.MANIFEST, "rb") as file:
        file.seek(-min(64, file.seek(0, os.SEEK_END)), os.SEEK_END)
        return file.read().decode(errors="replace")
    return ""


def _published_later(copied: dict[str, Any], disk: dict[str, Any]) -> bool:
    """Whether the save that was in progress during a copy has become the newest checkpoint."""
    latest = disk["latest"]
    return latest is not None and latest != copied["latest"] and latest[0] == copied["saving"]


def _problem(trainer: Trainer, manifest: Manifest | None, disk: dict[str, Any]) -> str:
    """Return why a copy cannot be used, or an empty string. The same on every rank.

    Numbers of steps do not say which state is newer, because a run may go back, or continue from an earlier
    checkpoint: a copy is newer than the newest checkpoint if that is still the one of when it was made.

    Args:
        disk: what the disk has now (`_lineage`).
    """
    assert manifest is not None
    copied, latest = manifest.state[LINEAGE], disk["latest"]
    if copied["run"] != disk["run"]:
        return f"it is of another run in {trainer.run_dir}"
    if latest != copied["latest"] and not _published_later(copied, disk):
        return "the checkpoints before it are gone" if latest is None else f"checkpoint {latest[0]} is newer"
    config, saved = trainer.config, manifest.state["config"]
    if config.train.memory_budget is not None:  # what is recomputed depends on the layout
        config = replace(config, train=replace(config.train, recompute=saved["train"]["recompute"]))
    return "" if resume_checks.is_same_run(config, saved) else "it was made with other options"


def _verify(trainer: Trainer, manifest: Manifest) -> None:
    with raise_on_all_ranks(trainer.mesh, DamagedError):
        manifest.verify(trainer.mesh.world.rank, trainer.mesh.world.size)


def _rollback_target(trainer: Trainer, copied: dict[str, Any], disk: dict[str, Any]) -> Path | None:
    """Return the checkpoint to roll back to: that of when a copy was made or, if it was not saved among
    skipped steps, the one whose save was in progress. Collective."""
    checkpoints = trainer.run_dir / run_files.CHECKPOINTS

    def look() -> Path | None:
        if _published_later(copied, disk):
            with suppress(CheckpointError):
                newest = checkpoints / disk["latest"][0]
                if checkpoint.manifest_of(newest).state["guard"]["streak"] == 0:
                    return newest
        if copied["rollback"] is None or not (target := checkpoints / copied["rollback"]).is_dir():
            return None
        return target

    return on_rank_0(trainer.mesh, look)


def check_room(trainer: Trainer) -> None:
    """Check that the copies fit into their directory, and allocate their staging memory.

    A job that continues on fewer nodes, each with more of the state, goes on without copies if they do not,
    and keeps the one from which it has resumed.

    Raises:
        ConfigError: on every rank, if they do not on a node.
    """
    copies = trainer.copies
    assert copies is not None
    rectangles = checkpointing.to_save(trainer)
    need, room = copies.room(rectangles)
    every = trainer.config.checkpoint.copy_interval
    message = (
        f"checkpoint.copy_interval = {every}: {KEPT} copies of the state of this node's ranks, and of those "
        f"of its neighbor, take {amount(need, 'B')}, but {copies.directory} has room for {amount(room, 'B')}"
        ". Give it more memory (in a container --shm-size), leave checkpoint.copy_interval unset, or "
        f"name another directory in memory with {PLACE_VARIABLE}."
    )
    try:
        with raise_on_all_ranks(trainer.mesh):
            if need > room:
                raise ConfigError(message)
    except ConfigError as error:
        if not (copies.of_restart and trainer.step_done):
            raise
        trainer.notes.append(f"{error}\ncontinuing without copies in memory")
        copies.without_room = True
        copies.remove(keep=copies.resumed)
    else:
        copies.reserve(rectangles)


def copy(trainer: Trainer, wait: bool = False) -> Copy | None:
    """Start a copy of the state after the last step.

    Among skipped steps there is none: the run may go back, and a restart could not. There is none without
    room, either.

    Args:
        wait: return when the copy is complete or has failed.
    """
    copies = trainer.copies
    assert copies is not None
    if copies.without_room:
        return None
    trainer.drain()  # an unconfirmed step must not be copied
    if trainer.bad_steps.streak:
        return None
    trainer.mesh.activity.enter(SAVING)
    with raise_on_all_ranks(trainer.mesh, OffloadError):
        trainer.store.state.sync()
    state = checkpointing.state_of(trainer)
    if trainer.mesh.world.rank == 0:
        state[LINEAGE] = _lineage(trainer)
    begun = copies.begin(trainer.step_done, checkpointing.to_save(trainer), state)
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
