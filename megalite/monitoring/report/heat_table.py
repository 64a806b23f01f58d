"""Tables of fp8 operands by layer and matrix, with cells colored by value (`logging.fp8_interval`)."""

from __future__ import annotations

from collections import Counter
from html import escape

from megalite.monitoring.metrics import BY_LAYER, FLUSHED, ROUNDING, SATURATED
from megalite.monitoring.report.run import RecordedRun

TITLES = {
    ROUNDING: "Error of operands and products, % of the norm",
    FLUSHED: "Flushed to zero, % of elements",
    SATURATED: "Saturated (codes ±448), % of elements",
}
STYLE = """
  .heat td, .heat th { padding: 0.1rem 0.5rem; text-align: right; }
  .heat caption { text-align: left; padding: 0.6rem 0; }
  .heat th[colspan] { text-align: center; border-left: 1px solid var(--line); }
"""
STRONGEST = 60  # percent of the color, so that text stays readable


def heat_tables(run: RecordedRun) -> str:
    """Return the tables of the last step that was measured, as HTML; empty if there is none."""
    names = run.names(f"{ROUNDING}{BY_LAYER}/")
    measured = [line for line in run.steps if any(f"{ROUNDING}{BY_LAYER}/{name}" in line for name in names)]
    if not measured:
        return ""
    last = measured[-1]
    tables = []
    for key, title in TITLES.items():
        prefix = f"{key}{BY_LAYER}/"
        columns = {
            name.removeprefix(prefix): values for name, values in last.items() if name.startswith(prefix)
        }
        tables.append(_table(f"{title} (step {last['step']:,})", columns))
    return f"<p>{escape(run.name)}</p>{''.join(tables)}"


def _table(caption: str, columns: dict[str, list[float | None]]) -> str:
    """Return a table with a row for each layer.

    Args:
        columns: MATRIX.OPERAND → value of each layer, None if it does not have the matrix.
    """
    names = [name.rpartition(".")[::2] for name in columns]  # in the order of the model, operand by operand
    places = [list(dict.fromkeys(part)) for part in zip(*names, strict=True)]
    split = sorted(
        zip(names, columns.values(), strict=True),
        key=lambda column: [place.index(part) for place, part in zip(places, column[0], strict=True)],
    )
    matrices = Counter(matrix for (matrix, _), _ in split)
    top = "".join(
        f'<th scope="colgroup" colspan="{count}">{escape(name)}</th>' for name, count in matrices.items()
    )
    second = "".join(f'<th scope="col">{escape(operand.replace("_", " "))}</th>' for (_, operand), _ in split)
    largest = max((value for _, values in split for value in values if value is not None), default=0.0)
    rows = list[str]()
    for layer in range(len(split[0][1])):
        if any(values[layer] is not None for _, values in split):
            cells = "".join(_cell(values[layer], largest) for _, values in split)
            rows.append(f'<tr><th scope="row">{layer}</th>{cells}</tr>')
    return (
        f'<div class="wide"><table class="heat"><caption>{escape(caption)}</caption><tr><th></th>{top}</tr>'
        f'<tr><th scope="col">layer</th>{second}</tr>{"".join(rows)}</table></div>'
    )


def _cell(value: float | None, largest: float) -> str:
    if value is None:
        return "<td></td>"
    strength = round(STRONGEST * value / largest) if largest else 0
    color = f"color-mix(in srgb, #e8590c {strength}%, transparent)"
    return f'<td style="background: {color}">{100 * value:.2g}</td>'
