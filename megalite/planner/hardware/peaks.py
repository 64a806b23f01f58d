"""Peak FLOP/s of known devices, from peaks.yaml."""

from __future__ import annotations

import functools
import re
from pathlib import Path

PEAKS = Path(__file__).with_name("peaks.yaml")


@functools.cache
def _peaks() -> dict[str, float]:
    import yaml

    found: dict[str, float] = yaml.safe_load(PEAKS.read_text(encoding="utf-8"))
    return found


def peak_flops(device_name: str, precision: str) -> float | None:
    """The device's dense peak in FLOP/s, or None if unknown: CPUs, and precisions other than bf16 and
    fp16."""
    if precision not in ("bf16", "fp16"):
        return None
    words = set(re.split(r"[^A-Z0-9]+", device_name.upper()))
    return next((tera * 1e12 for name, tera in _peaks().items() if words.issuperset(name.split())), None)
