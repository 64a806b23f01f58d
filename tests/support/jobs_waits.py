"""Steps under a device's rules on the pool's ranks."""

from __future__ import annotations

from typing import Any

from megalite.config.load import from_dict
from megalite.training.trainer import Trainer
from tests.support.device_rules import DEVICE, watched
from tests.support.jobs import mesh_of


def waits(context: Any, config: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The faults of a step, and what was queued while the host waited for an event."""
    made = from_dict(config)
    rules = watched(Trainer(made, mesh_of(context, made), DEVICE))
    return rules.faults, rules.waits
