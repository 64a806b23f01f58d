"""Sparse attention with an indexer (DeepSeek-V3.2, 2025; shared selections: GLM-5).

Latent attention in which each query attends to the `index_topk` rows that an indexer scores highest, all
visible ones where they are fewer. Layers with indexer type `shared` have no indexer, and attend to the rows
that the last `full` one selected. If no row is longer than that, or in the indexer's warm-up, attention is
the dense one of `latent_attention`.

An indexer is trained by its own loss (`loss`), whose gradient reaches no other parameter, as that of the
model's loss reaches none of the indexer. A selection is made once for each microbatch: recomputation repeats
it.

Communicates as `latent_attention` and as `indexer.WholeKeys`. Under sequence parallelism each tp rank scores
the queries of its own tokens, and selections are gathered over tp; over cp see
`parallel.context.selected`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megalite_kernels.index_scores import select
from torch import Tensor

from megalite.config.sections.model import ModelConfig
from megalite.mesh.mesh import Mesh, MeshAxis
from megalite.model.added_loss import AddLoss
from megalite.model.block_kind import BlockSpec
from megalite.model.block_module import Operation
from megalite.model.blocks.indexed_attention import loss
from megalite.model.blocks.indexed_attention.indexer import Indexer, IndexInputs
from megalite.model.blocks.latent_attention.block import LatentAttention
from megalite.model.forward_state import ForwardState, Site
from megalite.model.layer_options import LayerOptions
from megalite.parallel.context.gathered import whole
from megalite.parallel.context.latents import Spread
from megalite.parallel.context.parts import PositionSegment
from megalite.parallel.context.selected import Selections, attention_to_selections, whole_latents
from megalite.parallel.microbatch import positions_of
from megalite.parallel.weight import Weights


class IndexedAttention(LatentAttention):
    """`LatentAttention` to the rows that an indexer selects, its own or that of an earlier layer.

    Attributes:
        indexer: None in a shared layer.
        counts_queries: whether no other tp rank with a lower rank has the same queries.
    """

    has_gradient = False

    def __init__(
        self, model: ModelConfig, block: BlockSpec, weights: Weights, mesh: Mesh, options: LayerOptions
    ):
        super().__init__(model, block, weights, mesh, options)
        self.cp, self.top, self.selecting = mesh.cp, model.index_topk or 0, model.selecting_layer(self.layer)
        self.split = options.sequence_parallel and mesh.tp.size > 1
        self.counts_queries = self.split or mesh.tp.rank == 0
        self.indexer = None
        if self.selecting == self.layer:
            tp = mesh.tp if self.split else MeshAxis("alone", 0, 1, (mesh.rank,))
            way = Spread(mesh.cp, tp, self.split)
            self.indexer = Indexer(model, f"{block.name}.indexer", weights, way, options.ops)
        self.coefficient = model.index_loss_coef
        self.trains_indexer = self.indexer is not None and self.indexer.trained and self.coefficient > 0
        self.attend_to_selection = attention_to_selections(mesh.cp, self.way)
        self.summed = loss.SumOverHeads(mesh.tp, self.split)
        self.selections = Selections(mesh.cp, mesh.tp, self.split, whole=self.way is None)

    def sends_latents(self, context: str, mesh: Mesh) -> bool:
        return mesh.cp.size > 1 and context != "ulysses"

    def operations(self) -> Mapping[str, Operation]:
        return {"qkv": self.project_with_latent, "attention": self.attention}

    def forward(self, x: Tensor, state: ForwardState) -> Tensor:
        # [seq, batch, heads/tp, dim], and [seq (/tp), batch, q_lora_rank]; see `project` for k and v
        q, k, v, latent = self.call(self.project_with_latent, x, state)
        measured = self.trains_indexer and state.training and state.targets is not None
        selects = self.selects(state)
        inputs, selection = None, None
        if self.indexer is not None and (selects or measured):
            inputs = self.index(x, latent, state)
        if selects:
            selection = self.selection(inputs, state)  # [seq, batch, top]
        options = {**self.attention_options(state, self.recomputes_scores), "measured": measured}
        recompute = self.recomputes_scores or not torch.is_grad_enabled()
        options["recompute"] = recompute
        out, *probabilities = self.call(self.attention, q, k, v, selection, options)
        if measured:
            assert inputs is not None
            counted = None if state.counted is None else self._own(state.counted)
            if selection is None:
                measure = self._of_visible_rows(q, k, v, state, counted)
            else:
                own = self.selections.own(selection, state.part)
                measure = loss.of_selection(own, self.summed(probabilities[0]), counted)
            factor = state.query_scale * self.coefficient
            added, total = loss.indexer_loss(inputs, measure, factor)
            out = AddLoss.apply(out, added)
            queries = total.new_tensor(float(len(inputs.queries) * inputs.queries.shape[1]))
            loss.record(
                state, self.model_config, self.layer, total, queries if counted is None else counted.sum()
            )
        mask = state.adapter_mask(Site.OUT_ADAPTER, self.layer)
        return self.call(self.last, out.flatten(-2), mask)

    def project_with_latent(self, x: Tensor, state: ForwardState) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return `project`, and the latent of queries, [seq (/tp), batch, q_lora_rank]."""
        latent = self.query_latent(x, state)
        return *self.project_from(x, latent, state), latent

    def index(self, x: Tensor, latent: Tensor, state: ForwardState) -> IndexInputs:
        """Return the inputs of the indexer's scores."""
        assert self.indexer is not None
        tables = self.rotary_tables(state)
        own = None if tables is None else (self._own(tables[0]), self._own(tables[1]))
        inputs: IndexInputs = self.indexer(x, latent, own, state.part)
        return inputs

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, selection: Tensor | None, options: dict[str, Any]
    ) -> tuple[Tensor, ...]:
        """Return the output of this rank's heads, [seq, batch, heads, value_size].

        With a selection and `options["measured"]` the probabilities follow, see `selected.Attend`.

        Args:
            selection: of `selection`; None: attention is dense.
        """
        if selection is None:
            dense = {name: value for name, value in options.items() if name != "measured"}
            return (self.attend(q, k, v, dense),)
        return self.attend_to_selection(q, k, v, selection, options)

    def selects(self, state: ForwardState) -> bool:
        """Return whether queries attend to selected rows: not if all rows that they see are as few."""
        return not self.options.indexer_warmup and state.length > self.top

    def selection(self, inputs: IndexInputs | None, state: ForwardState) -> Tensor:
        """Return the rows that the queries of this rank's attention attend to, [seq, batch, top], -1 where
        fewer.

        Recomputation and shared layers find it in the state.
        """
        if self.selecting not in state.selections:
            assert inputs is not None, "a stage begins with a layer that has an indexer"
            starts = state.document_start
            with torch.no_grad():
                own = select(
                    *inputs,
                    top=self.top,
                    positions=self._own(state.positions),
                    document_start=None if starts is None else self._own(starts),
                )
            state.selections[self.layer] = self.selections.gather(own, state.part)
        return state.selections[self.selecting]

    def _of_visible_rows(
        self, q: Tensor, k: Tensor, v: Tensor, state: ForwardState, counted: Tensor | None
    ) -> loss.Measure:
        """Return the divergence from dense attention."""
        with torch.no_grad():
            keys = self._whole_keys(k, v, state)  # [seq, batch, heads, head_size]
        wide = torch.promote_types(q.dtype, torch.float32)
        queries, keys = q.detach().to(wide), keys.to(wide)
        positions, starts = state.positions, state.document_start
        row = positions_of((PositionSegment(0, len(keys)),), q.device).flatten()

        def visible(positions: Tensor, starts: Tensor | None) -> Tensor:
            seen = row <= positions.unsqueeze(-1)  # [queries, batch or 1, rows]
            return seen if starts is None else seen & (row >= starts.unsqueeze(-1))

        def attention(block: slice) -> Tensor:
            of_block = self.summed.of_block
            scores = torch.einsum("sbhd,tbhd->sbht", of_block(queries, block.start, block.stop), keys)
            seen = visible(
                of_block(positions, block.start, block.stop),
                None if starts is None else of_block(starts, block.start, block.stop),
            )
            scores = (scores * self.scale).masked_fill(~seen.unsqueeze(2), -torch.inf)
            return scores.softmax(-1).sum(2)

        own_positions = self._own(positions)
        own_starts = None if starts is None else self._own(starts)

        def own_visible(block: slice) -> Tensor:
            return visible(own_positions[block], None if own_starts is None else own_starts[block])

        return loss.of_visible_rows(attention, self.summed, own_visible, counted)

    def _whole_keys(self, k: Tensor, v: Tensor, state: ForwardState) -> Tensor:
        """Return the keys of whole rows of this tp rank's heads."""
        if state.part is None:
            return k.detach()
        if self.way is None:
            return whole(k.detach(), self.cp, state.part)
        latents = whole_latents(self.way, k.detach(), v.detach(), state.part)
        return self.keys_and_values(*latents, None)[0]


def make(
    model: ModelConfig, block: BlockSpec, weights: Weights, mesh: Mesh, options: LayerOptions
) -> IndexedAttention:
    """Return the module of a block, see `BlockKind.make`."""
    return IndexedAttention(model, block, weights, mesh, options)
