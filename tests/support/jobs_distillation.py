"""Distillation on the pool's ranks: the divergence of a split vocabulary."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from megalite.parallel.tensor.cross_entropy import CrossEntropy
from megalite.parallel.tensor.divergence import TeacherDivergence
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
    loss = TeacherDivergence(CrossEntropy(mesh.tp, student.shape[1], 0.1, 1e-3), **options)
    value = loss(own * 1.0, parts[1], targets, 0.125, weights)
    value.backward()
    assert own.grad is not None
    return value.detach(), own.grad
