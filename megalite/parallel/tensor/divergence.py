"""TokenDivergence of a student's distribution from a teacher's, with logits split over the vocabulary.

With p of the teacher and q of the student, both softmax(z / τ) over the vocabulary without padding, and
m = β p + (1 − β) q, the divergence of a token and its derivative by the student's logits z are

    forward    KL(p‖q)                        (q − p) / τ
    reverse    KL(q‖p)                        q (log q − log p − KL(q‖p)) / τ
    jsd        β KL(p‖m) + (1 − β) KL(q‖m)    (1 − β) q (log q − log m − KL(q‖m)) / τ

Forward: one all-gather over tp of five numbers per token: the largest logit and the sum of exponentials of
both models, and D = Σ exp(z_a − max)(z_a − z_b), from which KL(a‖b) = D / Σexp − lse_a + lse_b. For jsd it is
an all-gather of the first four, and an all-reduce of two, KL(p‖m) and KL(q‖m). Backward: no communication;
the gradient overwrites the student's logits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from megalite_kernels.cross_entropy import gradient_
from torch import Tensor

from megalite.parallel.collectives import all_gather, all_reduce
from megalite.parallel.microbatch import IGNORE_INDEX
from megalite.parallel.tensor.cross_entropy import NO_SECOND_DERIVATIVE, CrossEntropy
from megalite.parallel.top_words import TopWords


class _Divergences(NamedTuple):
    """What the gradient needs, [tokens] each in at least fp32.

    Attributes:
        values: the divergence of each token.
        slope: the mean of log q − log p or of log q − log m under q, which reverse and jsd subtract.
        teacher_lse, student_lse: log-sum-exp of the logits divided by the temperature.
    """

    values: Tensor
    slope: Tensor
    teacher_lse: Tensor
    student_lse: Tensor


@dataclass(frozen=True, kw_only=True)
class TokenDivergence(ABC):
    """Sum of token losses times a scale: divergence + cross_entropy_weight · cross-entropy.

    Args:
        cross_entropy: of the student, with its padding, label smoothing and z-loss.
    """

    cross_entropy: CrossEntropy
    temperature: float = 1.0
    cross_entropy_weight: float = 0.0

    def __call__(
        self,
        student: Tensor,
        teacher: Sequence[Tensor],
        targets: Tensor,
        scale: float | Tensor,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Compute the loss, a scalar in at least fp32. The student's logits are overwritten in backward.

        Args:
            student: logits [tokens, vocabulary/tp].
            teacher: what is known of the teacher's distributions, without gradients.
            targets: [tokens]. Where they are IGNORE_INDEX the loss is 0.
            weights: of the tokens, [tokens] in at least fp32; None: all are 1.
        """
        return _VocabParallelDivergence.apply(student, targets, scale, weights, self, *teacher)

    @abstractmethod
    def of_tokens(self, student: Tensor, *teacher: Tensor) -> tuple[Tensor, ...]:
        """Return the divergence of each token, whatever its target, and what else the gradient needs,
        [tokens] each. Collective over tp."""

    @abstractmethod
    def gradient(
        self, student: Tensor, teacher: Sequence[Tensor], known: Sequence[Tensor], scale: Tensor
    ) -> Tensor:
        """Return the gradient of the sum of `scale` times the divergences by the student's logits.

        Args:
            known: what `of_tokens` has returned.
            scale: [tokens].

        Returns:
            [tokens, columns without padding].
        """

    def scaled(self, logits: Tensor) -> Tensor:
        """Return the columns without padding in at least fp32, divided by the temperature."""
        _, valid = self.cross_entropy.part(logits)
        wide = logits[:, :valid].to(torch.promote_types(logits.dtype, torch.float32))
        return wide / self.temperature


