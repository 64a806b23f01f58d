"""The places for ranks on a node of an elastic run: which are in use, and which are lost and may return.

A place is a GPU or, without GPUs, a number. A lost one returns after it has been seen healthy: a GPU once a
process has computed on it, a place of a CPU at once, both not before `wait_s` seconds. The time doubles each
time that the place is lost, so that a damaged one costs the run less and less.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic

from megalite.launch import machine
from megalite.launch.local_ranks import package_path

DEVICES = "CUDA_VISIBLE_DEVICES"
LOST_AT = "MEGALITE_LOST_AT"
"""Environment variable of a start after a change of the number of ranks: when the launcher noticed the loss
or the return, in seconds since the epoch."""
_COMPUTES = """
import torch
from megalite.launch.checkup.rank import matmul
raise SystemExit(torch.cuda.device_count() != 1 or bool(matmul()))
"""


@dataclass
class _Slot:
    """A place for a rank.

    Attributes:
        device: the GPU's entry of CUDA_VISIBLE_DEVICES; None for a place without a GPU of its own.
        lost_at: when it was lost; None: it is usable.
        losses: how often it was lost.
        probe: a process that computes on the GPU.
    """

    device: str | None
    lost_at: float | None = None
    losses: int = 0
    probe: subprocess.Popen[bytes] | None = None


class Slots:
    """The places of this node.

    Args:
        count: number of places.
        used: returns how many ranks start on a number of usable places.
        wait_s: seconds before a place that was lost for the first time is tried again.
        devices: the GPUs of the places; empty without GPUs.
        clock: time in seconds, with an arbitrary origin.
    """

    def __init__(
        self,
        count: int,
        used: Callable[[int], int],
        wait_s: float,
        devices: Sequence[str] = (),
        clock: Callable[[], float] = monotonic,
    ):
        self._slots = [_Slot(devices[number] if devices else None) for number in range(count)]
        self._used, self._wait_s, self._clock = used, wait_s, clock
        self.in_use: list[int] = []  # local rank → place

    @property
    def usable(self) -> list[int]:
        """The places that are not lost."""
        return [number for number, slot in enumerate(self._slots) if slot.lost_at is None]

    def start(self) -> int:
        """Choose the places of the next start. Returns the number of ranks."""
        usable = self.usable
        self.in_use = usable[: self._used(len(usable))]
        for number in self.in_use:
            self._end_probe(self._slots[number])
        if self._slots[0].device is not None:
            os.environ[DEVICES] = ",".join(str(self._slots[number].device) for number in self.in_use)
        return len(self.in_use)

    def lose(self, local_ranks: Sequence[int]) -> None:
        """Drop the places of ranks."""
        for rank in local_ranks:
            slot = self._slots[self.in_use[rank]]
            slot.lost_at, slot.losses = self._clock(), slot.losses + 1

    def grown(self) -> bool:
        """Take back lost places that are healthy. Returns whether more ranks can start than are in use."""
        for slot in self._slots:
            lost = slot.lost_at is not None and self._clock() - slot.lost_at >= self._wait(slot)
            if lost and self._healthy(slot):
                slot.lost_at = None
        return self._used(len(self.usable)) > len(self.in_use)

    def restore(self) -> None:
        """Take back every lost place without a test."""
        for slot in self._slots:
            slot.lost_at = None

    def close(self) -> None:
        """End the processes that test places."""
        for slot in self._slots:
            self._end_probe(slot)

    def _wait(self, slot: _Slot) -> float:
        return float(self._wait_s * 2 ** (slot.losses - 1))

    def _healthy(self, slot: _Slot) -> bool:
        """Whether the place's GPU computes. Starts a process that tries; False until it has ended.

        A GPU that fails is tried again after the place's time; one on which the process hangs stays lost.
        """
        if slot.device is None:
            return True
        if slot.probe is None:
            slot.probe = subprocess.Popen(
                [sys.executable, "-P", "-c", _COMPUTES],
                env={**os.environ, DEVICES: slot.device, "PYTHONPATH": package_path()},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        status = slot.probe.poll()
        if status is None:
            return False
        slot.probe = None
        if status != 0:
            slot.lost_at = self._clock()
        return status == 0

    @staticmethod
    def _end_probe(slot: _Slot) -> None:
        if slot.probe is not None:
            slot.probe.kill()
            slot.probe.wait()
            slot.probe = None


def devices_of(count: int) -> list[str]:
    """Return the entries of CUDA_VISIBLE_DEVICES for ranks; empty unless each has a GPU of its own."""
    gpus = len(machine.gpus())
    visible = os.environ.get(DEVICES)
    names = (
        [name.strip() for name in visible.split(",")] if visible is not None else list(map(str, range(gpus)))
    )
    return names[:count] if 1 < count <= gpus else []
