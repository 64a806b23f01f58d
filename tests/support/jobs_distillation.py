"""Distillation on the pool's ranks: the divergence of a split vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from megalite.parallel.tensor.cross_entropy import CrossEntropy
from megalite.parallel.tensor.divergence import Divergence, TeacherDivergence, TopWordsDivergence
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
    loss: Divergence
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
