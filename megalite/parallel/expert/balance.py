"""Keeps the experts of a layer equally loaded, in ways that no layout of ranks changes.

    global    auxiliary loss  E · Σ_e f_e P_e, with f the share of the previous step's tokens (all ranks')
    that chose expert e
    sequence  the same with f the share of the token's own sequence (DeepSeek-V2)
    bias      a bias is added to the probabilities when experts are chosen, not when they are weighted; after
    each applied step it moves by
              `router_bias_rate` against the load (Wang et al. 2024). A loss, if it has a coefficient, is that
              of `sequence` with f the share that the k most probable experts of each token would give,
              without bias and groups (DeepSeek-V3)

P is the mean router probability; of sigmoid scores, that of a token's scores over their sum. With f fixed the
loss is a sum over tokens, so it adds over microbatches and ranks like the loss of the model: it is divided by
the number of valid tokens of the global batch, and tokens whose loss does not count do not count here either.
A balance by microbatch, which is usual, depends on the micro-batch size and on the layout.

Communication: a loss by sequence sums counts over the ranks that share one, in forward.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from megalite_kernels.permutation import count_by_column
from torch import Tensor

from megalite.config.sections.model import ModelConfig
from megalite.mesh.mesh import MeshAxis
from megalite.parallel.collectives import all_reduce
from megalite.parallel.expert.choice import ExpertChoice, best
from megalite.parallel.microbatch import IGNORE_INDEX

AUXILIARY, Z, DROPPED = -3, -2, -1  # columns of the statistics, after one for each expert


class RouterState(NamedTuple):
    """What a layer's router has learned from earlier steps; not a function of the weights. Both [experts],
    fp64, on the device; or of several layers, [layers, experts].

    Attributes:
        load: share of the previous step's tokens that chose each expert; the sum is k. At the start equal,
            without a gradient.
        bias: added to the probabilities when experts are chosen.
    """

    load: Tensor
    bias: Tensor

    @staticmethod
    def start(model: ModelConfig, device: torch.device) -> RouterState:
        experts = model.num_experts or 0
        equal = torch.full(
            (experts,), model.num_experts_per_tok / experts, dtype=torch.float64, device=device
        )
        return RouterState(equal, torch.zeros_like(equal))

    def learned(self, counts: Tensor, model: ModelConfig) -> RouterState:
        """The state after an applied step: counts of all ranks' valid tokens, of the shape of the state."""
        bias = self.bias
        if model.router_balance == "bias":
            bias = bias + model.router_bias_rate * (counts.mean(-1, keepdim=True) - counts).sign()
        return RouterState(
            counts * (model.num_experts_per_tok / counts.sum(-1, keepdim=True).clamp(min=1)), bias
        )


class _AddLoss(torch.autograd.Function):
    """x, unchanged.  Backward: the loss gets the gradient 1, as if it had been added to the model's loss. No
    communication."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.dtype = loss.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], torch.ones((), dtype=ctx.dtype, device=grads[0].device)


class Balance:
    """The auxiliary losses and the statistics of one layer.

    Args:
        sequence: the axis of the ranks that share a sequence.
    """

    def __init__(self, model: ModelConfig, state: RouterState, sequence: MeshAxis):
        self.model, self.state, self.sequence = model, state, sequence
        # modules of multi-token prediction do not count
        self.layers = max(sum(map(model.is_mixture, range(model.num_hidden_layers))), 1)
        self.by_sequence = model.router_balance == "sequence" or (
            model.router_balance == "bias" and model.router_aux_loss_coef > 0
        )

    def with_losses(
        self,
        weights: Tensor,
        logits: Tensor,
        probabilities: Tensor,
        choice: ExpertChoice,
        targets: Tensor,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """Weights [tokens, k] whose backward adds the auxiliary losses, and the layer's statistics [experts +
        3].

        Args:
            logits, probabilities: [tokens, experts] of this rank's tokens, [seq, batch] flattened.
            targets: [seq, batch] of these tokens.
            scale: factor on the sum of token losses.
        """
        model, valid = self.model, targets != IGNORE_INDEX
        mask = valid.flatten().to(logits.dtype)
        factor = scale / self.layers
        statistics = torch.zeros(logits.shape[1] + 3, dtype=torch.float64, device=logits.device)
        statistics[:AUXILIARY] = count_by_column(choice.experts, valid, len(choice.counts)).sum(0)
        statistics[DROPPED] = (
            (choice.inverse >= len(choice.order)).view_as(choice.experts) & valid.flatten().unsqueeze(1)
        ).sum()
        shares = self._shares(choice, probabilities, valid).to(logits.dtype)  # [1 or batch, experts]
        shares = shares.expand(valid.shape[1], -1)
        balance = (probabilities.view(*valid.shape, -1) * shares * valid.unsqueeze(-1)).sum() * shares.shape[
            1
        ]
        z = (logits.logsumexp(-1).square() * mask).sum()
        statistics[AUXILIARY], statistics[Z] = balance.detach(), z.detach()
        loss = balance * (model.router_aux_loss_coef * factor) + z * (model.router_z_loss_coef * factor)
        return _AddLoss.apply(weights, loss), statistics

    def _shares(self, choice: ExpertChoice, probabilities: Tensor, valid: Tensor) -> Tensor:
        """f: [1, experts] of the previous step, or [batch, experts] of each sequence."""
        if not self.by_sequence:
            return self.state.load.unsqueeze(0)
        if "shares" not in choice.kept:
            experts = best(probabilities, choice.k) if self.model.router_balance == "bias" else choice.experts
            own = count_by_column(experts, valid, len(choice.counts))
            counts = all_reduce(own, self.sequence).wait()
            choice.kept["shares"] = counts * (choice.k / counts.sum(1, keepdim=True).clamp(min=1))
        return choice.kept["shares"]
