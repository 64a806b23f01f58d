"""Schedules as data, their timing and their memory, against published values."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megalite.parallel.pipeline.generator import build
from megalite.parallel.pipeline.schedule import Action, ActionKind, Schedule, ScheduleError, peak_activations
from megalite.parallel.pipeline.simulator import simulate
from megalite.planner.drawing.text import draw

F, B, W = ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.WEIGHT
ROOT = Path(__file__).parents[3]


def printed(schedule, rank):
    return " ".join(map(repr, schedule.actions[rank]))


def test_the_lists_are_those_of_the_papers():
    schedule = build("1f1b", 3, 4)
    assert printed(schedule, 0) == "F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 B0.2 B0.3"
    assert printed(schedule, 1) == "F1.0 F1.1 B1.0 F1.2 B1.1 F1.3 B1.2 B1.3"
    assert printed(schedule, 2) == "F2.0 B2.0 F2.1 B2.1 F2.2 B2.2 F2.3 B2.3"
    assert printed(build("1f1b", 3, 1), 0) == "F0.0 B0.0"
    assert printed(build("gpipe", 2, 3), 1) == "F1.0 F1.1 F1.2 B1.0 B1.1 B1.2"


ORACLE = [(2, 4, 0.2), (4, 4, 0.4286), (4, 8, 0.2727), (8, 16, 0.3043), (8, 64, 0.0986), (16, 64, 0.1899)]


@pytest.mark.parametrize("stages, microbatches, bubble", ORACLE)
def test_published_bubbles_and_peaks_of_1f1b(stages, microbatches, bubble):
    schedule = build("1f1b", stages, microbatches)
    assert simulate(schedule).bubble_fraction == pytest.approx(bubble, abs=5e-5)
    assert peak_activations(schedule) == list(range(stages, 0, -1))


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_bubble_and_peak_of_every_size(name):
    """Both schedules idle for p - 1 of every microbatch's time over m of them (Narayanan et al. 2021); they differ in
    memory."""
    for stages in range(1, 9):
        for microbatches in range(1, 33):
            schedule = build(name, stages, microbatches)
            assert simulate(schedule).makespan == 3 * (microbatches + stages - 1)
            peak = [microbatches if name == "gpipe" else min(stages - stage, microbatches) for stage in range(stages)]
            assert peak_activations(schedule) == peak == list(schedule.activation_limit)
            evaluation = build(name, stages, microbatches, forward_only=True)
            assert simulate(evaluation).makespan == microbatches + stages - 1
            assert peak_activations(evaluation) == [1] * stages
            assert {action.kind for actions in evaluation.actions for action in actions} == {F}


@pytest.mark.parametrize("stages, microbatches", [(2, 4), (4, 4), (4, 16), (8, 24)])
def test_latency_lengthens_1f1b_as_derived(stages, microbatches):
    """p | m: each of the m / p - 1 rounds waits for a round trip through p - 1 stages, beyond the way in and out of the
    pipeline."""
    forward, input_backward, weight_backward, latency = 1.0, 1.1, 0.9, 0.05
    whole = forward + input_backward + weight_backward
    expected = (microbatches + stages - 1) * whole + (
        2 * (stages - 1) * microbatches / stages + 2 * (stages - 2)
    ) * latency
    timeline = simulate(build("1f1b", stages, microbatches), forward, input_backward, weight_backward, latency)
    assert timeline.makespan == pytest.approx(expected)


def test_time_of_uneven_stages_and_of_messages():
    """Two stages, two microbatches, worked out by hand."""
    timeline = simulate(build("1f1b", 2, 2), forward=[1, 3], input_backward=[1, 2], weight_backward=[1, 2], comm=0.5)
    assert [tuple(span) for span in timeline.spans[1]] == [
        (Action(F, 1, 0), 1.5, 4.5),
        (Action(B, 1, 0), 4.5, 8.5),
        (Action(F, 1, 1), 8.5, 11.5),
        (Action(B, 1, 1), 11.5, 15.5),
    ]
    assert [(span.start, span.end) for span in timeline.spans[0]] == [(0, 1), (1, 2), (9, 11), (16, 18)]
    assert timeline.makespan == 18 and timeline.ideal == (6 + 14) / 2 and timeline.bubble_fraction == 1 - 10 / 18


def folded_with_weights():
    """Four stages on two ranks in a V, backward split: rank 0 holds both ends of the model."""
    actions = tuple(
        tuple(
            Action(kind, stage, 0)
            for kind, order in ((F, (first, last)), (B, (last, first)), (W, (last, first)))
            for stage in order
        )
        for first, last in ((0, 3), (1, 2))
    )
    return Schedule("folded", 2, 4, 1, (0, 1, 1, 0), actions, (2, 2), (F, B, W))


def test_split_backward_and_several_stages_on_a_rank():
    schedule = folded_with_weights()
    # a stage takes half: 1, 2 and 3
    timeline = simulate(schedule, forward=2, input_backward=4, weight_backward=6, comm=1)
    ends = {repr(span.action): span.end for spans in timeline.spans for span in spans}
    assert ends == {
        **{"F0.0": 1, "F1.0": 3, "F2.0": 4, "F3.0": 6},  # a message between stages 0 and 1, none between 1 and 2
        **{"B3.0": 8, "B2.0": 11, "B1.0": 13, "B0.0": 16},
        **{"W2.0": 16, "W1.0": 19, "W3.0": 19, "W0.0": 22},
    }
    assert peak_activations(schedule) == peak_activations(schedule, until=W) == [2, 2]
    other = tuple(Action(kind, stage, 0) for kind, stage in ((F, 1), (B, 1), (F, 2), (W, 1), (B, 2), (W, 2)))
    early = replace(schedule, actions=(schedule.actions[0], other))
    assert peak_activations(early) == [2, 1] and peak_activations(early, until=W) == [2, 2]


def test_a_missing_action_is_named():
    schedule = build("1f1b", 2, 2)
    broken = replace(schedule, actions=(schedule.actions[0], schedule.actions[1][1:]))
    with pytest.raises(ScheduleError, match=r"rank 1: B1\.0 waits for F1\.0, which never completes"):
        simulate(broken)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("1f1", 2, 2), "Unknown schedule: parallel.schedule='1f1'. Choose one of: gpipe, 1f1b"),
        (("1f1b", 0, 2), "parallel.pp must be at least 1, got 0"),
        (("gpipe", 2, 0), "microbatches per step must be at least 1, got 0"),
    ],
)
def test_bad_input_is_named(arguments, message):
    with pytest.raises(ScheduleError, match=message):
        build(*arguments)


def test_the_hash_tells_plans_apart_and_nothing_else():
    plans = [
        build(*plan)
        for plan in (("gpipe", 2, 3), ("1f1b", 2, 3), ("1f1b", 3, 2), ("1f1b", 2, 4), ("1f1b", 2, 3, None, None, True))
    ]
    one = plans[1]
    plans += [replace(one, placement=(1, 0)), replace(one, actions=one.actions[::-1]), replace(one, passes=(F, B, W))]
    assert len({plan.hash for plan in plans}) == len(plans)
    program = "from megalite.parallel.pipeline.generator import build; print(build('1f1b', 2, 3).hash)"
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(ROOT)}
    elsewhere = subprocess.check_output([sys.executable, "-c", program], text=True, cwd=ROOT, env=environment)
    assert elsewhere.strip() == build("1f1b", 2, 3).hash


def test_plans_need_no_torch():
    names = ("schedule", "generator", "send_recv_actions", "validator", "partition")
    modules = ", ".join(f"megalite.parallel.pipeline.{name}" for name in names)
    program = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})


def test_drawing_places_every_bar_in_its_time():
    timeline = simulate(build("1f1b", 2, 2))
    assert draw(timeline) == "rank 0  F0|F1|......B0---|...B1---|\nrank 1  ...F0|B0---|F1|B1---|......"
    rows = draw(simulate(folded_with_weights(), 1, 1, 1)).splitlines()
    assert rows[0].startswith("rank 0  F0.0|..........F3.0|B3.0|") and rows[1].startswith(
        "rank 1  .....F1.0|F2.0|..........B2.0|B1.0|"
    )


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_documentation_shows_what_the_code_does(name):
    page = (ROOT / "docs" / "pipeline.md").read_text()
    assert draw(simulate(build(name, 4, 8))) in page
    assert str(build(name, 4, 8)).splitlines()[1] in page
