"""Errors of predictions by kind of run and GPU, which `megalite plan --from` prints beside a prediction.

    python -m benchmarks.error_kinds        from results/held_out.json; benchmarks.held_out does it too

Rows of tables that constants are fitted to are predicted with constants fitted without their table, rows of
the others with the constants fitted to the first.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

import numpy as np
import yaml

from benchmarks import held_out, published
from megalite.planner.plans import published_errors


def deviations(content: Mapping[str, Any]) -> Iterator[tuple[str, str, bool, float]]:
    """Yield the kind, the GPU, whether it is held out, and the deviation of each published row."""
    tree, values = published.read_published(), published.fitted()
    apart = {table.key: [row.deviation for row in table.rows] for table in published.apart()}
    tables = {key: [row["deviation"] for row in table["rows"]] for key, table in content["tables"].items()}
    for key, of_table in (tables | apart).items():
        table = (tree["tables"] | tree["apart"])[key]
        for row, deviation in zip(published.rows_of(table), of_table, strict=True):
            job, choice = published.job_of(row, tree, values), published.choice_of(row)
            kind = published_errors.kind_of(job, choice, job.software.fp8 not in (None, "none"))
            yield kind, row["gpu"], key in tables, deviation


def errors(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the errors of each kind and GPU, as the fields of PublishedError."""
    kinds: dict[tuple[str, str], list[tuple[bool, float]]] = {}
    for kind, gpu, fitted, deviation in deviations(content):
        kinds.setdefault((kind, gpu), []).append((fitted, deviation))
    return [_summary(kind, gpu, rows) for (kind, gpu), rows in sorted(kinds.items())]


def _summary(kind: str, gpu: str, rows: list[tuple[bool, float]]) -> dict[str, Any]:
    all_of_kind = [deviation for _, deviation in rows]
    sizes = [abs(deviation) for deviation in all_of_kind]
    figures = {
        "median": median(sizes),
        "within": float(np.quantile(sizes, held_out.COVERED)),
        "lowest": min(all_of_kind),
        "highest": max(all_of_kind),
    }
    counts = {"kind": kind, "gpu": gpu, "rows": len(rows), "held_out": all(fitted for fitted, _ in rows)}
    return counts | {name: round(value, 4) for name, value in figures.items()}


def write(content: Mapping[str, Any]) -> None:
    """Write the planner's file."""
    heading = "# written by python -m benchmarks.held_out; published_errors.py explains the fields\n"
    text = yaml.safe_dump({"errors": errors(content)}, sort_keys=False, default_flow_style=None, width=200)
    published_errors.ROWS.write_text(heading + text, encoding="utf-8")


def main() -> None:
    """Write the planner's file from stored results."""
    write(json.loads(held_out.RESULTS.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
