"""Gathers and reshards in the list of actions (ZeRO-3): each use finds its weights, no more is whole than needed, and
what it costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.parallel.pipeline.bubble import GatheredWeights, plan
from megalite.parallel.pipeline.gather_actions import with_gathering
from megalite.parallel.pipeline.generator import SCHEDULES, build
from megalite.parallel.pipeline.schedule import ActionKind, Schedule, ScheduleError, Unit
from megalite.parallel.pipeline.send_recv_actions import OUTSTANDING_SENDS, with_communication
from megalite.parallel.pipeline.simulator import simulate
from megalite.parallel.pipeline.validator import validate

COMPUTE = (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.WEIGHT)


def units_of(schedule: Schedule, each: int, shared: int = 1) -> tuple[tuple[Unit, ...], ...]:
    """`each` units a stage, the first an embedding; `shared` neighbouring units of a rank lie in one bucket."""
    created = []
    for stage, rank in enumerate(schedule.placement):
        place = schedule.stages_of(rank).index(stage) * each
        created.append(tuple(Unit(stage * each + i, ((place + i) // shared,)) for i in range(each)))
    return tuple(created)


def expected_uses(schedule: Schedule, rank: int) -> list[tuple[int, ...]]:
    """What a rank computes with, use by use: restated from what forward and backward need."""
    results: list[tuple[int, ...]] = []
    for action in schedule.actions[rank]:
        if action.kind is ActionKind.FORWARD:
            results += [unit.buckets for unit in schedule.units[action.stage]]
        elif action.kind is ActionKind.BACKWARD:
            results += [unit.buckets for unit in schedule.units[action.stage][::-1] if unit.number != 0]
    return results


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(SCHEDULES),
    ranks=st.integers(1, 4),
    microbatches=st.integers(1, 8),
    each=st.integers(1, 4),
    shared=st.integers(1, 3),
    keep=st.booleans(),
    forward_only=st.booleans(),
)
def test_every_plan_gathers_what_it_uses_and_no_more(name, ranks, microbatches, each, shared, keep, forward_only):
    plain = with_communication(build(name, ranks, microbatches, forward_only=forward_only))
    schedule = with_gathering(plain, units_of(plain, each, shared), keep)
    validate(schedule, OUTSTANDING_SENDS)
    assert schedule.hash != plain.hash
    for rank in range(ranks):
        assert [action for action in schedule.actions[rank] if action.bucket is None] == list(plain.actions[rank])
        sequence = [bucket for (bucket,) in expected_uses(schedule, rank)]
        gathers = [action.bucket for action in schedule.actions[rank] if action.kind is ActionKind.GATHER]
        frees = [action.bucket for action in schedule.actions[rank] if action.kind is ActionKind.RESHARD]
        if keep:
            assert gathers == list(dict.fromkeys(sequence)) and not frees
        else:  # as often as another bucket is needed than just before
            changes = [bucket for i, bucket in enumerate(sequence) if i == 0 or sequence[i - 1] != bucket]
            assert gathers == changes == frees


def test_at_most_what_two_units_need_is_whole():
    for name in SCHEDULES:
        bubble_plan = plan(name, 4, 8, weights=GatheredWeights(1.0, buckets=8))
        assert max(bubble_plan.gathering()["weights_whole"]) == 2 / 8
        kept = plan(name, 4, 8, weights=GatheredWeights(1.0, buckets=8, reshard="step"))
        assert kept.gathering()["weights_whole"] == kept.gathering()["weights_gathered"] == [1.0] * 4


def test_a_tied_embedding_is_whole_for_both_of_its_uses():
    """One rank: bucket 0 is the embedding, which the head (with a norm of its own, bucket 2) uses too."""
    plain = with_communication(build("1f1b", 1, 2))
    schedule = with_gathering(plain, ((Unit(0, (0,)), Unit(1, (1,)), Unit(2, (0, 2))),))
    validate(schedule)
    first = "G0 G1@0 R0@0 G0@1 G2@1 R1@1 F0.0 G1@2 R0@2 R2@2 G0@1 R1@1 B0.0"
    second = "G1@0 R0@0 G0@1 G2@1 R1@1 F0.1 G1@2 R0@2 R2@2 R1@1 B0.1"
    assert " ".join(map(repr, schedule.actions[0])) == f"{first} {second}"


def spoiled(schedule: Schedule, drop: str | None = None, twice: str | None = None, late: str | None = None) -> Schedule:
    """The one rank's list with one action left out, doubled, or moved behind the next computation."""
    actions = []
    for action in schedule.actions[0]:
        actions += [] if repr(action) in (drop, late) else [action, action] if repr(action) == twice else [action]
        if late and action.is_compute:
            actions += [other for other in schedule.actions[0] if repr(other) == late]
            late = None
    return replace(schedule, actions=(tuple(actions),))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"drop": "G0"}, "F0.0 uses unit 0, but its bucket 0 is not gathered"),
        ({"drop": "G1@0"}, "F0.0 uses unit 1, but its bucket 1 is not gathered"),
        ({"twice": "G1@0"}, "G1@0 is executed while bucket 1 is already gathered"),
        ({"twice": "R0@0"}, "R0@0 is executed while bucket 0 is not gathered"),
        ({"late": "G1@0"}, "F0.0 uses unit 1, but its bucket 1 is not gathered"),
        ({"late": "R0@0"}, "R0@0 is never executed, because B0.0 does not use its unit"),
    ],
)
def test_a_spoiled_list_is_refused(change, message):
    plain = with_communication(build("1f1b", 1, 1))
    schedule = with_gathering(plain, ((Unit(0, (0,)), Unit(1, (1,))),))
    validate(schedule)
    with pytest.raises(ScheduleError, match=message):
        validate(spoiled(schedule, **change))


