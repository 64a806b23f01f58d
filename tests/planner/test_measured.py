"""Reading what a run measured: the recorder of the trainer writes it, the same schedule is simulated with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megalite.mesh.mesh import Layout
from megalite.monitoring.timeline import Record, timeline
from megalite.parallel.pipeline.generator import build
from megalite.parallel.pipeline.schedule import Costs, ScheduleError
from megalite.parallel.pipeline.send_recv_actions import with_communication
from megalite.parallel.pipeline.simulator import simulate
from megalite.planner.drawing.measured import read
from megalite.system.clock import ActionTiming

DURATIONS = {"forward": [1, 2, 2, 1], "input_backward": [2, 3, 2, 2], "weight_backward": [1, 1, 2, 2], "comm": 0.25}
FILE = {
    **{"schedule": "zb-h1", "pp": 4, "microbatches": 8, "virtual_stages": 1, "steps": [3, 4], "comm": 0.25},
    **{"durations": {name: DURATIONS[name] for name in ("forward", "input_backward", "weight_backward")}},
    **{"measured": {"bubble_fraction": 0.4, "bubble_rate": 0.3}, "traceEvents": []},
}


def saved(run: Path, **changes) -> Path:
    (run / "traces").mkdir()
    (run / "traces" / "timeline.json").write_text(
        json.dumps({key: value for key, value in (FILE | changes).items() if value != "left out"})
    )
    return run


@pytest.mark.parametrize("name, ranks", [("1f1b", 4), ("zb-v", 2)])
def test_a_recorded_timeline_predicts_what_it_was_made_from(name, ranks, tmp_path):
    schedule = build(name, ranks, 4)
    simulated = simulate(schedule, **DURATIONS)
    records = []
    for spans in simulated.spans:
        free = [0.0, *(span.end for span in spans)]
        records.append(
            Record(
                "host",
                [0.0],
                {
                    3: [
                        ActionTiming(span.action, before, span.start, span.end)
                        for before, span in zip(free, spans, strict=False)
                    ]
                },
            )
        )
    (tmp_path / "traces").mkdir()
    found_by_the_run = timeline(with_communication(schedule), Layout(pp=ranks, dp=1, cp=1, tp=1), records)
    (tmp_path / "traces" / "timeline.json").write_text(json.dumps(found_by_the_run))
    run = read(tmp_path)
    assert run.plan.schedule == schedule and run.steps == [3]
    assert run.plan.timeline.makespan == pytest.approx(simulated.makespan) and run.plan.durations[
        "comm"
    ] == pytest.approx(0.25)
    assert run.bubbles["bubble_fraction"] == pytest.approx(simulated.bubble_fraction)


def test_the_run_is_simulated_with_its_durations(tmp_path):
    run = read(saved(tmp_path))
    assert run.plan.timeline == simulate(build("zb-h1", 4, 8), **DURATIONS)
    assert run.bubbles == {"bubble_fraction": 0.4, "bubble_rate": 0.3}
    predicted = run.plan.timeline
    assert run.beside().split() == [
        *(
            "over",
            "2",
            "steps",
            "measured",
            "predicted",
            "bubble_fraction",
            "40.0%",
            f"{predicted.bubble_fraction:.1%}",
        ),
        *("bubble_rate", "30.0%", f"{predicted.bubble_rate:.1%}"),
    ]


def test_the_order_is_that_of_the_costs_that_the_run_planned_for(tmp_path):
    (saved(tmp_path) / "config.yaml").write_text("parallel:\n  schedule_costs: [1.0, 1.0, 0.3, 0.2]\n")
    planned = build("zb-h1", 4, 8, costs=Costs(1, 1, 0.3, 0.2))
    assert read(tmp_path).plan.schedule == planned != build("zb-h1", 4, 8)


def test_other_schedules_take_the_means_and_halves_of_a_whole_backward(tmp_path):
    results = {plan.schedule.name: plan for plan in read(saved(tmp_path)).compare()}
    costs = Costs(1.5, 2.25, 1.5, 0.25)
    assert results["zb-v"].timeline == simulate(build("zb-v", 4, 8, costs=costs), *costs)
    whole = tmp_path / "whole"
    whole.mkdir()
    durations = {**FILE["durations"], "weight_backward": None}
    results = {plan.schedule.name: plan for plan in read(saved(whole, schedule="1f1b", durations=durations)).compare()}
    assert results["1f1b"].durations == {
        "forward": 1.5,
        "input_backward": 1.125,
        "weight_backward": 1.125,
        "comm": 0.25,
    }
    assert {plan.unit for plan in results.values()} == {"s"}


def test_others_have_as_many_stages_on_a_rank_as_the_run(tmp_path):
    durations = {"forward": [1] * 12, "input_backward": [2] * 12, "weight_backward": None}
    run = read(saved(tmp_path, schedule="interleaved", virtual_stages=3, durations=durations, comm=0))
    same = next(plan for plan in run.compare() if plan.schedule.name == "interleaved")
    assert same.chunks == 3 and same.timeline.makespan == pytest.approx(run.plan.timeline.makespan)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"pp": "left out"}, "missing key 'pp'"),
        ({"schedule": "zigzag"}, "parallel.schedule='zigzag'"),
        ({"pp": 0}, "pp must be at least 1, got 0"),
        ({"pp": "four"}, "is not a run's timeline"),
        ({"comm": "fast"}, "is not a run's timeline"),
        ({"durations": {**FILE["durations"], "forward": [1, 2]}}, "forward has 2 durations for 4 stages"),
        ({"durations": {**FILE["durations"], "forward": None}}, "is not a run's timeline"),
        ({"durations": dict.fromkeys(FILE["durations"], [0] * 4)}, "all durations are 0"),
        ({"durations": {**FILE["durations"], "forward": [-1, 1, 1, 1]}}, "-1 is not a duration in seconds"),
        ({"durations": {**FILE["durations"], "forward": [1, 1, 1, float("nan")]}}, "nan is not a duration"),
        ({"comm": float("inf")}, "inf is not a duration"),
    ],
)
def test_a_broken_file_is_named(changes, message, tmp_path):
    with pytest.raises(ScheduleError, match=message) as error:
        read(saved(tmp_path, **changes))
    assert str(tmp_path / "traces" / "timeline.json") in str(error.value)


def test_a_run_without_a_timeline_is_told_how_to_get_one(tmp_path):
    with pytest.raises(ScheduleError, match=r"profiling\.timeline"):
        read(tmp_path)
    (saved(tmp_path) / "traces" / "timeline.json").write_text("[1]")
    with pytest.raises(ScheduleError, match="not a JSON object"):
        read(tmp_path)
    (tmp_path / "traces" / "timeline.json").write_text(json.dumps(FILE))
    (tmp_path / "config.yaml").write_text("{}")
    with pytest.raises(ScheduleError, match=r"config\.yaml has no parallel\.schedule_costs"):
        read(tmp_path)
