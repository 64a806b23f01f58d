"""Starts of an elastic run: the number of ranks, where the state came from, and how long the change took."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from megalite.config.elastic import describe as describe_layout
from megalite.launch.slots import LOST_AT

if TYPE_CHECKING:
    from megalite.training.trainer import Trainer


def change_of(trainer: Trainer) -> dict[str, Any]:
    """Return what starts.jsonl says of a start of an elastic run; empty for another run.

    Keys: `ranks`, `layout`, `state` ("memory", "checkpoint", or None at step 0), and after a change of the
    number of ranks `seconds`: from the moment at which the launcher noticed the loss, or asked the ranks
    to stop for a return, until now.
    """
    if trainer.config.parallel.min_ranks is None:
        return {}
    change = {
        "ranks": trainer.mesh.world.size,
        "layout": describe_layout(trainer.config.parallel),
        "state": origin(trainer),
    }
    if lost_at := os.environ.get(LOST_AT):
        change["seconds"] = round(time.time() - float(lost_at), 2)
    return change


def describe_change(trainer: Trainer) -> list[str]:
    """Return a line about a change of the number of ranks; no line if there was none."""
    change = change_of(trainer)
    if "seconds" not in change:
        return []
    ranks = f"{change['ranks']} rank{'s' * (change['ranks'] > 1)}"
    return [
        f"going on after step {trainer.step_done} with {ranks} ({change['layout']}), state "
        f"from {change['state'] or 'the start'}, {change['seconds']:.1f} s after the change was noticed"
    ]


def origin(trainer: Trainer) -> str | None:
    """Return from where the run has resumed, before its first step; None if it starts at step 0."""
    if trainer.copies is not None and trainer.copies.resumed is not None:
        return "memory"
    return "checkpoint" if trainer.step_done else None
