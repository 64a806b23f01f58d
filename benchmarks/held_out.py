"""Held-out predictions of the tables in published.yaml, and a fit of the constants to all of them.

    python -m benchmarks.held_out           about 100 s of CPU; writes results/held_out.json, the tables of
                                            docs/appendix/published-runs.md and the summary in docs/planner.md

Each table is predicted with constants fitted to the other tables. The fit is a least-squares fit of the
logarithms of predicted / measured speed, linear around the current constants, with each constant drawn to its
published value according to the uncertainty of its source (`start` and `spread` in published.yaml). Rows of
one table share their conditions and therefore their errors: a table counts as at most six rows. The last
column leaves out all tables of a publisher, which share its code: constants for properties of that code that
no other table has are then at their start. Run it again with the printed constants until they no longer
change.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks import effects, published
from benchmarks.published import PublishedComparison, Table

RESULTS = Path(__file__).with_name("results") / "held_out.json"
PLANNER_PAGE = published.DOCS / "planner.md"
NOISE = 0.06  # of a row: what remains between prediction and measurement when the constants are right
MOST_ROWS = 6  # that a table counts as
STEP = 1.05  # by which a constant is changed to find how predictions depend on it
COVERED = 0.8
OF_DEVICE = {"a100": ("hopper", "limited", "older_attention"), "h100": ("ampere", "triton_attention")}
"""Device → constants that its tables do not depend on."""


class Fit:
    """Dependence of all rows on all constants, around the current constants."""

    def __init__(self) -> None:
        tree = published.read_published()
        self.at, self.prior = published.fitted(), tree["constants"]
        self.gpus = {key: table["gpu"] for key, table in tree["tables"].items()}
        self.publishers = {key: table.get("publisher", key) for key, table in tree["tables"].items()}
        now = published.compare(self.at)
        self.keys = [table.key for table in now for _ in table.rows]
        self.deviations = logarithms(now)
        self.slopes = np.array([self._slope(name) for name in self.prior]).T
        counts = [self.keys.count(key) for key in self.keys]
        self.weights = np.array([math.sqrt(min(count, MOST_ROWS) / count) / NOISE for count in counts])

    def _slope(self, name: str) -> np.ndarray[Any, Any]:
        depends = [key for key, gpu in self.gpus.items() if name not in OF_DEVICE[gpu]]
        slope = np.zeros(len(self.keys))
        changed = logarithms(published.compare(self.at | {name: self.at[name] * STEP}, depends))
        mask = np.array([key in depends for key in self.keys])
        slope[mask] = (changed - self.deviations[mask]) / math.log(STEP)
        return slope

    def of_publisher(self, key: str) -> set[str]:
        """Return the tables with the same publisher as a table."""
        return {each for each, publisher in self.publishers.items() if publisher == self.publishers[key]}

    def without(self, left_out: Collection[str]) -> dict[str, float]:
        """Return the constants fitted to all tables except some."""
        mask = np.array([each not in left_out for each in self.keys])
        spread = np.array([row["spread"] for row in self.prior.values()])
        away = np.array([math.log(self.at[name] / row["start"]) for name, row in self.prior.items()])
        rows = np.vstack([self.slopes[mask] * self.weights[mask, None], np.diag(1 / spread)])
        wanted = np.concatenate([-self.deviations[mask] * self.weights[mask], -away / spread])
        moved = np.linalg.lstsq(rows, wanted, rcond=None)[0]
        return {name: self.at[name] * math.exp(by) for name, by in zip(self.prior, moved, strict=True)}


def logarithms(tables: Sequence[Table]) -> np.ndarray[Any, Any]:
    return np.array([math.log1p(row.deviation) for table in tables for row in table.rows])


def quantile(groups: Sequence[Sequence[float]], share: float) -> float:
    """Return the value below which a fraction of all values lies, with equal weight for each group."""
    weighted = sorted((value, 1 / len(group)) for group in groups for value in group)
    wanted, passed = share * sum(weight for _, weight in weighted), 0.0
    for value, weight in weighted:
        passed += weight
        if passed >= wanted:
            return value
    return weighted[-1][0]


def errors(table: Table) -> list[float]:
    return [abs(math.log1p(row.deviation)) for row in table.rows]


def differences(table: Table) -> list[float]:
    """Return errors of the ratio of two rows with the same model and different layouts."""
    pairs = combinations(table.rows, 2)
    return [
        abs(math.log1p(a.deviation) - math.log1p(b.deviation)) for a, b in pairs if layout(a) != layout(b)
    ]


def layout(row: PublishedComparison) -> tuple[object, ...]:
    return tuple(value for name, value in asdict(row.choice).items() if name != "dp")


def run() -> dict[str, Any]:
    """Fit the constants, predict each held-out table, and remove effects one at a time.

    Each table is predicted with the constants fitted without it and without its publisher.
    """
    fit = Fit()
    constants = {key: fit.without({key}) for key in fit.gpus}
    tables = [published.compare(values, [key])[0] for key, values in constants.items()]
    strict = {key: published.compare(fit.without(fit.of_publisher(key)), [key])[0].median for key in fit.gpus}
    widths = {
        table.key: quantile([errors(other) for other in tables if other is not table], COVERED)
        for table in tables
    }
    everything = fit.without(())
    return {
        "constants": {"all": everything, "without": constants},
        "interval": quantile(list(map(errors, tables)), COVERED),
        "alike": quantile([deviations for table in tables if (deviations := differences(table))], COVERED),
        "tables": {
            table.key: _as_data(table, widths[table.key], fit.gpus[table.key], strict[table.key])
            for table in tables
        },
        "effects": effects.measured(everything),
    }


def _as_data(table: Table, width: float, gpu: str, strict: float) -> dict[str, Any]:
    rows = [
        {
            "name": row.name,
            "gpus": row.choice.gpus,
            "measured": row.measured,
            "predicted": row.predicted,
            "deviation": row.deviation,
        }
        for row in table.rows
    ]
    return {
        "title": table.title,
        "gpu": gpu,
        "unit": table.unit,
        "interval": width,
        "median_without_publisher": strict,
        "rows": rows,
    }


def covered(table: Mapping[str, Any]) -> list[bool]:
    """Return whether the measurement of each row lies in the interval of its prediction."""
    return [abs(math.log1p(row["deviation"])) <= table["interval"] for row in table["rows"]]


def summary(tables: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return rows, median and worst deviation, fractions within 8 and 20 %, and within the interval."""
    deviations = [row["deviation"] for table in tables for row in table["rows"]]
    inside = [each for table in tables for each in covered(table)]
    shares = [sum(abs(value) <= limit for value in deviations) / len(deviations) for limit in (0.08, 0.2)] + [
        sum(inside) / len(inside)
    ]
    return (
        str(len(deviations)),
        f"{median(map(abs, deviations)):.1%}",
        f"{max(deviations, key=abs):+.1%}",
        *(f"{share:.0%}" for share in shares),
    )


