"""Initial values of parameters that are neither normal nor constant: decays and time steps of recurrences.

They are functions of uniform random numbers, which `system.rng` draws, and of the index along dim 0, computed
in fp64.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class InitialValues(Protocol):
    """Initial values of a segment (`Segment.initial`). Hashable, as a segment is."""

    def values(self, uniform: Tensor, index: Tensor) -> Tensor:
        """Return the values of a block of rows, in fp64.

        Args:
            uniform: random numbers in (0, 1], fp64, with the block's shape.
            index: global indices of its rows from 0, fp64, broadcastable to this shape.
        """


@dataclass(frozen=True)
class LogUniform:
    """log(u) with u uniform in (low, high]: logarithms of decay rates.

    Raises:
        ValueError: not 0 <= low < high. With low = 0 the values are finite, too.
    """

    low: float = 1.0
    high: float = 16.0

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high:
            raise ValueError(f"a uniform number needs 0 <= low < high, got low {self.low}, high {self.high}")

    def values(self, uniform: Tensor, index: Tensor) -> Tensor:
        return (self.low + (self.high - self.low) * uniform).log()


@dataclass(frozen=True)
class LogIndex:
    """log(1), log(2), … log(n) along dim 0 (Mamba-2's decay rates)."""

    def values(self, uniform: Tensor, index: Tensor) -> Tensor:
        return (index + 1).log().expand_as(uniform)


@dataclass(frozen=True)
class InverseSoftplus:
    """softplus⁻¹(t) with t log-uniform in (low, high] and at least `floor`: biases of time steps.

    Raises:
        ValueError: not 0 < low <= high, or floor <= 0.
    """

    low: float = 1e-3
    high: float = 0.1
    floor: float = 1e-4

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.high or self.floor <= 0:
            raise ValueError(
                "time steps need 0 < low <= high and floor > 0, got "
                f"low {self.low}, high {self.high}, floor {self.floor}"
            )

    def values(self, uniform: Tensor, index: Tensor) -> Tensor:
        step = (log(self.low) + (log(self.high) - log(self.low)) * uniform).exp().clamp(min=self.floor)
        return step + (-(-step).expm1()).log()  # log(eᵗ − 1), without overflow and cancellation
