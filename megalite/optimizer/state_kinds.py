"""The kinds of optimizer state of each parameter, by name: read by offload, planner, memory reports and checkpoints. Imports no torch.

Each kind has the shape of its segment, in at least fp32. The master weight is not one of them: the store holds it.
"""

from __future__ import annotations

from megalite.parallel.spec import Segment

ADAMW = ("exp_avg", "exp_avg_sq")


def state_kinds(segment: Segment) -> tuple[str, ...]:
    """The kinds of optimizer state of a segment; empty where it is frozen."""
    return ADAMW if segment.trainable else ()
