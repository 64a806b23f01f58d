"""What a rule is checked on: a configuration and where it will run."""

import math
from dataclasses import dataclass

from megalite.config.dims import ParallelDims
from megalite.config.schema import Config


@dataclass
class RuleContext(Config):
    """A configuration and where it will run: the input of a rule."""

    world_size: int = 1
    local_devices: int | None = None

    @property
    def dims(self) -> ParallelDims:
        return ParallelDims.of(self, self.world_size)

    @property
    def known_steps(self) -> float:
        """train.steps; infinite for a number of epochs of data that is not there, with which it is only the
        default."""
        return self.train.steps if self.train.epochs is None else math.inf
