"""What holds for every plan of every size: sampled here, all of them by tests/matrix.py. The rules are restated, not
the code's own."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.parallel.pipeline.generator import SCHEDULES, build
from megalite.parallel.pipeline.schedule import ActionKind, Costs, Schedule
from megalite.parallel.pipeline.send_recv_actions import OUTSTANDING_SENDS, with_communication
from megalite.parallel.pipeline.simulator import simulate
from megalite.parallel.pipeline.validator import validate
from tests.parallel.pipeline.test_send_recv_actions import message_of, terminates

F, B, W = ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.WEIGHT
SPLIT = ("zb-h1", "zb-h2", "zb-v", "v-half")
FOLDED = ("zb-v", "v-half")


def prove_plan(
    name: str, ranks: int, microbatches: int, virtual: int | None, costs: Costs | None, forward_only: bool
) -> None:
    """Raise where a plan is not what its name promises, or could hang."""
    plan = with_communication(build(name, ranks, microbatches, virtual, costs, forward_only))
    for outstanding in (None, 0, OUTSTANDING_SENDS):
        validate(plan, outstanding)
    assert terminates(plan) and terminates(plan, blocking=True)
    chunks = {"interleaved": virtual or 2, "zb-v": 2, "v-half": 2}.get(name, 1)
    stages = range(ranks * chunks)
    assert plan.placement == tuple(min(s, len(stages) - 1 - s) if name in FOLDED else s % ranks for s in stages)
    kinds = (F,) if forward_only else (F, B, W) if name in SPLIT else (F, B)
    for rank in range(ranks):
        done = [action[:3] for action in plan.compute(rank)]
        own = [stage for stage in stages if plan.placement[stage] == rank]
        assert sorted(done) == sorted(product(kinds, own, range(microbatches))), "everything once"
        place = {action: i for i, action in enumerate(done)}
        for stage, i in product(own, range(microbatches)):
            passes = [place[kind, stage, i] for kind in kinds]
            assert passes == sorted(passes), "forward, backward, weight"
            assert i == 0 or all(place[kind, stage, i - 1] < place[kind, stage, i] for kind in kinds), (
                "microbatches ascend"
            )
        held = most_held(done, last=kinds[-1])
        assert held <= (
            1 if forward_only else min(promised(name, ranks, microbatches, chunks, rank), microbatches * chunks)
        )
    check_messages(plan, kinds)


def most_held(done: list[tuple], last: ActionKind) -> int:
    """Activations of a microbatch on a stage, from its forward to its last pass."""
    held = most = 0
    for kind, *_ in done:
        held += kind is F
        most = max(most, held)
        held -= kind is last
    return most


def promised(name: str, ranks: int, microbatches: int, chunks: int, rank: int) -> int:
    """The published memory of each schedule, in activations of one microbatch on one stage."""
    # Megatron's warm-up, and one; its groups have p microbatches, or up to 2p - 1 where p does not divide m
    if name == "interleaved":
        if chunks == 1:
            return ranks - rank
        group = ranks if microbatches % ranks == 0 else min(microbatches, 2 * ranks - 1)
        return 2 * (ranks - rank - 1) + (chunks - 1) * group + 1
    whole = {
        "gpipe": microbatches,
        "1f1b": ranks - rank,
        "zb-h1": ranks,
        "zb-h2": 2 * ranks - 1,
        "zb-v": ranks,
        "v-half": ranks / 2 + 1,
    }
    return int(whole[name] * chunks)


def check_messages(plan: Schedule, kinds: tuple[ActionKind, ...]) -> None:
    """Each boundary between stages of two ranks carries each microbatch's activation up and its gradient down; others
    carry nothing."""
    expected = Counter()
    for stage in range(plan.stages - 1):
        if plan.placement[stage] != plan.placement[stage + 1]:
            for i in range(plan.microbatches):
                expected[True, stage, i] = 2  # one end each
                if B in kinds:
                    expected[False, stage + 1, i] = 2
    assert (
        Counter(message_of(action) for actions in plan.actions for action in actions if action.peer is not None)
        == expected
    )


durations = st.sampled_from([0.0, 0.1, 1.0, 1.5, 3.0])


@pytest.mark.parametrize("name", SCHEDULES)
@settings(max_examples=25, deadline=None)
@given(
    ranks=st.integers(1, 8),
    microbatches=st.integers(1, 32),
    virtual=st.integers(1, 4),
    costs=st.builds(Costs, durations, durations, durations, durations).filter(lambda costs: sum(costs[:3]) > 0),
    forward_only=st.booleans(),
)
def test_a_plan_of_any_size_and_for_any_costs(name, ranks, microbatches, virtual, costs, forward_only):
    prove_plan(name, ranks, microbatches, virtual if name == "interleaved" else None, costs, forward_only)


@pytest.mark.parametrize("ranks, rounds, chunks", [(2, 1, 2), (2, 5, 3), (4, 1, 2), (4, 2, 2), (4, 3, 4), (8, 2, 2)])
def test_interleaved_is_megatrons_table(ranks, rounds, chunks):
    """Narayanan et al. 2021, with microbatches that p divides: the k-th forward and backward of a rank, and how many
    warm up."""
    microbatches = ranks * rounds
    plan = build("interleaved", ranks, microbatches, chunks)
    for rank in range(ranks):
        count = microbatches * chunks
        chunk = [k // ranks % chunks for k in range(count)]
        microbatch = [k // (ranks * chunks) * ranks + k % ranks for k in range(count)]
        forwards, backwards = ([action for action in plan.compute(rank) if action.kind is kind] for kind in (F, B))
        assert [(action.stage, action.microbatch) for action in forwards] == [
            (chunk[k] * ranks + rank, microbatch[k]) for k in range(count)
        ]
        assert [(action.stage, action.microbatch) for action in backwards] == [
            ((chunks - 1 - chunk[k]) * ranks + rank, microbatch[k]) for k in range(count)
        ]
        warmup = min(2 * (ranks - rank - 1) + (chunks - 1) * ranks, count)
        steady = min(warmup + 1, count)
        assert [action.kind for action in plan.compute(rank)[: steady + 1]] == [F] * steady + [B]


# ranks, microbatches, virtual stages, bubble, most activations on the first and the last rank in whole stages
PUBLISHED = [
    *((4, 8, 2, 0.1579, 5.5, 2.5), (4, 8, 4, 0.0857, 4.75, 3.25), (8, 16, 2, 0.1795, 11.5, 4.5)),
    *((4, 8, 1, 0.2727, 4, 1), (16, 64, 1, 0.1899, 16, 1)),
]


@pytest.mark.parametrize("ranks, microbatches, chunks, bubble, first, last", PUBLISHED)
def test_published_bubbles_and_peaks_of_interleaved(ranks, microbatches, chunks, bubble, first, last):
    plan = build("interleaved", ranks, microbatches, chunks)
    assert simulate(plan).bubble_fraction == pytest.approx(bubble, abs=5e-5)
    peaks = [most_held(plan.compute(rank), last=B) / chunks for rank in (0, ranks - 1)]
    assert peaks == [first, last]


def test_interleaved_with_one_stage_a_rank_is_1f1b():
    for ranks, microbatches in product(range(1, 9), (1, 3, 8, 17)):
        assert build("interleaved", ranks, microbatches, 1).actions == build("1f1b", ranks, microbatches).actions


def longest_span(plan: Schedule) -> float:
    """The longest time that any rank spends from its first action to its last, a whole stage's pass taking 1."""
    return max(spans[-1].end - spans[0].start for spans in simulate(plan, 1, 1, 1).spans)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_published_bubbles_of_split_backwards(ranks):
    """Qi et al. 2023, all passes equally long: zb-h1 idles for a third of 1f1b's time, zb-h2 and zb-v for none from
    step to step."""
    microbatches = 3 * ranks
    work = 3 * microbatches
    assert simulate(build("zb-h1", ranks, microbatches), 1, 1, 1).makespan == pytest.approx(work + ranks - 1)
    assert longest_span(build("zb-h2", ranks, microbatches)) == pytest.approx(work)
    assert longest_span(build("zb-v", ranks, microbatches)) == pytest.approx(work)
