"""Time that a test drives: each rank has a clock of its own, and messages bring the sender's time with them.

The ranks, the messages and the runtime are real, and real messages decide what runs before what. The test alone says how long a pass or a
message takes, so recorded times are exact on any machine, whatever else runs on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor

from megalite.clock import Clock


class VirtualClock(Clock):
    """A rank's time: it moves where work is done and where a message is waited for, and nowhere else."""

    def __init__(self) -> None:
        self.now = 0.0

    def mark(self) -> float:
        return self.now

    def read(self, marks: Iterable[tuple[Any, Any, Any, Any]]) -> list[tuple[Any, float, float, float]]:
        return list(marks)

    def spend(self, seconds: float) -> None:
        self.now += seconds


class _Arrival:
    """A receive under way. Who waits for it goes on when the message arrives, at the earliest."""

    def __init__(self, work: Any, message: Tensor, clock: VirtualClock):
        self.work, self.message, self.clock = work, message, clock

    def wait(self) -> None:
        self.work.wait()
        self.clock.now = max(self.clock.now, self.message.view(-1)[0].item())

    def is_completed(self) -> bool:
        return bool(self.work.is_completed())


@contextmanager
def virtual_messages(clock: VirtualClock, latency: float) -> Iterator[None]:
    """Messages (fp64) that take `latency` from when the sender starts them. The time of arrival replaces their values."""
    send, receive = dist.isend, dist.irecv

    @wraps(send)
    def isend(message: Tensor, *place: Any, **options: Any) -> Any:
        return send(message.fill_(clock.now + latency), *place, **options)

    @wraps(receive)
    def irecv(message: Tensor, *place: Any, **options: Any) -> Any:
        return _Arrival(receive(message, *place, **options), message, clock)

    replacements: dict[str, Callable[..., Any]] = {"isend": isend, "irecv": irecv}
    with ExitStack() as stack:
        for name, replacement in replacements.items():
            stack.enter_context(patch.object(dist, name, replacement))
        yield
