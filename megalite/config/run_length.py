"""The length of a run in steps.

`resolve_steps` replaces amounts that depend on other options (train.tokens, train.epochs, a warm-up that is a
share of the steps) by numbers of steps: a resolved configuration has nothing else. Imports no torch; reads
the index of the training data, and only for train.epochs.
"""

import math
from fractions import Fraction
from typing import Any

from megalite.config.extensions import is_source
from megalite.config.rampup import position, resume_at, steps_for
from megalite.config.schema import Config
from megalite.config.sections.train import BatchSizeStep, Finished, Horizon
from megalite.config.streams import has_streams
from megalite.config.token_files import missing_files, prefixes


def resolve_steps(config: Config) -> None:
    """Replace train.tokens or train.epochs by train.steps, and a share of the steps by their number.

    Rounds up. What cannot be resolved because another option is wrong, or because the training data is not
    there, is left as it is, a share of unknown steps as a Fraction: the rules say why. Raises DataError if
    the data is damaged.
    """
    train, optimizer = config.train, config.optimizer
    sizes = min(train.global_batch_size, config.data.sequence_length)
    warmup: Any = optimizer.warmup_steps
    share, samples = warmup if isinstance(warmup, Fraction) else None, None
    if train.tokens is not None and train.tokens > 0 and sizes > 0:
        samples = math.ceil(Fraction(train.tokens, config.data.sequence_length))
        train.tokens = None
    if (
        train.epochs is not None
        and math.isfinite(train.epochs)
        and train.epochs > 0
        and sizes > 0
        and _can_be_counted(config)
    ):
        # numpy, which a run of a given number of steps need not load here
        from megalite.config.samples import samples_per_epoch

        samples = math.ceil(Fraction(repr(train.epochs)) * samples_per_epoch(config.data))
        train.epochs = None
    train.horizon = Horizon(samples, share if train.epochs is None else None)
    _count_steps(config)


def _count_steps(config: Config) -> None:
    """Set the numbers of steps that were given as amounts."""
    train, horizon = config.train, config.train.horizon
    if horizon.samples is not None:
        train.steps = steps_for(train, horizon.samples)
    if horizon.warmup is not None:
        config.optimizer.warmup_steps = math.ceil(horizon.warmup * Fraction(position(train, train.steps)))


def batches_done(config: Config) -> dict[str, Any]:
    """What a checkpoint keeps of the batches of a run that was resumed with other ones; nothing for most
    runs."""
    return {} if config.train.finished is None else {"batches": config.train.finished}


def with_batches(saved: Config, state: dict[str, Any]) -> Config:
    """A checkpoint's configuration with the batches that its run has had."""
    if (batches := state.get("batches")) is not None:
        step, samples, levels = batches
        saved.train.finished = Finished(step, samples, tuple(BatchSizeStep(*level) for level in levels))
    return saved


def resume_steps(config: Config, saved: Config, step: int) -> None:
    """Count the steps again after those that a checkpoint's run has done, if its batches were others: the
    finished samples, and the rest.

    Args:
        saved: the checkpoint's configuration, as of `with_batches`.
    """
    resume_at(config.train, saved.train, step)
    _count_steps(config)


def _can_be_counted(config: Config) -> bool:
    """Whether the training data and the options that say how it is read keep their rules."""
    data = config.data
    weights = data.train.values() if isinstance(data.train, dict) else ()
    held_out = data.validation if isinstance(data.validation, float | int) else 0.0
    return (
        (bool(prefixes(data.train)) or is_source(data.train))
        and not has_streams(data)
        and not missing_files(data.train)
        and all(0 < each < math.inf for each in weights)
        and 0 <= held_out < 1
    )
