"""Virtual time controlled by a test: each rank has its own clock, and messages carry the sender's time.

The ranks, the messages and the runtime are real, and real messages determine the order of execution. The test sets the
durations of passes and messages, so recorded times are exact on any machine under any load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor

from megalite.system.clock import Clock


class VirtualClock(Clock):
    """A rank's time: it advances only with work and with waits for messages."""

    def __init__(self) -> None:
        self.now = 0.0

    def mark(self) -> float:
        return self.now

    def read(self, marks: Iterable[tuple[Any, Any, Any, Any]]) -> list[tuple[Any, float, float, float]]:
        return list(marks)

    def spend(self, seconds: float) -> None:
        self.now += seconds


class _Arrival:
    """A receive in flight. A rank that waits for it continues no earlier than the message arrives."""

    def __init__(self, work: Any, message: Tensor, clock: VirtualClock):
        self.work, self.message, self.clock = work, message, clock

    def wait(self) -> None:
        self.work.wait()
        self.clock.now = max(self.clock.now, self.message.view(-1)[0].item())

    def is_completed(self) -> bool:
        return bool(self.work.is_completed())


@contextmanager
def virtual_messages(clock: VirtualClock, latency: float) -> Iterator[None]:
    """Messages (fp64) that arrive `latency` after the sender starts them. Their values are replaced by the time of
    arrival."""
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
