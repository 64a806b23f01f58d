"""Parts of first-light in order. A part may use the time that earlier parts have left."""

from __future__ import annotations

from dataclasses import dataclass

LONG = 3.0  # times the short limits, without --short


@dataclass(frozen=True)
class FirstLightPart:
    """A part that runs in its own process.

    Attributes:
        module: module of benchmarks.first_light with a function `rows` of a Scene.
        short_s: its share of the eight minutes of --short.
        rehearsal_s: its limit in a rehearsal, far above the time it takes.
        proves: whether a part that reaches its limit has failed. Otherwise measurements are missing.
    """

    name: str
    heading: str
    module: str
    short_s: float
    rehearsal_s: float
    proves: bool = False


PARTS = (
    FirstLightPart("machine", "Versions, topology, clocks, known troubles", "machine", 25, 60),
    FirstLightPart("values", "Kernels against float64, tests marked gpu", "values", 100, 120, proves=True),
    FirstLightPart("step", "A training step, and routes of its largest operations", "step", 105, 120),
    FirstLightPart("layouts", "Layouts against one process", "layouts", 100, 180, proves=True),
    FirstLightPart("graphs", "CUDA graphs against the eager step", "graphs", 30, 120, proves=True),
    FirstLightPart("links", "Links and collectives", "exchange", 30, 60),
    FirstLightPart("kernels", "Speed of the kernels", "speeds", 60, 90),
    FirstLightPart("predictions", "Predicted and measured", "predictions", 30, 60),
)
NAMES = tuple(part.name for part in PARTS)


def limit(part: FirstLightPart, *, rehearse: bool, short: bool) -> float:
    """Return the time limit in seconds."""
    return part.rehearsal_s if rehearse else part.short_s * (1.0 if short else LONG)
