"""Clocks that measure the actions of a step, for the measured bubble and the measured timeline.

A clock records cheap marks and converts them to seconds after the step. On a CPU a mark is a reading of the
host's clock. On a GPU the host runs far ahead of the device, so a mark is an event in the device's stream,
and reading it waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from megalite.parallel.pipeline.schedule import Action


class ActionMarks(NamedTuple):
    """The clock marks of one compute action."""

    action: Action
    free: Any  # the rank has finished what precedes the action
    start: Any  # the action's input has arrived
    end: Any


class ActionTiming(NamedTuple):
    """The times of one compute action, in seconds on the monotonic clock shared by a host."""

    action: Action
    free: float  # from `free` to `start` the rank waited for another one
    start: float
    end: float


class Transfer(NamedTuple):
    """The times of a data-parallel collective, in seconds as above."""

    name: str
    start: float
    awaited: float  # from `awaited` to `end` the rank waited for it
    end: float


class StepTiming(NamedTuple):
    """A rank's times in a step, in seconds. With sums over all ranks, 1 - busy / (pp · wall) is the bubble of
    the step."""

    busy: float = 0.0  # inside compute actions
    # from the start of the first to the end of the last; 0 on ranks without the first stage, which spans the
    # step
    wall: float = 0.0

    @classmethod
    def of(
        cls, ran: Sequence[ActionTiming], first_stage: bool, thrown_away: Sequence[ActionTiming] = ()
    ) -> StepTiming:
        """Compute from the times of a step's actions. Discarded actions before them count as waiting."""
        wall = ran[-1].end - (*thrown_away, *ran)[0].start if ran and first_stage else 0.0
        return cls(sum(end - start for _, _, start, end in ran), wall)


class Clock:
    """A clock that measures nothing, for GPU steps that must not wait for the device."""

    def mark(self) -> Any:
        return None

    def read(self, marks: Iterable[tuple[Any, Any, Any, Any]]) -> list[tuple[Any, float, float, float]]:
        """Convert the three marks of each (what, mark, mark, mark) to seconds."""
        return []


class HostClock(Clock):
    """A clock of the host. On a CPU, the computation reaches a point at the same time.

    `has_passed` and `seconds` never wait: call `seconds` only with marks that have passed.
    """

    def mark(self) -> Any:
        return perf_counter()

    def has_passed(self, mark: Any) -> bool:
        return True

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds from one mark to another."""
        return float(end - start)

    def read(self, marks: Iterable[tuple[Any, Any, Any, Any]]) -> list[tuple[Any, float, float, float]]:
        return list(marks)


class DeviceClock(HostClock):
    """A clock of the current CUDA stream."""

    def mark(self) -> Any:
        import torch  # which tools that read times need not import

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
        seconds = perf_counter()  # ties the device's clock to the host's: events measure only differences

        def at(event: Any) -> float:
            return seconds - float(event.elapsed_time(now)) / 1000

        return [(what, at(first), at(second), at(third)) for what, first, second, third in marks]
