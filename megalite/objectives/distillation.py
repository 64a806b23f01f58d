"""The divergence from a teacher, a mean over tokens (Hinton et al. 2015; Agarwal et al. 2024)."""

from __future__ import annotations

from megalite.objectives.cross_entropy import NextToken


class Distillation(NextToken):
    """loss = Σ (divergence + cross_entropy_weight · −log p(target)) / number of targets.

    Like the cross-entropy it is computed by the head (`megalite.model.objective.distillation`), from the
    logits of two models. Its formulas are in `megalite.parallel.tensor.divergence`.
    """
