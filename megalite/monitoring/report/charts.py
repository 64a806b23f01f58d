"""Curves over steps, tokens or time as SVG, drawn by matplotlib; thinned: a run of a million steps is no larger than one of a thousand."""

from __future__ import annotations

import io
import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from megalite.monitoring.metrics import SOURCE, VALIDATED
from megalite.monitoring.report.run import PHASES, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

POINTS = 600  # maximum per curve
SIZE = (6.2, 2.7)  # inches
GREY = "#88888c"
LONGEST_NAME = 40  # characters
ROWS = 8  # of a heat map that are labelled
COLOURS = ("#2a62a8", "#c8691b", "#2f7d4f", "#b03a8c", "#7a4fa3", "#8a7a1f", "#3a8f9c", "#a33a3a")


@dataclass(frozen=True)
class Chart:
    """One figure: the curves of some keys of metrics.jsonl. `scale` multiplies the values; `over`: a key of AXES."""

    title: str
    unit: str
    keys: tuple[str, ...]
    scale: float = 1.0
    logarithmic: bool = False
    from_zero: bool = False
    over: str = "step"


AXES = {"step": ("step", 1.0), "tokens": ("million tokens", 1e-6), "step_time_s": ("minutes of training", 1 / 60)}
"""What a curve is drawn over: key of metrics.jsonl, summed up to a step → name, and what multiplies it."""
LOSS, LOSS_UNIT = ("loss", "val_loss"), "nats a token (dots: validation)"
COMPARED = (
    Chart("Loss over tokens", LOSS_UNIT, LOSS, over="tokens"),
    Chart("Loss over time", LOSS_UNIT, LOSS, over="step_time_s"),
)
"""Only in a comparison: of one run they have the shape of the loss over steps."""
CHARTS = (
    Chart("Loss", LOSS_UNIT, LOSS),
    Chart("Gradient norm", "before clipping", ("grad_norm",), logarithmic=True),
    Chart("Learning rate", "", ("lr",), from_zero=True),
    Chart("Throughput", "thousand tokens/s, all ranks", ("tokens_per_second",), 1e-3, from_zero=True),
    Chart("Model FLOPs utilisation", "% of the peak", ("mfu",), 100, from_zero=True),
    Chart("Time of a step", "s", ("step_time_s",), from_zero=True),
    Chart("Bubble", "% of the pipeline's time", ("bubble_fraction",), 100, from_zero=True),
    Chart("Peak memory of rank 0", "GiB", ("peak_memory_bytes",), 2.0**-30, from_zero=True),
    Chart("Load of the fullest expert", "over the mean; of all layers", ("expert_load_peak",), from_zero=True),
    Chart("Global batch size", "sequences", ("global_batch_size",), from_zero=True),
    Chart("Loss scale", "", ("loss_scale",), logarithmic=True),
)

BY_NAME = {VALIDATED: "Validation loss of each set", SOURCE: "Training loss of each member of the data"}
"""What keys of metrics.jsonl that have names in them start with → title of the chart that a run has of them."""
LOADS = "expert_load_peaks"  # of each mixture
ONLY_IF_IT_CHANGES = ("loss_scale", "bubble_fraction")


def charts(runs: Sequence[Run]) -> list[str]:
    """Every chart that has data, as SVG elements."""
    wanted = (CHARTS[0], *COMPARED, *CHARTS[1:]) if len(runs) > 1 else CHARTS
    made = [_curves(chart, runs) for chart in wanted if any(_changes(run, chart) for run in runs)]
    by_name = [_by_name(run, prefix, title) for run in runs for prefix, title in BY_NAME.items() if run.names(prefix)]
    made += [_loads(run) for run in runs if any(line.get(LOADS) for line in run.steps)]
    return [*made, *by_name, *(_phases(run) for run in runs if run.phases)]


def _changes(run: Run, chart: Chart) -> bool:
    """Whether a chart has a curve to show. A constant loss scale, or the bubble of a single stage, is not shown."""
    values = [value for key in chart.keys for value in run.curve(key)[1]]
    return bool(values) and (chart.keys[0] not in ONLY_IF_IT_CHANGES or len(set(values)) > 1)


