"""The loss of an indexer: its scores should be large where attention looks.

    p(t) = Σ_heads probabilities of attention, divided by their sum; a constant      q(t) = softmax(I(t))
    loss = coefficient / queries · Σ_t Σ_s p(t, s) · (log p(t, s) − log q(t, s))
    ∂loss/∂I(t, s) = coefficient / queries · (q(t, s) − p(t, s))

over the rows that the query attends to: all visible ones where attention is dense, else the selected ones, on
which both are normalized. `queries` are the tokens of the global batch without padding. Their number is known
before the first backward, so that the loss is a sum over microbatches and ranks.

The gradients of the indexer's queries, keys and weights are computed in the forward, if one is needed, and
kept in place of scores and probabilities. Where attention is dense, both exist for a block of queries at a
time.

Communicates in `SumOverHeads`: p is a sum over the heads of all tp ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from megalite_kernels.index_scores import selected_scores, selected_scores_backward
from torch import Tensor

from megalite.config.schema import Config
from megalite.config.sections.model import ModelConfig
from megalite.mesh.mesh import MeshAxis
from megalite.model.block_module import BlockModule
from megalite.model.blocks.indexed_attention.indexer import IndexInputs
from megalite.model.forward_state import ForwardState
from megalite.model.mtp.losses import layer_count
from megalite.parallel.collectives import all_reduce, reduce_scatter
from megalite.parallel.spec import Rectangle

BLOCK = 64  # queries whose scores with all rows exist at a time
STATISTIC = "indexer"


class Divergence(NamedTuple):
    """Σ KL(p ‖ q) of this rank's queries, and the gradients of a multiple of it; None: none is needed."""

    total: Tensor  # [], fp64
    gradients: tuple[Tensor, Tensor, Tensor] | None


Measure = Callable[[IndexInputs, float | Tensor | None], Divergence]
"""(inputs, the factor of the gradients or None) -> the divergence."""


@dataclass(frozen=True)
class SumOverHeads:
    """Sums probabilities over the heads of all tp ranks.

    [seq/cp, batch, rows] -> [seq/cp (/tp), batch, rows].

    Under sequence parallelism a reduce-scatter, else an all-reduce.
    """

    tp: MeshAxis
    split: bool

    def __call__(self, partial: Tensor) -> Tensor:
        if self.tp.size == 1:
            return partial
        pending = reduce_scatter(partial, self.tp) if self.split else all_reduce(partial, self.tp)
        return pending.wait()

    def of_block(self, x: Tensor, first: int, stop: int) -> Tensor:
        """Return those of x [seq/cp, …] whose sums are queries first to stop of each rank's own."""
        if not self.split or self.tp.size == 1:
            return x[first:stop]
        return x.unflatten(0, (self.tp.size, -1))[:, first:stop].flatten(0, 1)


class _IndexerLoss(torch.autograd.Function):
    """The loss, whose gradients its forward computes. No communication but that of `measure`."""

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        keys: Tensor,
        weights: Tensor,
        measure: Measure,
        factor: float | Tensor,
        differentiates: bool,
    ) -> tuple[Tensor, Tensor]:
        inputs = IndexInputs(queries, keys, weights)
        total, gradients = measure(inputs, factor if differentiates else None)
        if gradients is not None:
            ctx.save_for_backward(*(grad.to(x.dtype) for grad, x in zip(gradients, inputs, strict=True)))
        ctx.mark_non_differentiable(total)
        return total * factor, total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys, weights = (
            ctx.saved_tensors
        )  # the loss is added to that of the model: its gradient is 1
        return queries, keys, weights, None, None, None


