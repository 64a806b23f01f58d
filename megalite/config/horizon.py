"""What a resolved configuration remembers of a run's length beside its steps: no options. Imports no torch.

`train.tokens`, `train.epochs` and shares of the steps are amounts of samples. They become numbers of steps once, and again if a run is
resumed with other batches: the steps that are done had the old ones.
"""

from fractions import Fraction
from typing import NamedTuple


class Horizon(NamedTuple):
    """What was given as an amount.

    Attributes:
        samples: those of the whole run, if its length was given in tokens or epochs; None if it was given in steps.
        warmup: the warm-up as a share of the run; None if it was given in steps.
    """

    samples: int | None = None
    warmup: Fraction | None = None


class Level(NamedTuple):
    """Steps of one batch size: the number of steps before them, and of the samples that these read."""

    step: int
    samples: int
    size: int


class Finished(NamedTuple):
    """The part of a resumed run that had other batches: its steps, the samples that they read, and its levels."""

    step: int
    samples: int
    levels: tuple[Level, ...]
