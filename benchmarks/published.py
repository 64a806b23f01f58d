"""Predictions of published training speeds (published.yaml), and their deviations.

    python -m benchmarks.published              writes the tables of docs/appendix/published-runs.md

The constants are fitted to all of these tables by benchmarks/held_out.py, which also predicts each table with
constants fitted without it. A row lists its assumptions if its source does not give a value.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

from megalite.config.files import read_tree
from megalite.config.sections.model import ModelConfig
from megalite.families.presets import preset
from megalite.model.cost.flops import model_flops_per_token
from megalite.planner.api import Device, Link, find_device, read_link
from megalite.planner.hardware.constants import CONSTANTS
from megalite.planner.plans import LayoutChoice, PlannedJob, Software, Stepper, StepTime, explanation

ROWS = Path(__file__).with_name("published.yaml")
DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = DOCS / "appendix" / "published-runs.md"

UNITS = {
    "sc21_tflops": "TFLOP/s",
    "palm_tflops": "TFLOP/s",
    "seconds": "s a step",
    "tokens_per_second": "tokens/s/GPU",
    "sequences_per_second": "sequences/s/GPU",
}


@dataclass(frozen=True)
class PublishedComparison:
    """A published figure and its prediction.

    Attributes:
        step: the predicted step.
    """

    name: str
    unit: str
    choice: LayoutChoice
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
    """Rows of one source."""

    key: str
    title: str
    unit: str
    rows: list[PublishedComparison]

    @property
    def median(self) -> float:
        return median(abs(row.deviation) for row in self.rows)

    @property
    def worst(self) -> float:
        return max((row.deviation for row in self.rows), key=abs)


def fitted() -> dict[str, float]:
    """Return the constants that published runs determine.

    These are the planner's own, and those of other training codes and conditions.
    """
    own = {
        "ampere": find_device("a100").sustained,
        "hopper": find_device("h100").sustained,
        **asdict(CONSTANTS),
    }
    return {name: row.get("value", own.get(name)) for name, row in read_published()["constants"].items()}


def read_published() -> dict[str, Any]:
    """Return the content of published.yaml."""
    tree: dict[str, Any] = read_tree(str(ROWS), "published rows")
    return tree


def compare(constants: Mapping[str, float] | None = None, only: Collection[str] | None = None) -> list[Table]:
    """Return the tables of published.yaml, predicted with given constants, by default the fitted ones.

    Args:
        only: keys of the tables; default: all.
    """
    tree, values = read_published(), constants or fitted()
    return [
        _table(key, table, tree, values)
        for key, table in tree["tables"].items()
        if only is None or key in only
    ]


def apart() -> list[Table]:
    """Return the tables that constants are not fitted to."""
    tree = read_published()
    return [_table(key, table, tree, fitted()) for key, table in tree["apart"].items()]


def _table(key: str, table: Mapping[str, Any], tree: Mapping[str, Any], values: Mapping[str, float]) -> Table:
    rows = [_row(row, job_of(row, tree, values), choice_of(row)) for row in rows_of(table)]
    return Table(key, table["title"], table["measured"], rows)


def rows_of(table: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a table, including the values that all rows share."""
    return [
        {**table, **row, "unit": table["measured"], "layout": table["layout"] | row.get("layout", {})}
        for row in table["rows"]
    ]


def job_of(row: Mapping[str, Any], tree: Mapping[str, Any], values: Mapping[str, float]) -> PlannedJob:
    """Return the model, device, batch and training code of a row."""
    model = ModelConfig(**preset(row["preset"]) if "preset" in row else _shape(row, tree))
    software: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else values.get(value, value)
        for name, value in tree["software"][row["software"]].items()
    }
    batch = row["sequence_length"], row["batch"], row["precision"]
    return PlannedJob(model, _device(row, values), *batch, Software(**software), row["gradient_bytes"])


