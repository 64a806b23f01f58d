"""What a run may do with its directory: nothing that is there is lost without being asked for.

Rank 0 decides before any process group starts: it locks the directory (`launch.run_lock`), refuses to start a
new run over an old one, and ends at once where nothing is left to do.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import yaml

from megalite import checkpoint
from megalite.checkpoint import CheckpointError, find
from megalite.config.errors import ConfigError
from megalite.config.schema import Config
from megalite.launch.run_lock import RunLock
from megalite.monitoring.metrics import FILE as METRICS
from megalite.training.best import stopped_early
from megalite.training.resume_checks import changed_experiment, continue_steps, is_same_run


@dataclass
class Claim:
    """A run's directory, locked for this job.

    Attributes:
        notes: lines for the user: a stale lock that was taken over, an old run that was moved aside.
        complete: why there is nothing to do, and the way to continue; None: there are steps to do.
    """

    lock: RunLock
    notes: list[str]
    complete: str | None = None


def claim(config: Config, restarted: bool = False, lock: Callable[[Path], RunLock] = RunLock) -> Claim:
    """Lock the run's directory for this job.

    Args:
        restarted: the job was started again and may find a run that it began itself, with the same options.

    Raises:
        InUseError: another job uses the directory.
        ConfigError: an earlier run in it would be overwritten or is complete and had other options, or it
        cannot be written.
    """
    directory = config.run.directory
    held = lock(directory)
    try:
        note = held.acquire()
    except OSError as error:
        raise ConfigError(
            f"run.dir = {config.run.dir}: {directory} cannot be written ({error.strerror}). Choose another "
            "run.dir."
        ) from None
    claimed = Claim(held, [note] if note else [])
    try:
        if starts_anew(config) and has_run(directory) and not (restarted and _is_own(config)):
            claimed.notes.append(_move_aside(config, directory, held))
        claimed.complete = _nothing_to_do(config)
    except BaseException:
        held.release()
        raise
    return claimed


def _is_own(config: Config) -> bool:
    """Whether the run in the directory was begun with the same options, the layout excepted."""
    try:
        return is_same_run(
            config, yaml.safe_load((config.run.directory / "config.yaml").read_text(encoding="utf-8"))
        )
    except (OSError, yaml.YAMLError, ConfigError, TypeError):
        return False


def has_run(directory: Path) -> bool:
    """Whether a run has left steps or checkpoints in a directory."""
    metrics = directory / METRICS
    return any((directory / "checkpoints").glob("step_*")) or (
        metrics.is_file() and metrics.stat().st_size > 0
    )


def starts_anew(config: Config) -> bool:
    """Whether the run does not continue what its own directory holds."""
    load = config.checkpoint.load
    if load in ("auto", "none"):
        return load == "none"
    own = config.run.directory.resolve()
    return own not in (place := Path(load).resolve()).parents and own != place


def _move_aside(config: Config, directory: Path, lock: RunLock) -> str:
    """Rename the directory of an earlier run if run.overwrite allows it, or raise ConfigError. Returns a line
    for the user."""
    if not config.run.overwrite:
        raise ConfigError(
            f"checkpoint.load = {config.checkpoint.load} starts a new run, and {directory} holds one already "
            f"({_described(directory)}). "
            f"Give this one another name, for example run.name = {_free_name(config)}, or set run.overwrite "
            "= true, which keeps the old "
            f"one as {_free(directory).name}. To continue the old one, leave checkpoint.load out."
        )
    target = _free(directory)
    try:
        lock.move_directory(target)
    except OSError as error:
        raise ConfigError(
            f"run.overwrite = true: {directory} cannot be renamed to {target.name} ({error.strerror})."
        ) from None
    return f"the run that was in {directory} is now {target}"


def _free_name(config: Config) -> str:
    """A name for another run next to this one."""
    names = (f"{config.run.name}-{number}" for number in count(2))
    return next(name for name in names if not has_run(config.run.directory.with_name(name)))


def _free(directory: Path) -> Path:
    """The name that an old run gets."""
    places = (directory.with_name(f"{directory.name}.old-{number}") for number in count(1))
    return next(place for place in places if not place.exists())


def _described(directory: Path) -> str:
    newest = checkpoint.latest(directory / "checkpoints")
    return f"its newest checkpoint is {newest.name}" if newest else "it has no checkpoint"


def _nothing_to_do(config: Config) -> str | None:
    """Why there is nothing to do, and the way to continue; None where steps are left, or where that is not
    known.

    Raises:
        ConfigError: the run that is complete had other options, so that this one is probably meant to be
        another.
    """
    load, directory = config.checkpoint.load, config.run.directory
    if load == "none":
        return None
    place = find(directory if load == "auto" else Path(load))
    try:
        state = checkpoint.manifest_of(place).state
        step, planned = state["step"], state["config"]["train"]["steps"]
        config = deepcopy(config)
        continue_steps(config, state)
    except (
        CheckpointError,
        KeyError,
        TypeError,
    ):  # reading the checkpoint to resume will say what is wrong, or there is none
        return None
    early = stopped_early(config, state.get("loop", {}))
    if step < config.train.steps and early is None:
        return None
    allow = (
        ""
        if config.optimizer.decay == "constant"
        else " and accept the new learning rates with checkpoint.allow = [horizon]"
    )
    done = f"all {planned} steps are done" if step >= planned else f"{step} of {planned} steps are done"
    wanted = "" if config.train.steps == planned else f", train.steps = {config.train.steps} asks for no more"
    more = f"set train.steps to more than {step}{allow}"
    if step < config.train.steps:
        wanted, more = f": {early}", "raise train.early_stopping_patience, or leave it out"
    if not starts_anew(config) and (table := changed_experiment(config, state)):
        raise ConfigError(
            f"run.name = {config.run.name} is a run that has ended ({done}, {place}), with other options:\n"
            + "\n".join(table)
            + "\nNothing was trained. For a new run, give it another name, for example --run.name "
            f"{_free_name(config)}. "
            f"To continue the old one, {more}."
        )
    return f"nothing to do: {done} ({place}){wanted}. To continue, {more}."
