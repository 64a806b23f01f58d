"""What a rank has computed in one pass over a step: digests of what it sends, receives and accumulates.

A digest is the sum of the bits of a tensor, read as integers, modulo 2^64. One flipped bit always changes it.
Digests are computed on the device and read after the pass.

Only communication inside a replica is recorded. Sums over data-parallel ranks have other summands in a
repetition, and gathers of weights bring the same in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalite.system.activity import Activity

SENT, RECEIVED, GRADIENTS = "sent", "received", "accumulated"
INSIDE = ("tp", "cp", "cp_inner", "cp_outer", "expert", "sequence")
"""Names of the axes inside a replica."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Event(NamedTuple):
    """An event in a pass of a rank.

    Attributes:
        kind: SENT, RECEIVED or GRADIENTS.
        what: the communication, or the weights of the gradients.
        during: what the rank was doing: an action of its schedule.
        digest: of the tensor.
    """

    kind: str
    what: str
    during: str
    digest: int


def digest(tensor: Tensor) -> Tensor:
    """Return the sum of the bits of a tensor as integers, [] int64.

    Integers of 64 bits, whose sum needs no conversion, if they divide the tensor.
    """
    flat, size = tensor.detach().contiguous().view(-1), tensor.element_size()
    if tensor.nbytes % 8:
        return flat.view(_INTEGERS[size]).sum(dtype=torch.int64)
    aligned = flat if flat.storage_offset() * size % 8 == 0 else flat.clone()
    return aligned.view(torch.int64).sum()


def _is_inside(what: str) -> bool:
    """Return whether a communication is inside a replica: over one of its axes, or between stages."""
    _, over, axis = what.partition(" over ")
    return not over or axis.split(" ")[0] in INSIDE


class PassRecord:
    """The events of a rank in one pass, in its own order.

    Args:
        activity: tells what the rank is doing.
    """

    def __init__(self, activity: Activity, device: torch.device | str):
        self._activity, self._device = activity, device
        self._places: list[tuple[str, str, Any]] = []
        self._digests: list[Tensor] = []

    @torch.no_grad()
    def sent(self, what: str, tensor: Tensor) -> None:
        if _is_inside(what):
            self._add(SENT, what, digest(tensor))

    @torch.no_grad()
    def received(self, what: str, tensors: Sequence[Tensor]) -> None:
        if _is_inside(what):
            for tensor in tensors:
                self._add(RECEIVED, what, digest(tensor))

    @torch.no_grad()
    def accumulated(self, what: str, gradients: Tensor) -> None:
        """Record the gradients of a bucket before their reduction."""
        self._add(GRADIENTS, what, digest(gradients))

    def _add(self, kind: str, what: str, value: Tensor) -> None:
        # without the numbers of its ranks, which differ between replicas
        self._places.append((kind, what.partition(" (ranks ")[0], self._activity.action))
        self._digests.append(value)

    def summary(self) -> Tensor:
        """Return the number of events and a digest of their digests, [2] int64 on the device.

        The factors are odd: one digest that differs always changes the sum, modulo 2^64.
        """
        values = self._values()
        factors = torch.arange(len(values), device=values.device, dtype=torch.int64) * 2 + 1
        return torch.stack((torch.full_like(factors.sum(), len(values)), (values * factors).sum()))

    def events(self) -> tuple[Event, ...]:
        """Return the events. Waits for the device."""
        digests = self._values().tolist()
        return tuple(
            Event(kind, what, str(during), value)
            for (kind, what, during), value in zip(self._places, digests, strict=True)
        )

    def _values(self) -> Tensor:
        """Return the digests, [events] int64."""
        empty = torch.zeros(0, dtype=torch.int64, device=self._device)
        return torch.stack(self._digests) if self._digests else empty