def thinned(steps: Sequence[float], values: Sequence[float], begins: Sequence[float] = ()) -> tuple[np.ndarray[Any, Any], ...]:
    """About POINTS points at most: arrays of the mean step, and the mean, the smallest and the largest value of neighbouring steps.

    begins: places where a segment begins; no point has steps of two segments.
    """
    places = np.searchsorted(np.asarray(steps, dtype=float), begins)
    pieces = [np.split(np.asarray(each, dtype=float), places) for each in (steps, values)]
    at, of = ([part for piece in each for part in _divided(piece, len(steps))] for each in pieces)
    return tuple(
        np.array([reduce(part) for part in source]) for source, reduce in ((at, np.mean), (of, np.mean), (of, np.min), (of, np.max))
    )


def _divided(piece: np.ndarray[Any, Any], whole: int) -> list[np.ndarray[Any, Any]]:
    """A segment's share of the points of a curve; of a segment without values none."""
    parts = min(len(piece), -(-POINTS * len(piece) // max(whole, 1)))
    return np.array_split(piece, parts) if parts else []


def _begins(run: Run, over: str = "step") -> list[float]:
    """Where the segments of a run begin on an axis, the first one excepted."""
    later = [each.first for each in run.segments[1:]]
    if over == "step":
        return [first - 0.5 for first in later]
    scale, sums = AXES[over][1], run.sums(over)
    steps, values = list(sums), [0.0, *sums.values()]
    return [scale * values[bisect_left(steps, first)] for first in later]


def _mark(axes: Axes, run: Run, over: str = "step", colour: str = GREY) -> None:
    """A dashed line, with its number, where a segment begins."""
    for segment, place in zip(run.segments[1:], _begins(run, over), strict=True):
        axes.axvline(place, color=colour, linestyle="--", linewidth=0.9)
        where = axes.get_xaxis_transform()  # the height in parts of the axes
        axes.text(place, 1.0, f" {segment.number}", transform=where, color=colour, fontsize=8, va="top", gid=f"segment {segment.number}")


def _curves(chart: Chart, runs: Sequence[Run]) -> str:
    def draw(axes: Axes) -> None:
        for run, colour in zip(runs, _cycled(len(runs)), strict=True):
            for key in chart.keys:
                steps, values = run.curve(key)
                if not steps:
                    continue
                begins = [np.nextafter(place, np.inf) for place in _begins(run, chart.over)]
                at, mean, low, high = thinned(_places(run, chart.over, steps), [value * chart.scale for value in values], begins)
                style: dict[str, Any] = {"marker": "o", "markersize": 3, "linestyle": "--"} if key == "val_loss" else {}
                axes.plot(at, mean, color=colour, linewidth=1.3, label=_label(run, key, len(runs)), **style)
                if len(steps) > len(at):
                    axes.fill_between(at, low, high, color=colour, alpha=0.18, linewidth=0)
            _mark(axes, run, chart.over, colour if len(runs) > 1 else GREY)
        if chart.logarithmic:
            axes.set_yscale("log")
            bottom, top = axes.get_ylim()
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if top < 10 * bottom else "")  # else they overlap
        if chart.from_zero:
            axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
        if len(axes.get_legend_handles_labels()[1]) > 1:
            axes.legend(frameon=False, fontsize=8)

    return _svg(chart.title, chart.unit, draw, AXES[chart.over][0])


def _label(run: Run, key: str, runs: int) -> str | None:
    """A curve's name in the legend; None: it has none. In a comparison the colour names the run, and dots are validations."""
    if runs == 1:
        return "validation" if key == "val_loss" else "training"
    return None if key == "val_loss" else _short(run.name)


def _short(name: str) -> str:
    """A name that fits into a chart."""
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"


def _places(run: Run, over: str, steps: Sequence[int]) -> list[float]:
    """Where these steps are on an axis. A validation is at the step before it."""
    if over == "step":
        return list(steps)
    sums, scale = run.sums(over), AXES[over][1]
    return [scale * sums.get(step, 0.0) for step in steps]


def _loads(run: Run) -> str:
    """The load of the fullest expert of each layer over the steps as a heat map: 1 where all experts are equally loaded."""
    lines = [line for line in run.steps if line.get(LOADS)]
    columns = zip(*(line[LOADS] for line in lines), strict=True)
    found = [thinned([line["step"] for line in lines], column) for column in columns]
    at, loads = found[0][0], np.array([mean for _, mean, _, _ in found])  # [layers, steps]
    layers = list(filter(run.config.model.is_mixture, range(run.config.model.num_hidden_layers)))

    def draw(axes: Axes) -> None:
        half = (at[-1] - at[0]) / max(len(at) - 1, 1) / 2 or 0.5
        place = (at[0] - half, at[-1] + half, -0.5, len(loads) - 0.5)
        image = axes.imshow(loads, extent=place, origin="lower", aspect="auto", interpolation="nearest", vmin=1, vmax=max(2.0, loads.max()))
        axes.set_yticks(range(0, len(loads), -(-len(loads) // ROWS)))
        axes.yaxis.set_major_formatter(lambda row, _: str(layers[round(row)]))
        axes.set_axisbelow(True)
        _mark(axes, run)
        bar = axes.figure.colorbar(image, ax=axes, pad=0.02)
        bar.outline.set_visible(False)

    return _svg(f"Load of the fullest expert, over the mean: {_short(run.name)}", "layer", draw)


def _by_name(run: Run, prefix: str, title: str) -> str:
    """A curve for each name."""

    def draw(axes: Axes) -> None:
        names = run.names(prefix)
        for name, colour in zip(names, _cycled(len(names)), strict=True):
            at, mean, _, _ = thinned(*run.curve(prefix + name))
            axes.plot(at, mean, color=colour, linewidth=1.3, marker="o" if prefix == VALIDATED else "", markersize=3, label=_short(name))
        _mark(axes, run)
        axes.legend(frameon=False, fontsize=8)

    return _svg(f"{title}: {_short(run.name)}", "nats a token", draw)


def _phases(run: Run) -> str:
    """The phases of a step, stacked."""

    def draw(axes: Axes) -> None:
        steps, bottom = [line["step"] for line in run.steps], np.zeros(0)
        for key, colour in zip(run.phases, _cycled(len(run.phases)), strict=True):
            at, mean, _, _ = thinned(steps, [float(line.get(key) or 0.0) for line in run.steps], _begins(run))
            bottom = np.zeros_like(mean) if not len(bottom) else bottom
            name = key.removeprefix(PHASES).removesuffix("_s").replace("_", " ")
            axes.fill_between(at, bottom, bottom + mean, color=colour, alpha=0.85, linewidth=0, label=name)
            bottom = bottom + mean
        axes.set_ylim(bottom=0)
        _mark(axes, run)
        axes.legend(frameon=False, fontsize=8, ncols=3)

    return _svg(f"Phases of a step: {_short(run.name)}", "s", draw)


def _cycled(count: int) -> list[str]:
    return [COLOURS[index % len(COLOURS)] for index in range(count)]


def _svg(title: str, unit: str, draw: Any, over: str = "step") -> str:
    """One figure as an SVG element, transparent, in colours for light and dark pages. Text is kept as text, and the hash salt keeps its ids
    distinct from other figures on the page. Names of runs are no formulas."""
    import matplotlib
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": title,
        "font.size": 9,
        "font.family": "sans-serif",
        "text.parse_math": False,
    }
    with matplotlib.rc_context(style | dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color", "grid.color"), GREY)):
        figure = Figure(figsize=SIZE, layout="constrained")
        axes = figure.add_subplot()
        draw(axes)
        axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
        axes.set_ylabel(unit)
        axes.set_xlabel(over)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        written = io.StringIO()
        figure.savefig(written, format="svg", metadata={"Date": None}, transparent=True)
    return re.sub(r"^.*?(?=<svg)", "", written.getvalue(), count=1, flags=re.DOTALL)
