"""Logits of the router, and the choice of experts by the scores made of them.

Logits are a matmul of this rank's tokens with a small replicated matrix, in at least fp32.

No communication. Under sequence parallelism each tp rank has a part of the sequence: the weight gradient is
partial, and summed over tp at the end of the step like that of a norm.
"""

from __future__ import annotations

import torch
from megalite_kernels import router_logits
from torch import Tensor

from megalite.parallel.expert.choice import ExpertChoice
from megalite.parallel.node import Saved
from megalite.parallel.weight import Weight


class Router:
    """Router that computes logits: [tokens, hidden] -> [tokens, outputs], in at least fp32.

    Args:
        bias: [outputs].
    """

    def __init__(self, weight: Weight, bias: Weight | None = None):
        self.weight, self.bias = weight, bias

    def compute(self, rows: Tensor, saved: Saved) -> Tensor:
        saved.append((rows,))
        logits = router_logits.logits(rows, self.weight.tensor)
        return logits if self.bias is None else logits.add_(self.bias.tensor.to(logits.dtype))

    def gradient(self, grad: Tensor, saved: Saved) -> Tensor:
        (rows,) = saved.pop()
        self.weight.accumulate_matmul(grad, rows.to(grad.dtype))
        if self.bias is not None:
            self.bias.accumulate(grad.sum(0))
        return torch.mm(grad, self.weight.tensor.to(grad.dtype)).to(rows.dtype)


def best(scores: Tensor, k: int) -> Tensor:
    """Return the experts with the k largest scores of each token, [tokens, experts] -> [tokens, k].

    Among equal scores the expert with the lower index comes first.
    """
    # topk breaks ties in arbitrary order
    return scores.detach().sort(dim=-1, descending=True, stable=True).indices[:, :k].contiguous()


def choose(scores: Tensor, k: int) -> ExpertChoice:
    """Choose the k best experts."""
    return ExpertChoice.of(best(scores, k), scores.shape[1])


def in_best_groups(scores: Tensor, groups: int, kept: int, counted: int) -> Tensor:
    """Set scores [tokens, experts] outside the `kept` best of `groups` equal groups of each token to −inf.

    The score of a group is the sum of its `counted` largest scores. Among equal groups the first ones are
    better.
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
