"""Numbers of rows that the host must know before it can send them, and the tensors that they are counted in.

The host waits for the collective that brings the tensor, and for the copy, but for nothing that the device is
given in the meantime: on a GPU both are on a stream of their own. No communication besides.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from megalite.parallel.collectives import Pending
from megalite.system.pinned_memory import read_aside

Count = Callable[[Tensor], Tensor]


class PendingCounts:
    """What a collective brings, and numbers counted in it.

    Args:
        pending: the collective.
        like: a tensor on its device.
        count: tensor → numbers.
    """

    def __init__(self, pending: Pending, like: Tensor, count: Count):
        self._pending, self._count = pending, count
        self._read = None if like.is_cpu else read_aside(self._counted, like.device)

    def _counted(self) -> Tensor:
        self._value = self._pending.wait()
        return self._count(self._value)

    def wait(self) -> tuple[Tensor, list[int]]:
        """The tensor, and the numbers, flat. Both have arrived: no stream has to wait for another."""
        numbers = self._counted() if self._read is None else self._read()
        return self._value, numbers.flatten().tolist()
