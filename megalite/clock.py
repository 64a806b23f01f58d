"""When the actions of a step really ran: what the measured bubble and the measured timeline are made of.

A clock gives marks that cost next to nothing, and turns them into seconds when the step is over. On a CPU a mark is a reading of the host's
clock. On a GPU the host runs far ahead of the device, so a mark is an event in the device's stream, and reading it waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from megalite.parallel.pipeline.schedule import Action


class ActionMarks(NamedTuple):
    """One compute action, as a clock has marked it."""

    action: Action
    free: Any  # nothing was left to do before it
    start: Any  # what it needs had arrived
    end: Any


class ActionTiming(NamedTuple):
    """One compute action in time: seconds on this host's monotonic clock, which all processes of a host share."""

    action: Action
    free: float  # from here to `start` the rank waited for another one
    start: float
    end: float


class StepTiming(NamedTuple):
    """How a rank spent a step, in seconds. Summed over all ranks, 1 - busy / (pp · wall) is the step's bubble."""

    busy: float = 0.0  # inside compute actions
    wall: float = 0.0  # from the start of the first to the end of the last; 0 on ranks without the first stage, which frames the step

    @classmethod
    def of(cls, ran: Sequence[ActionTiming], first_stage: bool, thrown_away: Sequence[ActionTiming] = ()) -> StepTiming:
        """Of the actions of a step; those that were done first and thrown away count as waiting."""
        wall = ran[-1].end - (*thrown_away, *ran)[0].start if ran and first_stage else 0.0
        return cls(sum(end - start for _, _, start, end in ran), wall)


class Clock:
    """Marks nothing: for a GPU whose step nobody asked to measure."""

    def mark(self) -> Any:
        return None

    def read(self, marks: Iterable[tuple[Any, Any, Any, Any]]) -> list[tuple[Any, float, float, float]]:
        """Things with three marks each, in time."""
        return []


class HostClock(Clock):
    """The time at which the host gets somewhere, which on a CPU is when the computation does.

    `has_passed` and `seconds` never wait: the second is for marks that have been passed.
    """

    def mark(self) -> Any:
        return perf_counter()

    def has_passed(self, mark: Any) -> bool:
        return True

    def seconds(self, start: Any, end: Any) -> float:
        """From one mark to another."""
        return float(end - start)

    def read(self, marks: Iterable[tuple[Any, Any, Any, Any]]) -> list[tuple[Any, float, float, float]]:
        return list(marks)


class DeviceClock(HostClock):
    """The time at which the current CUDA stream gets somewhere."""

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def has_passed(self, mark: Any) -> bool:
        return bool(mark.query())

    def seconds(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) / 1000

    def read(self, marks: Iterable[tuple[Any, Any, Any, Any]]) -> list[tuple[Any, float, float, float]]:
        now = self.mark()
        now.synchronize()
        seconds = perf_counter()

        def at(event: Any) -> float:
            return seconds - float(event.elapsed_time(now)) / 1000

        return [(what, at(first), at(second), at(third)) for what, first, second, third in marks]
