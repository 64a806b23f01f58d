"""Plans as sentences and tables."""

from __future__ import annotations

from collections.abc import Sequence

from megalite.parallel.pipeline.bubble import BUBBLES, DIGITS, BubblePlan
from megalite.parallel.pipeline.schedule import ActionKind
from megalite.system.text import aligned

LISTED = 16  # up to this number of ranks, a value is printed for each


def number(value: float, unit: str = "") -> str:
    """Format a value with six digits, without rounding noise, and its unit."""
    return f"{round(value, DIGITS):.6g}{unit and ' ' + unit}"


def percent(value: float) -> str:
    return f"{round(value, DIGITS):.1%}"


def heading(plan: BubblePlan) -> str:
    """Return one line that describes a plan."""
    stages = f" of {plan.chunks} stages" if plan.chunks > 1 else ""
    return (
        f"{plan.schedule.name}: {plan.schedule.ranks} ranks{stages}, {plan.schedule.microbatches} "
        "microbatches"
    )


def durations(plan: BubblePlan) -> str:
    """Return one line with the durations that a plan is timed with."""
    values = dict(plan.durations)
    # measured: one pass computes both gradients
    if not plan.splits and isinstance(values["weight_backward"], list):
        parts = zip(values.pop("input_backward"), values.pop("weight_backward"), strict=True)
        values = {
            "forward": values["forward"],
            "backward": [sum(both) for both in parts],
            "comm": values["comm"],
        }
    times = [f"{name} {_range(value, plan.unit)}" for name, value in values.items()]
    if plan.weights is not None:
        times.append(
            f"gather {number(plan.weights.gather, plan.unit)} in {plan.gathering()['buckets']} buckets"
        )
    return ", ".join(times)


def _range(value: float | list[float], unit: str) -> str:
    if not isinstance(value, list):
        return number(value, unit)
    ends = (min(value), max(value))
    return number(ends[0], unit) if ends[0] == ends[1] else f"{number(ends[0])} to {number(ends[1], unit)}"


def summary(plan: BubblePlan) -> str:
    """Return every measure of a plan with its meaning, one per line."""
    timeline = plan.timeline
    rows = [
        (
            "makespan",
            number(timeline.makespan, plan.unit),
            "from the first action's start to the last one's end",
        ),
        ("ideal", number(timeline.ideal, plan.unit), "without any waiting"),
        (
            "longest_span",
            number(timeline.longest_span, plan.unit),
            "of any one rank, from its first action to its last",
        ),
        ("bubble_fraction", percent(timeline.bubble_fraction), "idle / makespan"),
        ("bubble_over_ideal", percent(timeline.bubble_over_ideal), "makespan / ideal - 1"),
        (
            "bubble_rate",
            percent(timeline.bubble_rate),
            "(longest_span - ideal) / longest_span: steps that follow without a barrier",
        ),
        (
            "peak_activations",
            _by_rank(plan.peaks()),
            "microbatches of a whole stage, from forward to the end of backward",
        ),
        (
            "peak_with_weight_stash",
            _by_rank(plan.peaks(ActionKind.WEIGHT)),
            "to the end of the weight gradient",
        ),
        ("messages", str(sum(plan.messages())), f"in a step, at most {max(plan.messages())} from one rank"),
    ]
    if gathering := plan.gathering():
        rows += [
            (
                "weights_gathered",
                _by_rank(gathering["weights_gathered"]),
                "times in a step, over data parallelism",
            ),
            ("weights_whole", _by_rank(gathering["weights_whole"]), "share of a rank's weights, at most"),
            ("stalled", _by_rank(gathering["stalled"]), "time that compute waits for weights, part of idle"),
        ]
    width = max(len(value) for _, value, _ in rows)
    return "\n".join(f"{name:<22}  {value:>{width}}  {meaning}" for name, value, meaning in rows)


def _by_rank(values: Sequence[float]) -> str:
    if len(values) > LISTED:
        return f"at most {number(max(values))}"
    return " ".join(map(number, values))


def table(plans: Sequence[BubblePlan], axis: str = "schedule") -> str:
    """Return a table with one row per plan, labelled by the size that varies.

    If ranks differ, the largest value is shown.

    Args:
        axis: schedule, pp or microbatches.
    """
    gathering = ["gathered", "stalled"] if plans[0].weights else []
    rows = [[axis, "v", "makespan", "longest_span", *BUBBLES, "peak", "with stash", "messages", *gathering]]
    for plan in plans:
        timeline = plan.timeline
        times = [
            number(timeline.makespan),
            number(timeline.longest_span),
            *(percent(getattr(timeline, name)) for name in BUBBLES),
        ]
        memory = [number(max(plan.peaks())), number(max(plan.peaks(ActionKind.WEIGHT)))]
        gathers = plan.gathering()
        gathered = [number(max(gathers[name])) for name in ("weights_gathered", "stalled")] if gathers else []
        rows.append(
            [str(plan.size(axis)), str(plan.chunks), *times, *memory, str(sum(plan.messages())), *gathered]
        )
    return "\n".join(aligned(rows, left=1))


def grid(plans: Sequence[BubblePlan], axis: str, measure: str) -> str:
    """Return a table of one measure: schedules as columns, sizes as rows.

    Peaks are those of the fullest rank.

    Args:
        axis: the size that varies.
    """
    names = list(dict.fromkeys(plan.schedule.name for plan in plans))
    rows = [[axis, *names]]
    for start in range(0, len(plans), len(names)):
        measures = [plan.measures() for plan in plans[start : start + len(names)]]
        values = (
            percent(row[measure]) if measure in BUBBLES else number(max(row[measure])) for row in measures
        )
        rows.append([str(measures[0][axis]), *values])
    return "\n".join([measure, *aligned(rows, left=1)])
