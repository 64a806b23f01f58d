"""Timelines as pictures: laid out once as boxes and labels in pixels, and written as SVG, HTML or PNG.

A row is a rank; a bar is an action, coloured by its pass and shaded by its stage among the rank's stages. A
tint behind the bars and a strip below them show the phase: warm-up until the rank's first backward, cool-down
after its last forward, steady in between. A line along the bars' lower edge shows the gathering of weights.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from megalite.parallel.pipeline.bubble import BUBBLES, BubblePlan
from megalite.parallel.pipeline.schedule import Action, ActionKind
from megalite.parallel.pipeline.simulator import Interval
from megalite.planner.drawing.tables import durations, heading, number, percent

COLOURS = {ActionKind.FORWARD: "#2a62a8", ActionKind.BACKWARD: "#c8691b", ActionKind.WEIGHT: "#2f7d4f"}
MEANING = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.WEIGHT: "weight gradient",
}
# tint, strip
PHASES = {
    "warm-up": ("#fdf0c0", "#e9bb2d"),
    "steady": ("#ececec", "#a9a9ae"),
    "cool-down": ("#dfe3fb", "#8d99e6"),
}
GATHER, STALL = "#b03a8c", "#f3dcea"
INK, FAINT = "#1d1d1f", "#77777c"
# pixels for the ranks' names, for each rank's figures, and around everything
LEFT, RIGHT, MARGIN = 66, 112, 16
WIDTHS = (880, 2600)  # smallest and largest width of the time axis in pixels
SHORTEST = 15  # preferred width of the shortest bar in pixels
SMALLEST = 6  # smallest readable font in pixels
# width of the time axis from which letters and rows grow with it, to stay readable when the picture is scaled
# to a screen
ZOOM_FROM = 1300
DIGIT, LETTER = 0.64, 0.57  # width of a digit and mean width of a letter, relative to the font's height
MOST_BARS = 50_000


class DrawingError(ValueError):
    """Raised if a plan cannot be drawn; the message suggests an alternative."""


class Box(NamedTuple):
    """A filled rectangle. `hover` is its tooltip, `microbatch` the microbatch of an action."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    hover: str = ""
    microbatch: int | None = None


class Label(NamedTuple):
    """A line of text; (x, y) is on its baseline, at its start, middle or end as `anchor` says."""

    x: float
    y: float
    text: str
    size: float = 12
    anchor: str = "start"
    fill: str = INK
    bold: bool = False


@dataclass
class Picture:
    """Boxes and labels, back to front. Coordinates are from the upper left corner, in units of `zoom`
    pixels."""

    width: float
    height: float
    zoom: float
    boxes: list[Box] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)


# --- Layout
# ------------------------------------------------------------------------------------------------------------


def picture(plans: Sequence[BubblePlan]) -> Picture:
    """Draw timelines stacked vertically on one time scale.

    Raises:
        DrawingError: there are too many bars for a picture.
    """
    bars = [span for plan in plans for spans in plan.timeline.spans for span in spans]
    if len(bars) > MOST_BARS:
        raise DrawingError(
            f"a picture has at most {MOST_BARS} actions, got {len(bars)}. Use .json, which Perfetto opens at "
            "any size."
        )
    longest = max(plan.timeline.makespan for plan in plans)
    shortest = min(span.end - span.start for span in bars if span.end > span.start)
    scale = min(max(WIDTHS[0] / longest, SHORTEST / shortest), WIDTHS[1] / longest)
    zoom = max(1.0, longest * scale / ZOOM_FROM)
    scale /= zoom
    drawn = Picture(LEFT + longest * scale + RIGHT + MARGIN, MARGIN, zoom)
    for plan in plans:
        _add_panel(drawn, plan, scale)
    _add_legend(drawn, plans)
    return drawn


