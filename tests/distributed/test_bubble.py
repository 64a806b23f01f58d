"""Ranks start and end every action when the simulator says, under every schedule, and so have its bubble.

Real ranks run the real runtime and exchange real messages, in virtual time (see virtual_time.py): a pass takes what the
test says. A window is a few steps that follow each other without a barrier, and its prediction is the simulation of
that very window. `tools/benchmark.py bubble` measures the same by the wall clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import NamedTuple

import pytest
import torch

from benchmarks.bubble import repeated
from benchmarks.bubble_run import PacedStage, StageSeconds
from megalite.mesh.mesh import Layout, Mesh
from megalite.parallel.microbatch import Microbatch
from megalite.parallel.pipeline.generator import SCHEDULES, build
from megalite.parallel.pipeline.runtime import Runtime
from megalite.parallel.pipeline.schedule import ActionKind, Schedule
from megalite.parallel.pipeline.send_recv_actions import CHANNELS, with_communication
from megalite.parallel.pipeline.simulator import Interval, Timeline, simulate
from megalite.parallel.weight_grad_queue import WeightGradQueue
from megalite.system.clock import ActionTiming, StepTiming
from tests.support.pool import RankContext, RankPool
from tests.support.virtual_time import VirtualClock, virtual_messages

RANKS, MICROBATCHES, STEPS = 4, 8, 2
SHAPE = (2, 1, 3)
LATE = (
    (ActionKind.SEND_FORWARD, 0, 0),
    (ActionKind.FORWARD, 0, 1),
)  # of the first rank: what is sent, and what it then waits for


class Durations(NamedTuple):
    """How long passes take by stage, and a message."""

    passes: list[StageSeconds]
    message: float


def equal(stages: int) -> Durations:
    return Durations([StageSeconds(1, 1, 1)] * stages, 0)


def slow_messages(stages: int) -> Durations:
    return Durations([StageSeconds(1, 1.5, 0.75)] * stages, 0.4)


def heavy_ends(stages: int) -> Durations:
    """An embedding that has no input gradient, and a head as long as three layers."""
    return Durations([StageSeconds(0.25, 0, 0.5), *[StageSeconds(1, 1, 1)] * (stages - 2), StageSeconds(3, 3, 3)], 0.1)


def uneven(stages: int) -> Durations:
    random = Random(stages)
    return Durations(
        [StageSeconds(*(random.uniform(0.1, 2) for _ in StageSeconds._fields)) for _ in range(stages)], 1.3
    )


def simulated(schedule: Schedule, durations: Durations) -> Timeline:
    forward, backward, weight = (list(values) for values in zip(*durations.passes, strict=True))
    return simulate(repeated(schedule, STEPS), forward, backward, weight, durations.message)


class Recorded(NamedTuple):
    """What one rank has done in a window."""

    steps: list[list[ActionTiming]]
    paces: list[StepTiming]


def run_window(context: RankContext, plan: Schedule, durations: Durations) -> Recorded:
    """Run a window in virtual time."""
    mesh = context.cached(
        "pipeline", lambda: Mesh(Layout(pp=RANKS), channels={channel.name: () for channel in CHANNELS})
    )
    clock, queue, recorder = VirtualClock(), WeightGradQueue(), Recorded([], [])
    stages = {
        stage: PacedStage(stage == plan.stages - 1, durations.passes[stage], clock.spend, queue, torch.float64)
        for stage in plan.stages_of(context.rank)
    }
    runtime = Runtime(stages, mesh, SHAPE, torch.float64, "cpu", queue)
    runtime.clock = clock
    batch = Microbatch.of(torch.zeros(SHAPE, dtype=torch.float64), torch.zeros(1), torch.zeros(1, dtype=torch.int64))
    with virtual_messages(clock, durations.message):
        for step in range(STEPS):
            recorder.paces.append(runtime.run(plan, [batch] * MICROBATCHES, step=step, loss_scale=1.0)[1])
            recorder.steps.append(runtime.ran)
    return recorder


def measured(ranks: list[Recorded]) -> Timeline:
    """The recorded window in the simulator's form, whose formulas measure both."""
    return Timeline(
        tuple(
            tuple(
                Interval(
                    one.action._replace(microbatch=one.action.microbatch + step * MICROBATCHES), one.start, one.end
                )
                for step, ran in enumerate(rank.steps)
                for one in ran
            )
            for rank in ranks
        )
    )


def exact(value: float) -> object:
    return pytest.approx(value, rel=0, abs=1e-9)


def test_the_theory_is_that_of_the_papers() -> None:
    """Forward, input and weight gradient take equally long: (p - 1) / (v m + p - 1), and 3 / (3 m + 3) for zb-h1 at p =
    4."""
    bubbles = {
        name: simulated(schedule, equal(schedule.stages)).bubble_fraction for name, schedule in schedules().items()
    }
    for name, bubble in {"gpipe": 3 / 11, "1f1b": 3 / 11, "interleaved": 3 / 19, "zb-h1": 3 / 27}.items():
        assert bubbles[name] == pytest.approx(bubble)
    assert bubbles["zb-v"] < bubbles["zb-h2"] < bubbles["zb-h1"]


def schedules() -> dict[str, Schedule]:
    return {name: build(name, RANKS, MICROBATCHES) for name in SCHEDULES}


@pytest.mark.parametrize(
    "durations_of", [equal, slow_messages, heavy_ends, uneven], ids=lambda function: function.__name__
)
@pytest.mark.parametrize("name", SCHEDULES)
def test_ranks_have_the_bubble_that_is_predicted(
    name: str, durations_of: Callable[[int], Durations], ranks: RankPool
) -> None:
    schedule = schedules()[name]
    durations = durations_of(schedule.stages)
    recorders = ranks.run(RANKS, run_window, with_communication(schedule), durations)
    timeline, expected = measured(recorders), simulated(schedule, durations)
    for own, predicted in zip(timeline.spans, expected.spans, strict=True):
        assert [span.action for span in own] == [span.action for span in predicted]
        for one, other in zip(own, predicted, strict=True):
            assert (one.start, one.end) == (exact(other.start), exact(other.end)), one.action
    assert timeline.bubble_fraction == exact(expected.bubble_fraction)
    assert timeline.bubble_rate == exact(expected.bubble_rate)
    for rank, (steps, paces) in enumerate(recorders):
        for ran, pace in zip(steps, paces, strict=True):
            assert pace.busy == exact(sum(one.end - one.start for one in ran))
            assert pace.wall == exact(ran[-1].end - ran[0].start if 0 in schedule.stages_of(rank) else 0)
            assert all(before.end == one.free <= one.start for before, one in zip(ran, ran[1:], strict=False))


def test_a_message_that_starts_late_shows(ranks: RankPool) -> None:
    """Under gpipe every rank after the first waits for its first input: sent one forward later, it makes each step one
    forward longer."""
    plan = with_communication(schedules()["gpipe"])
    first, *others = plan.actions
    sent, computed = (next(place for place, one in enumerate(first) if one[:3] == what) for what in LATE)
    assert sent < computed
    late = (*first[:sent], *first[sent + 1 : computed + 1], first[sent], *first[computed + 1 :])
    durations = equal(RANKS)
    recorders = ranks.run(RANKS, run_window, replace(plan, actions=(late, *others)), durations)
    assert simulated(plan, durations).makespan == 3 * (MICROBATCHES + RANKS - 1) * STEPS
    assert measured(recorders).makespan == (3 * (MICROBATCHES + RANKS - 1) + 1) * STEPS
