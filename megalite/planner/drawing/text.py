"""A timeline in characters, for the terminal."""

from __future__ import annotations

import math

from megalite.parallel.pipeline.simulator import Timeline


def draw(timeline: Timeline, columns: int | None = None) -> str:
    """Draw a timeline as text, one row per rank.

    Dots mark idle time, including waits for weights within an action.

    A bar reads F3 for the forward of microbatch 3, or F2.3 (stage 2) if ranks hold several stages, and ends
    with `|`. The shortest action is as wide as its label, unless the rows would be wider than `columns`: then
    all are scaled down to fit, if possible to whole cells, and a bar that is too short for its label shows
    only its letter.
    """
    bars = [span for spans in timeline.spans for span in spans]
    several = any(len({span.action.stage for span in spans}) > 1 for spans in timeline.spans)
    labels = {
        span.action: repr(span.action) if several else f"{span.action.kind.value}{span.action.microbatch}"
        for span in bars
    }
    shortest = min(span.end - span.start for span in bars if span.end > span.start)
    cell = (1 + max(map(len, labels.values()))) / shortest
    heads = [f"rank {rank}  " for rank in range(len(timeline.spans))]
    if columns is not None and cell * timeline.makespan > columns - len(heads[-1]):
        cell = (columns - len(heads[-1])) / timeline.makespan
        cell = max(1, int(cell * shortest)) / shortest if cell * shortest >= 1 else cell
    rows = []
    for head, spans, stalls in zip(heads, timeline.spans, timeline.stalls or ((),) * len(heads), strict=True):
        row = ""
        for action, start, end in spans:
            row = row.ljust(round(start * cell), ".")
            width = round(end * cell) - len(row)
            label = labels[action] if len(labels[action]) < width else action.kind.value
            row += (label.ljust(width - 1, "-") + "|")[: max(0, width)]
        for first, last in ((math.ceil(start * cell), math.floor(end * cell)) for start, end in stalls):
            row = row[:first] + row[first:last].replace("-", ".") + row[max(first, last) :]
        rows.append(head.ljust(len(heads[-1])) + row.ljust(round(timeline.makespan * cell), "."))
    return "\n".join(rows)
