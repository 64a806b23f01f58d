"""Compares the timeline that a run recorded of a few steps (profiling.timeline), on one clock, with the
simulator's.

Reads traces/records.json of a run's directory and writes traces/timeline.json: the durations by stage, the
measured bubble and the one predicted from these durations, and a trace for ui.perfetto.dev or
chrome://tracing, in which the prediction is below the measurement.

Processes of one host share its monotonic clock. Clocks of other hosts are aligned by their readings right
after a few barriers.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

import yaml

from megalite.assembly.plan import schedule as schedule_of
from megalite.config.errors import ConfigError
from megalite.config.load import from_dict
from megalite.mesh.layout import Layout
from megalite.monitoring import starts
from megalite.monitoring.starts import start_of
from megalite.parallel.pipeline.schedule import Action, ActionKind, Schedule, dependencies
from megalite.parallel.pipeline.simulator import Interval, Timeline, simulate
from megalite.system.clock import ActionTiming, Transfer

RECORDS, TIMELINE = Path("traces", "records.json"), Path("traces", "timeline.json")
PASSES = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "input_backward",
    ActionKind.WEIGHT: "weight_backward",
}
MEASURES = ("bubble_fraction", "bubble_rate")
MICROSECONDS = 1e6


@dataclass
class Record:
    """The record of one rank.

    Attributes:
        host: equal for ranks that share a clock.
        clock: its readings after each of the barriers, in seconds.
        steps: step → its timed actions.
        transfers: step → the data-parallel transfers that ended in it.
    """

    host: str
    clock: list[float] = field(default_factory=list)
    steps: dict[int, list[ActionTiming]] = field(default_factory=dict)
    transfers: dict[int, list[Transfer]] = field(default_factory=dict)


def compare(run_dir: Path) -> dict[str, Any]:
    """Write the timeline of a run's records, and return its content.

    The run may have been resumed with another layout since then: the one that recorded the steps counts.

    Raises ConfigError if the directory has no records, or if they are not of its steps.
    """
    try:
        options = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))
        records = [
            read_record(comparison)
            for comparison in json.loads((run_dir / RECORDS).read_text(encoding="utf-8"))
        ]
    except OSError as error:
        raise ConfigError(
            f"{error.filename}: {error.strerror}. A run writes it if profiling.timeline is set."
        ) from None
    recorded_by = start_of(starts.read(run_dir), min(records[0].steps))
    config = from_dict(options if recorded_by is None else recorded_by.options)
    layout = Layout.of(config)
    if layout.world != len(records):
        raise ConfigError(
            f"{run_dir / RECORDS} has records of {len(records)} ranks, and its steps were done again on "
            f"{layout.world}. "
            f"Record them again with profiling.timeline = true."
        )
    schedule = schedule_of(config, layout.microbatches)
    comparison, path = timeline(schedule, layout, records), run_dir / TIMELINE
    comparison["schedule_costs"] = config.parallel.schedule_costs
    path.write_text(json.dumps(comparison, allow_nan=False), encoding="utf-8")
    return comparison


def written(run_dir: Path) -> str:
    """The line about the file that `compare` has written."""
    return f"  {run_dir / TIMELINE} (ui.perfetto.dev opens it)"


def read_record(content: Mapping[str, Any]) -> Record:
    """One rank's record from its JSON form."""
    steps = {
        int(step): [
            ActionTiming(Action(ActionKind(kind), *place), *times) for (kind, *place), *times in actions
        ]
        for step, actions in content["steps"].items()
    }
    transfers = {
        int(step): [Transfer(*transfer) for transfer in arrived]
        for step, arrived in content["transfers"].items()
    }
    return Record(content["host"], content["clock"], steps, transfers)


def offsets(records: Sequence[Record]) -> list[float]:
    """Seconds by which each rank's clock is ahead of rank 0's."""
    lead = records[0]
    readings: defaultdict[str, list[float]] = defaultdict(list)
    for record in records:
        readings[record.host] += [there - here for there, here in zip(record.clock, lead.clock, strict=True)]
    return [0.0 if record.host == lead.host else median(readings[record.host]) for record in records]


@dataclass(frozen=True)
class PipelineStep:
    """One step of one pipeline: the ranks that differ only in pp, each with its timed actions and transfers,
    on one clock."""

    name: str
    step: int
    ranks: tuple[int, ...]
    ran: tuple[tuple[ActionTiming, ...], ...]
    transfers: tuple[tuple[Transfer, ...], ...]

    @property
    def start(self) -> float:
        """The start of the first action of any rank."""
        return min(actions[0].start for actions in self.ran)

    @property
    def measured(self) -> Timeline:
        """The measured step as a simulator's Timeline, so that both use the same formulas."""
        start = self.start
        return Timeline(
            tuple(
                tuple(Interval(timing.action, timing.start - start, timing.end - start) for timing in actions)
                for actions in self.ran
            )
        )


