"""Curves over steps, tokens or time as plain data, which charts.js draws with uPlot.

Curves are downsampled, so that the page of a run with a million steps is no larger than with a thousand.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, NamedTuple

import numpy as np

from megalite.model.kinds import dispatching_layers
from megalite.monitoring.metrics import (
    FLUSHED,
    HELD_OUT,
    LOGPS,
    REWARDS,
    ROUNDING,
    SATURATED,
    SOURCE,
    VALIDATED,
)
from megalite.monitoring.report.run import PHASES, RecordedRun

POINTS = 600  # maximum per curve
DIGITS, PLACE_DIGITS = 6, 12  # of a value on the page, and of its step, tokens or time
LONGEST_NAME = 40  # characters


@dataclass(frozen=True)
class Chart:
    """One chart with the curves of some keys of metrics.jsonl.

    Attributes:
        scale: factor on the values.
        over: horizontal axis, a key of AXES.
    """

    title: str
    unit: str
    keys: tuple[str, ...]
    scale: float = 1.0
    logarithmic: bool = False
    from_zero: bool = False
    whole: bool = False
    over: str = "step"


AXES = {
    "step": ("step", 1.0),
    "tokens": ("million tokens", 1e-6),
    "step_time_s": ("minutes of training", 1 / 60),
}
"""Horizontal axes: key of metrics.jsonl, summed up to a step → name and factor."""
LOSS, LOSS_UNIT = ("loss", "val_loss"), "nats per token"
COMPARED = (
    Chart("Loss over tokens", LOSS_UNIT, LOSS, over="tokens"),
    Chart("Loss over time", LOSS_UNIT, LOSS, over="step_time_s"),
)
"""Charts that are only shown in a comparison. For a single run they have the shape of the loss over steps."""
CHARTS = (
    Chart("Loss", LOSS_UNIT, LOSS),
    Chart("Gradient norm", "before clipping", ("grad_norm",), logarithmic=True),
    Chart("Learning rate", "", ("lr",), from_zero=True),
    Chart("Throughput", "thousand tokens/s, all ranks", ("tokens_per_second",), 1e-3, from_zero=True),
    Chart("Model FLOPs utilization", "% of peak", ("mfu",), 100, from_zero=True),
    Chart("Step time", "s", ("step_time_s",), from_zero=True),
    Chart("Bubble", "% of pipeline time", ("bubble_fraction",), 100, from_zero=True),
    Chart("Peak memory (rank 0)", "GiB", ("peak_memory_bytes",), 2.0**-30, from_zero=True),
    Chart(
        "Maximum expert load", "relative to the mean, over all layers", ("expert_load_peak",), from_zero=True
    ),
    Chart("Global batch size", "sequences", ("global_batch_size",), from_zero=True, whole=True),
    Chart("Loss scale", "", ("loss_scale",), logarithmic=True),
)


class Named(NamedTuple):
    """The chart of keys of metrics.jsonl that contain names."""

    title: str
    unit: str = LOSS_UNIT
    scale: float = 1.0


BY_NAME = {
    VALIDATED: Named("Validation loss of each dataset"),
    SOURCE: Named("Training loss of each data source"),
    REWARDS: Named("Rewards of completions, and their accuracy", ""),
    f"{HELD_OUT}{REWARDS}": Named("Validation: rewards of completions, and their accuracy", ""),
    LOGPS: Named("Log-probabilities of completions", "nats"),
    f"{HELD_OUT}{LOGPS}": Named("Validation: log-probabilities of completions", "nats"),
    f"{ROUNDING}/": Named("Errors of fp8", "% of the norm", 100),
    f"{FLUSHED}/": Named("Flushed to zero in fp8", "% of elements", 100),
    f"{SATURATED}/": Named("Saturated in fp8", "% of elements", 100),
}
"""Prefix of keys in metrics.jsonl that contain names → their chart."""
LOADS = "expert_load_peaks"  # of each mixture
ONLY_IF_IT_CHANGES = ("loss_scale", "global_batch_size")


def charts(runs: Sequence[RecordedRun]) -> list[dict[str, Any]]:
    """Return all charts with data. Each is a dict with these keys:

    title, unit, over     title, and names of the axes
    log, zero, whole      whether the vertical axis is logarithmic, starts at zero, shows only whole numbers
    whole_over            whether the horizontal axis shows only whole numbers
    kind                  lines; stack, where each line is drawn on top of the previous one; or heat, with a
                          row per line
    lines                 name, color (an index), at, values, and low and high if downsampled; dots: markers
                          on a dashed line
    marks                 (place, segment, color) of the start of each segment except the first
    """
    wanted = (CHARTS[0], *COMPARED, *CHARTS[1:]) if len(runs) > 1 else CHARTS
    drawn = [_curves(chart, runs) for chart in wanted if any(_shows(run, chart) for run in runs)]
    drawn += [_loads(run) for run in runs if any(line.get(LOADS) for line in run.steps)]
    drawn += [
        _by_name(run, prefix, chart) for run in runs for prefix, chart in BY_NAME.items() if run.names(prefix)
    ]
    return [*drawn, *(_phases(run) for run in runs if run.phases)]


def _shows(run: RecordedRun, chart: Chart) -> bool:
    """Return whether a chart has a curve to show. A constant loss scale is not shown."""
    values = [value for key in chart.keys for value in run.curve(key)[1] if isfinite(value)]
    return (
        _applies(run, chart)
        and bool(values)
        and (chart.keys[0] not in ONLY_IF_IT_CHANGES or len(set(values)) > 1)
    )


def _applies(run: RecordedRun, chart: Chart) -> bool:
    """Return whether a chart applies to a run.

    A pipeline with one stage has no bubble, only the noise of its measurement.
    """
    return chart.keys[0] != "bubble_fraction" or any(segment.has_pipeline for segment in run.segments)


def thinned(
    steps: Sequence[float], values: Sequence[float], begins: Sequence[float] = ()
) -> tuple[np.ndarray[Any, Any], ...]:
    """Downsample a curve to about POINTS points.

    Args:
        begins: starts of segments. No point contains steps of two segments.

    Returns:
        arrays of the mean step, and of the mean, minimum and maximum of neighboring steps.
    """
    places = np.searchsorted(np.asarray(steps, dtype=float), begins)
    pieces = [np.split(np.asarray(numbers, dtype=float), places) for numbers in (steps, values)]
    at, of = ([part for piece in numbers for part in _divided(piece, len(steps))] for numbers in pieces)
    return tuple(
        np.array([reduce(part) for part in source])
        for source, reduce in ((at, np.mean), (of, np.mean), (of, np.min), (of, np.max))
    )


def _divided(piece: np.ndarray[Any, Any], whole: int) -> list[np.ndarray[Any, Any]]:
    """Return a segment's share of the points of a curve. A segment without values has none."""
    parts = min(len(piece), -(-POINTS * len(piece) // max(whole, 1)))
    return np.array_split(piece, parts) if parts else []


def _begins(run: RecordedRun, over: str = "step") -> list[float]:
    """Return the positions where the segments of a run start on an axis, except for the first."""
    later = [segment.first for segment in run.segments[1:]]
    if over == "step":
        return [first - 0.5 for first in later]
    scale, sums = AXES[over][1], run.sums(over)
    steps, values = list(sums), [0.0, *sums.values()]
    return [scale * values[bisect_left(steps, first)] for first in later]


def _chart(
    title: str, unit: str, kind: str, lines: list[dict[str, Any]], runs: Sequence[RecordedRun], **options: Any
) -> dict[str, Any]:
    over = options.pop("over", "step")
    marks = [
        [rounded(place, PLACE_DIGITS), segment.number, index if len(runs) > 1 else None]
        for index, run in enumerate(runs)
        for segment, place in zip(run.segments[1:], _begins(run, over), strict=True)
    ]
    facts = {"title": title, "unit": unit, "over": AXES[over][0], "kind": kind, "whole_over": over == "step"}
    return facts | {"log": False, "zero": False, "whole": False} | options | {"lines": lines, "marks": marks}


def _line(
    name: str, color: int, at: Sequence[float], values: Sequence[float], begins: Sequence[float] = ()
) -> dict[str, Any]:
    """Return a downsampled curve, with minimum and maximum where a point represents several steps."""
    places, mean, low, high = thinned(at, values, begins)
    line = {"name": name, "color": color, "at": [rounded(value, PLACE_DIGITS) for value in places]}
    line["values"] = [rounded(value) for value in mean]
    if len(at) > len(places):
        line |= {"low": [rounded(value) for value in low], "high": [rounded(value) for value in high]}
    return line


def rounded(value: float, digits: int = DIGITS) -> float | None:
    """Round a number to significant digits. Numbers that JSON does not support become None."""
    return float(f"{value:.{digits}g}") if isfinite(value) else None


def _curves(chart: Chart, runs: Sequence[RecordedRun]) -> dict[str, Any]:
    lines = []
    for index, run in enumerate(runs):
        begins = [float(np.nextafter(place, np.inf)) for place in _begins(run, chart.over)]
        for key in chart.keys:
            steps, values = run.curve(key)
            if not steps or not _applies(run, chart):
                continue
            color = index if len(runs) > 1 else int(key == "val_loss")
            places = _places(run, chart.over, steps)
            line = _line(
                _label(run, key, len(runs)), color, places, [value * chart.scale for value in values], begins
            )
            lines.append(line | ({"dots": True} if key == "val_loss" else {}))
    options = {"log": chart.logarithmic, "zero": chart.from_zero, "whole": chart.whole, "over": chart.over}
    return _chart(chart.title, chart.unit, "lines", lines, runs, **options)


def _label(run: RecordedRun, key: str, runs: int) -> str:
    """Return the name of a curve in the legend, with the name of the run if there are several."""
    what = {"val_loss": "validation", "loss": "training"}.get(key, "")
    if runs == 1:
        return what or "value"
    return f"{_short(run.name)}, validation" if key == "val_loss" else _short(run.name)


def _short(name: str) -> str:
    """Shorten a name to fit into a chart."""
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"


def _places(run: RecordedRun, over: str, steps: Sequence[int]) -> list[float]:
    """Return the positions of steps on an axis. A validation is at the step before it."""
    if over == "step":
        return list(steps)
    sums, scale = run.sums(over), AXES[over][1]
    return [scale * sums.get(step, 0.0) for step in steps]


def _loads(run: RecordedRun) -> dict[str, Any]:
    """Return a heat map of the maximum expert load of each layer. At 1 all experts are equally loaded."""
    recorded = [line for line in run.steps if line.get(LOADS)]
    steps, columns = (
        [line["step"] for line in recorded],
        zip(*(line[LOADS] for line in recorded), strict=True),
    )
    layers = dispatching_layers(run.config.model)
    lines = [
        _line(f"layer {layer}", 0, steps, column, _begins(run))
        for layer, column in zip(layers, columns, strict=False)
    ]
    return _chart(
        f"Maximum expert load, relative to the mean: {_short(run.name)}",
        "layer",
        "heat",
        lines,
        [run],
        whole=True,
    )


def _by_name(run: RecordedRun, prefix: str, chart: Named) -> dict[str, Any]:
    """Return a chart with a curve for each name."""
    lines = []
    for index, name in enumerate(run.names(prefix)):
        steps, values = run.curve(prefix + name)
        scaled = [value * chart.scale for value in values]
        lines.append(_line(_short(name), index, steps, scaled, _begins(run)))
    if prefix.startswith(HELD_OUT):
        lines = [line | {"dots": True} for line in lines]
    return _chart(f"{chart.title}: {_short(run.name)}", chart.unit, "lines", lines, [run])


def _phases(run: RecordedRun) -> dict[str, Any]:
    """Return a stacked chart of the phases of a step."""
    steps = [line["step"] for line in run.steps]
    lines = []
    for index, key in enumerate(run.phases):
        name = key.removeprefix(PHASES).removesuffix("_s").replace("_", " ")
        line = _line(
            name, index, steps, [float(record.get(key) or 0.0) for record in run.steps], _begins(run)
        )
        lines.append({part: value for part, value in line.items() if part not in ("low", "high")})
    return _chart(f"Step phases: {_short(run.name)}", "s", "stack", lines, [run], zero=True)
