"""Coordinates of every rank, for any world size.

tp is innermost, then cp, dp, pp: rank = ((pp·DP + dp)·CP + cp)·TP + tp, so that the ranks that communicate
most are neighbours on one node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

from megalite.config.dims import ParallelDims

AXES = ("pp", "dp", "cp", "tp")
PRODUCTS = {"data": ("dp", "cp"), "model": ("pp", "tp"), "stage": ("dp", "cp", "tp"), "world": AXES}


class AxisPlace(NamedTuple):
    """A rank's index on one axis, and the axis's size."""

    rank: int
    size: int


@dataclass(frozen=True)
class Coordinates:
    """A rank's index on the axes of the mesh, by name. An axis that is not named has one rank."""

    axes: Mapping[str, AxisPlace] = field(default_factory=dict)

    def __getitem__(self, axis: str) -> AxisPlace:
        return self.axes.get(axis, AxisPlace(0, 1))

    @staticmethod
    def on(axis: str, rank: int, size: int) -> Coordinates:
        """Return coordinates on one axis; every other axis has one rank."""
        return Coordinates({axis: AxisPlace(rank, size)})


@dataclass(frozen=True)
class Layout(ParallelDims):
    """Sizes of the mesh, and coordinates of its ranks."""

    def position(self, rank: int) -> dict[str, int]:
        """Return the rank's index on each axis."""
        position = {}
        for axis in reversed(AXES):
            rank, position[axis] = divmod(rank, getattr(self, axis))
        return position

    def coordinates(self, rank: int) -> Coordinates:
        """Return the rank's index on each axis, with the axes' sizes."""
        return Coordinates(
            {axis: AxisPlace(index, getattr(self, axis)) for axis, index in self.position(rank).items()}
        )

    def rank(self, position: dict[str, int]) -> int:
        """Return the rank with these indices: the inverse of `position`."""
        rank = 0
        for axis in AXES:
            rank = rank * getattr(self, axis) + position[axis]
        return rank

    def peers(self, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` only along `axes`, itself included, in ascending order."""
        position = self.position(rank)
        ranges = [range(getattr(self, axis)) if axis in axes else (position[axis],) for axis in AXES]
        return tuple(self.rank(dict(zip(AXES, place, strict=True))) for place in product(*ranges))
