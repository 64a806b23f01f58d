"""Saving on four ranks, synchronously and in the background, compared with torch.save.

torch.save writes the same bytes from the same processes to the same disk. The state is that of a model with
500 million parameters in fp32 and the two moments of AdamW, 6 GB in total, a quarter on each rank. The three
methods alternate, and all of them fsync every file.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import report

RANKS = 4
MATRICES, SHAPE = 30, (4096, 4096)  # 503 million elements
COLUMNS = {
    "way": "way",
    "held, s": "held_s:.2f",
    "on disk after, s": "durable_s:.2f",
    "GB/s": "gb_per_second:.2f",
    "extra memory of a rank, MiB": "extra_mib:,.0f",
}


def compare(*, rounds: int, threads: int, smoke: bool, progress: Callable[[str], None]) -> dict[str, Any]:
    """Run all measurements, and return the figures with their conditions."""
    matrices, shape, ranks = (2, (64, 64), 2) if smoke else (MATRICES, SHAPE, RANKS)
    elements = matrices * shape[0] * shape[1]
    progress(f"{rounds} rounds of three saves of {3 * 4 * elements / 1e9:.2f} GB")
    # on a disk: /tmp may be in memory
    with TemporaryDirectory(prefix="megalite_benchmark_", dir=Path.cwd()) as directory:
        spec = {"directory": directory, "matrices": matrices, "shape": shape, "rounds": rounds}
        seconds = report.launch("benchmarks.checkpoint_run", spec, ranks=ranks, threads=1)
    rows = [_row(way, each, seconds["bytes"]) for way, each in seconds["ways"].items()]
    return {
        "threads": 1,
        "ranks": ranks,
        "config": {
            "parameters": elements,
            "bytes": seconds["bytes"],
            "dtype": "fp32",
            "tensors": "weights and two moments",
        },
        "protocol": {"rounds": rounds, "fsync": True},
        "results": rows,
        "targets": targets(rows),
    }


def _row(way: str, rounds: list[dict[str, float]], size: int) -> dict[str, Any]:
    durable = median(each["durable_s"] for each in rounds)
    return {
        "way": way,
        "held_s": median(each["held_s"] for each in rounds),
        "durable_s": durable,
        "gb_per_second": size / 1e9 / durable,
        "extra_mib": max(each["extra_bytes"] for each in rounds) / 2**20,
        "rounds": rounds,
    }


def targets(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the targets: nearly the speed of torch.save, and a short stall when saving in the background.

    torch.save writes no checksums or manifest.
    """
    peer, at_once, background = rows
    speed = at_once["gb_per_second"] / peer["gb_per_second"]
    share = background["held_s"] / at_once["held_s"]
    return [
        {
            "target": "throughput, at once / torch.save",
            "measured": speed,
            "wanted": "≥ 0.8",
            "met": speed >= 0.8,
        },
        {
            "target": "held, in the background / at once",
            "measured": share,
            "wanted": "≤ 0.15",
            "met": share <= 0.15,
        },
    ]
