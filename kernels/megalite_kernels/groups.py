"""Rows in consecutive groups, such as the rows of each expert.

Kernels read the end of each group on the device.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor


class PaddedRows(NamedTuple):
    """Places of rows among rows that are padded.

    Attributes:
        places: [rows] int64, the place of each; rows of no group share one that is in no group either.
        number: number of padded rows, a multiple of that of a block.
        groups: the padded groups.
    """

    places: Tensor
    number: int
    groups: "Groups"

    def pad(self, rows: Tensor) -> Tensor:
        """Return the rows at their places, and zeros between: [rows, width] -> [number, width]."""
        return rows.new_zeros(self.number, rows.shape[1]).index_copy_(0, self.places, rows)


class Groups:
    """The rows of each group, one group after the other. Rows after the last group belong to no group.

    Args:
        counts: [groups] int64, the number of rows of each, on their device.
        sizes: the same numbers, where the host knows them.
        runs: returns [groups, runs] int64, the consecutive parts of each group, such as those of several
            sources; None: a group is one run.
    """

    def __init__(
        self,
        counts: Tensor,
        sizes: Sequence[int] | None = None,
        runs: Callable[[], Tensor] | None = None,
    ):
        self.counts, self._sizes = counts, None if sizes is None else list(sizes)
        self._runs = runs

    def __len__(self) -> int:
        return len(self.counts)

    @cached_property
    def ends(self) -> Tensor:
        """[groups] int32: the index of the row after each group."""
        return self.counts.cumsum(0, dtype=torch.int32)

    @property
    def sizes(self) -> list[int]:
        """The number of rows of each group.

        The first access waits for the device, unless the host knows them.
        """
        if self._sizes is None:
            self._sizes = self.counts.tolist()
        return self._sizes

    def split(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Return the rows of each group; waits as `sizes`."""
        return rows[: sum(self.sizes)].split(self.sizes)

    def holds_rows(self, number: int) -> Tensor:
        """Return [number] bool: whether each of the first rows belongs to a group."""
        return torch.arange(number, device=self.counts.device) < self.ends[-1]

    def of_rows(self, number: int) -> Tensor:
        """Return [number] int64: the group of each of the first rows; the last group for rows of no group."""
        rows = torch.arange(number, device=self.counts.device, dtype=torch.int32)
        return torch.searchsorted(self.ends, rows, right=True).clamp_(max=len(self) - 1)

    def padded(self, rows: int, block: int) -> PaddedRows:
        """Return places at which each run starts with a block. The host waits for nothing.

        Args:
            rows: number of rows, those of no group included.
            block: rows of a block.
        """
        runs = self.counts[:, None] if self._runs is None else self._runs()  # [groups, runs]
        each = runs.flatten()
        padded = (each + block - 1) // block * block
        ends = each.cumsum(0)
        number = (rows // block + len(each) + 1) * block  # the last block has no run
        row = torch.arange(rows, device=each.device)
        run = torch.searchsorted(ends, row, right=True).clamp_(max=len(each) - 1)
        places = row + ((padded.cumsum(0) - padded) - (ends - each))[run]
        places = torch.where(row < ends[-1], places, number - 1)
        return PaddedRows(places, number, Groups(padded.view_as(runs).sum(1)))
