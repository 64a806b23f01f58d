"""Distillation on the pool's ranks: the divergence of a split vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.evaluation import stored_passes
from megalite.evaluation.stored_passes import RowOptions, pass_config
from megalite.evaluation.teacher_words import WordScorer, open_words
from megalite.generation.sources import for_inference, open_source
from megalite.parallel.tensor.cross_entropy import CrossEntropy
from megalite.parallel.tensor.divergence import TeacherDivergence, TokenDivergence, TopWordsDivergence
from tests.support.jobs import mesh_of
from tests.support.jobs_parts import plain_mesh


def divergence(
    context: Any,
    student: Tensor,
    teacher: Tensor,
    targets: Tensor,
    weights: Tensor | None,
    padded: int,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """The loss, and this rank's part of its gradient by the student's logits. Logits [tokens, vocabulary] are whole;
    padded columns get large values."""
    mesh = plain_mesh(context, tp=context.world)
    parts = [
        F.pad(logits, (0, padded - logits.shape[1]), value=value).chunk(context.world, dim=1)[context.rank].clone()
        for logits, value in ((student, 50.0), (teacher, 70.0))
    ]
    own = parts[0].requires_grad_()
    entropy, options = CrossEntropy(mesh.tp, student.shape[1], 0.1, 1e-3), dict(options)
    known: Sequence[Tensor] = (parts[1],)
    loss: TokenDivergence
    if (number := options.pop("top", None)) is None:
        loss = TeacherDivergence(cross_entropy=entropy, **options)
    else:
        log_p = (teacher / options["temperature"]).log_softmax(1)
        values, words = log_p.topk(number)
        rest = log_p.exp().scatter(1, words, 0.0).sum(1)
        loss, known = TopWordsDivergence(cross_entropy=entropy, **options), (words, values, rest)
    value = loss(own * 1.0, known, targets, 0.125, weights)
    value.backward()
    assert own.grad is not None
    return value.detach(), own.grad


def score_words(
    context: Any,
    model: str,
    prefix: str,
    output: str,
    layout: dict[str, int],
    number: int,
    temperature: float,
    length: int,
    batches: int | None = None,
) -> None:
    """Store the top words of a Hugging Face model in fp64, of all rows or of those of some batches."""
    source = open_source(f"hf:{model}")
    axes = {axis: size for axis, size in layout.items() if axis != "dp"}
    config = for_inference(source.config, **axes, precision="fp64")  # type: ignore[arg-type]
    config = pass_config(config, prefix, RowOptions(layout.get("dp", 1), 2, length, held_out=0.3))
    store = open_words(Path(output), source.name, number, temperature, config.model.vocabulary, "fp64")
    mesh = mesh_of(context, config)
    scorer = WordScorer(config, source, mesh, torch.device("cpu"), number, temperature)
    if batches is not None:
        batch, left = scorer._batch, iter(range(batches))

        def interrupted(*arguments: Any) -> Any:
            if next(left, None) is None:
                raise KeyboardInterrupt
            return batch(*arguments)

        scorer._batch = interrupted  # type: ignore[method-assign]
    with patch.object(stored_passes, "SAVE_S", 0.0), suppress(KeyboardInterrupt):
        scorer.run(config, store, lambda *_, **__: None)
