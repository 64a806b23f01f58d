"""What an optimizer keeps of each parameter, by name, without torch: offload, planner, memory reports and checkpoints read it here.

A kind of state has the shape of its segment and at least fp32. The master weight is not among them: it belongs to the weights.
"""

from __future__ import annotations

from megalite.parallel.spec import Segment

ADAMW = ("exp_avg", "exp_avg_sq")


def state_kinds(segment: Segment) -> tuple[str, ...]:
    """The kinds of state that the optimizer keeps of a segment; none where it is not trained."""
    return ADAMW if segment.trainable else ()
