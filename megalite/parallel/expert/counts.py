"""Numbers of rows that the host must know before it can send them, and the tensors that they are counted in.

The host waits for the collective that brings the tensor, and for the copy, but for nothing that the device is given in the meantime: on a
GPU both are on a stream of their own. No communication besides.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from megalite.parallel.collectives import Pending
from megalite.pinned_memory import read_later

Count = Callable[[Tensor], Tensor]


class CountedAhead:
    """What a collective brings, and numbers counted in it.

    Args:
        pending: the collective.
        like: a tensor on its device.
        count: tensor → numbers.
    """

    def __init__(self, pending: Pending, like: Tensor, count: Count):
        self._pending, self._count = pending, count
        self._read: Callable[[], Tensor] | None = None
        if not like.is_cpu:
            stream = _stream(like.device)
            with torch.cuda.stream(stream):  # a collective is waited for by the stream that is current
                self._start()
                self._counted = stream.record_event()

    def _start(self) -> None:
        self._value = self._pending.wait()
        self._read = read_later(self._count(self._value))

    def wait(self) -> tuple[Tensor, list[int]]:
        """The tensor, and the numbers, flat."""
        if self._read is None:
            self._start()
        else:
            torch.cuda.current_stream(self._value.device).wait_event(self._counted)
        assert self._read is not None
        return self._value, self._read().flatten().tolist()


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