def _add_panel(drawn: Picture, plan: BubblePlan, scale: float) -> None:
    """Add one timeline: title, a row for each rank, the time axis."""
    timeline, ranks = plan.timeline, plan.schedule.ranks
    title, *lines = _title(plan)
    drawn.labels.append(Label(LEFT, drawn.height + 14, title, 15, bold=True))
    for line in lines:
        drawn.height += 17
        drawn.labels.append(Label(LEFT, drawn.height + 14, line, fill=FAINT))
    right = LEFT + timeline.makespan * scale
    idle, peak = right + 52, right + RIGHT - 12  # the right edges of two columns
    drawn.labels += [
        Label(x, drawn.height + 28, text, 11, "end", FAINT) for x, text in ((idle, "idle"), (peak, "peak"))
    ]
    drawn.height += 33
    row = 28 if ranks <= 8 else 24 if ranks <= 16 else 16
    for rank, (held, busy) in enumerate(zip(plan.peaks(), timeline.busy, strict=True)):
        _add_row(drawn, plan, rank, scale, row)
        _add_gathers(drawn, plan, rank, scale, row)
        columns = (
            (LEFT - 8, f"rank {rank}"),
            (idle, percent(1 - busy / timeline.makespan)),
            (peak, f"{held:.4g}"),
        )
        drawn.labels += [
            Label(x, drawn.height + row / 2 + 2, text, min(12, row - 4), "end") for x, text in columns
        ]
        drawn.height += row
    _add_axis(drawn, timeline.makespan, scale, plan.unit)


def _title(plan: BubblePlan) -> list[str]:
    """Return the lines above a timeline: name and sizes, bubbles and times, memory and durations."""
    timeline = plan.timeline
    bubbles = [f"{name} {percent(getattr(timeline, name))}" for name in BUBBLES]
    times = [
        f"makespan {number(timeline.makespan, plan.unit)}",
        f"longest span {number(timeline.longest_span, plan.unit)}",
    ]
    stash = f" ({number(max(plan.peaks(ActionKind.WEIGHT)))} with the weight stash)" if plan.splits else ""
    return [
        heading(plan),
        ", ".join([*bubbles, *times]),
        f"peak activations {number(max(plan.peaks()))}{stash}; {durations(plan)}",
    ]


def _add_row(drawn: Picture, plan: BubblePlan, rank: int, scale: float, row: float) -> None:
    """Add a rank's phases, and over them its bars, with microbatch numbers where they fit."""
    spans, end = plan.timeline.spans[rank], plan.timeline.makespan
    first_backward, last_forward = phases(spans)
    borders = [0.0, first_backward, last_forward, end]
    for (name, (tint, strip)), (start, stop) in zip(PHASES.items(), pairwise(borders), strict=True):
        x, width = LEFT + start * scale, (stop - start) * scale
        drawn.boxes.append(Box(x, drawn.height, width, row - 5, tint, f"rank {rank}: {name}"))
        drawn.boxes.append(Box(x, drawn.height + row - 5, width, 3, strip))
    places = {stage: place for place, stage in enumerate(plan.schedule.stages_of(rank))}
    digits = len(str(plan.schedule.microbatches - 1))
    for action, start, stop in spans:
        x, width = LEFT + start * scale, (stop - start) * scale
        fill = shade(COLOURS[action.kind], places[action.stage], plan.chunks)
        hover = _describe(action, rank, start, stop, plan.unit)
        drawn.boxes.append(
            Box(
                x,
                drawn.height + 1,
                max(width - 0.8 / drawn.zoom, width / 2),
                row - 7,
                fill,
                hover,
                action.microbatch,
            )
        )
        size = min(11.0, 0.6 * row, (width - 2 / drawn.zoom) / (DIGIT * digits))
        if size * drawn.zoom >= SMALLEST:
            ink = "#ffffff" if _is_dark(fill) and not _stalls_at((start + stop) / 2, plan, rank) else INK
            drawn.labels.append(
                Label(
                    x + width / 2 - 0.4,
                    drawn.height + row / 2 - 2.5 + 0.36 * size,
                    str(action.microbatch),
                    size,
                    "middle",
                    ink,
                )
            )


def _stalls_at(time: float, plan: BubblePlan, rank: int) -> bool:
    """Return whether a rank waits for weights at this time."""
    stalls = plan.timeline.stalls[rank] if plan.weights else ()
    place = bisect_right(stalls, (time, math.inf))
    return place > 0 and time < stalls[place - 1][1]


