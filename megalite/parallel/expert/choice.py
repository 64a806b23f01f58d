"""The experts of each token, and the order in which the rows of tokens are sent to them.

Rows are sorted by expert, then by token, so that the rows for one rank are consecutive. On return from the
experts, the k rows of a token are gathered and summed in the order of its choices, without atomic additions,
so that runs are bitwise reproducible. No communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

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
    """Experts of the tokens of a microbatch on this rank. Recomputation uses the choice of the first forward.

    Attributes:
        experts: [tokens, k] int64, the experts of each token, most probable first.
        order: [rows] int64, the index into the flattened experts of each sent row. These may be all of them
            or fewer, and may be followed by rows that are not sent. The number of rows is then a function of
            shapes alone, and the host need not wait for it.
        inverse: [tokens · k] int64, the sent row of each (token, k); at least the number of rows if it is not
            sent.
        counts: [experts] int64, rows for each expert.
        partial: whether some rows may not be sent.
        kept: results that `balance` and `dispatch` have computed for this choice, including those that were
            read from the device or communicated.
    """

    experts: Tensor
    order: Tensor
    inverse: Tensor
    counts: Tensor
    partial: bool = False
    kept: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, experts: Tensor, number: int) -> ExpertChoice:
        """Return the choice of these experts for each token, [tokens, k], out of `number`."""
        flat = experts.flatten()
        order = flat.argsort(stable=True)
        return cls(experts, order, inverse_order(order, len(order)), count(flat, number))

    @property
    def k(self) -> int:
        return self.experts.shape[1]

    def first(self, rows: int) -> ExpertChoice:
        """Return the choice with the first rows only, if the following ones are not sent."""
        return self if rows == len(self.order) else replace(self, order=self.order[:rows], kept={})

    @property
    def tokens(self) -> Tensor:
        """The token of each sent row, [rows]."""
        return self.order // self.k

    @property
    def rows(self) -> Tensor:
        """The sent row of each token and choice, [tokens, k], as in `inverse`."""
        return self.inverse.view_as(self.experts)


def spread(rows: Tensor, choice: ExpertChoice) -> Tensor:
    """Return the rows to send, copied for each expert and sorted: [tokens, hidden] -> [rows, hidden]."""
    return gather_rows(rows, choice.tokens)


def spread_gradient(grad: Tensor, choice: ExpertChoice) -> Tensor:
    """Return the sum of the gradients of each token's copies: [rows, hidden] -> [tokens, hidden]."""
    return combine_rows(grad, choice.rows, partial=choice.partial)


def combine(rows: Tensor, weights: Tensor, choice: ExpertChoice) -> Tensor:
    """Return the weighted sums of the rows of each token: [rows, hidden], [tokens, k] -> [tokens, hidden].

    Weights are in at least fp32.
    """
    return combine_rows(rows, choice.rows, weights, choice.partial)


def combine_gradient(grad: Tensor, kept: Sequence[Tensor], choice: ExpertChoice) -> tuple[Tensor, Tensor]:
    """Return the gradients of the rows and of the weights of `combine`.

    Args:
        grad: that of the sums.
        kept: rows and weights.
    """
    rows, weights = kept
    drows, dweights = combine_rows_backward(grad, rows, choice.order, weights)  # [rows, hidden], [rows]
    return drows, by_slot(dweights, choice.inverse, choice.partial).view_as(weights)
