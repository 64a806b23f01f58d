"""Load balance of context-parallel ranks on packed rows: `python -m benchmarks.context_parts`.

Nothing is timed: rows of random documents are cut, and tiles of attention are counted. Writes
results/context-parts.json, and a table into docs/context-parallel.md. The planner's assumption about
documents is based on these results (`megalite.planner.cost.context_exchange`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks import report
from megalite.parallel.context.balanced import Counts, balanced, between_ranks, imbalance
from megalite.parallel.context.parts import PositionSegment, PositionSegments, zigzag

RESULT = report.RESULTS / "context-parts.json"
DOCUMENT = report.ROOT / "docs" / "context-parallel.md"
BEGIN, END = "<!-- written by python -m benchmarks.context_parts -->\n", "<!-- end of what was counted -->"
LENGTH, RANKS, ROWS = 8192, 8, 400
DOCUMENTS = {"median 256": (256, 1.5), "median 1,024": (1024, 1.2), "median 4,096": (4096, 1.0)}
"""Median and spread (standard deviation of the logarithm) of log-normal document lengths, in tokens."""
METHODS = ("gather", "ring")


def row(random: np.random.Generator, median: float, spread: float, length: int = LENGTH) -> Counts:
    """Return the start of each position's document, [length, 1], in a row of random documents.

    The first and the last document may be truncated.
    """
    starts = np.zeros(length, np.int64)
    position = -int(random.integers(0, int(median)))
    while position < length:
        starts[max(position, 0) :] = max(position, 0)
        position += max(1, int(random.lognormal(np.log(median), spread)))
    return starts[:, None]


def zigzag_of_each_document(starts: Counts, ranks: int) -> list[PositionSegments]:
    """Return zigzag parts of each document, as used by other projects.

    If lengths are not divisible, ranks have different numbers of positions.
    """
    firsts = [*np.unique(starts).tolist(), len(starts)]
    held: list[list[PositionSegment]] = [[] for _ in range(ranks)]
    for first, stop in zip(firsts, firsts[1:], strict=False):
        cuts = [first + (stop - first) * part // (2 * ranks) for part in range(2 * ranks + 1)]
        for part, (begin, end) in enumerate(zip(cuts, cuts[1:], strict=False)):
            if begin < end:
                held[min(part, 2 * ranks - 1 - part)].append(PositionSegment(begin, end - begin))
    return [tuple(segments) for segments in held]


PARTS: dict[str, Callable[[Counts, int, str], Sequence[PositionSegments]]] = {
    "zigzag": lambda starts, ranks, _: zigzag(len(starts), ranks),
    "zigzag of each document": lambda starts, ranks, _: zigzag_of_each_document(starts, ranks),
    "balanced": lambda starts, ranks, method: balanced(starts, ranks, method=method),
}


def measure(rows: int = ROWS) -> dict[str, Any]:
    """Measure the rows of each distribution.

    The results are the mean and maximum imbalance of each method with each kind of parts, and the tiles that
    all ranks visit, relative to zigzag.
    """
    results = []
    for name, (median, spread) in DOCUMENTS.items():
        random = np.random.default_rng(0)
        drawn = [row(random, median, spread) for _ in range(rows)]
        fewest = sum(int(between_ranks(zigzag(LENGTH, RANKS), starts).sum()) for starts in drawn)
        for parts, cut in PARTS.items():
            summary: dict[str, Any] = {"documents": name, "median": median, "spread": spread, "parts": parts}
            for method in METHODS:
                tiles = [between_ranks(cut(starts, RANKS, method), starts) for starts in drawn]
                values = [imbalance([each], method) for each in tiles]
                summary[method] = {"mean": round(float(np.mean(values)), 3), "worst": round(max(values), 3)}
            results.append(summary | {"tiles": round(sum(int(each.sum()) for each in tiles) / fewest, 3)})
    return {"length": LENGTH, "ranks": RANKS, "rows": rows, "results": results}


def section(content: dict[str, Any]) -> str:
    """Return the text between the markers."""
    lines = [
        f"{content['rows']} rows of {content['length']:,} tokens on {content['ranks']} ranks for each "
        "distribution of log-normal document",
        "lengths: imbalance, mean and worst row, and tiles of all ranks relative to zigzag.",
        "",
        "| documents | parts | gather | ring | tiles |",
        "|---|---|---|---|---|",
    ]
    for row in content["results"]:
        cells = [f"{row[method]['mean']:.2f}, {row[method]['worst']:.2f}" for method in METHODS]
        documents = f"{row['documents']}, spread {row['spread']}"
        lines.append(f"| {documents} | {row['parts']} | {' | '.join(cells)} | {row['tiles']:.2f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    content = measure()
    RESULT.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    before, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)
    DOCUMENT.write_text(before + BEGIN + section(content) + END + rest.partition(END)[2], encoding="utf-8")
    print(section(content), end="")


if __name__ == "__main__":
    main()
