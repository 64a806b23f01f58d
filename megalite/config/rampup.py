"""The global batch size of each step (`train.rampup_batch_size`).

The size is a function of the samples that were read before the step, so the order of samples is that of every
other run: a ramp-up only changes where steps cut it. Without one the size is constant. A run that is resumed
with other batches keeps its steps so far (`TrainConfig.finished`): the present sizes begin where it was
resumed.
"""

from functools import lru_cache

from megalite.config.sections.train import BatchSizeStep, Finished, TrainConfig


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
    return (
        train.global_batch_size if samples >= length else start + samples * increments // length * increment
    )


def samples_after(train: TrainConfig, step: int) -> int:
    """Samples that the first `step` steps of a run read."""
    level = next(each for each in reversed(_levels(train)) if each.step <= step)
    return level.samples + (step - level.step) * level.size


def steps_for(train: TrainConfig, samples: int) -> int:
    """The number of steps, from the first one on, that read at least so many samples."""
    level = next(each for each in reversed(_levels(train)) if each.samples <= samples)
    return level.step - (level.samples - samples) // level.size  # rounded up


def counts_samples(train: TrainConfig) -> bool:
    """Whether the learning rate follows the samples and not the steps: batches are of several sizes, and the
    run is so many samples long or grows its batches by itself."""
    ramped = train.rampup_batch_size is not None and problem(train) is None
    return ramped or (train.finished is not None and train.horizon.samples is not None)


def position(train: TrainConfig, step: int) -> float:
    """How far a run is after a step, in steps of the whole batch size: what the learning rate follows."""
    return samples_after(train, step) / train.global_batch_size if counts_samples(train) else step


def warmup_in_steps(train: TrainConfig) -> bool:
    """Whether a warm-up counts steps although the decay follows the samples: it was given in steps, and the
    run's batches have changed."""
    return train.rampup_batch_size is None and counts_samples(train) and train.horizon.warmup is None


def resume_at(train: TrainConfig, saved: TrainConfig, step: int) -> None:
    """Keep the batches of the steps that a checkpoint's run has done, if the present ones differ."""
    finished = saved.finished
    if step > 0 and (train.global_batch_size, train.rampup_batch_size) != (
        saved.global_batch_size,
        saved.rampup_batch_size,
    ):
        finished = Finished(
            step, samples_after(saved, step), tuple(level for level in _levels(saved) if level.step < step)
        )
    train.finished = finished


def _levels(train: TrainConfig) -> tuple[BatchSizeStep, ...]:
    finished = train.finished or Finished(0, 0, ())
    if train.rampup_batch_size is None or problem(train) is not None:
        return (*finished.levels, BatchSizeStep(finished.step, finished.samples, train.global_batch_size))
    return (
        *finished.levels,
        *_ramp(*train.rampup_batch_size, train.global_batch_size, finished.step, finished.samples),
    )


@lru_cache(maxsize=8)
def _ramp(
    start: int, increment: int, length: int, full: int, step: int, samples: int
) -> tuple[BatchSizeStep, ...]:
    """The levels from a step on, before which so many samples are read."""
    increments = (full - start) // increment
    completed = min(samples * increments // length, increments)
    levels = [BatchSizeStep(step, samples, start + completed * increment)]
    for number in range(completed + 1, increments + 1):
        # the first number of samples at which this many increments are made
        ends = -(-number * length // increments)
        step, samples, size = levels[-1]
        # none: a batch before has passed this level's part of the samples
        steps = max(-(-(ends - samples) // size), 0)
        levels.append(BatchSizeStep(step + steps, samples + steps * size, start + number * increment))
    return tuple(levels)
