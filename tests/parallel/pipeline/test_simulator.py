"""Bubbles and memory of every schedule, against closed forms of the papers written out here, and a longest path through
a graph."""

from __future__ import annotations

import random
from collections import Counter
from graphlib import TopologicalSorter
from itertools import pairwise

import pytest

from megalite.parallel.pipeline.bubble import compare, plan, sweep
from megalite.parallel.pipeline.generator import SCHEDULES, build
from megalite.parallel.pipeline.schedule import Action, ActionKind, Costs, ScheduleError, peak_activations
from megalite.parallel.pipeline.send_recv_actions import with_communication
from megalite.parallel.pipeline.simulator import Interval, Timeline, simulate
from megalite.planner.drawing.tables import grid, summary, table
from megalite.planner.drawing.text import draw

F, B, W = ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.WEIGHT
RANKS = range(2, 17)
# ranks, microbatches, stages a rank, bubble, peak on the first and the last rank: backward takes twice as long as
# forward
ORACLE = [
    *(
        (2, 4, 1, 0.2, 2, 1),
        (4, 4, 1, 0.4286, 4, 1),
        (4, 8, 1, 0.2727, 4, 1),
        (4, 8, 2, 0.1579, 5.5, 2.5),
        (4, 8, 4, 0.0857, 4.75, 3.25),
    ),
    *((8, 16, 1, 0.3043, 8, 1), (8, 16, 2, 0.1795, 11.5, 4.5), (8, 64, 1, 0.0986, 8, 1), (16, 64, 1, 0.1899, 16, 1)),
]


@pytest.mark.parametrize("ranks, microbatches, stages, bubble, first, last", ORACLE)
def test_known_bubbles_and_peaks(ranks, microbatches, stages, bubble, first, last):
    bubble_plan = plan("interleaved" if stages > 1 else "1f1b", ranks, microbatches, stages)
    assert bubble_plan.timeline.bubble_fraction == pytest.approx(bubble, abs=5e-5)
    assert bubble_plan.peaks()[0] == first and bubble_plan.peaks()[-1] == last


@pytest.mark.parametrize("ranks", RANKS)
def test_bubble_over_ideal_of_the_schedules_with_a_whole_backward(ranks):
    """Narayanan et al. 2021, section 2.2: (p - 1) / m, and with v stages on each rank (p - 1) / (v m), whatever a
    backward takes."""
    for microbatches in (ranks, 2 * ranks, 5 * ranks):
        for costs in (Costs(), Costs(1, 0.7, 0.6)):
            for name in ("gpipe", "1f1b"):
                assert plan(name, ranks, microbatches, costs=costs).timeline.bubble_over_ideal == pytest.approx(
                    (ranks - 1) / microbatches
                )
            for stages in (2, 3, 4):
                bubble_plan = plan("interleaved", ranks, microbatches, stages, costs)
                assert bubble_plan.timeline.bubble_over_ideal == pytest.approx((ranks - 1) / (stages * microbatches))
                held = [
                    min(2 * (ranks - rank - 1) + (stages - 1) * ranks + 1, microbatches * stages) / stages
                    for rank in range(ranks)
                ]
                assert bubble_plan.peaks() == pytest.approx(held)


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_ragged_groups_idle_no_more_than_whole_ones(ranks):
    """Groups of p and a short one would idle 34.5% and 20.75% at p = 4, v = 2 and m = 6 and 7, where these idle 20% and
    17.6%."""
    for microbatches in range(ranks, 4 * ranks):
        for stages in (2, 3):
            bubble_plan = plan("interleaved", ranks, microbatches, stages)
            assert bubble_plan.timeline.bubble_fraction == pytest.approx(
                (ranks - 1) / (stages * microbatches + ranks - 1)
            )
    assert [max(plan("interleaved", 4, microbatches, 2).peaks()) for microbatches in (6, 7)] == [6, 7]


@pytest.mark.parametrize("ranks", RANKS)
def test_latency_in_1f1b(ranks):
    """Derived: each of the m / p rounds of the steady state waits for a way down and up the ranks."""
    for microbatches, latency in ((ranks, 0.1), (3 * ranks, 0.05), (4 * ranks, 0.2)):
        forward, backward, weight = 1.0, 1.2, 0.9
        whole = forward + backward + weight
        waiting = 2 * (ranks - 1) * microbatches / ranks + 2 * (ranks - 2)
        bubble_plan = plan("1f1b", ranks, microbatches, costs=Costs(forward, backward, weight, latency))
        assert bubble_plan.timeline.makespan == pytest.approx((microbatches + ranks - 1) * whole + waiting * latency)


def random_costs(choose: random.Random) -> Costs:
    """With weight gradients no longer than the other passes, but longer than a round trip: a shorter one cannot fill
    it."""
    forward, backward = choose.uniform(0.5, 2), choose.uniform(0.5, 2)
    weight = choose.uniform(0.1, 1) * min(forward, backward)
    return Costs(forward, backward, weight, choose.choice([0, choose.uniform(0, 0.5)]) * weight)