def indexer_loss(inputs: IndexInputs, measure: Measure, factor: float | Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss and Σ KL of this rank's queries, [] each in fp64.

    Args:
        factor: coefficient / queries, times the factor of the model's loss.
    """
    loss, total = _IndexerLoss.apply(*inputs, measure, factor, torch.is_grad_enabled())
    return loss, total


def of_selection(selection: Tensor, target: Tensor, counted: Tensor | None) -> Measure:
    """Return the divergence over selected rows.

    Args:
        selection: [seq/cp (/tp), batch, top] of this rank's own queries.
        target: [seq/cp (/tp), batch, top], the sum of the probabilities of all heads.
        counted: [seq/cp (/tp), batch], whether a query is no padding; None: none is.
    """

    def measure(inputs: IndexInputs, factor: float | Tensor | None) -> Divergence:
        scores = selected_scores(*inputs, selection)
        total, dscores = _divergence(scores, target, counted)
        if factor is None:
            return Divergence(total, None)
        dq, dk, dw = selected_scores_backward(dscores * factor, *inputs, selection)
        return Divergence(total, (dq, dk, dw))

    return measure


def of_visible_rows(
    attention: Callable[[slice], Tensor],
    summed: SumOverHeads,
    visible: Callable[[slice], Tensor],
    counted: Tensor | None,
) -> Measure:
    """Return the divergence over all visible rows, by blocks of queries.

    Args:
        attention: a block of own queries -> the probabilities of this rank's heads, summed, of
            `SumOverHeads.of_block`: [block (· tp), batch, rows].
        visible: a block of own queries -> whether they see each row, [block, batch or 1, rows].
    """

    def measure(inputs: IndexInputs, factor: float | Tensor | None) -> Divergence:
        queries, keys, weights = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in inputs)
        dq, dk, dw = torch.empty_like(queries), torch.zeros_like(keys), torch.empty_like(weights)
        total = torch.zeros((), dtype=torch.float64, device=keys.device)
        for block in blocks(len(queries)):
            products = torch.einsum("sbhd,tbd->sbht", queries[block], keys)
            active = products.relu()
            scores = torch.einsum("sbh,sbht->sbt", weights[block], active)
            scores = scores.masked_fill(~visible(block), -torch.inf)
            target = summed(attention(block))
            part, dscores = _divergence(scores, target, None if counted is None else counted[block])
            total += part
            if factor is None:
                continue
            dscores = dscores * factor
            dw[block] = torch.einsum("sbt,sbht->sbh", dscores, active)
            dproducts = weights[block].unsqueeze(-1) * dscores.unsqueeze(2) * (products > 0)
            dq[block] = torch.einsum("sbht,tbd->sbhd", dproducts, keys)
            dk += torch.einsum("sbht,sbhd->tbd", dproducts, queries[block])
        return Divergence(total, None if factor is None else (dq, dk, dw))

    return measure


def blocks(queries: int) -> Iterator[slice]:
    return (slice(first, min(first + BLOCK, queries)) for first in range(0, queries, BLOCK))


def _divergence(scores: Tensor, target: Tensor, counted: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return Σ KL(p ‖ softmax(scores)) in fp64, and softmax(scores) − p, [queries, batch, rows].

    Rows with a score of −inf do not take part. Queries that are not counted have 0.
    """
    hidden = scores == -torch.inf
    p = target / target.sum(-1, keepdim=True)
    log_q = scores.log_softmax(-1)
    terms = torch.xlogy(p, p) - p * log_q.masked_fill(hidden, 0)
    difference = log_q.exp() - p
    if counted is not None:
        mask = counted.unsqueeze(-1).to(p.dtype)
        terms, difference = terms * mask, difference * mask
    return terms.sum(dtype=torch.float64), difference.masked_fill(hidden, 0)


def record(state: ForwardState, model: ModelConfig, layer: int, total: Tensor, queries: Tensor) -> None:
    """Record Σ KL and the number of queries of a layer in the tensor of all layers, [layers, 2]."""
    if STATISTIC not in state.statistics:
        state.statistics[STATISTIC] = total.new_zeros(layer_count(model), 2)
    state.statistics[STATISTIC][layer] = torch.stack((total.detach(), queries))


class IndexerStatistics:
    """The losses of the layers' indexers, as `ModelStatistics`.

    Args:
        layers: the layers with an indexer, without those of MTP modules.
        count: number of layers, with those.
        counts: whether this rank's queries are counted: no other tp rank has the same.
    """

    def __init__(self, layers: Sequence[int], count: int, counts: bool, device: torch.device):
        self.layers, self.counts, self.size = list(layers), counts, 2 * count
        self._zeros = torch.zeros(self.size, dtype=torch.float64, device=device)

    def own(self, statistics: Mapping[str, Tensor]) -> Tensor:
        return statistics[STATISTIC].flatten() if self.counts and STATISTIC in statistics else self._zeros

    def learn(self, totals: Tensor, tokens: int, applied: bool) -> dict[str, Any]:
        rows = totals.view(-1, 2)[self.layers]
        losses = (rows[:, 0] / rows[:, 1].clamp(min=1)).tolist()
        return {"indexer_loss": sum(losses) / len(losses), "indexer_losses": losses}

    def learned(self) -> list[Rectangle]:
        return []

    def rectangles(self) -> Iterator[Rectangle]:
        return iter(())


def statistics(
    config: Config, blocks: Iterable[BlockModule], device: torch.device
) -> IndexerStatistics | None:
    """Return the losses of a model's indexers, see `BlockKind.statistics`; None if none is computed."""
    model = config.model
    if not model.index_loss_coef or config.lora.rank:
        return None
    layers = [layer for layer in range(model.num_hidden_layers) if model.selecting_layer(layer) == layer]
    own = next(iter(blocks), None)
    counts = bool(getattr(own, "counts_queries", False))
    return IndexerStatistics(layers, layer_count(model), counts, device)
