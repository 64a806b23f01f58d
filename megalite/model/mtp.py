"""Multi-token prediction (DeepSeek-V3, 2024): modules after the last layer, each of which predicts one token
further ahead in training.

    h₀ = norm(x)                                                   x: the output of the model's last layer
    hₖ = normₖ(layerₖ(Wₖ [enormₖ(embedding(tₖ)) | hnormₖ(hₖ₋₁)]))     tₖ: the token k positions further on
    loss = loss(h₀ · head, targets)  +  weight / modules · Σₖ mean over its own targets of loss(hₖ · head,
    targets k positions further on)

Embedding and head are the model's own. The order of the two halves is that in which vLLM
(models/deepseek_mtp.py) and transformers (MtpLayer in modeling_layers.py) multiply with DeepSeek-V3's
`eh_proj`: the embedding first. That h₀ is the output of the final norm, and hₖ that of the module's norm, is
what they give a module, and what Megatron-LM trains (transformer/multi_token_prediction.py).

Communication: that of the embedding, the layer and the head. All tp ranks have the whole matrix W, and
multiply their part of the sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megalite.config.schema import Config
from megalite.mesh.mesh import Mesh, MeshAxis
from megalite.model.forward_state import Dropout, ForwardState, Site
from megalite.model.options import LayerOptions
from megalite.model.parameters import layer_count
from megalite.model.transformer import make_layer, make_norm
from megalite.parallel.compiled_ops import CompiledOps
from megalite.parallel.microbatch import IGNORE_INDEX, Microbatch
from megalite.parallel.spec import Rectangle
from megalite.parallel.tensor.cross_entropy import CrossEntropy
from megalite.parallel.tensor.embedding import ParallelEmbedding
from megalite.parallel.tensor.linear import ColumnParallelLinear
from megalite.parallel.weight import Weight

if TYPE_CHECKING:
    from megalite.model.routers import Routers
    from megalite.model.stage import Head

STATISTIC = "mtp"


class MtpModule(nn.Module):
    """One module: hₖ₋₁ and the embedding of tₖ, both [seq (/tp), batch, hidden] -> hₖ, of the same shape.
    index: that of its layer."""

    def __init__(
        self, config: Config, index: int, weights: Mapping[str, Weight], mesh: Mesh, ops: CompiledOps
    ):
        super().__init__()
        model, name, options = config.model, f"layers.{index}.mtp", LayerOptions.of(config, index, ops)
        self.enorm, self.hnorm, self.norm = (
            make_norm(model, weights, f"{name}.{part}", ops) for part in ("enorm", "hnorm", "norm")
        )
        alone = MeshAxis("alone", 0, 1, (mesh.rank,))
        self.join = ColumnParallelLinear(weights[f"{name}.eh_proj.weight"], None, alone, False)
        self.layer = make_layer(model, index, weights, mesh, options)
        self.dropout = Dropout(
            model.embedding_dropout, Site.EMBEDDING, index, mesh.tp, options.sequence_parallel
        )

    def forward(self, hidden: Tensor, embedded: Tensor, state: ForwardState) -> Tensor:
        embedded = self.dropout(embedded, state)
        x = self.join(torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1))
        return self.norm(self.layer(x, state))


class MultiTokenPrediction(nn.Module):
    """The loss of the last stage, with that of further tokens. loss: of the logits of these."""

    def __init__(
        self, config: Config, weights: Mapping[str, Weight], mesh: Mesh, ops: CompiledOps, loss: CrossEntropy
    ):
        super().__init__()
        model, options = config.model, LayerOptions.of(config, 0, ops)
        self.loss, self.weight = loss, config.train.mtp_weight / model.mtp_layers
        self.embedding = ParallelEmbedding(
            weights["embedding.weight"], None, mesh.tp, options.sequence_parallel, model.embedding_scale
        )
        self.embedding.first_stage = False
        indices = range(model.num_hidden_layers, layer_count(model))
        self.each = nn.ModuleList(MtpModule(config, index, weights, mesh, ops) for index in indices)

    def forward(
        self, x: Tensor, head: Head, microbatch: Microbatch, state: ForwardState
    ) -> tuple[Tensor, Tensor]:
        """The scaled sum of the losses of the next token, and with those of further ones. x: [seq (/tp),
        batch, hidden], the output of the last layer.

        What a module's layer counts or balances (experts), it does of the module's own targets.
        """
        assert microbatch.mtp_targets is not None, "a microbatch has the tokens that the modules read"
        hidden = head.norm(x)
        own = total = head.loss_of(hidden, microbatch.targets, state.loss_scale, head.loss)  # []
        found = []
        for module, tokens, targets, factor in zip(self.each, *microbatch.mtp_targets, strict=True):
            scale = state.loss_scale * factor  # 1 / (the module's targets in the global batch)
            hidden = module(
                hidden, self.embedding(tokens, None), replace(state, targets=targets, loss_scale=scale)
            )
            # The weight is part of the scale: a loss in chunks has its gradient before it could be
            # multiplied.
            loss = head.loss_of(hidden, targets, scale * self.weight, self.loss)
            total = total + loss
            found.append(
                torch.stack(
                    [loss.detach().double() / (scale * self.weight), (targets != IGNORE_INDEX).sum().double()]
                )
            )
        state.statistics[STATISTIC] = torch.stack(found)  # [modules, 2]
        return own, total


class MultiTokenStatistics:
    """The metrics of the modules' losses, next to those of routers if there are any: used like `Routers`."""

    def __init__(self, modules: int, routers: Routers | None, mesh: Mesh, device: torch.device):
        # tp ranks have the same losses
        self.modules, self.routers, self.counts = modules, routers, mesh.tp.rank == 0
        self._none = torch.zeros(2 * modules, dtype=torch.float64, device=device)

    def own(self, statistics: Mapping[str, Tensor]) -> Tensor:
        """This rank's part, flattened: each module's sum of token losses and number of targets, after what
        routers count."""
        found = statistics[STATISTIC].flatten() if self.counts and STATISTIC in statistics else self._none
        return found if self.routers is None else torch.cat([self.routers.own(statistics), found])

    def learn(self, totals: Tensor | None, tokens: int, applied: bool) -> dict[str, Any]:
        """The metrics of a step; routers learn from it. Arguments as for `Routers`."""
        assert totals is not None, "the totals of a step are known before it is learned from"
        before, own = totals[: -2 * self.modules], totals[-2 * self.modules :].view(-1, 2)  # [modules, 2]
        losses = (own[:, 0] / own[:, 1].clamp(min=1)).tolist()
        found: dict[str, Any] = {} if self.routers is None else self.routers.learn(before, tokens, applied)
        return (
            found
            | {"mtp_loss": sum(losses) / len(losses)}
            | ({"mtp_losses": losses} if len(losses) > 1 else {})
        )

    def learned(self) -> list[Rectangle]:
        return [] if self.routers is None else self.routers.learned()

    def rectangles(self) -> Iterator[Rectangle]:
        yield from () if self.routers is None else self.routers.rectangles()