@pytest.mark.parametrize("ranks", RANKS)
def test_zero_bubble_schedules_reach_their_papers_bubbles(ranks):
    """Qi et al. 2023, table 1: (p - 1)(F + B - W) for ZB-H1 and (p - 1)(F + B - 2W) for ZB-H2, and time for the
    messages."""
    choose = random.Random(ranks)
    for microbatches in (2 * ranks - 1, 2 * ranks, 3 * ranks):
        for costs in (Costs(), random_costs(choose)):
            forward, backward, weight, latency = costs
            work = microbatches * (forward + backward + weight)
            h1, h2 = (plan(name, ranks, microbatches, costs=costs) for name in ("zb-h1", "zb-h2"))
            if microbatches >= 2 * ranks:
                assert h1.timeline.makespan <= work + (ranks - 1) * (forward + backward - weight + 4 * latency) + 1e-9
            assert (
                h2.timeline.longest_span <= work + (ranks - 1) * (forward + backward - 2 * weight + 2 * latency) + 1e-9
            )
            for bubble_plan, limit in ((h1, ranks), (h2, 2 * ranks - 1)):
                assert max(bubble_plan.peaks()) <= max(bubble_plan.peaks(W)) <= limit


def test_a_weight_pass_shorter_than_a_round_trip_can_not_hide_it():
    """Why the bound of ZB-H1 asks for W >= 2 latencies: two ranks then wait for each other in every round."""
    forward, backward, weight, latency = costs = Costs(1, 1, 0.1, 0.2)
    bound = 16 * (forward + backward + weight) + (forward + backward - weight) + 4 * latency
    assert plan("zb-h1", 2, 16, costs=costs).timeline.makespan > bound


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name, activations", [("zb-h2", lambda p: 2 * p - 1), ("zb-v", lambda p: p)])
def test_no_bubble_is_left_at_equal_costs(name, activations, ranks):
    for microbatches in (2 * ranks, 2 * ranks + 1, 4 * ranks):
        bubble_plan = plan(name, ranks, microbatches)
        assert bubble_plan.timeline.longest_span == bubble_plan.timeline.ideal == 3 * microbatches
        assert bubble_plan.timeline.bubble_rate == 0 < bubble_plan.timeline.bubble_fraction
        assert max(bubble_plan.peaks(W)) == activations(ranks)


@pytest.mark.parametrize("ranks", RANKS)
def test_v_half_holds_half_of_1f1b(ranks):
    """Qi et al. 2024, "Pipeline Parallelism with Controllable Memory": about p / 2, with less idle time than 1F1B."""
    half, whole = plan("v-half", ranks, 3 * ranks), plan("1f1b", ranks, 3 * ranks)
    assert max(half.peaks(W)) <= ranks / 2 + 1
    assert half.timeline.makespan < whole.timeline.makespan or ranks == 2


def test_the_three_bubbles_of_a_timeline_worked_out_by_hand():
    first = (Interval(Action(F, 0, 0), 0, 1), Interval(Action(B, 0, 0), 5, 8))
    last = (Interval(Action(F, 1, 0), 2, 5), Interval(Action(B, 1, 0), 5, 10))
    timeline = Timeline((first, last))
    assert (timeline.busy, timeline.ideal, timeline.makespan, timeline.longest_span) == ((4, 8), 6, 10, 8)
    assert timeline.bubble_fraction == pytest.approx(8 / 20)  # idle over all time of two ranks
    assert timeline.bubble_over_ideal == pytest.approx(4 / 6)
    assert timeline.bubble_rate == pytest.approx(2 / 8)


def longest_paths(schedule, durations, latency):
    """When each action ends: the longest path to it through what it needs and what precedes it on its rank."""
    needs: dict[Action, dict[Action, float]] = {}
    for rank, actions in enumerate(schedule.actions):
        for before, action in pairwise((None, *actions)):
            kind, stage, microbatch = action[:3]
            needs[action] = {before: 0} if before else {}
            wanted = {F: [(F, stage - 1)], B: [(F, stage), (B, stage + 1)], W: [(B, stage)]}[kind]
            for other, source in wanted:
                if 0 <= source < schedule.stages:
                    needs[action][Action(other, source, microbatch)] = (
                        latency if schedule.placement[source] != rank else 0
                    )
    ends: dict[Action, float] = {}
    for action in TopologicalSorter(needs).static_order():
        start = max((ends[other] + delay for other, delay in needs[action].items()), default=0)
        ends[action] = start + durations[action.kind][action.stage]
    return ends


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_simulator_finds_the_longest_path(name):
    choose = random.Random(name)
    for ranks, microbatches in ((1, 3), (2, 3), (3, 7), (4, 8), (5, 4)):
        schedule = build(name, ranks, microbatches)
        passes = {kind: [choose.randint(0, 9) for _ in range(schedule.stages)] for kind in (F, B, W)}
        timeline = simulate(schedule, passes[F], passes[B], passes[W], comm=2)
        whole = [b + w for b, w in zip(passes[B], passes[W], strict=True)]
        durations = passes if W in schedule.passes else passes | {B: whole}
        assert {span.action: span.end for spans in timeline.spans for span in spans} == longest_paths(
            schedule, durations, 2
        )
        assert all(
            span.end - span.start == durations[span.action.kind][span.action.stage]
            for spans in timeline.spans
            for span in spans
        )


