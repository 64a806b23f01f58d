"""Memory of the optimizer state, and the ranges of it that one optimizer call updates.

Optimizer state is what the optimizer keeps for this rank's owned ranges: the moments, and the master weights
if they are not the weights themselves. It always consists of ordinary tensors, so that initialization and
checkpoints do not depend on its location: the device of the weights, or CPU memory or a file
(`parallel.sharding.offload`). No communication.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

UPLOAD = 1 << 26  # elements of updated weights that are on the device before they are copied to pinned memory


@dataclass(frozen=True)
class StateRange:
    """A range of a bucket that one optimizer call updates, as flat tensors of equal length."""

    decays: bool
    lr_factor: float
    weights: Tensor  # as the model reads them
    grads: Tensor
    master: Tensor  # at least fp32; the weights themselves if dtype and device agree
    state: Sequence[Tensor]  # the optimizer's state; scales of blocks have a part of the length
    first: int = 0  # number of its first element, for the optimizer

    @property
    def separate(self) -> bool:
        """Whether the master weights are a copy of the weights."""
        return self.weights.data_ptr() != self.master.data_ptr()

    def cut(self, size: int) -> Iterator[StateRange]:
        """Split the range into pieces of at most `size` elements."""
        tensors, count = (self.weights, self.grads, self.master, *self.state), self.master.numel()
        parts = (tensor.split(size * tensor.numel() // count) for tensor in tensors)
        for index, (weights, grads, master, *state) in enumerate(zip(*parts, strict=True)):
            yield StateRange(
                self.decays, self.lr_factor, weights, grads, master, state, self.first + index * size
            )


class StateMemory:
    """Optimizer state on the device of the weights."""

    def __init__(self, device: torch.device):
        self.device = device

    def zeros(self, count: int, dtype: torch.dtype) -> Tensor:
        """Allocate `count` elements of state."""
        return torch.zeros(count, dtype=dtype, device=self.device)

    def windows(self, ranges: Sequence[StateRange]) -> Iterator[list[StateRange]]:
        """Yield parts of the ranges, each part once.

        The caller updates the masters and weights of a part before it requests the next one. By default
        there are two parts, with and without weight decay, and further ones of other learning rates; those
        whose masters are the weights are parts of their own. If the weights are on another device than their
        masters (ZeRO-3 with `offload_parameters`), parts are windows of UPLOAD elements: one call updates
        tensors of one device, so that the new weights are written to a temporary and copied.
        """
        for alike in sorted({(not each.decays, each.lr_factor) for each in ranges}):
            group = [each for each in ranges if (not each.decays, each.lr_factor) == alike]
            for separate in (True, False):
                if together := [
                    each
                    for each in group
                    if each.weights.device == each.master.device and each.separate is separate
                ]:
                    yield together
            for window in (
                window
                for each in group
                if each.weights.device != each.master.device
                for window in each.cut(UPLOAD)
            ):
                # the current values, because an update may skip itself on the device
                weights = window.master.to(window.weights.dtype, copy=True)
                yield [replace(window, weights=weights)]
                # into pinned memory, in order with the kernels that read it next
                window.weights.copy_(weights, non_blocking=True)

    def place_of(self, tensor: Tensor) -> str:
        """Return where a tensor is stored: cuda, cpu or disk."""
        return tensor.device.type

    def release(self, tensor: Tensor | None = None) -> None:
        """Evict the pages of a state tensor, or of all of them, after an access not made through windows."""

    def sync(self) -> None:
        """Wait until written state can be read back. Raises OffloadError if it cannot."""


def state_memory(offload: str, device: torch.device, directory: Path) -> StateMemory:
    """Return the memory for a value of `parallel.offload`. `directory` is used for disk."""
    if offload == "none":
        return StateMemory(device)
    from megalite.parallel.sharding.offload import CPUState, DiskState

    return CPUState() if offload == "cpu" else DiskState(directory)
