"""Where a training step's time goes on a CPU: the columns of the tables. `breakdown_run` measures them, and
says what they mean."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

COLUMNS = {
    "products": "products_ms:,.1f",
    "bytes": "bytes_ms:,.1f",
    "waiting": "waiting_ms:,.1f",
    "sockets": "sockets_ms:,.1f",
    "calls": "calls_ms:,.1f",
    "rest": "rest_ms:,.1f",
    "floor/step": "floor_share:.0%",
}


def medians(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """The median of each part over several runs."""
    return {name: median(each[name] for each in parts) for name in parts[0]}
