"""Training on preferences, on the pool's ranks."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from megalite.evaluation import stored_passes
from megalite.evaluation.preference_scores import Scorer, open_scores
from megalite.evaluation.stored_passes import RowOptions, pass_config
from megalite.generation.sources import for_inference, open_source
from megalite.launch.environment import facts
from megalite.monitoring.observers import observers
from megalite.training.fit import measured
from megalite.training.validation import losses
from megalite.training.verify import global_tensors
from tests.support.jobs import make_trainer, mesh_of, numbers


def train_and_validate(context: Any, config: dict[str, Any], steps: int) -> dict[str, Any]:
    """Train some steps: losses, gradient norms, metrics, those of a validation, and the global weights on rank 0."""
    trainer = make_trainer(context, config)
    try:
        results = [result for step in range(steps) for result in trainer.train_step(wait=step == steps - 1)]
        report = numbers(results) | {"metrics": [result.of_model for result in results]}
        held_out = losses(trainer)
        report |= {"validation": held_out.mean, "held_out": held_out.metrics}
        return {**report, "tensors": global_tensors(trainer)}
    finally:
        trainer.close()


def score_preferences(
    context: Any, model: str, prefix: str, output: str, layout: dict[str, int], killed_after: int | None = None
) -> None:
    """Score a token file in fp64 with a Hugging Face model. SIGKILL ends it after some batches, in the next one."""
    source = open_source(f"hf:{model}")
    axes = {axis: size for axis, size in layout.items() if axis != "dp"}
    config = for_inference(source.config, **axes, precision="fp64")
    config = pass_config(config, prefix, RowOptions(layout.get("dp", 1), 1, 19, packing=True))
    scores = open_scores(Path(output), source.name, "fp64")
    scorer = Scorer(config, source, mesh_of(context, config), torch.device("cpu"))
    batch, left = scorer._batch, iter(range(killed_after or 0))

    def killed(*arguments: Any) -> Any:
        if killed_after is not None and next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return batch(*arguments)

    with patch.object(stored_passes, "SAVE_S", 0.0), patch.object(scorer, "_batch", killed):
        scorer.run(config, scores, lambda *_, **__: None)


def observe(context: Any, config: dict[str, Any], steps: int) -> dict[str, Any]:
    """Call the observers of the user around some steps; rank 0 asks for their numbers and lines."""
    trainer = make_trainer(context, config)
    try:
        chosen = observers(trainer, facts(trainer.device, 1))
        own = [each for each in chosen if type(each).__module__.startswith("megalite extension")]
        numbers, lines = list[int](), list[str]()
        for step in range(1, steps + 1):
            for each in own:
                each.before(step)
            result = trainer.step()
            for each in own:
                each.after(step)
            for each in own if trainer.mesh.rank == 0 else ():
                metrics = measured(trainer, result)
                numbers.append(each.numbers(metrics)["tokens_so_far"])
                lines += each.lines(metrics)
        return {"tokens_so_far": numbers, "lines": lines}
    finally:
        trainer.close()
