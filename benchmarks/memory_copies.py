"""Copies of the state in memory on four ranks, beside checkpoints on a disk: to make one, and to restore it.

The state is that of a model with 34 million parameters in fp32 and the two moments of AdamW, 0.4 GB in
total, a quarter on each rank. The ranks are one node, or two of two ranks on this machine, so that what
nodes exchange passes through its loopback interface. A restored checkpoint is read from the disk, whose
cached pages are dropped before, and from the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import report

RANKS = 4
MATRICES, SHAPE = 8, (4096, 1024)  # 34 million elements
COLUMNS = {
    "action": "action",
    "way": "way",
    "training waits, s": "held_s:.3f",
    "complete after, s": "complete_s:.3f",
    "GB/s": "gb_per_second:.2f",
}


def compare(*, rounds: int, threads: int, smoke: bool, progress: Callable[[str], None]) -> dict[str, Any]:
    """Run all measurements, and return the figures with their conditions."""
    matrices, shape, ranks = (2, (64, 64), 4) if smoke else (MATRICES, SHAPE, RANKS)
    elements = matrices * shape[0] * shape[1]
    progress(f"{rounds} rounds of copies and loads of {3 * 4 * elements / 1e9:.2f} GB")
    with (
        TemporaryDirectory(prefix="megalite_benchmark_", dir=Path.cwd()) as disk,
        TemporaryDirectory(prefix="megalite_benchmark_", dir="/dev/shm") as memory,
    ):
        spec = {"disk": disk, "memory": memory, "matrices": matrices, "shape": shape, "rounds": rounds}
        measured = report.launch("benchmarks.memory_copies_run", spec, ranks=ranks, threads=1)
    rows = [_row(action, way, each, measured["bytes"]) for action, way, each in measured["ways"]]
    return {
        "threads": 1,
        "ranks": ranks,
        "config": {
            "parameters": elements,
            "bytes": measured["bytes"],
            "dtype": "fp32",
            "tensors": "weights and two moments",
        },
        "protocol": {"rounds": rounds, "dropped": measured["dropped"]},
        "results": rows,
        "targets": targets(rows),
    }


def _row(action: str, way: str, rounds: list[dict[str, float]], size: int) -> dict[str, Any]:
    complete = median(each["complete_s"] for each in rounds)
    return {
        "action": action,
        "way": way,
        "held_s": median(each["held_s"] for each in rounds),
        "complete_s": complete,
        "gb_per_second": size / 1e9 / complete,
        "rounds": rounds,
    }


def targets(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the target: a copy in the background holds up training for a small part of its time."""
    held = {row["way"]: row["held_s"] for row in rows if row["action"] == "copy"}
    share = held["one node, in the background"] / held["one node, at once"]
    return [
        {
            "target": "held, in the background / at once",
            "measured": share,
            "wanted": "≤ 0.15",
            "met": share <= 0.15,
        }
    ]
