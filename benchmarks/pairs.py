"""Ratios of runs that alternate: one ratio a round, so that what slows the machine down for a while slows
both sides of a pair."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median, quantiles
from typing import Any

COLUMNS = {"time/megalite's": "ratio:.3f", "quartiles": "ratio_quartiles", "pairs": "pairs"}
# ends the name of a second run of megalite: its ratio to the first one shows what a ratio of 1 looks like
# here
AGAIN = "again"


def compared(own: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The other run's time for a step over the own one's, round by round: the median and the quartiles of the
    ratios.

    Args:
        own, other: one result per round, with the `seconds` of its steps.
    """
    ratios = [
        median(theirs["seconds"]) / median(ours["seconds"]) for ours, theirs in zip(own, other, strict=True)
    ]
    low, _, high = quantiles(ratios, n=4) if len(ratios) > 1 else (ratios[0],) * 3
    return {"ratio": median(ratios), "ratio_quartiles": f"{low:.3f}–{high:.3f}", "pairs": len(ratios)}
