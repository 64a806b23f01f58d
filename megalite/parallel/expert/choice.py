"""Which experts process each token, and the order in which the tokens' rows are sent to them.

Rows are sorted by expert, then by token: the rows for one rank are consecutive. Back from the experts, a
token's k rows are gathered and summed in the order of its choices, without atomic additions, so that a run
repeats bit for bit. No communication.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from megalite_kernels.permutation import (
    by_slot,
    combine_rows,
    combine_rows_backward,
    count,
    gather_rows,
    inverse_order,
)
from torch import Tensor


@dataclass
class ExpertChoice:
    """The experts of a microbatch's tokens on this rank. Recomputation uses the choice of the first forward.

    Attributes:
        experts: [tokens, k] int64, each token's experts, the most probable first.
        order: [rows] int64, which (token, k) of the flattened experts each sent row is: all of them, or fewer
            if some are not sent. Rows that are not sent may follow: then their number is a function of shapes
            alone, and the host need not wait for it.
        inverse: [tokens · k] int64, the sent row of each (token, k); at least the number of rows if it is not
            sent.
        counts: [experts] int64, rows for each expert.
        partial: whether some of all rows may not be sent.
        kept: what `balance` and `dispatch` have computed once for this choice, among it what was read from
            the device or communicated.
    """

    experts: Tensor
    order: Tensor
    inverse: Tensor
    counts: Tensor
    partial: bool = False
    kept: dict[str, Any] = field(default_factory=dict)

    @property
    def k(self) -> int:
        return self.experts.shape[1]

    def first(self, rows: int) -> ExpertChoice:
        """The same with the first rows only, if those that follow are not sent."""
        return self if rows == len(self.order) else replace(self, order=self.order[:rows], kept={})

    @property
    def tokens(self) -> Tensor:
        """[rows]: the token of each sent row."""
        return self.order // self.k

    @property
    def rows(self) -> Tensor:
        """[tokens, k]: the sent row of each token and choice, as `inverse`."""
        return self.inverse.view_as(self.experts)


def best(scores: Tensor, k: int) -> Tensor:
    """[tokens, k]: the experts with the largest scores [tokens, experts] of each token; of equal ones those
    with the lower index."""
    # topk breaks ties in any order
    return scores.detach().sort(dim=-1, descending=True, stable=True).indices[:, :k].contiguous()


def choose(scores: Tensor, k: int) -> ExpertChoice:
    """The choice of the k best experts."""
    experts = best(scores, k)
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    return ExpertChoice(experts, order, inverse_order(order, len(order)), count(flat, scores.shape[1]))


def in_best_groups(scores: Tensor, groups: int, kept: int, counted: int) -> Tensor:
    """The scores [tokens, experts], −inf outside each token's `kept` best of `groups` equal groups; of equal
    ones the first are better.

    A group's score is the sum of its `counted` largest ones.
    """
    grouped = scores.detach().unflatten(-1, (groups, -1))  # [tokens, groups, experts / groups]
    best = (
        grouped.topk(counted, dim=-1)
        .values.sum(-1)
        .sort(dim=-1, descending=True, stable=True)
        .indices[:, :kept]
    )
    hidden = torch.ones(grouped.shape[:2], dtype=torch.bool, device=scores.device).scatter_(1, best, False)
    return grouped.masked_fill(hidden.unsqueeze(-1), -torch.inf).flatten(1)


class _Spread(torch.autograd.Function):
    """[tokens, hidden] -> [rows, hidden]: each token's row once for each of its experts, sorted.  Backward:
    their sum, in order."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, choice: ExpertChoice) -> Tensor:
        ctx.choice = choice
        return gather_rows(rows, choice.tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return combine_rows(grads[0], ctx.choice.rows, partial=ctx.choice.partial), None


class _Combine(torch.autograd.Function):
    """Σ_k weight · row of each token: [rows, hidden] sorted by expert, [tokens, k] -> [tokens, hidden].
    Backward: both gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, choice: ExpertChoice) -> Tensor:
        ctx.choice = choice
        ctx.save_for_backward(rows, weights)
        return combine_rows(rows, choice.rows, weights, choice.partial)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (rows, weights), choice = ctx.saved_tensors, ctx.choice
        # [rows, hidden], [rows]
        drows, dweights = combine_rows_backward(grads[0], rows, choice.order, weights)
        return drows, by_slot(dweights, choice.inverse, choice.partial).view_as(weights), None


def spread(rows: Tensor, choice: ExpertChoice) -> Tensor:
    """The rows to send: [tokens, hidden] -> [rows, hidden], sorted by expert."""
    return _Spread.apply(rows, choice)


def combine(rows: Tensor, weights: Tensor, choice: ExpertChoice) -> Tensor:
    """The weighted sum of the rows that came back: [rows, hidden], [tokens, k] at least fp32 -> [tokens,
    hidden]."""
    return _Combine.apply(rows, weights, choice)
