"""Load balancing of the experts of a layer, independent of the layout of ranks.

    global    auxiliary loss  E · Σ_e f_e P_e, where f is the fraction of the tokens of the previous step (on
              all ranks) that chose expert e
    sequence  the same, where f is the fraction within the token's own sequence (DeepSeek-V2)
    bias      a bias is added to the probabilities when experts are chosen, but not to their weights; after
              each applied step it moves by `router_bias_rate` against the load (Wang et al. 2024). If the
              loss has a coefficient, it is that of `sequence`, where f is the fraction that the k most
              probable experts of each token would receive without bias and groups (DeepSeek-V3)

P is the mean router probability; for sigmoid scores, the scores of a token divided by their sum. With
constant f the loss is a sum over tokens, so that it adds over microbatches and ranks like the loss of the
model: it is divided by the number of valid tokens of the global batch, and tokens without loss are not
counted. The usual balancing by microbatch depends on the micro-batch size and on the layout.

Communication: a loss by sequence sums counts over the ranks that share a sequence, in forward.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from megalite_kernels.permutation import count_by_column
from torch import Tensor

from megalite.config.sections.model import ModelConfig
from megalite.mesh.mesh import MeshAxis
from megalite.model.added_loss import AddLoss
from megalite.model.blocks.mixture.router import best
from megalite.model.kinds import layers_of
from megalite.parallel.collectives import all_reduce
from megalite.parallel.expert.choice import ExpertChoice
from megalite.parallel.microbatch import IGNORE_INDEX

AUXILIARY, Z, DROPPED = -3, -2, -1  # columns of the statistics, after one for each expert


class RouterState(NamedTuple):
    """State of a layer's router from earlier steps, which is not a function of the weights.

    Both tensors are [experts] in fp64 on the device, or [layers, experts] for several layers.

    Attributes:
        load: fraction of the previous step's tokens that chose each expert; the sum is k. Equal at the start,
            and without a gradient.
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
        """Return the state after an applied step.

        Args:
            counts: numbers of valid tokens on all ranks, with the shape of the state.
        """
        bias = self.bias
        if model.router_balance == "bias":
            bias = bias + model.router_bias_rate * (counts.mean(-1, keepdim=True) - counts).sign()
        return RouterState(
            counts * (model.num_experts_per_tok / counts.sum(-1, keepdim=True).clamp(min=1)), bias
        )


class Balance:
    """Auxiliary losses and statistics of one layer.

    Args:
        sequence: the axis of the ranks that share a sequence.
    """

    def __init__(self, model: ModelConfig, state: RouterState, sequence: MeshAxis):
        self.model, self.state, self.sequence = model, state, sequence
        # modules of multi-token prediction are not counted
        layers = layers_of(model, "mixture")
        self.layers = max(sum(layer < model.num_hidden_layers for layer in layers), 1)
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
        scale: float | Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return weights [tokens, k] whose backward adds the auxiliary losses, and statistics [experts + 3].

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
        return AddLoss.apply(weights, loss), statistics

    def _shares(self, choice: ExpertChoice, probabilities: Tensor, valid: Tensor) -> Tensor:
        """Return f: [1, experts] of the previous step, or [batch, experts] of each sequence."""
        if not self.by_sequence:
            return self.state.load.unsqueeze(0)
        if "shares" not in choice.kept:
            experts = best(probabilities, choice.k) if self.model.router_balance == "bias" else choice.experts
            own = count_by_column(experts, valid, len(choice.counts))
            counts = all_reduce(own, self.sequence).wait()
            choice.kept["shares"] = counts * (choice.k / counts.sum(1, keepdim=True).clamp(min=1))
        return choice.kept["shares"]
