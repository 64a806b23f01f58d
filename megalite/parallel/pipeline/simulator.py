"""When each action of a schedule starts and ends, given how long each takes: exact, by following the dependencies. Imports no torch.

A rank computes one action at a time, in the order of its list. An action starts when its rank is free and what it depends on has arrived:
at once from the same rank, one message latency after its end from another. Messages overlap with compute.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megalite.parallel.pipeline.schedule import Action, Kind, Schedule, ScheduleError, dependencies


class Span(NamedTuple):
    """One compute action in time."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The compute actions of every rank in time, in the unit of the durations given."""

    spans: tuple[tuple[Span, ...], ...]

    @property
    def makespan(self) -> float:
        """From the first action's start to the last one's end, over all ranks."""
        return max(spans[-1].end for spans in self.spans)

    @property
    def ideal(self) -> float:
        """What the step would take without any waiting: the mean over ranks of the time spent computing."""
        return sum(span.end - span.start for spans in self.spans for span in spans) / len(self.spans)

    @property
    def bubble_fraction(self) -> float:
        """Share of all ranks' time in which they wait: idle / makespan."""
        return 1 - self.ideal / self.makespan


def simulate(
    schedule: Schedule,
    forward: float | Sequence[float] = 1,
    input_backward: float | Sequence[float] = 1,
    weight_backward: float | Sequence[float] = 1,
    comm: float = 0,
) -> Timeline:
    """Time a schedule.

    Args:
        forward, input_backward, weight_backward: duration of one microbatch on a rank's whole share of the model (a virtual stage takes its
            part of it), or one duration for each stage. A schedule without a WEIGHT pass computes both gradients in its backward.
        comm: latency of one message between two ranks; messages are not limited in number and none is needed within a rank.

    Raises:
        ScheduleError: actions wait for each other in a circle, or for one that is in no list.
    """
    durations = _durations(schedule, forward, input_backward, weight_backward)
    todo = [deque(schedule.compute(rank)) for rank in range(schedule.ranks)]
    spans: list[list[Span]] = [[] for _ in todo]
    ended: dict[Action, float] = {}
    waiting: defaultdict[Action, list[int]] = defaultdict(list)  # action not yet ended → ranks that need it next
    runnable = list(range(schedule.ranks))
    while runnable:
        rank = runnable.pop()
        while todo[rank]:
            action = todo[rank][0]
            needed = dependencies(action, schedule.stages)
            missing = next((other for other in needed if other not in ended), None)
            if missing is not None:
                waiting[missing].append(rank)
                break
            start = spans[rank][-1].end if spans[rank] else 0
            for other in needed:
                start = max(start, ended[other] + (comm if schedule.placement[other.stage] != rank else 0))
            span = Span(action, start, start + durations[action.kind][action.stage])
            spans[rank].append(span)
            ended[todo[rank].popleft()] = span.end
            runnable += waiting.pop(action, ())
    for missing, ranks in waiting.items():
        raise ScheduleError(f"rank {ranks[0]}: {todo[ranks[0]][0]} waits for {missing}, which never ends.")
    return Timeline(tuple(map(tuple, spans)))


def _durations(schedule: Schedule, *whole: float | Sequence[float]) -> dict[Kind, list[float]]:
    """Duration of each compute kind on each stage."""
    share = schedule.ranks / schedule.stages

    def per_stage(value: float | Sequence[float]) -> list[float]:
        return list(value) if isinstance(value, Sequence) else [value * share] * schedule.stages

    forward, backward, weight = map(per_stage, whole)
    if Kind.WEIGHT not in schedule.passes:
        backward = [b + w for b, w in zip(backward, weight, strict=True)]
    return {Kind.FORWARD: forward, Kind.BACKWARD: backward, Kind.WEIGHT: weight}


def draw(timeline: Timeline) -> str:
    """A timeline as text: a row for each rank, one cell for the time of the shortest action, dots where the rank waits.

    A bar reads F3 for the forward of microbatch 3, or F2.3 (stage 2) where ranks hold several stages, and runs to its closing `|`.
    """
    bars = [span for spans in timeline.spans for span in spans]
    several = any(len({span.action.stage for span in spans}) > 1 for spans in timeline.spans)
    labels = {span.action: repr(span.action) if several else f"{span.action.kind.value}{span.action.microbatch}" for span in bars}
    cell = (1 + max(map(len, labels.values()))) / min(span.end - span.start for span in bars if span.end > span.start)
    rows = []
    for rank, spans in enumerate(timeline.spans):
        row = ""
        for action, start, end in spans:
            row = row.ljust(round(start * cell), ".")
            row += labels[action].ljust(round(end * cell) - len(row) - 1, "-") + "|"
        rows.append(f"rank {rank}  " + row.ljust(round(timeline.makespan * cell), "."))
    return "\n".join(rows)