@dataclass(frozen=True, kw_only=True)
class TeacherDivergence(TokenDivergence):
    """The divergence from a teacher's logits, [tokens, vocabulary/tp].

    Args:
        kind: forward, reverse or jsd.
        beta: β of jsd, between 0 and 1.
    """

    kind: Literal["forward", "reverse", "jsd"] = "forward"
    beta: float = 0.5

    def of_tokens(self, student: Tensor, *teacher: Tensor) -> _Divergences:
        """Return the divergence of each token, whatever its target. Collective over tp."""
        return self._of_logits(student, *teacher)

    def _of_logits(self, student: Tensor, teacher: Tensor) -> _Divergences:
        """Return the divergence of each token, whatever its target. Collective over tp."""
        z_student, z_teacher = self.scaled(student), self.scaled(teacher)
        own = [*_maximum_and_sum(z_teacher), *_maximum_and_sum(z_student)]
        if self.kind != "jsd":
            a, b = (z_teacher, z_student) if self.kind == "forward" else (z_student, z_teacher)
            largest = own[0] if self.kind == "forward" else own[2]
            own.append(((a - largest.unsqueeze(1)).exp() * (a - b)).sum(1))
        packed, tp = torch.stack(own), self.cross_entropy.tp
        stats = all_gather(packed, tp).wait().view(tp.size, *packed.shape)  # [tp, 4 or 5, tokens]
        of_teacher, of_student = stats[:, 0:2].unbind(1), stats[:, 2:4].unbind(1)
        teacher_lse, student_lse = _log_sum_exp(*of_teacher), _log_sum_exp(*of_student)
        if self.kind == "jsd":
            return self._jensen_shannon(z_student, z_teacher, teacher_lse, student_lse)
        lse_a, lse_b = (teacher_lse, student_lse) if self.kind == "forward" else (student_lse, teacher_lse)
        largest = (of_teacher if self.kind == "forward" else of_student)[0]
        # Σ over ranks of exp(max of the rank − lse_a) · D of the rank
        mean = ((largest - lse_a).exp() * stats[:, 4]).sum(0)
        value = mean - lse_a + lse_b
        return _Divergences(value, value, teacher_lse, student_lse)

    def _jensen_shannon(
        self, z_student: Tensor, z_teacher: Tensor, teacher_lse: Tensor, student_lse: Tensor
    ) -> _Divergences:
        log_p, log_q = z_teacher - teacher_lse.unsqueeze(1), z_student - student_lse.unsqueeze(1)
        log_m = self._log_mixture(log_p, log_q)
        own = torch.stack([(each.exp() * (each - log_m)).sum(1) for each in (log_p, log_q)])
        to_teacher, to_student = all_reduce(own, self.cross_entropy.tp).wait()
        values = self.beta * to_teacher + (1 - self.beta) * to_student
        return _Divergences(values, to_student, teacher_lse, student_lse)

    def gradient(
        self, student: Tensor, teacher: Sequence[Tensor], known: Sequence[Tensor], scale: Tensor
    ) -> Tensor:
        divergences = _Divergences(*known)
        log_q = self.scaled(student) - divergences.student_lse.unsqueeze(1)
        log_p = self.scaled(teacher[0]) - divergences.teacher_lse.unsqueeze(1)
        scale = (scale / self.temperature).unsqueeze(1)
        if self.kind == "forward":
            return (log_q.exp() - log_p.exp()) * scale
        if self.kind == "reverse":
            return log_q.exp() * (log_q - log_p - divergences.slope.unsqueeze(1)) * scale
        log_m = self._log_mixture(log_p, log_q)
        return (1 - self.beta) * log_q.exp() * (log_q - log_m - divergences.slope.unsqueeze(1)) * scale

    def _log_mixture(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        beta = log_p.new_tensor(self.beta)
        return torch.logaddexp(log_p + beta.log(), log_q + torch.log1p(-beta))


@dataclass(frozen=True, kw_only=True)
class TopWordsDivergence(TokenDivergence):
    """The forward divergence from a teacher of which only the most probable words K are known (`TopWords`).

    All other words are one more outcome, with p_r of the teacher and q_r = Σ q of the student:

        Σ_K p (log p − log q) + p_r (log p_r − log q_r)
        by z: q − p inside K, q − p_r (q / q_r) outside, both divided by τ

    log q_r is a log-sum-exp of the words outside, with a maximum of their own: 1 − Σ_K q has no digits where
    the student is sure, and q_r may be too small for a number of its own. Forward: one all-gather over tp of
    four numbers per token: the largest logit, the sum of exponentials, the log-sum-exp of the words outside,
    and Σ_K p z. Backward: no communication.
    """

    def of_tokens(self, student: Tensor, *teacher: Tensor) -> tuple[Tensor, ...]:
        top, z = TopWords(*teacher), self.scaled(student)
        place, inside = self._places(top, student)
        p = top.log_p.to(z.dtype).exp()
        largest, total = _maximum_and_sum(z)
        outside, products = torch.full_like(total, -torch.inf), torch.zeros_like(total)
        if z.shape[1]:
            products = (p * z.gather(1, place.clamp(max=z.shape[1] - 1)) * inside).sum(1)
            # words of other ranks are written to a column of their own
            outside = F.pad(z, (0, 1)).scatter_(1, place, -torch.inf)[:, :-1].logsumexp(1)
        packed, tp = torch.stack([largest, total, outside, products]), self.cross_entropy.tp
        stats = all_gather(packed, tp).wait().view(tp.size, *packed.shape)  # [tp, 4, tokens]
        lse = _log_sum_exp(stats[:, 0], stats[:, 1])
        log_rest = stats[:, 2].logsumexp(0) - lse  # log q_r
        known, rest = p.sum(1), top.rest.to(z.dtype)
        values = torch.xlogy(p, p).sum(1) - stats[:, 3].sum(0) + known * lse
        values = values + torch.where(rest > 0, torch.xlogy(rest, rest) - rest * log_rest, 0)
        return values, lse, log_rest

    def gradient(
        self, student: Tensor, teacher: Sequence[Tensor], known: Sequence[Tensor], scale: Tensor
    ) -> Tensor:
        top, (_, lse, log_rest) = TopWords(*teacher), known
        place, _ = self._places(top, student)
        log_q = self.scaled(student) - lse.unsqueeze(1)
        q, p, rest = log_q.exp(), top.log_p.to(log_q.dtype).exp(), top.rest.to(log_q.dtype).unsqueeze(1)
        mass = p.sum(1, keepdim=True) + rest
        of_words = F.pad(q, (0, 1)).gather(1, place)
        # outside: mass · q − p_r (q / q_r); inside, where q / q_r may be infinite: mass · q − p
        of_rest = log_q.sub_(log_rest.unsqueeze(1)).exp_().mul_(rest)
        padded = F.pad(q.mul_(mass).sub_(of_rest), (0, 1)).scatter_(1, place, mass * of_words - p)
        return padded[:, :-1].mul_((scale / self.temperature).unsqueeze(1))

    def _places(self, top: TopWords, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the column of each word on this rank, and whether it is here; others are past the last."""
        first, valid = self.cross_entropy.part(logits)
        place = top.words.long() - first
        inside = (place >= 0) & (place < valid)
        return torch.where(inside, place, valid), inside


def _maximum_and_sum(z: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest of each row and the sum of exp(z − largest), [tokens] each.

    A rank whose columns are all padding has a sum of 0.
    """
    if not z.shape[1]:
        return z.new_full(z.shape[:1], torch.finfo(z.dtype).min), z.new_zeros(z.shape[:1])
    largest = z.amax(1)
    return largest, (z - largest.unsqueeze(1)).exp().sum(1)


def _log_sum_exp(largest: Tensor, sums: Tensor) -> Tensor:
    """Combine the statistics of the ranks, [tp, tokens] each: [tokens]."""
    most = largest.amax(0)
    return most + (sums * (largest - most).exp()).sum(0).log()


class _VocabParallelDivergence(torch.autograd.Function):
    """Forward: as `TokenDivergence.of_tokens`, and that of `CrossEntropy`. Backward: nothing is sent."""

    @staticmethod
    def forward(
        ctx: Any,
        student: Tensor,
        targets: Tensor,
        scale: Any,
        weights: Tensor | None,
        loss: TokenDivergence,
        *teacher: Tensor,
    ) -> Tensor:
        known = loss.of_tokens(student, *teacher)
        valid = targets != IGNORE_INDEX
        losses, lse = torch.where(valid, known[0], 0), None
        if loss.cross_entropy_weight:
            own, lse = loss.cross_entropy.of_tokens(student, targets)
            losses = losses + loss.cross_entropy_weight * own
        if weights is not None:
            losses = losses * weights
        ctx.save_for_backward(student, targets, lse, *teacher, *known)
        ctx.scale, ctx.weights, ctx.loss, ctx.teachers = scale, weights, loss, len(teacher)
        if loss.cross_entropy.observe is not None:
            loss.cross_entropy.observe(losses)
        return losses.sum() * scale

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(NO_SECOND_DERIVATIVE)
        student, targets, lse, *others = ctx.saved_tensors
        teacher, known = others[: ctx.teachers], others[ctx.teachers :]
        loss = ctx.loss
        entropy, scale = loss.cross_entropy, grads[0] * ctx.scale
        scale = scale if ctx.weights is None else scale * ctx.weights
        of_tokens = torch.where(targets != IGNORE_INDEX, scale, 0)  # [tokens]
        gradient = loss.gradient(student, teacher, known, of_tokens)
        first, valid = entropy.part(student)
        # In place, as the gradient of the cross-entropy.
        if loss.cross_entropy_weight:
            gradient_(
                student,
                targets,
                lse,
                scale * loss.cross_entropy_weight,
                first,
                valid,
                IGNORE_INDEX,
                entropy.label_smoothing,
                entropy.z_loss,
                entropy.vocab_size,
            )
            student[:, :valid] += gradient
        else:
            student.zero_()
            student[:, :valid] = gradient
        return student, *(None,) * (4 + ctx.teachers)
