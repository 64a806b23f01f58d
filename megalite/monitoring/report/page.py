"""The report: one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

import yaml

from megalite.monitoring.report.charts import charts
from megalite.monitoring.report.run import Run
from megalite.parallel.pipeline.bubble import BUBBLES
from megalite.planning.drawing import timeline as drawing

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><title>{title}</title>
<style>
  body {{ margin: 2rem auto; max-width: 1320px; padding: 0 1rem; font: 15px/1.45 system-ui, sans-serif; color: #1d1d1f; background: #fff; }}
  h1 {{ font-size: 1.5rem; }} h2 {{ font-size: 1.15rem; margin-top: 2.2rem; }}
  table {{ border-collapse: collapse; }} th, td {{ padding: 0.2rem 1.2rem 0.2rem 0; text-align: left; border-bottom: 1px solid #e4e4e8; }}
  td, th[scope=row] {{ font-variant-numeric: tabular-nums; vertical-align: top; }} th[scope=row] {{ font-weight: normal; color: #55555a; }}
  .charts {{ display: flex; flex-wrap: wrap; gap: 1rem; }} .charts svg {{ width: 630px; max-width: 100%; height: auto; }}
  .wide {{ overflow-x: auto; }} pre {{ background: #f5f5f7; padding: 1rem; overflow-x: auto; font-size: 13px; }}
</style></head>
<body>
<h1>{title}</h1>
{body}
</body></html>
"""


def page(runs: Sequence[Run]) -> str:
    """The whole report of one run, or of several side by side."""
    title = " · ".join(run.name for run in runs)
    sections = [
        ("", _table(["", *(run.name for run in runs)], _summary(runs))),
        ("Over the steps", f'<div class="charts">{"".join(charts(runs))}</div>'),
        ("The pipeline", "".join(map(_pipeline, runs))),
        ("Predicted and measured", "".join(_predictions(run) for run in runs)),
        ("What differs between the configurations", _differences(runs)),
        ("Configuration", "".join(_details(run.name, run.options) for run in runs)),
        ("Environment", "".join(_details(run.name, run.environment) for run in runs if run.environment)),
    ]
    body = "\n".join(f"<h2>{heading}</h2>\n{content}" if heading else content for heading, content in sections if content)
    return PAGE.format(title=escape(title), body=body)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    lines = (
        f'<tr><th scope="row">{escape(first)}</th>' + "".join(f"<td>{escape(cell)}</td>" for cell in rest) + "</tr>"
        for first, *rest in rows
    )
    return f'<div class="wide"><table><tr>{top}</tr>{"".join(lines)}</table></div>'


def _summary(runs: Sequence[Run]) -> list[list[str]]:
    """The summary table, with a column for each run."""

    def number(value: float | None, form: str, scale: float = 1.0) -> str:
        return "–" if value is None else format(value * scale, form)

    def best(run: Run) -> float | None:
        return min(run.curve("val_loss")[1], default=None)

    def layout(run: Run) -> str:
        parallel = run.config.parallel
        schedule = f", {parallel.schedule}" if parallel.pp > 1 else ""
        return f"tp {parallel.tp} × pp {parallel.pp} × dp {parallel.dp}, ZeRO-{parallel.zero}{schedule}"

    last = [run.steps[-1] if run.steps else {} for run in runs]
    return [
        ["Parameters", *(f"{run.parameters:,}" for run in runs)],
        ["Layout", *(layout(run) for run in runs)],
        ["Precision, recomputation", *(f"{run.config.train.precision}, {run.config.train.recompute}" for run in runs)],
        ["Steps done, of", *(f"{line.get('step', 0):,} of {run.config.train.steps:,}" for run, line in zip(runs, last, strict=True))],
        ["Tokens seen", *(f"{sum(line.get('tokens') or 0 for line in run.steps):,}" for run in runs)],
        ["Last loss", *(number(line.get("loss"), ".4f") for line in last)],
        ["Best validation loss", *(number(best(run), ".4f") for run in runs)],
        ["Time of a step, s", *(number(run.typical("step_time_s"), ".4g") for run in runs)],
        ["Tokens/s", *(number(run.typical("tokens_per_second"), ",.0f") for run in runs)],
        ["TFLOP/s a rank", *(number(run.typical("tflops_per_gpu"), ".3g") for run in runs)],
        ["MFU", *(number(run.typical("mfu"), ".1%") for run in runs)],
        ["Bubble", *(number(run.typical("bubble_fraction"), ".1%") for run in runs)],
        ["Peak memory of rank 0, GiB", *(number(max(run.curve("peak_memory_bytes")[1], default=None), ".2f", 2.0**-30) for run in runs)],
        ["Steps skipped", *(str(sum(bool(line.get("skipped")) for line in run.steps)) for run in runs)],
    ]


def _pipeline(run: Run) -> str:
    plan = run.schedule()
    if plan is None:
        return ""
    timed = "the durations that the run recorded" if run.recorded else "the durations that it was planned for: profiling.timeline records"
    try:
        drawn = drawing.svg(drawing.picture([plan]))
    except drawing.DrawingError as error:
        drawn = f"<p>{escape(str(error))}</p>"
    return f'<p>{escape(run.name)}, simulated with {timed}.</p><div class="wide">{drawn}</div>'


def _predictions(run: Run) -> str:
    """Predicted and measured values, where both are known."""
    rows = []
    plan = run.schedule()
    if run.recorded is not None:
        rows += [
            [name, f"{getattr(run.recorded.plan.timeline, name):.1%}", f"{run.recorded.bubbles[name]:.1%}"] for name in run.recorded.bubbles
        ]
    elif plan is not None and (found := run.typical(BUBBLES[0])) is not None:
        predicted = run.prediction.get(BUBBLES[0]) or plan.timeline.bubble_fraction
        rows.append([BUBBLES[0], f"{predicted:.1%}", f"{found:.1%}"])
    seconds, measured = run.prediction.get("step_time_s"), run.typical("step_time_s")
    if seconds is not None and measured is not None:
        rows.append(["step_time_s", f"{seconds:.4g}", f"{measured:.4g}"])
    return _table([run.name, "predicted", "measured"], rows) if rows else ""


def _differences(runs: Sequence[Run]) -> str:
    """The options in which the runs differ."""
    flat = [dict(_flat(run.options)) for run in runs]
    names = dict.fromkeys(name for options in flat for name in options)
    rows = [[name, *(str(options.get(name, "–")) for options in flat)] for name in names]
    rows = [row for row in rows if len(set(row[1:])) > 1 and row[0] != "run.name"]
    return _table(["", *(run.name for run in runs)], rows) if rows else ""


def _flat(options: dict[str, Any]) -> Iterable[tuple[str, Any]]:
    return ((f"{section}.{key}", value) for section, values in options.items() for key, value in values.items())


def _details(name: str, content: dict[str, Any]) -> str:
    text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
    return f"<details><summary>{escape(name)}</summary><pre>{escape(text)}</pre></details>"