def _shape(row: Mapping[str, Any], tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model of a row without a preset."""
    hidden, layers, heads = row["shape"]
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    return {
        **tree["models"][row["model"]],
        **sizes,
        "intermediate_size": row.get("intermediate_size", 4 * hidden),
    }


def choice_of(row: Mapping[str, Any]) -> LayoutChoice:
    """Return the layout of a row. dp has the remaining ranks."""
    layout = row["layout"]
    return LayoutChoice(**layout, dp=row["gpus"] // prod(layout.get(axis, 1) for axis in ("tp", "pp", "cp")))


def _row(row: Mapping[str, Any], job: PlannedJob, choice: LayoutChoice) -> PublishedComparison:
    step = Stepper(job).step(choice)
    predicted = _figure(row["unit"], job, choice, step.total)
    return PublishedComparison(row["name"], row["unit"], choice, row["measured"], predicted, step)


def _device(row: Mapping[str, Any], values: Mapping[str, float]) -> Device:
    """Return the device of a row with given constants.

    Conditions that its source states replace the usual ones.
    """
    device, named = find_device(row["gpu"]), row.get("hardware", {})
    fitted_rate = named.get("sustained", {"a100": "ampere", "h100": "hopper"}.get(row["gpu"]))
    between = read_link(named["between"]) if "between" in named else device.between
    own = replace(CONSTANTS, **{name: value for name, value in values.items() if name in asdict(CONSTANTS)})
    return replace(
        device,
        sustained=device.sustained if fitted_rate is None else values[fitted_rate],
        bandwidth=named.get("bandwidth", device.bandwidth),
        within=_scaled(device.within, own.links / CONSTANTS.links),
        between=_scaled(between, own.links / (1.0 if "between" in named else CONSTANTS.links)),
        constants=own,
    )


def _scaled(link: Link, factor: float) -> Link:
    return replace(link, bandwidth=link.bandwidth * factor)


def _figure(unit: str, job: PlannedJob, choice: LayoutChoice, seconds: float) -> float:
    """Convert the duration of a step to the unit of a source."""
    model, tokens = job.model, job.tokens_per_second_per_gpu(choice, seconds)
    if unit == "seconds":
        return seconds
    if unit == "sequences_per_second":
        return tokens / job.sequence_length
    if unit == "sc21_tflops":
        return tokens * _sc21_flops_per_token(model, job.sequence_length) / 1e12
    return (
        tokens * model_flops_per_token(model, job.sequence_length) / 1e12 if unit == "palm_tflops" else tokens
    )


def _sc21_flops_per_token(model: ModelConfig, sequence: int) -> float:
    """Return the FLOPs per token by Narayanan et al. 2021, equation 3, including the recomputed forward."""
    layers, hidden = model.num_hidden_layers, model.hidden_size
    return 96 * layers * hidden**2 * (1 + sequence / (6 * hidden) + model.vocabulary / (16 * layers * hidden))


def document(tables: list[Table]) -> str:
    """Return Markdown with a table for each source."""
    tree = read_published()
    known, parts = tree["tables"] | tree["apart"], []
    for table in tables:
        source = known[table.key]
        unit = UNITS[source["measured"]]
        parts += [
            f"**{table.title}.** Source: {source['source']}. Median {table.median:.1%}, worst "
            f"{table.worst:+.1%}.",
            "",
        ]
        parts += [
            f"| | GPUs | layout | measured, {unit} | predicted | deviation of speed |",
            "|---|---|---|---|---|---|",
        ]
        for row in table.rows:
            layout = explanation.describe_layout(row.choice)
            parts.append(
                f"| {row.name} | {row.choice.gpus} | {layout} | {row.measured:,g} | {row.predicted:,.4g} | "
                f"{row.deviation:+.1%} |"
            )
        parts.append("")
    return "\n".join(parts)


def write_between(script: str, text: str, page: Path = PAGE) -> None:
    """Replace the text between a script's two markers in a page."""
    begin, end = f"<!-- written by python -m benchmarks.{script} -->", f"<!-- end of benchmarks.{script} -->"
    before, rest = page.read_text(encoding="utf-8").split(begin)
    page.write_text(f"{before}{begin}\n\n{text}\n{end}{rest.split(end)[1]}", encoding="utf-8")


def main() -> None:
    """Write the tables into the page."""
    write_between("published", document([*compare(), *apart()]))


if __name__ == "__main__":
    main()