def test_what_may_run_twice_includes_its_gathering():
    plain = with_communication(build("zb-h2", 4, 8))
    schedule = with_gathering(plain, units_of(plain, 2))
    for rank, (with_, without) in enumerate(zip(schedule.forward_prefix, plain.forward_prefix, strict=True)):
        kept = [action for action in schedule.actions[rank][:with_] if action.bucket is None]
        assert kept == list(plain.actions[rank][:without])


def test_time_of_one_rank_by_hand():
    """Two buckets of 1; F takes 1, B with W 2, so a unit half of that.

    F: bucket 0 until 1; unit 1 runs to 1.5, beside it bucket 1 until 2; unit 2 runs from 2 to 2.5.
    B: unit 2 at once, from 2.5 to 3.5, beside it bucket 0 until 3.5; unit 1 to 4.5.
    """
    timeline = simulate(plan("1f1b", 1, 1, weights=GatheredWeights(2.0, buckets=2)).schedule, gather=2.0)
    assert [(repr(span.action), span.start, span.end) for span in timeline.spans[0]] == [
        ("F0.0", 0, 2.5),
        ("B0.0", 2.5, 4.5),
    ]
    assert [(repr(span.action), span.start, span.end) for span in timeline.gathers[0]] == [
        ("G0", 0, 1),
        ("G1@1", 1, 2),
        ("G0@2", 2.5, 3.5),
    ]
    assert (
        timeline.stalled == (1.5,) and timeline.busy == (3.0,) and timeline.bubble_fraction == pytest.approx(1.5 / 4.5)
    )


def test_gathering_costs_nothing_where_it_hides_and_all_where_it_can_not():
    for name in SCHEDULES:
        free = plan(name, 4, 8).timeline
        assert plan(name, 4, 8, weights=GatheredWeights(0.0)).timeline.makespan == pytest.approx(free.makespan)
        hidden = plan(name, 4, 8, weights=GatheredWeights(0.5, buckets=8)).timeline
        # the first bucket of the first rank, and nothing else
        assert hidden.makespan == pytest.approx(free.makespan + 0.5 / 8)
        assert hidden.ideal == pytest.approx(free.ideal)
    slow = plan("1f1b", 1, 8, weights=GatheredWeights(10.0, buckets=10))
    times = slow.gathering()["weights_gathered"][0]
    assert times == pytest.approx((8 * 2 * 10 - 8 - 7) / 10)  # up and down for each microbatch, the turning points once
    assert slow.timeline.makespan == pytest.approx(10 * times + (1 + 2) / 10, rel=0.05)  # the link is never idle
