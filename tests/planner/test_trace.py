"""The Chrome trace of a plan: slices, arrows and counters as Perfetto needs them."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise

import pytest

from megalite.parallel.pipeline.bubble import plan
from megalite.parallel.pipeline.generator import SCHEDULES
from megalite.parallel.pipeline.schedule import ActionKind, Costs
from megalite.planner.drawing.trace import chrome_trace


@pytest.fixture(params=SCHEDULES)
def traced(request):
    bubble_plan = plan(request.param, 4, 8, costs=Costs(1, 1.5, 0.5, 0.25))
    trace = json.loads(json.dumps(chrome_trace(bubble_plan), allow_nan=False))
    events = defaultdict(list)
    for event in trace["traceEvents"]:
        events[event["ph"]].append(event)
    return bubble_plan, trace, events


def test_slices_are_the_actions_in_microseconds(traced):
    bubble_plan, trace, events = traced
    seen = {(e["args"]["action"], e["tid"], e["ts"] / 1000, (e["ts"] + e["dur"]) / 1000) for e in events["X"]}
    assert seen == {(repr(a), rank, s, e) for rank, spans in enumerate(bubble_plan.timeline.spans) for a, s, e in spans}
    for rank in range(4):
        row = sorted((e["ts"], e["dur"]) for e in events["X"] if e["tid"] == rank)
        assert all(one[0] + one[1] <= other[0] for one, other in pairwise(row))
    names = {e["tid"]: e["args"]["name"] for e in events["M"] if e["name"] == "thread_name"}
    assert names == {rank: f"rank {rank}" for rank in range(4)}
    assert trace["metadata"]["bubble_rate"] == bubble_plan.measures()["bubble_rate"]


def test_an_arrow_is_a_message_that_takes_its_latency(traced):
    bubble_plan, _, events = traced
    starts, ends = ({e["id"]: e for e in events[phase]} for phase in "sf")
    assert len(starts) == len(events["s"]) == sum(bubble_plan.messages()) and starts.keys() == ends.keys()
    for key, start in starts.items():
        (source,) = [e for e in events["X"] if e["tid"] == start["tid"] and e["ts"] < start["ts"] < e["ts"] + e["dur"]]
        (target,) = [e for e in events["X"] if e["tid"] == ends[key]["tid"] and e["ts"] == ends[key]["ts"]]
        assert source["cat"] == target["cat"] and source["args"]["microbatch"] == target["args"]["microbatch"]
        assert abs(source["args"]["stage"] - target["args"]["stage"]) == 1 and source["tid"] != target["tid"]
        assert target["ts"] >= source["ts"] + source["dur"] + 250 - 1e-6 and ends[key]["bp"] == "e"


def test_counters_peak_at_the_memory_of_the_plan(traced):
    bubble_plan, _, events = traced
    for rank, peak in enumerate(bubble_plan.peaks(ActionKind.WEIGHT)):
        counts = [e for e in events["C"] if e["tid"] == rank]
        values = [e["args"]["activations"] for e in counts]
        assert max(values) == peak and values[-1] == 0
        assert all(one["ts"] <= other["ts"] for one, other in pairwise(counts))
