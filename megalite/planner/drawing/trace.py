"""A timeline in the Chrome trace format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

Each rank is a thread with a slice per action, and a second thread with its gathering of weights if the plan
has any. A flow (an arrow) is a message between ranks; a counter shows the activations on a rank.
"""

from __future__ import annotations

from typing import Any

from megalite.parallel.pipeline.bubble import BubblePlan
from megalite.parallel.pipeline.schedule import Action, ActionKind
from megalite.parallel.pipeline.send_recv_actions import send_after

# per unit of time; durations without a unit are shown as milliseconds
MICROSECONDS = {"s": 1e6, "ms": 1e3, "": 1e3}
CATEGORIES = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.WEIGHT: "weight gradient",
}


def chrome_trace(plan: BubblePlan) -> dict[str, Any]:
    """Return the trace for json.dump, with the plan's measures as metadata."""
    events: list[dict[str, Any]] = []
    for rank in range(plan.schedule.ranks):
        events.append(
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}}
        )
        events.append(
            {"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": rank, "args": {"sort_index": rank}}
        )
        events += _slices(plan, rank) + _counter(plan, rank)
        if plan.weights is not None:
            events += _gathers(plan, rank)
    return {"traceEvents": events + _flows(plan), "displayTimeUnit": "ms", "metadata": plan.measures()}


def _slices(plan: BubblePlan, rank: int) -> list[dict[str, Any]]:
    scale = MICROSECONDS[plan.unit]
    return [
        {
            **{
                "ph": "X",
                "name": f"{action.kind}{action.microbatch}",
                "cat": CATEGORIES[action.kind],
                "pid": 0,
                "tid": rank,
            },
            **{"ts": start * scale, "dur": (end - start) * scale},
            "args": {"action": repr(action), "stage": action.stage, "microbatch": action.microbatch},
        }
        for action, start, end in plan.timeline.spans[rank]
    ]


def _gathers(plan: BubblePlan, rank: int) -> list[dict[str, Any]]:
    """Return the weight gathers of a rank, on a thread below the rank's own thread."""
    scale, thread = MICROSECONDS[plan.unit], {"pid": 0, "tid": plan.schedule.ranks + rank}
    slices = [
        {
            "ph": "X",
            "name": repr(move),
            "cat": "gather",
            **thread,
            "ts": start * scale,
            "dur": (end - start) * scale,
        }
        for move, start, end in plan.timeline.gathers[rank]
    ]
    return [
        {"ph": "M", "name": "thread_name", **thread, "args": {"name": f"rank {rank} gathers weights"}},
        {"ph": "M", "name": "thread_sort_index", **thread, "args": {"sort_index": rank}},
        *slices,
    ]


def _counter(plan: BubblePlan, rank: int) -> list[dict[str, Any]]:
    """Return the number of activations in whole stages.

    An activation counts from the start of its forward to the end of the last pass that needs it.
    """
    scale, held, events = MICROSECONDS[plan.unit], 0, []
    for action, start, end in plan.timeline.spans[rank]:
        change = {ActionKind.FORWARD: 1, plan.schedule.passes[-1]: -1}.get(action.kind, 0)
        if change:
            held += change
            time = start if change > 0 else end
            value = {"activations": held / plan.chunks}
            events.append(
                {
                    "ph": "C",
                    "name": f"rank {rank} holds",
                    "pid": 0,
                    "tid": rank,
                    "ts": time * scale,
                    "args": value,
                }
            )
    return events


def _flows(plan: BubblePlan) -> list[dict[str, Any]]:
    """Return an arrow per message, from the sending action to the start of the action that needs it."""
    scale = MICROSECONDS[plan.unit]
    placed = {span.action: (rank, span) for rank, spans in enumerate(plan.timeline.spans) for span in spans}
    events: list[dict[str, Any]] = []
    for action, (rank, span) in placed.items():
        if send_after(action, plan.schedule) is None:
            continue
        step = 1 if action.kind is ActionKind.FORWARD else -1
        target, needed = placed[Action(action.kind, action.stage + step, action.microbatch)]
        common = {"name": "message", "cat": "message", "id": len(events), "pid": 0}
        # inside the slice, to attach to it
        events.append({**common, "ph": "s", "tid": rank, "ts": (span.start + span.end) / 2 * scale})
        events.append({**common, "ph": "f", "bp": "e", "tid": target, "ts": needed.start * scale})
    return events
