"""Blends with streams, whose samples are drawn lane by lane.

Lane l takes turn t, sample t·L + l of the blend, from the dataset that a blend of one process has at index
t + offset(l), and counts the samples of each dataset since offset(l). So each lane has the proportions of the
weights, a batch has samples of all datasets, and a rank needs only its own lanes of each stream.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megalite.data.dataset import Dataset
from megalite.data.mixtures import Blend
from megalite.data.streams.stream import Streamed


class StreamBlend(Blend, Streamed):
    """A mixture by weight of streams with the same number of lanes, and of other datasets."""

    def __init__(self, datasets: list[Dataset], weights: list[float], lanes: int):
        super().__init__(datasets, weights)
        self.lanes = lanes
        self.width = sum(part.width for part in datasets if isinstance(part, Streamed))
        self._turns = turns = self.period  # the dataset of each turn of a lane without offset
        self._offsets = [lane * len(turns) // lanes for lane in range(lanes)]
        shifted = [np.roll(turns, -offset) for offset in self._offsets]
        self.period = np.stack(shifted, 1).ravel()  # [turns · lanes]

    def locate(self, index: int) -> tuple[int, int]:
        turn, lane = divmod(index, self.lanes)
        source = int(self.period[index % len(self.period)])
        return source, self._rows(source, lane, turn) * self.lanes + lane

    def _rows(self, source: int, lane: int, turns: int) -> int:
        """Return the number of samples of a dataset in the first turns of a lane."""
        offset = self._offsets[lane]
        return self._before(source, offset + turns) - self._before(source, offset)

    def _before(self, source: int, index: int) -> int:
        periods, rest = divmod(index, len(self._turns))
        return periods * self._counts[source] + int(np.count_nonzero(self._turns[:rest] == source))

    def position(self, lane: int, row: int) -> list[int]:
        parts = [(j, part) for j, part in enumerate(self.parts) if isinstance(part, Streamed)]
        return [number for j, part in parts for number in part.position(lane, self._rows(j, lane, row))]

    def restore(self, lane: int, position: Sequence[int]) -> None:
        for part in self.parts:
            if isinstance(part, Streamed):
                part.restore(lane, list(position[: part.width]))
                position = position[part.width :]