def pipelines(layout: Layout, records: Sequence[Record]) -> list[PipelineStep]:
    """Every step of every pipeline, in the order of their first ranks."""
    ahead, measured = offsets(records), []
    for lead in range(layout.world // layout.pp):  # pp is the outermost axis: these are the ranks with pp = 0
        ranks = layout.peers(lead, ("pp",))
        place = ", ".join(
            f"{axis} {index}"
            for axis, index in layout.position(lead).items()
            if axis != "pp" and getattr(layout, axis) > 1
        )
        for step in records[lead].steps:
            ran = tuple(
                tuple(
                    ActionTiming(action, *(time - ahead[rank] for time in times))
                    for action, *times in records[rank].steps[step]
                )
                for rank in ranks
            )
            transfers = tuple(
                tuple(
                    Transfer(name, *(time - ahead[rank] for time in times))
                    for name, *times in records[rank].transfers.get(step, ())
                )
                for rank in ranks
            )
            measured.append(PipelineStep(f"measured {place}".rstrip(), step, ranks, ran, transfers))
    return measured


def timeline(schedule: Schedule, layout: Layout, records: Sequence[Record]) -> dict[str, Any]:
    """The whole content of timeline.json.

    Args:
        schedule: the schedule that the ranks executed.
        records: one per rank, in rank order, each with the same steps.
    """
    steps = pipelines(layout, records)
    durations, comm = stage_durations(schedule, steps), message_seconds(schedule, steps)
    forward, backward, weight = (values or [0.0] * schedule.stages for values in durations.values())
    predicted = simulate(schedule, forward, backward, weight, comm)
    measured = [step.measured for step in steps]
    return {
        "schedule": schedule.name,
        "pp": schedule.ranks,
        "microbatches": schedule.microbatches,
        "virtual_stages": schedule.stages // schedule.ranks,
        "layout": {axis: getattr(layout, axis) for axis in ("tp", "pp", "dp", "cp")},
        "steps": sorted({step.step for step in steps}),
        "durations": durations,
        "comm": comm,
        "measured": {name: fmean(getattr(pipeline, name) for pipeline in measured) for name in MEASURES},
        "predicted": {name: getattr(predicted, name) for name in MEASURES},
        "data_parallel": data_parallel(steps),
        "traceEvents": trace_events(schedule, steps, predicted),
    }


def stage_durations(schedule: Schedule, steps: Iterable[PipelineStep]) -> dict[str, list[float] | None]:
    """For each pass, the median seconds of one microbatch on each stage; None for a pass that the schedule
    does not have."""
    seconds: defaultdict[tuple[ActionKind, int], list[float]] = defaultdict(list)
    for actions in (actions for step in steps for actions in step.ran):
        for action, _, start, end in actions:
            seconds[action.kind, action.stage].append(end - start)
    return {
        name: [median(seconds[kind, stage]) for stage in range(schedule.stages)]
        if kind in schedule.passes
        else None
        for kind, name in PASSES.items()
    }


def data_parallel(steps: Sequence[PipelineStep]) -> dict[str, float]:
    """Means over ranks and steps: number of transfers, seconds with at least one in flight, and seconds of
    waiting for one."""
    ranks = [transfers for step in steps for transfers in step.transfers]
    under_way = waited = 0.0
    for transfers in ranks:
        reached = float("-inf")
        for _, start, awaited, end in sorted(transfers, key=lambda transfer: transfer.start):
            under_way += max(end - max(start, reached), 0.0)
            waited += end - awaited
            reached = max(reached, end)
    return {
        "transfers": fmean(map(len, ranks)),
        "under_way": under_way / len(ranks),
        "waited": waited / len(ranks),
    }


def message_seconds(schedule: Schedule, steps: Iterable[PipelineStep]) -> float:
    """The median latency of the messages for which a rank was already waiting; 0 if there were none.

    The latency is from the end of the action that produces the message to the start of the action that needs
    it.
    """
    latencies = []
    for step in steps:
        ends = {timing.action: timing.end for actions in step.ran for timing in actions}
        for timing in (timing for actions in step.ran for timing in actions):
            sources = received(timing.action, schedule)
            latencies += [timing.start - ends[source] for source in sources if timing.free <= ends[source]]
    return max(median(latencies), 0.0) if latencies else 0.0


def received(action: Action, schedule: Schedule) -> list[Action]:
    """The actions on other ranks whose results an action needs."""
    placement = schedule.placement
    return [
        source
        for source in dependencies(action, schedule.stages)
        if placement[source.stage] != placement[action.stage]
    ]


def trace_events(
    schedule: Schedule, steps: Sequence[PipelineStep], predicted: Timeline
) -> list[dict[str, Any]]:
    """Chrome's trace events: a process for each pipeline, a thread for each of its ranks; the last process is
    the prediction."""
    origin = min(actions[0].free for step in steps for actions in step.ran)
    names = list(dict.fromkeys(step.name for step in steps))
    events = [
        event for pid, name in enumerate([*names, "predicted"]) for event in _names(pid, name, schedule.ranks)
    ]
    events += [event for step in steps for event in _transfer_events(step, names.index(step.name), origin)]
    for step in steps:
        pid, shift = names.index(step.name), step.start - origin
        for tid, actions in enumerate(step.ran):
            for timing in actions:
                if received(timing.action, schedule):
                    events.append(
                        _slice("wait", "wait", pid, tid, timing.free - origin, timing.start - origin)
                    )
                events.append(
                    _action(timing.action, step.step, pid, tid, timing.start - origin, timing.end - origin)
                )
            if pid == 0:
                events += [
                    _action(action, step.step, len(names), tid, start + shift, end + shift)
                    for action, start, end in predicted.spans[tid]
                ]
    return events


def _names(pid: int, name: str, ranks: int) -> list[dict[str, Any]]:
    threads = [
        {"ph": "M", "name": "thread_name", "pid": pid, "tid": rank, "args": {"name": f"pp {rank}"}}
        for rank in range(ranks)
    ]
    return [{"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}, *threads]


def _transfer_events(step: PipelineStep, pid: int, origin: float) -> Iterable[dict[str, Any]]:
    """Data-parallel transfers, on tracks of their own because several may overlap, and the rank's waits for
    them."""
    for tid, transfers in enumerate(step.transfers):
        for place, (name, start, awaited, end) in enumerate(transfers):
            track = {
                "name": f"pp {tid}: {name}",
                "cat": "data parallel",
                "id": f"{step.step}.{pid}.{tid}.{place}",
                "pid": pid,
                "tid": tid,
            }
            args = {"step": step.step, "waited_ms": (end - awaited) * 1000}
            yield {"ph": "b", **track, "ts": (start - origin) * MICROSECONDS, "args": args}
            yield {"ph": "e", **track, "ts": (end - origin) * MICROSECONDS}
            yield _slice(f"wait: {name}", "wait", pid, tid, awaited - origin, end - origin)


def _action(action: Action, step: int, pid: int, tid: int, start: float, end: float) -> dict[str, Any]:
    args = {"step": step, "stage": action.stage, "microbatch": action.microbatch}
    return {**_slice(repr(action), PASSES[action.kind], pid, tid, start, end), "args": args}


def _slice(name: str, category: str, pid: int, tid: int, start: float, end: float) -> dict[str, Any]:
    times = {"ts": start * MICROSECONDS, "dur": (end - start) * MICROSECONDS}
    return {"ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid, **times}


def describe(comparison: Mapping[str, Any]) -> list[str]:
    """Lines for the user: measured and predicted, and the durations behind the prediction."""
    measured, predicted, steps = comparison["measured"], comparison["predicted"], comparison["steps"]
    compared = "; ".join(
        f"{name} {measured[name]:.1%} measured, {predicted[name]:.1%} predicted" for name in MEASURES
    )
    spans = (f"{name} {_range(values)} ms" for name, values in comparison["durations"].items() if values)
    head = f"{comparison['schedule']}, steps {steps[0]} to {steps[-1]}: {compared}"
    lines = [
        head,
        f"  predicted from the median {', '.join(spans)} a stage, and "
        f"{comparison['comm'] * 1000:.2f} ms a message",
    ]
    count, under_way, waited = comparison["data_parallel"].values()
    if count:
        measures = (
            f"{under_way * 1000:.2f} ms with a transfer in flight, {waited * 1000:.2f} ms of waiting for one"
        )
        lines.append(f"  over data parallelism, per rank and step: {count:.4g} transfers, {measures}")
    return lines


def _range(seconds: Sequence[float]) -> str:
    low, high = (f"{1000 * bound:.2f}" for bound in (min(seconds), max(seconds)))
    return low if low == high else f"{low}–{high}"
