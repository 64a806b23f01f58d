"""Measured bubble of all pipeline schedules on four ranks with sleeping stages, compared with the simulator.

Sleeps replace the computation of a stage: they overlap on any number of cores, and are long compared with all
overhead. A window is a few steps without a barrier between them; its prediction is the simulation of the
concatenated actions of the steps. For most schedules this is the bubble of one step. Under zb-h2 and zb-v
ranks continue into the next step, and only the first and the last step of the window have a bubble.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

from benchmarks import report
from megalite.parallel.pipeline.generator import SCHEDULES, build
from megalite.parallel.pipeline.schedule import Schedule
from megalite.parallel.pipeline.simulator import simulate

COLUMNS = {
    "schedule": "schedule",
    "measured": "measured:.1%",
    "predicted": "predicted:.1%",
    "sleeps took longer by": "lateness:.1%",
}
RANKS, MICROBATCHES, STEPS = 4, 8, 2
PASS_S = 0.03  # seconds of one microbatch on a stage, for each of forward, input gradient and weight gradient
TOLERANCE = 0.02


def compare(*, rounds: int, threads: int, smoke: bool, progress: Callable[[str], None]) -> dict[str, Any]:
    """Run a window of every schedule in every round, in the same processes.

    `threads` is ignored, because sleeping ranks need one thread each.
    """
    names = ("gpipe", "zb-v") if smoke else SCHEDULES
    protocol = {
        "ranks": RANKS,
        "microbatches": MICROBATCHES,
        "steps": STEPS,
        "pass_s": 0.001 if smoke else PASS_S,
        "rounds": rounds,
    }
    progress(f"{rounds} rounds of {', '.join(names)}")
    timings = report.launch("benchmarks.bubble_run", {**protocol, "schedules": names}, ranks=RANKS, threads=1)
    rows = [_row(name, timings[name], protocol["pass_s"]) for name in names]
    worst = max(abs(row["measured"] - row["predicted"]) for row in rows)
    target = {
        "target": "largest deviation of a bubble",
        "measured": worst,
        "wanted": f"≤ {TOLERANCE}",
        "met": worst <= TOLERANCE,
    }
    return {"protocol": protocol, "results": rows, "targets": [target]}


def _row(name: str, windows: list[dict[str, float]], pass_s: float) -> dict[str, Any]:
    """Return the figures of a schedule.

    `wall_s` is the time from the start of the first action of a window to the end of its last action;
    `busy_s` is a sum over ranks.
    """
    schedule = build(name, RANKS, MICROBATCHES)
    requested = 3 * pass_s * STEPS * MICROBATCHES * schedule.stages
    bubbles = [1 - window["busy_s"] / RANKS / window["wall_s"] for window in windows]
    return {
        "schedule": name,
        "measured": median(bubbles),
        "predicted": simulate(repeated(schedule, STEPS)).bubble_fraction,
        "lateness": median(window["busy_s"] for window in windows) / requested - 1,
        "rounds": bubbles,
    }


def repeated(schedule: Schedule, steps: int) -> Schedule:
    """Return the schedule of several steps without a barrier between them."""
    shifts = [step * schedule.microbatches for step in range(steps)]
    actions = tuple(
        tuple(one._replace(microbatch=one.microbatch + shift) for shift in shifts for one in each)
        for each in schedule.actions
    )
    return replace(schedule, microbatches=steps * schedule.microbatches, actions=actions)