def totals(tables: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, tuple[str, ...]]]:
    """Return the summary of all tables, and of those for each GPU."""
    of_gpu = {gpu: [table for table in tables.values() if table["gpu"] == gpu] for gpu in ("h100", "a100")}
    return [
        ("all", summary(list(tables.values()))),
        *((gpu.upper(), summary(chosen)) for gpu, chosen in of_gpu.items()),
    ]


def overview(content: Mapping[str, Any]) -> str:
    """Return Markdown with the held-out errors of all tables, for the planner's page."""
    lines = [
        "| published runs on | rows | median error | worst | within 8 % | within 20 % | in the interval |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [f"| {name} | {' | '.join(cells)} |" for name, cells in totals(content["tables"])]
    return "\n".join(lines)


def document(content: Mapping[str, Any]) -> str:
    """Return Markdown with each table's held-out errors, the constants, and the effects."""
    tables, prior = content["tables"], published.read_published()["constants"]
    lines = [
        "| table | rows | median | worst | within 8 % | within 20 % | in the interval | interval | median "
        "without its publisher |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for table in tables.values():
        cells = (
            table["title"],
            *summary([table]),
            f"±{table['interval']:.0%}",
            f"{table['median_without_publisher']:.1%}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    lines += [f"| **{name}** | {' | '.join(cells)} | | |" for name, cells in totals(tables)]
    beyond = [
        f"| {table['title']} | {row['name']} | {row['gpus']} | {row['deviation']:+.1%} |"
        for table in tables.values()
        for row in table["rows"]
        if abs(row["deviation"]) > 0.2
    ]
    lines += [
        "",
        "### Rows beyond 20 %",
        "",
        "| table | row | GPUs | deviation of speed |",
        "|---|---|---|---|",
        *(beyond or ["| none | | | |"]),
    ]
    lines += [
        "",
        "### Fitted constants",
        "",
        "| constant | start | fitted to all | without one table | what it is, and where its start is from |",
        "|---|---|---|---|---|",
    ]
    for name, row in prior.items():
        values = [each[name] for each in content["constants"]["without"].values()]
        moved = f"{min(values):.3g} to {max(values):.3g}"
        lines.append(
            f"| {name} | {row['start']:g} ± {row['spread']:.0%} | {content['constants']['all'][name]:.3g} | "
            f"{moved} | {row['source']} |"
        )
    return "\n".join([*lines, "", "### Effects", "", *effects.table(content["effects"])])


def main() -> None:
    """Write the results, the page, and the planner's errors."""
    from benchmarks import error_kinds  # which imports this module

    content = run()
    RESULTS.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    published.write_between("held_out", document(content))
    published.write_between("held_out", overview(content), PLANNER_PAGE)
    error_kinds.write(content)
    print(
        json.dumps(content["constants"]["all"]),
        f"interval {content['interval']:.3f}, alike {content['alike']:.3f}",
    )


if __name__ == "__main__":
    main()
