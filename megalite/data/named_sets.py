"""Several validation sets, by name: one dataset after the other."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from megalite.data.dataset import Dataset


class NamedSets(Dataset):
    """The samples of each set in turn. `sets` has them one by one."""

    def __init__(self, sets: Mapping[str, Dataset]):
        self._sets, self._each = dict(sets), list(sets.values())
        self._ends = list(accumulate(each.samples_per_epoch for each in self._each))
        self.samples_per_epoch, self.members = (
            self._ends[-1],
            [member for each in self._each for member in each.members],
        )
        self.vocab_size, self.eos, self.chat = self._each[0].vocab_size, self._each[0].eos, self._each[0].chat
        self.fingerprint = "+".join(each.fingerprint for each in self._each)

    @property
    def sets(self) -> Mapping[str, Dataset]:
        return self._sets

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        sample = index % self.samples_per_epoch
        found = bisect_right(self._ends, sample)
        return self._each[found][sample - (self._ends[found - 1] if found else 0)]
