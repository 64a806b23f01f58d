"""LoRA runs on the pool's ranks."""

from __future__ import annotations

from typing import Any

from megalite.config.load import from_dict
from megalite.training.memory_report import ModelStates, formula, measured
from megalite.training.trainer import Trainer
from megalite.training.verify import global_tensors
from tests.support.jobs import mesh_of


def train(context: Any, config: dict[str, Any], steps: int) -> dict[str, Any]:
    """Train some steps; every rank returns losses and gradient norms, rank 0 also the whole global weights before and
    after."""
    made = from_dict(config)
    trainer = Trainer(made, mesh_of(context, made))
    try:
        before = global_tensors(trainer)
        results = [trainer.step() for _ in range(steps)]
        found = {"losses": [result.loss for result in results], "grad_norms": [result.grad_norm for result in results]}
        return found | {"before": before, "tensors": global_tensors(trainer)}
    finally:
        trainer.close()


def states(context: Any, config: dict[str, Any]) -> tuple[ModelStates, ModelStates]:
    """What a rank's states take after a step, and what they should."""
    made = from_dict(config)
    trainer = Trainer(made, mesh_of(context, made))
    try:
        trainer.step()
        trainer.store.gatherer.finish()
        trainer.store.gatherer.gather_updated()
        return measured(trainer), formula(trainer)
    finally:
        trainer.close()