@pytest.mark.parametrize("name", SCHEDULES)
def test_messages_are_those_that_the_runtime_sends(name):
    for ranks, microbatches in ((1, 2), (2, 3), (4, 8)):
        bubble_plan = plan(name, ranks, microbatches)
        sends = Counter(dict.fromkeys(range(ranks), 0))
        for rank, actions in enumerate(with_communication(bubble_plan.schedule).actions):
            sends[rank] += sum(action.is_send for action in actions)
        assert bubble_plan.messages() == [sends[rank] for rank in range(ranks)]


def test_memory_of_stages_that_differ():
    """Stages 0 and 3 on rank 0, 1 and 2 on rank 1, worked out by hand: at the turn each rank holds both of its
    stages."""
    schedule = build("zb-v", 2, 1)
    assert peak_activations(schedule, sizes=[5, 1, 2, 10]) == [15, 3]
    assert peak_activations(build("1f1b", 3, 4), sizes=[4, 1, 1.5]) == [12, 2, 1.5]


def test_costs_shape_the_order_and_not_only_the_times():
    short, even = Costs(1, 1, 0.3, 0.2), Costs()
    assert (
        plan("zb-h1", 4, 8, costs=short).schedule
        == build("zb-h1", 4, 8, costs=short)
        != build("zb-h1", 4, 8, costs=even)
    )


def test_comparing_and_sweeping_cover_what_was_asked_for():
    assert [bubble_plan.schedule.name for bubble_plan in compare(4, 8)] == list(SCHEDULES)
    assert [bubble_plan.chunks for bubble_plan in compare(4, 8, 3)] == [1, 1, 3, 1, 1, 2, 2]
    assert [bubble_plan.schedule.ranks for bubble_plan in sweep("pp", [2, 4], "zb-h1", None, 8)] == [2, 4]
    plans = sweep("microbatches", [4, 8], None, 2, None)
    assert [(bubble_plan.schedule.name, bubble_plan.schedule.microbatches) for bubble_plan in plans] == [
        (name, m) for m in (4, 8) for name in SCHEDULES
    ]
    title, head, *rows = grid(plans, "microbatches", "bubble_over_ideal").splitlines()
    assert title == "bubble_over_ideal" and head.split() == ["microbatches", *SCHEDULES]
    assert [row.split()[:4] for row in rows] == [["4", "25.0%", "25.0%", "12.5%"], ["8", "12.5%", "12.5%", "6.2%"]]


def test_tables_name_every_measure():
    bubble_plan = plan("zb-h2", 4, 8)
    lines = dict(line.split(maxsplit=1) for line in summary(bubble_plan).splitlines())
    values = {name: text.split("  ")[0] for name, text in lines.items()}
    assert values == {
        **{"makespan": "27", "ideal": "24", "longest_span": "24", "messages": "48"},
        **{"bubble_fraction": "11.1%", "bubble_over_ideal": "12.5%", "bubble_rate": "0.0%"},
        **{"peak_activations": "7 5 3 1", "peak_with_weight_stash": "7 7 7 7"},
    }
    head, row = table([bubble_plan]).splitlines()
    assert {"bubble_fraction", "bubble_over_ideal", "bubble_rate", "peak", "messages"} <= set(head.split())
    assert row.split() == ["zb-h2", "1", "27", "24", "11.1%", "12.5%", "0.0%", "7", "7", "48"]


def test_a_step_that_takes_no_time_is_refused():
    with pytest.raises(ScheduleError, match="all 0"):
        plan("1f1b", 2, 2, costs=Costs(0, 0, 0, 1))


def test_a_drawing_is_scaled_to_the_columns_there_are():
    timeline = plan("1f1b", 2, 2, costs=Costs(1, 1, 1)).timeline
    natural = draw(timeline)
    assert natural.splitlines()[0] == "rank 0  F0|F1|......B0---|...B1---|"
    assert draw(timeline, 200) == natural
    assert draw(timeline, 26).splitlines() == ["rank 0  F|F|....B0-|..B1-|", "rank 1  ..F|B0-|F|B1-|...."]
    assert draw(timeline, 17).splitlines() == ["rank 0  FF..B|.B|", "rank 1  .FB|FB|.."]
    wide = draw(plan("zb-v", 12, 24).timeline, 160).splitlines()
    assert {len(row) for row in wide} == {len(wide[0])} and len(wide[0]) <= 160 and len(wide) == 12
