"""What the test ranks run for the tests of tools."""

from __future__ import annotations

from typing import Any

from megalite.config.load import from_dict
from megalite.training.trainer import Trainer
from tests.distributed.jobs import mesh_of


def train_and_save(context: Any, config: dict[str, Any]) -> tuple[str, float]:
    """Train all steps and save; returns the checkpoint's directory and the last loss."""
    made = from_dict(config)
    trainer = Trainer(made, mesh_of(context, made))
    try:
        losses = [trainer.step().loss for _ in range(made.train.steps)]
        return str(trainer.save()), losses[-1]
    finally:
        trainer.close()
