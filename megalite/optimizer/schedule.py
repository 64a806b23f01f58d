"""The learning rate as a pure function of the step.

Scaling with the global batch size: linear (Goyal et al. 2017) or square root (Krizhevsky 2014; the usual
choice with Adam). wsd: warmup, stable, decay (Hu et al. 2024). A new schedule is a branch here and a value of
`optimizer.decay` in config/sections/optimizer.py.
"""

from __future__ import annotations

from math import cos, pi, sqrt

from megalite.config.rampup import position, warmup_in_steps
from megalite.config.schema import Config


def learning_rate(config: Config, step: int) -> float:
    """Return the learning rate of a 1-based step.

    Warm-up reaches the peak at step warmup_steps, decay reaches the minimum at the last step. With batches of
    several sizes (a ramp-up, or another size since a resume) all three are counted in whole batches.
    """
    options, train = config.optimizer, config.train
    several_sizes = train.rampup_batch_size is not None or train.finished is not None
    at, steps = (
        (position(train, step), position(train, train.steps)) if several_sizes else (step, train.steps)
    )
    scale = batch_scale(config)
    peak, minimum = options.lr * scale, options.min_lr * scale
    in_steps = several_sizes and warmup_in_steps(train)
    warmed = step if in_steps else at
    if warmed < options.warmup_steps:
        return peak * warmed / options.warmup_steps
    if options.decay == "constant":
        return peak
    if options.decay == "wsd":
        start = steps - options.wsd_decay_fraction * steps
    else:
        start = position(train, options.warmup_steps) if in_steps else options.warmup_steps
    # may be a part of a step, which still ends at the minimum; 0 if the whole run is warm-up
    length = steps - start
    progress = min(max((at - start) / length, 0.0), 1.0) if length > 0 else 0.0
    factor = 0.5 * (1 + cos(pi * progress)) if options.decay == "cosine" else 1 - progress
    return minimum + (peak - minimum) * factor


def batch_scale(config: Config) -> float:
    """Return the factor on the learning rate for a global batch size.

    The learning rate was chosen for `base_batch_size`.
    """
    base = config.optimizer.base_batch_size
    if config.optimizer.lr_scaling == "none" or base is None:
        return 1.0
    ratio = config.train.global_batch_size / base
    return ratio if config.optimizer.lr_scaling == "linear" else sqrt(ratio)
