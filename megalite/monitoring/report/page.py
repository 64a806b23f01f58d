"""The report as one self-contained HTML page.

It includes uPlot (MIT, in uplot/), the library that draws its charts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

import yaml

from megalite.monitoring.report import figures
from megalite.monitoring.report.charts import charts
from megalite.monitoring.report.heat_table import STYLE, heat_tables
from megalite.monitoring.report.run import RecordedRun
from megalite.monitoring.report.segments import RunSegment
from megalite.planner.drawing import timeline as drawing

ROWS = 12  # of a table of values
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><title>{title}</title>{head}
<style>
  :root {{ --ink: #1d1d1f; --quiet: #55555a; --paper: #fff; --line: #e4e4e8; --code: #f5f5f7; }}
  @media (prefers-color-scheme: dark) {{
    :root {{ --ink: #e8e8ec; --quiet: #a9a9b2; --paper: #17181b; --line: #36373d; --code: #222328; }}
    .drawing svg {{ filter: invert(1) hue-rotate(180deg); mix-blend-mode: screen; }}
  }}
  body {{ margin: 2rem auto; max-width: 1320px; padding: 0 1rem; font: 15px/1.45 system-ui, sans-serif; }}
  body {{ color: var(--ink); background: var(--paper); }}
  h1 {{ font-size: 1.5rem; overflow-wrap: anywhere; }} h2 {{ font-size: 1.15rem; margin-top: 2.2rem; }}
  table {{ border-collapse: collapse; }}
  th, td {{ padding: 0.2rem 1.2rem 0.2rem 0; text-align: left; border-bottom: 1px solid var(--line); }}
  td, th[scope=row] {{ font-variant-numeric: tabular-nums; vertical-align: top; }}
  td {{ max-width: 34rem; overflow-wrap: break-word; }} th[scope=row] {{ font-weight: normal; color: var(--quiet); }}
  .charts {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 1rem; }}
  .chart {{ min-width: 0; }} .chart h3 {{ display: inline; font-size: 1rem; margin: 0; overflow-wrap: anywhere; }}
  .chart button {{ float: right; font: inherit; font-size: 12px; color: var(--quiet); background: none; border: 1px solid var(--line); }}
  .chart button[aria-pressed=true] {{ color: var(--paper); background: var(--quiet); }}
  .chart details {{ font-size: 13px; color: var(--quiet); }}
  .u-legend {{ font-size: 13px; text-align: left; }} .u-legend .hidden {{ display: none; }}
  .u-legend th, .u-legend td {{ border: 0; padding: 0 3px; }}
  .u-select {{ background: color-mix(in srgb, var(--ink) 12%, transparent); }}
  .wide {{ overflow-x: auto; }} pre {{ background: var(--code); padding: 1rem; overflow-x: auto; font-size: 13px; }}
  summary, p {{ overflow-wrap: anywhere; }} .state {{ color: var(--quiet); }}{heat}
{library}</style></head>
<body>
<h1>{title}</h1>
{body}
</body></html>
"""


def page(runs: Sequence[RecordedRun]) -> str:
    """Return the report of one run, or a comparison of several."""
    return document(" · ".join(run.name for run in runs), f"{content(runs)}\n<script>{script()}</script>")


def document(title: str, body: str, head: str = "") -> str:
    """Return a page.

    Args:
        title: text.
        body, head: HTML.
    """
    return PAGE.format(
        title=escape(title), body=body, head=head, heat=STYLE, library=_text("uplot/uPlot.min.css")
    )


def script() -> str:
    """Return the script that draws the charts of a page. It must follow them."""
    return f"{_text('uplot/uPlot.iife.min.js')}\n{_text('charts.js')}"


@cache
def _text(name: str) -> str:
    """Read a file in the directory of this module."""
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def content(runs: Sequence[RecordedRun]) -> str:
    """Return the HTML below the title."""
    sections = [
        ("", _table(["", *(run.name for run in runs)], figures.summary(runs))),
        ("Segments", "".join(_segments(run) for run in runs if len(run.segments) > 1)),
        ("Curves", f'<div class="charts">{"".join(map(_chart, charts(runs)))}</div>'),
        ("fp8 by layer", "".join(map(heat_tables, runs))),
        ("Pipeline", "".join(_pipeline(run, segment) for run in runs for segment in run.segments)),
        (
            "Predicted and measured",
            "".join(_predictions(run, segment) for run in runs for segment in run.segments),
        ),
        ("Configuration differences", _differences(runs)),
        ("Configuration", "".join(_details(run.name, run.options) for run in runs)),
        ("Environment", "".join(_details(run.name, run.environment) for run in runs if run.environment)),
    ]
    return "\n".join(
        f"<h2>{heading}</h2>\n{content}" if heading else content for heading, content in sections if content
    )


