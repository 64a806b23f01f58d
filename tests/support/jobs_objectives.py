"""Training on preferences, on the pool's ranks."""

from __future__ import annotations

from typing import Any

from megalite.training.verify import global_tensors
from tests.support.jobs import make_trainer, numbers


def train_and_validate(context: Any, config: dict[str, Any], steps: int) -> dict[str, Any]:
    """Train some steps: losses, gradient norms, metrics, the validation loss, and the global weights on rank 0."""
    trainer = make_trainer(context, config)
    try:
        results = [result for step in range(steps) for result in trainer.train_step(wait=step == steps - 1)]
        report = numbers(results) | {"metrics": [result.of_model for result in results]}
        return {**report, "validation": trainer.evaluate(), "tensors": global_tensors(trainer)}
    finally:
        trainer.close()