def _add_gathers(drawn: Picture, plan: BubblePlan, rank: int, scale: float, row: float) -> None:
    """Add a rank's waits for weights over its bars, and a mark for each bucket that it gathers."""
    for start, stop in plan.timeline.stalls[rank] if plan.weights else ():
        drawn.boxes.append(
            Box(
                LEFT + start * scale,
                drawn.height + 1,
                (stop - start) * scale,
                row - 7,
                STALL,
                f"rank {rank} waits: weights",
            )
        )
    for move, start, stop in plan.timeline.gathers[rank] if plan.weights else ():
        x, width = LEFT + start * scale, (stop - start) * scale
        hover = (
            f"{move}: gathers bucket {move.bucket}, rank {rank}; {number(start)} to {number(stop, plan.unit)}"
        )
        drawn.boxes.append(
            Box(
                x,
                drawn.height + row - 8,
                max(width - 0.8 / drawn.zoom, width / 2),
                2.5,
                GATHER,
                hover,
                move.microbatch,
            )
        )


def phases(spans: Sequence[Interval]) -> tuple[float, float]:
    """Return the ends of a rank's warm-up and steady phases.

    They are the start of its first backward and the end of its last forward.

    Without a steady phase both are the latter.
    """
    last_forward = max(end for action, _, end in spans if action.kind is ActionKind.FORWARD)
    first_backward = min(
        (start for action, start, _ in spans if action.kind is ActionKind.BACKWARD), default=last_forward
    )
    return min(first_backward, last_forward), last_forward


def _describe(action: Action, rank: int, start: float, stop: float, unit: str) -> str:
    """Return the tooltip of an action."""
    what = (
        f"{action}: {MEANING[action.kind]} of microbatch {action.microbatch}, stage {action.stage}, rank "
        f"{rank}"
    )
    return f"{what}; {number(start)} to {number(stop, unit)}"


def _add_axis(drawn: Picture, end: float, scale: float, unit: str) -> None:
    """Add the time axis below the rows, with ticks at round values about 80 pixels apart."""
    about = 80 / scale
    power = 10.0 ** math.floor(math.log10(about))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= about)
    for i in range(int(end / step * (1 + 1e-9)) + 1):
        x = LEFT + i * step * scale
        drawn.boxes.append(Box(x - 0.5, drawn.height, 1, 4, FAINT))
        drawn.labels.append(Label(x, drawn.height + 15, number(i * step, unit), 10, "middle", FAINT))
    drawn.height += 34


def _add_legend(drawn: Picture, plans: Sequence[BubblePlan]) -> None:
    """Add the legend of colours, shades, tints and figures, with as many entries per line as fit."""
    most = max(plan.chunks for plan in plans)
    passes = [kind for kind in COLOURS if any(kind in plan.schedule.passes for plan in plans)]
    entries = [
        ([shade(COLOURS[kind], place, most) for place in range(most)], f"{kind} {MEANING[kind]}")
        for kind in passes
    ]
    entries += [([tint, strip], name) for name, (tint, strip) in PHASES.items()]
    if any(plan.weights for plan in plans):
        entries += [([GATHER], "gathering of weights"), ([STALL], "waiting for them")]
    if ActionKind.WEIGHT in passes:
        entries.append(([], "where W is drawn, B is the gradient of the input alone"))
    if most > 1:
        entries.append(([], "dark to light: a rank's first to last stage"))
    entries.append(([], "in a bar: microbatch"))
    entries.append(([], "idle: share of the makespan"))
    entries.append(
        ([], "peak: most activations held, of one microbatch on a whole stage, from F to the end of B")
    )
    x = float(LEFT)
    for colours, text in entries:
        width = 14 * len(colours) + LETTER * 11 * len(text) + 26
        if x + width > drawn.width + 20 and x > LEFT:
            x, drawn.height = LEFT, drawn.height + 19
        for place, colour in enumerate(colours):
            drawn.boxes.append(Box(x + 14 * place, drawn.height, 13, 12, colour))
        drawn.labels.append(Label(x + 14 * len(colours) + (5 if colours else 0), drawn.height + 10, text, 11))
        x += width
    drawn.height += 28


def shade(colour: str, place: int, of: int) -> str:
    """Return the shade of stage `place` of a rank with `of` stages, from the colour itself towards white."""
    light = 0.0 if of == 1 else min(0.5, 0.6 / (of - 1)) * place
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * light):02x}" for part in parts)


def _is_dark(colour: str) -> bool:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue < 150


