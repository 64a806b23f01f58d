"""What the test ranks run for the tests of tools."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from benchmarks.scaling_run import measure
from megalite.config.load import from_dict
from megalite.generation.language_model import LanguageModel, Sampling
from megalite.generation.sources import for_inference, open_source
from megalite.training.trainer import Trainer
from tests.support.jobs import mesh_of


def train_and_save(context: Any, config: dict[str, Any]) -> tuple[str, float]:
    """Train all steps and save; returns the checkpoint's directory and the last loss."""
    run_config = from_dict(config)
    trainer = Trainer(run_config, mesh_of(context, run_config))
    try:
        losses = [trainer.step().loss for _ in range(run_config.train.steps)]
        return str(trainer.save()), losses[-1]
    finally:
        trainer.close()


def step_from_hf(context: Any, config: dict[str, Any]) -> str:
    """Start from a Hugging Face directory, train one step and save; returns the checkpoint's directory."""
    run_config = from_dict(config)
    trainer = Trainer(run_config, mesh_of(context, run_config))
    try:
        trainer.step()
        return str(trainer.save())
    finally:
        trainer.close()


def continued(
    context: Any,
    sources: list[str],
    layout: dict[str, int],
    rows: list[list[int]],
    count: int,
    chunk: int | None = None,
    precision: str = "fp32",
) -> list[dict[str, Any]]:
    """What each model, spread over the layout, makes of the rows: greedy and drawn tokens, the logits after each row
    (None but on the last stage), and how likely it finds each row's tokens. After the greedy tokens it reads prompts in
    chunks."""
    results = []
    for name in sources:
        config = for_inference(open_source(name).config, **layout)
        model = LanguageModel(name, **layout, precision=precision, mesh=mesh_of(context, config))
        places = [(position, row) for row, tokens in enumerate(rows) for position in range(len(tokens) - 1)]
        targets = [token for tokens in rows for token in tokens[1:]]
        greedy = list(model.continuations(rows, count, Sampling(0.0)))
        model.prefill_chunk_size = chunk
        results.append(
            {
                "greedy": greedy,
                "read": model.read(model.new_cache(len(rows), max(map(len, rows))), rows),
                "drawn": list(model.continuations(rows, count, Sampling(1.0, top_k=40, top_p=0.9, seed=5))),
                "likely": model.log_probabilities(rows, places, targets),
                "answer": model.log_probabilities(rows[:1], places[:1], targets[:1])[0].item(),
            }
        )
    return results


class StepAndTokens(NamedTuple):
    checkpoint: str
    loss: float
    tokens: list[list[int]]


def step_and_tokens(
    context: Any, config: dict[str, Any], layout: dict[str, int], rows: list[list[int]], count: int
) -> StepAndTokens:
    """Start from a Hugging Face directory: each row's greedy tokens, and then one training step, which is saved."""
    source = config["model"]["init_from"]
    model = LanguageModel(source, **layout, mesh=mesh_of(context, for_inference(open_source(source).config, **layout)))
    tokens = list(model.continuations(rows, count, Sampling(0.0)))
    run_config = from_dict(config)
    trainer = Trainer(run_config, mesh_of(context, run_config))
    try:
        loss = trainer.step().loss
        return StepAndTokens(str(trainer.save()), loss, [list(row) for row in zip(*tokens, strict=True)])
    finally:
        trainer.close()


def measure_steps(context: Any, spec: dict[str, Any]) -> list[list[float]]:
    """What a world of the scaling benchmark measures."""
    return measure(spec, torch.device("cpu"))
