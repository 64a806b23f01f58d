"""The loss of the last stage under a teacher, a second model on the same mesh.

The teacher's forward keeps, for each microbatch, the normed output of its last layer on the ranks of its last
stage, which is also the last one of the model that is trained. Its logits are computed with the loss, for the
same chunk of tokens as those of the model: the logits of only one chunk exist at a time. Communication: that
of both heads, and of `TeacherDivergence`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megalite.config.sections.distillation import DistillationConfig
from megalite.model.forward_state import ForwardState
from megalite.model.objective.losses import HeadLosses
from megalite.parallel.microbatch import Microbatch
from megalite.parallel.tensor.divergence import TeacherDivergence, TopWordsDivergence
from megalite.parallel.top_words import TopWords

if TYPE_CHECKING:
    from megalite.model.stage import Head


class TeacherStates(HeadLosses):
    """What the last stage of a teacher does in place of a loss: it keeps its states in the microbatch."""

    def __init__(self, head: Head):
        self.head = head

    def losses(self, x: Tensor, microbatch: Microbatch, state: ForwardState) -> tuple[Tensor, Tensor]:
        """Set `microbatch.teacher`. Return zeros, [] each.

        Args:
            x: the output of the last layer, [seq (/tp), batch, hidden].
        """
        microbatch.teacher = self.head.norm(x)
        return x.new_zeros(()), x.new_zeros(())


class DistillationLosses(HeadLosses):
    """Losses of the last stage, given the teacher's states.

    Args:
        head: of the model that is trained.
        teacher: the head of the teacher, whose weights are available.
    """

    def __init__(self, head: Head, teacher: Head, options: DistillationConfig):
        self.head, self.teacher, self.options = head, teacher, options

    def losses(self, x: Tensor, microbatch: Microbatch, state: ForwardState) -> tuple[Tensor, Tensor]:
        """Return the scaled loss, and the total of all losses, which are the same here.

        Args:
            x: the output of the last layer, [seq (/tp), batch, hidden].
        """
        head, options = self.head, self.options
        divergence = TeacherDivergence(
            cross_entropy=head.loss,
            temperature=options.temperature,
            cross_entropy_weight=options.cross_entropy_weight,
            kind=options.divergence,
            beta=options.beta,
        )
        assert microbatch.teacher is not None, "the teacher's forward is before that of the model"
        targets, of_chunk = microbatch.targets, _OfChunk(microbatch, self.teacher, divergence)
        loss = head.loss_of(head.norm(x), targets, state.loss_scale, of_chunk, microbatch.weights)
        return loss, loss


class StoredLosses(HeadLosses):
    """Losses of the last stage, given the most probable words of a teacher (`Microbatch.top`).

    Args:
        head: of the model that is trained.
    """

    def __init__(self, head: Head, options: DistillationConfig):
        self.head, self.options = head, options

    def losses(self, x: Tensor, microbatch: Microbatch, state: ForwardState) -> tuple[Tensor, Tensor]:
        head, options = self.head, self.options
        divergence = TopWordsDivergence(
            cross_entropy=head.loss,
            temperature=options.temperature,
            cross_entropy_weight=options.cross_entropy_weight,
        )
        assert microbatch.top is not None, "the rows have the teacher's words"
        of_chunk = _OfTopWords(microbatch.top, len(x), divergence)
        loss = head.loss_of(head.norm(x), microbatch.targets, state.loss_scale, of_chunk, microbatch.weights)
        return loss, loss


class _OfTopWords:
    """The loss of a chunk of tokens, called for the chunks of a microbatch in order.

    Args:
        length: number of positions of this rank. Under sequence parallelism a chunk has the same of them of
            every tp rank's part.
    """

    def __init__(self, top: TopWords, length: int, divergence: TopWordsDivergence):
        self.by_rank = [each.unflatten(0, (-1, length)) for each in top]  # [ranks, length, batch, …]
        self.divergence, self.start = divergence, 0

    def __call__(
        self, logits: Tensor, targets: Tensor, scale: float | Tensor, weights: Tensor | None
    ) -> Tensor:
        ranks, _, batch = self.by_rank[0].shape[:3]
        end = self.start + len(logits) // (ranks * batch)
        known = [each[:, self.start : end].flatten(0, 2) for each in self.by_rank]
        self.start = end
        return self.divergence(logits, known, targets, scale, weights)


class _OfChunk:
    """The loss of a chunk of tokens, called for the chunks of a microbatch in order."""

    def __init__(self, microbatch: Microbatch, teacher: Head, divergence: TeacherDivergence):
        assert microbatch.teacher is not None
        self.states, self.tokens = microbatch.teacher, microbatch.targets.numel()
        self.teacher, self.divergence = teacher, divergence
        self.start = 0  # position of the chunk on this rank

    def __call__(
        self, logits: Tensor, targets: Tensor, scale: float | Tensor, weights: Tensor | None
    ) -> Tensor:
        end = self.start + len(logits) * len(self.states) // self.tokens
        with torch.no_grad():
            teacher = self.teacher.logits_of(self.states[self.start : end]).flatten(0, 1)
        self.start = end
        return self.divergence(logits, (teacher,), targets, scale, weights)