# --- Formats
# ------------------------------------------------------------------------------------------------------------


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Pipeline schedule</title>
<style>
  body {{ margin: 0; background: #fff; }}
  #tip {{ position: fixed; padding: 4px 8px; border-radius: 4px; background: #1d1d1f; color: #fff; font: 12px sans-serif; }}
  #tip {{ pointer-events: none; }}
</style><style id="others"></style></head>
<body>
{svg}
<div id="tip" hidden></div>
<script>
  // Show the tooltip of the bar under the pointer, and highlight the other passes of its microbatch.
  const tip = document.getElementById("tip"), others = document.getElementById("others");
  document.addEventListener("mousemove", event => {{
    const {{ tip: text, microbatch }} = event.target.dataset;
    tip.hidden = !text;
    tip.textContent = text ?? "";
    tip.style.left = Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 4) + "px";
    tip.style.top = event.clientY + 16 + "px";
    others.textContent = microbatch ? `rect[data-microbatch]:not([data-microbatch="${{microbatch}}"]) {{ opacity: 0.25; }}` : "";
  }});
</script>
</body></html>
"""


def svg(drawn: Picture, hover: Callable[[Box], tuple[str, str]] | None = None) -> str:
    """Return the picture as SVG.

    Args:
        hover: returns a box's attributes and content; by default a title, which viewers show as a tooltip.
    """
    hover = hover or (lambda box: ("", f"<title>{escape(box.hover)}</title>" if box.hover else ""))
    width, height = drawn.width, drawn.height
    size = (
        f'width="{width * drawn.zoom:.0f}" height="{height * drawn.zoom:.0f}" viewBox="0 0 {_short(width)} '
        f'{_short(height)}"'
    )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="DejaVu Sans, Verdana, sans-serif">'
    ]
    lines.append('<rect width="100%" height="100%" fill="#ffffff"/>')
    for box in drawn.boxes:
        attributes, content = hover(box)
        place = (
            f'x="{_short(box.x)}" y="{_short(box.y)}" width="{_short(box.width)}" '
            f'height="{_short(box.height)}"'
        )
        lines.append(f'<rect {place} fill="{box.fill}"{attributes}>{content}</rect>')
    lines.append('<g pointer-events="none">')
    for label in drawn.labels:
        style = (
            f'font-size="{_short(label.size)}" text-anchor="{label.anchor}" fill="{label.fill}"'
            + ' font-weight="bold"' * label.bold
        )
        lines.append(f'<text x="{_short(label.x)}" y="{_short(label.y)}" {style}>{escape(label.text)}</text>')
    return "\n".join([*lines, "</g>", "</svg>", ""])


def html(drawn: Picture) -> str:
    """Return a self-contained HTML page.

    Hovering over a bar shows its tooltip and highlights its microbatch.
    """

    def hover(box: Box) -> tuple[str, str]:
        microbatch = "" if box.microbatch is None else f' data-microbatch="{box.microbatch}"'
        return (f' data-tip="{escape(box.hover)}"' if box.hover else "") + microbatch, ""

    return PAGE.format(svg=svg(drawn, hover))


def write_png(drawn: Picture, path: Path) -> None:
    """Write the picture as PNG, at two dots per pixel. Needs matplotlib.

    Raises:
        DrawingError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise DrawingError(
            "a .png requires matplotlib. Install it with `pip install matplotlib`, or use .svg or .html."
        )
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.collections import PolyCollection
    from matplotlib.figure import Figure

    # one unit is one point (1/72 inch)
    figure = Figure(figsize=(drawn.width / 72, drawn.height / 72), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, drawn.width), ylim=(drawn.height, 0))
    axes.axis("off")
    corners = [[(x, y), (x + w, y), (x + w, y + h), (x, y + h)] for x, y, w, h, *_ in drawn.boxes]
    axes.add_collection(PolyCollection(corners, facecolors=[box.fill for box in drawn.boxes], linewidths=0))
    sides = {"start": "left", "middle": "center", "end": "right"}
    for x, y, text, size, anchor, fill, bold in drawn.labels:
        axes.text(
            x,
            y,
            text,
            fontsize=size,
            ha=sides[anchor],
            va="baseline",
            color=fill,
            weight="bold" if bold else "normal",
        )
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=144 * drawn.zoom)


def _short(value: float) -> str:
    """Format a length with at most two decimals."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
