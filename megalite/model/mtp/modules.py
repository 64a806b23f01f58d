"""Multi-token prediction (MTP; DeepSeek-V3, 2024).

Modules after the last layer each predict one token further in training.

    h₀ = norm(x)                                                     x: the output of the model's last layer
    hₖ = normₖ(layerₖ(Wₖ [enormₖ(embedding(tₖ)) | hnormₖ(hₖ₋₁)]))    tₖ: the token k positions later
    total = loss(h₀ · head, targets)  +  weight / modules · Σₖ lossₖ
    lossₖ = mean of loss(hₖ · head, targets k positions later) over the module's own targets

Embedding and head are the model's own. As in vLLM (models/deepseek_mtp.py) and transformers (MtpLayer in
modeling_layers.py), the embedding is the first half of the input of DeepSeek-V3's `eh_proj`. As in both of
them and in Megatron-LM (transformer/multi_token_prediction.py), h₀ is the output of the final norm, and hₖ
the output of the module's norm.

Communicates in the embedding, the layer and the head. All tp ranks have the whole matrix W, and multiply
their part of the sequence with it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from megalite.config.schema import Config
from megalite.mesh.mesh import Mesh, MeshAxis
from megalite.model.forward_state import Dropout, ForwardState, Site
from megalite.model.layer import make_layer, make_norm
from megalite.model.layer_options import LayerOptions
from megalite.model.mtp.losses import further_losses, module_layers
from megalite.model.mtp.statistics import STATISTIC
from megalite.parallel.compiled_ops import CompiledOps
from megalite.parallel.microbatch import IGNORE_INDEX, Microbatch
from megalite.parallel.tensor.cross_entropy import CrossEntropy
from megalite.parallel.tensor.embedding import ParallelEmbedding
from megalite.parallel.tensor.linear import ColumnParallelLinear
from megalite.parallel.weight import Weights

if TYPE_CHECKING:
    from megalite.model.stage import Head


class MtpModule(nn.Module):
    """MTP module: hₖ₋₁ and the embedding of tₖ, both [seq (/tp), batch, hidden] -> hₖ of the same shape.

    Args:
        index: the index of its layer.
    """

    def __init__(self, config: Config, index: int, weights: Weights, mesh: Mesh, ops: CompiledOps):
        super().__init__()
        model, name, options = config.model, f"layers.{index}.mtp", LayerOptions.of(config, index, ops)
        self.enorm = make_norm(model, weights, f"{name}.enorm", ops)
        self.hnorm = make_norm(model, weights, f"{name}.hnorm", ops)
        self.norm = make_norm(model, weights, f"{name}.norm", ops)
        alone = MeshAxis("alone", 0, 1, (mesh.rank,))
        self.eh_proj = ColumnParallelLinear(weights[f"{name}.eh_proj.weight"], None, alone, False)
        self.layer = make_layer(model, index, weights, mesh, options)
        self.dropout = Dropout(
            model.embedding_dropout, Site.EMBEDDING, index, mesh.tp, options.sequence_parallel
        )

    def forward(self, hidden: Tensor, embedded: Tensor, state: ForwardState) -> Tensor:
        embedded = self.dropout(embedded, state)
        x = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1))
        return self.norm(self.layer(x, state))


class MultiTokenPrediction(nn.Module):
    """Losses of the last stage: next-token prediction and multi-token prediction.

    Args:
        head: computes all logits, and the loss of the next token.
        loss: the loss of the logits of further tokens.
    """

    def __init__(
        self, config: Config, head: Head, weights: Weights, mesh: Mesh, ops: CompiledOps, loss: CrossEntropy
    ):
        super().__init__()
        model, options = config.model, LayerOptions.of(config, 0, ops)
        self.head, self.loss, self.weight = head, loss, config.train.mtp_weight / further_losses(model)
        self.embedding = ParallelEmbedding(
            weights["embedding.weight"], None, mesh.tp, options.sequence_parallel, model.embedding_scale
        )
        self.embedding.first_stage = False
        self.predictors = nn.ModuleList(
            MtpModule(config, index, weights, mesh, ops) for index in module_layers(model)
        )

    def losses(self, x: Tensor, microbatch: Microbatch, state: ForwardState) -> tuple[Tensor, Tensor]:
        """Return the scaled loss of the next token, and the total with the losses of further tokens.

        The experts of a module's layer count and balance the module's own targets.

        Args:
            x: the output of the last layer, [seq (/tp), batch, hidden].
        """
        assert microbatch.mtp_targets is not None, "a microbatch has the tokens that the modules read"
        head, ahead = self.head, microbatch.mtp_targets
        hidden, targets = head.plain_norm(x), microbatch.targets
        scaled = head.scale or nn.Identity()
        own = total = head.loss_of(
            scaled(hidden), targets, state.loss_scale, head.loss, microbatch.weights
        )  # []
        statistics = []
        for k, (module, tokens, targets) in enumerate(
            zip(self.predictors, ahead.tokens, ahead.targets, strict=True)
        ):
            scale = state.loss_scale * ahead.factors[k]  # 1 / (the module's targets in the global batch)
            weights = None if ahead.weights is None else ahead.weights[k]
            module_state = replace(state, targets=targets, loss_scale=scale)
            hidden = module(hidden, self.embedding(tokens, None), module_state)
            # The weight is part of the scale: a loss in chunks computes its gradient before the loss could be
            # multiplied.
            loss = head.loss_of(scaled(hidden), targets, scale * self.weight, self.loss, weights)
            total = total + loss
            token_losses = loss.detach().double() / (scale * self.weight)
            statistics.append(torch.stack([token_losses, (targets != IGNORE_INDEX).sum().double()]))
        state.statistics[STATISTIC] = torch.stack(statistics)  # [modules, 2]
        return own, total
