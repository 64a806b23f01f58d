"""Execution of the parts of first-light, each in a process with a time limit.

The results are written after every row. Rows that a part has printed before an error, a crash or its limit
are kept, and the next part runs.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.first_light.parts import PARTS, FirstLightPart, limit
from benchmarks.first_light.rows import Row, row
from megalite.commands.parser import write_whole

MARGIN_S = 5.0  # after its limit, for a part to end by itself


@dataclass(frozen=True)
class Order:
    """Options of an invocation.

    Attributes:
        parts: names, see parts.py; other parts in an existing file are kept.
        gpus: names of the visible GPUs; without any it is a rehearsal.
    """

    parts: Sequence[str]
    output: Path
    gpus: Sequence[str]
    short: bool = False
    calibrate: Path | None = None

    @property
    def rehearse(self) -> bool:
        return not self.gpus


def default_output(gpus: Sequence[str]) -> Path:
    """Return the path of the results. Those of a rehearsal are not results of this machine."""
    return (
        report.RESULTS / f"first-light-{report.slug(gpus[0])}.json"
        if gpus
        else report.ROOT / "runs" / "first-light-rehearsal.json"
    )


def run(order: Order, progress: Callable[[str], None]) -> dict[str, Any]:
    """Run the parts, and return the final content of the file."""
    content = _beginning(order)
    ends = time.monotonic()
    for part in PARTS:
        if part.name in order.parts:
            ends += limit(part, rehearse=order.rehearse, short=order.short)
            _run_part(part, order, ends - time.monotonic(), content, progress)
    content["verdict"] = verdict(content)
    write(order.output, content)
    return content


def _beginning(order: Order) -> dict[str, Any]:
    """Return the content of the file before the first part."""
    kept: dict[str, Any] = {}
    if order.output.exists():
        content = json.loads(order.output.read_text(encoding="utf-8"))
        kept = {name: part for name, part in content.get("parts", {}).items() if name not in order.parts}
    return {
        "benchmark": "first-light",
        "device": {"name": order.gpus[0] if order.gpus else None, "count": len(order.gpus)},
        "rehearsal": order.rehearse,
        "short": order.short,
        "machine": report.machine(),
        "versions": report.versions() | {name: report.version(name) for name in ("triton",)},
        "parts": kept,
    }


def _run_part(
    part: FirstLightPart,
    order: Order,
    seconds: float,
    content: dict[str, Any],
    progress: Callable[[str], None],
) -> None:
    progress(f"{part.heading}, up to {seconds:.0f} s")
    rows: list[Row] = []
    started = time.monotonic()
    earlier = {name: each["rows"] for name, each in content["parts"].items() if name != part.name}
    mine = content["parts"][part.name] = {
        "heading": part.heading,
        "limit_s": seconds,
        "commit": report.commit(),
        "rows": rows,
    }
    content["parts"] = {
        each.name: content["parts"][each.name] for each in PARTS if each.name in content["parts"]
    }

    def hear(row: Row) -> None:
        rows.append(row)
        mine["seconds"] = time.monotonic() - started
        write(order.output, content)
        progress(f"  {row['verdict']:8}  {row['name']}  {row['detail']}".rstrip())

    spec = {
        "part": part.name,
        "gpus": list(order.gpus),
        "rehearse": order.rehearse,
        "short": order.short,
        "seconds": seconds,
    }
    spec |= {"earlier": earlier, "calibrate": str(order.calibrate) if order.calibrate else None}
    environment = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} if order.rehearse else {}
    problem = report.stream(
        "benchmarks.first_light.part", spec, hear, environment=environment, limit_s=seconds + MARGIN_S
    )
    if problem is not None:
        hear(row(part.name, "failed" if part.proves else "missing", f"the part {problem}"))
    mine["seconds"] = time.monotonic() - started
    write(order.output, content)


def write(path: Path, content: dict[str, Any]) -> None:
    """Write the whole file atomically.

    An interrupted run leaves the previous or the current content.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(content, indent=1) + "\n")


def verdict(content: dict[str, Any]) -> dict[str, Any]:
    """Return the combined verdict of the rows of all parts."""
    rows = [{**row, "part": name} for name, part in content["parts"].items() for row in part["rows"]]
    counts = Counter(row["verdict"] for row in rows)

    def named(wanted: str) -> list[str]:
        return [f"{row['part']}: {row['name']}" for row in rows if row["verdict"] == wanted]

    return {
        "proved": counts["passed"] > 0 and not counts["failed"],
        "counts": dict(counts),
        "failed": named("failed"),
        "missing": named("missing"),
        "absent": named("absent"),
        "not_run": [part.name for part in PARTS if part.name not in content["parts"]],
    }
