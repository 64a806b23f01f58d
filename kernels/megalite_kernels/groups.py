"""Rows in consecutive groups, such as the rows of each expert.

Kernels read the end of each group on the device.
"""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor


class Groups:
    """The rows of each group, one group after the other. Rows after the last group belong to no group.

    Args:
        counts: [groups] int64, the number of rows of each, on their device.
        sizes: the same numbers, where the host knows them.
    """

    def __init__(self, counts: Tensor, sizes: Sequence[int] | None = None):
        self.counts, self._sizes = counts, None if sizes is None else list(sizes)

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
