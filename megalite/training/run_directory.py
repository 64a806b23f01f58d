"""Access to the directory of a run. Nothing in it is overwritten unless requested.

Rank 0 decides before any process group starts. It locks the directory (`launch.run_lock`), refuses to start a
new run over an old one, and ends immediately if nothing is left to do.
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
from megalite.config import run_files
from megalite.config.errors import ConfigError
from megalite.config.schema import Config
from megalite.launch.run_lock import RunLock
from megalite.stores.url import is_url, normal
from megalite.training.best import stopped_early
from megalite.training.resume_checks import changed_experiment, continue_steps, is_same_run


@dataclass
class Claim:
    """A run directory that is locked for this job.

    Attributes:
        notes: lines for the user, for example about a stale lock that was taken over or an old run that was
            renamed.
        complete: the reason why nothing is left to do, and how to continue; None if there are steps left.
    """

    lock: RunLock
    notes: list[str]
    complete: str | None = None


def claim(config: Config, restarted: bool = False, lock: Callable[[Path], RunLock] = RunLock) -> Claim:
    """Lock the directory of the run for this job.

    Args:
        restarted: whether the job was started again, so that it may find a run that it began itself, with the
            same options.

    Raises:
        InUseError: another job uses the directory.
        ConfigError: the directory is not writable, or contains an earlier run that would be overwritten, or
            that is complete and had other options.
    """
    directory = config.run.directory
    held = lock(directory)
    try:
        note = held.acquire()
    except OSError as error:
        raise ConfigError(
            f"Could not write to run.dir={config.run.dir}: {directory}: {error.strerror}. Choose "
            "another run.dir."
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
    """Return whether the run in the directory has the same options, except for the layout."""
    try:
        return is_same_run(
            config, yaml.safe_load((config.run.directory / run_files.CONFIG).read_text(encoding="utf-8"))
        )
    except (OSError, yaml.YAMLError, ConfigError, TypeError):
        return False


def has_run(directory: Path) -> bool:
    """Return whether a directory contains steps or checkpoints of a run."""
    metrics = directory / run_files.METRICS
    return any((directory / run_files.CHECKPOINTS).glob("step_*")) or (
        metrics.is_file() and metrics.stat().st_size > 0
    )


def starts_anew(config: Config) -> bool:
    """Return whether the run does not continue from its own directory."""
    load = config.checkpoint.load
    if load in ("auto", "none"):
        return load == "none"
    if config.run.url is not None and is_url(load):
        own, place = Path(config.run.url), Path(normal(load))
    else:
        own, place = config.run.directory.resolve(), Path(load).resolve()
    return own not in place.parents and own != place


def _move_aside(config: Config, directory: Path, lock: RunLock) -> str:
    """Rename the directory of an earlier run. Return a line for the user.

    Raises:
        ConfigError: run.overwrite is not set, or the directory cannot be renamed.
    """
    if not config.run.overwrite:
        raise ConfigError(
            f"checkpoint.load={config.checkpoint.load} starts a new run, but {directory} already "
            f"contains one ({_described(directory)}). Choose another name, for example "
            f"run.name={_free_name(config)}, or set run.overwrite=true to rename the old run to "
            f"{_free(directory).name}. To continue the old run, leave checkpoint.load unset."
        )
    target = _free(directory)
    try:
        lock.move_directory(target)
    except OSError as error:
        raise ConfigError(
            f"run.overwrite=true: could not rename {directory} to {target.name} ({error.strerror})."
        ) from None
    return f"renamed the previous run in {directory} to {target}"


def _free_name(config: Config) -> str:
    """Return an unused name for another run in the same parent directory."""
    names = (f"{config.run.name}-{number}" for number in count(2))
    return next(name for name in names if not has_run(config.run.directory.with_name(name)))


def _free(directory: Path) -> Path:
    """Return the path to which an old run is renamed."""
    places = (directory.with_name(f"{directory.name}.old-{number}") for number in count(1))
    return next(place for place in places if not place.exists())


def _described(directory: Path) -> str:
    newest = checkpoint.latest(directory / run_files.CHECKPOINTS)
    return f"newest checkpoint: {newest.name}" if newest else "no checkpoint"


def _nothing_to_do(config: Config) -> str | None:
    """Return the reason why nothing is left to do and how to continue, or None if steps are left.

    The result is also None if this cannot be determined.

    Raises:
        ConfigError: the run is complete, but had other options, so that this one is probably another run.
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
    ):  # there is none, or resuming it will report the error
        return None
    early = stopped_early(config, state.get("loop", {}))
    if step < config.train.steps and early is None:
        return None
    allow = (
        ""
        if config.optimizer.decay == "constant"
        else " and set checkpoint.allow=[horizon], because the learning rates change"
    )
    done = f"all {planned} steps are done" if step >= planned else f"{step} of {planned} steps are done"
    wanted = "" if config.train.steps == planned else f", and train.steps={config.train.steps} is not larger"
    more = f"set train.steps to more than {step}{allow}"
    if step < config.train.steps:
        wanted, more = f": {early}", "increase train.early_stopping_patience or leave it unset"
    if not starts_anew(config) and (table := changed_experiment(config, state)):
        raise ConfigError(
            f"run.name={config.run.name} has already finished ({done}, {place}), with "
            "different options:\n"
            + "\n".join(table)
            + (
                "\nNothing was trained. To start a new run, choose another name, for example "
                f"--run.name {_free_name(config)}. To continue the old run, {more}."
            )
        )
    return f"nothing to do: {done} ({place}){wanted}. To continue, {more}."