def _chart(chart: dict[str, Any]) -> str:
    """Return a chart that charts.js draws, with some of its values as a table."""
    data, title = escape(json.dumps(chart, separators=(",", ":")), quote=True), escape(chart["title"])
    toggle = (
        '<button type="button" aria-pressed="false">log</button>'
        if chart["kind"] == "lines" and _is_positive(chart)
        else ""
    )
    names = [line["name"] for line in chart["lines"]]
    described = f"{title}: {escape(', '.join(names))} over {chart['over']}"
    plot = (
        f'<div class="plot" role="img" aria-label="{described}"><noscript>Curves need '
        "JavaScript.</noscript></div>"
    )
    return (
        f'<section class="chart" data-chart="{data}">{toggle}<h3>{title}</h3>{plot}{_values(chart)}</section>'
    )


def _is_positive(chart: dict[str, Any]) -> bool:
    """Return whether all values are positive, so that the axis can be logarithmic."""
    return all(value > 0 for line in chart["lines"] for value in line["values"] if value is not None)


def _values(chart: dict[str, Any]) -> str:
    """Return the values of the curves at a few positions, including the first and the last."""
    lines = [dict(zip(line["at"], line["values"], strict=True)) for line in chart["lines"]]
    places = sorted({place for line in lines for place in line})
    chosen = (
        [places[round(index * (len(places) - 1) / max(ROWS - 1, 1))] for index in range(ROWS)]
        if len(places) > ROWS
        else places
    )
    rows = [
        [f"{place:,.6g}", *("–" if (value := line.get(place)) is None else f"{value:,.6g}" for line in lines)]
        for place in chosen
    ]
    return f"<details><summary>values</summary>{_table([chart['over'], *(line['name'] for line in chart['lines'])], rows)}</details>"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    lines = (
        f'<tr><th scope="row">{escape(first)}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in rest)
        + "</tr>"
        for first, *rest in rows
    )
    return f'<div class="wide"><table><tr>{top}</tr>{"".join(lines)}</table></div>'


def _segments(run: RecordedRun) -> str:
    """Return a table with a column per segment, for a run whose layout, hardware or options changed."""
    head = [run.name, *(f"{segment.number}" for segment in run.segments)]
    return (
        "<p>Each column is a segment of the run. Dashed lines in the curves mark where a segment "
        f"starts.</p>{_table(head, figures.segment_rows(run))}"
    )


def _named(run: RecordedRun, segment: RunSegment) -> str:
    """Return the name of the run, with the segment if there are several."""
    return (
        run.name
        if len(run.segments) == 1
        else f"{run.name}, segment {segment.number} ({segment.steps}: {segment.layout})"
    )


def _pipeline(run: RecordedRun, segment: RunSegment) -> str:
    recorded = run.recorded_in(segment)
    plan = segment.schedule() if recorded is None else recorded.plan
    if plan is None:
        return ""
    timed = (
        "recorded durations"
        if recorded
        else "planned durations (set profiling.timeline to record actual ones)"
    )
    try:
        drawn = drawing.svg(drawing.picture([plan]))
    except drawing.DrawingError as error:
        drawn = f"<p>{escape(str(error))}</p>"
    return (
        f'<p>{escape(_named(run, segment))}, simulated with {timed}.</p><div class="wide '
        f'drawing">{drawn}</div>'
    )


def _predictions(run: RecordedRun, segment: RunSegment) -> str:
    """Return a table of predicted and measured values of a segment."""
    predictions = segment.predicted(run.recorded_in(segment))
    rows = [
        [name, *(f"{value:.4g}" if name == "step_time_s" else f"{value:.1%}" for value in values)]
        for name, *values in predictions
    ]
    return _table([_named(run, segment), "predicted", "measured"], rows) if rows else ""


def _differences(runs: Sequence[RecordedRun]) -> str:
    rows = figures.difference_rows(runs)
    return _table(["", *(run.name for run in runs)], rows) if rows else ""


def _details(name: str, content: dict[str, Any]) -> str:
    text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
    return f"<details><summary>{escape(name)}</summary><pre>{escape(text)}</pre></details>"
