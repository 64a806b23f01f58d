"""Predicts published training speeds (published.yaml), and reports the deviation.

    python -m benchmarks.published              writes the tables of docs/planner.md

No constant of the planner is fitted to these rows; a row states its assumptions where its source does not give a value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from megalite.config.load import read_tree
from megalite.config.schema import ModelConfig
from megalite.model.cost import model_flops_per_token
from megalite.planning.explaining import described
from megalite.planning.hardware import Device, find, read_link
from megalite.planning.operations import Software
from megalite.planning.step import Choice, Job, Stepper, StepTime

ROWS = Path(__file__).with_name("published.yaml")
PAGE = Path(__file__).resolve().parents[1] / "docs" / "planner.md"
BEGIN, END = "<!-- written by python -m benchmarks.published -->", "<!-- end of what was predicted -->"

UNITS = {
    "sc21_tflops": "TFLOP/s",
    "palm_tflops": "TFLOP/s",
    "seconds": "s a step",
    "tokens_per_second": "tokens/s/GPU",
    "sequences_per_second": "sequences/s/GPU",
}


@dataclass(frozen=True)
class Comparison:
    """A published figure and its prediction; step: the predicted step."""

    name: str
    unit: str
    choice: Choice
    measured: float
    predicted: float
    step: StepTime

    @property
    def deviation(self) -> float:
        """Relative deviation of the predicted speed from the measured one."""
        ratio = self.predicted / self.measured
        return (1 / ratio if self.unit == "seconds" else ratio) - 1


@dataclass(frozen=True)
class Table:
    """One source's rows."""

    key: str
    title: str
    unit: str
    rows: list[Comparison]

    @property
    def median(self) -> float:
        return median(abs(row.deviation) for row in self.rows)

    @property
    def worst(self) -> float:
        return max((row.deviation for row in self.rows), key=abs)


def compare() -> list[Table]:
    """Every table of published.yaml."""
    tree = read_tree(str(ROWS), "published rows")
    return [_table(key, table, tree) for key, table in tree["tables"].items()]


def _table(key: str, table: Mapping[str, Any], tree: Mapping[str, Any]) -> Table:
    rows = [
        _row({**table, **row, "unit": table["measured"], "layout": table["layout"] | row.get("layout", {})}, tree) for row in table["rows"]
    ]
    return Table(key, table["title"], table["measured"], rows)


def _row(row: Mapping[str, Any], tree: Mapping[str, Any]) -> Comparison:
    hidden, layers, heads = row["shape"]
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    model = ModelConfig(**tree["models"][row["model"]], **sizes, intermediate_size=row.get("intermediate_size", 4 * hidden))
    job = Job(
        model,
        _device(row),
        row["sequence_length"],
        row["batch"],
        row["precision"],
        Software(**tree["software"][row["software"]]),
        row["gradient_bytes"],
    )
    layout = row["layout"]
    choice = Choice(**layout, dp=row["gpus"] // (layout.get("tp", 1) * layout.get("pp", 1)))
    step = Stepper(job).step(choice)
    predicted = _figure(row["unit"], job, choice, step.total)
    return Comparison(row["name"], row["unit"], choice, row["measured"], predicted, step)


def _device(row: Mapping[str, Any]) -> Device:
    """The device of a row, with the conditions that its source names instead of the usual ones."""
    changed = {key: read_link(value) if key == "between" else value for key, value in row.get("hardware", {}).items()}
    return replace(find(row["gpu"]), **changed)


def _figure(unit: str, job: Job, choice: Choice, seconds: float) -> float:
    """A step of `seconds` in the unit of a source."""
    model, tokens = job.model, job.tokens_per_second_per_gpu(choice, seconds)
    if unit == "seconds":
        return seconds
    if unit == "sequences_per_second":
        return tokens / job.sequence_length
    if unit == "sc21_tflops":
        return tokens * _sc21_flops_per_token(model, job.sequence_length) / 1e12
    return tokens * model_flops_per_token(model, job.sequence_length) / 1e12 if unit == "palm_tflops" else tokens


def _sc21_flops_per_token(model: ModelConfig, sequence: int) -> float:
    """FLOPs per token by Narayanan et al. 2021, equation 3, including the recomputed forward."""
    layers, hidden = model.num_hidden_layers, model.hidden_size
    return 96 * layers * hidden**2 * (1 + sequence / (6 * hidden) + model.vocabulary / (16 * layers * hidden))


def document(tables: list[Table]) -> str:
    """Markdown: a table for each source."""
    tree = read_tree(str(ROWS), "published rows")["tables"]
    parts = []
    for table in tables:
        source = tree[table.key]
        unit = UNITS[source["measured"]]
        parts += [f"**{table.title}.** Source: {source['source']}. Median {table.median:.1%}, worst {table.worst:+.1%}.", ""]
        parts += [f"| | GPUs | layout | measured, {unit} | predicted | deviation of speed |", "|---|---|---|---|---|---|"]
        for row in table.rows:
            layout = described(row.choice)
            parts.append(f"| {row.name} | {row.choice.gpus} | {layout} | {row.measured:,g} | {row.predicted:,.4g} | {row.deviation:+.1%} |")
        parts.append("")
    return "\n".join(parts)


def main() -> None:
    """Write the tables into the page."""
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n\n{document(compare())}\n{END}{after}")


if __name__ == "__main__":
    main()
