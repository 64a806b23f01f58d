"""The global batch size of each step (`train.rampup_batch_size`). Imports no torch.

The size is a function of the samples that were read before the step, so the order of samples is that of every other run: a ramp-up only
changes where steps cut it. Without one the size is constant.
"""

from functools import lru_cache
from typing import NamedTuple

from megalite.config.schema import TrainConfig


def problem(train: TrainConfig) -> str | None:
    """What is wrong with a ramp-up by itself; None: nothing."""
    ramp, full = train.rampup_batch_size, train.global_batch_size
    if ramp is None:
        return None
    if len(ramp) != 3 or min(ramp) < 1:
        return "is not three positive numbers: the first batch size, the increment, and the number of samples"
    if ramp[0] > full:
        return f"starts above train.global_batch_size = {full}"
    if (full - ramp[0]) % ramp[1]:
        return f"does not reach train.global_batch_size = {full} in whole increments"
    return None


def batch_size(train: TrainConfig, samples: int) -> int:
    """Samples of the global batch that starts after this many."""
    if train.rampup_batch_size is None or problem(train) is not None:
        return train.global_batch_size
    start, increment, length = train.rampup_batch_size
    increments = (train.global_batch_size - start) // increment
    return train.global_batch_size if samples >= length else start + samples * increments // length * increment


def samples_after(train: TrainConfig, step: int) -> int:
    """Samples that the first `step` steps of a run read."""
    level = next(each for each in reversed(_levels(train)) if each.step <= step)
    return level.samples + (step - level.step) * level.size


def steps_for(train: TrainConfig, samples: int) -> int:
    """The number of steps, from the first one on, that read at least so many samples."""
    level = next(each for each in reversed(_levels(train)) if each.samples <= samples)
    return level.step - (level.samples - samples) // level.size  # rounded up


def position(train: TrainConfig, step: int) -> float:
    """How far a run is after a step, in steps of the whole batch size: what the learning rate follows."""
    if train.rampup_batch_size is None or problem(train) is not None:
        return step
    return samples_after(train, step) / train.global_batch_size


class Level(NamedTuple):
    """Steps of one batch size: the number of steps before them, and of the samples that these read."""

    step: int
    samples: int
    size: int


def _levels(train: TrainConfig) -> tuple[Level, ...]:
    if train.rampup_batch_size is None or problem(train) is not None:
        return (Level(0, 0, train.global_batch_size),)
    return _ramp(*train.rampup_batch_size, train.global_batch_size)


@lru_cache(maxsize=8)
def _ramp(start: int, increment: int, length: int, full: int) -> tuple[Level, ...]:
    increments = (full - start) // increment
    levels = [Level(0, 0, start)]
    for number in range(1, increments + 1):
        ends = -(-number * length // increments)  # the first number of samples at which this many increments are made
        step, samples, size = levels[-1]
        steps = max(-(-(ends - samples) // size), 0)  # none: a batch before has passed this level's part of the samples
        levels.append(Level(step + steps, samples + steps * size, start + number * increment))
    return tuple(levels)
