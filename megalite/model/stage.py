"""A pipeline stage: consecutive units of the model.

The first stage has the embedding, the last one the head and the loss.

A stage communicates only through the modules of `parallel.tensor` (over tp) and its `WeightGatherer` (over
the shard axis); the runtime sends activations between stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from megalite.config.schema import Config
from megalite.config.sections.model import ModelConfig
from megalite.mesh.mesh import Mesh
from megalite.model.block_module import BlockModule
from megalite.model.cost.units import LOSS_CHUNK_ON_GPU
from megalite.model.forward_state import Dropout, ForwardState, Site
from megalite.model.kinds import block_kinds
from megalite.model.layer import Layer, PlacedBlock, Scale, as_node, make_layer, make_norm
from megalite.model.layer_options import LayerOptions
from megalite.model.mtp.losses import further_losses
from megalite.model.unit_numbers import head_unit
from megalite.parallel.compiled_ops import CompiledOps
from megalite.parallel.microbatch import Microbatch, StageOutput
from megalite.parallel.node import Chain, Differentiable
from megalite.parallel.sharding.weight_gatherer import WeightGatherer
from megalite.parallel.tensor.cross_entropy import CrossEntropy, loss_in_chunks
from megalite.parallel.tensor.embedding import ParallelEmbedding
from megalite.parallel.tensor.linear import ColumnParallelLinear
from megalite.parallel.weight import Weights

if TYPE_CHECKING:
    from megalite.model.mtp.modules import MultiTokenPrediction
    from megalite.model.objective.losses import HeadLosses
    from megalite.objectives.objective import Objective


class Head(nn.Module):
    """Final norm, vocabulary projection and loss.

    Args:
        chunk: tokens whose logits are computed at a time, so that the whole logits never exist; 0: all at
            once. None: LOSS_CHUNK_ON_GPU on a GPU, 0 on a CPU.
    """

    def __init__(
        self,
        model: ModelConfig,
        weights: Weights,
        mesh: Mesh,
        options: LayerOptions,
        loss: CrossEntropy,
        chunk: int | None,
    ):
        super().__init__()
        self.plain_norm = make_norm(model, weights, "norm", options.ops)
        self.scale = None if model.logit_factor is None else Scale(model.logit_factor)
        # cheaper than scaling the logits
        self.norm = self.plain_norm if self.scale is None else Chain([self.plain_norm, self.scale])
        name = "embedding.weight" if model.tied_head else "head.weight"
        self.project = ColumnParallelLinear(weights[name], None, mesh.tp, options.sequence_parallel)
        self.softcap, self.loss = model.logit_softcap, loss
        self.chunk = (LOSS_CHUNK_ON_GPU if weights[name].tensor.is_cuda else 0) if chunk is None else chunk

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits of x: [seq (/tp), batch, hidden] -> [seq, batch, vocabulary/tp].

        Padded columns are included.
        """
        return self.logits_of(self.norm(x))

    def logits_of(self, normed: Tensor) -> Tensor:
        """Return the logits of the output of `norm`, as `logits`."""
        logits = self.project(normed)
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def losses(self, x: Tensor, microbatch: Microbatch, state: ForwardState) -> tuple[Tensor, Tensor]:
        """Return the scaled loss of the next token, and the total of all losses, which are the same here.

        Args:
            x: the output of the last layer, [seq (/tp), batch, hidden].
        """
        normed, weights = self.norm(x), microbatch.weights
        loss = self.loss_of(normed, microbatch.targets, state.loss_scale, self.loss, weights)
        return loss, loss

    def loss_of(
        self,
        x: Tensor,
        targets: Tensor,
        scale: float | Tensor,
        of_logits: Callable[[Tensor, Tensor, float | Tensor, Tensor | None], Tensor],
        weights: Tensor | None = None,
    ) -> Tensor:
        """Return the sum of the token losses times `scale`, a scalar.

        Args:
            x: the normed output of the last layer, [seq (/tp), batch, hidden].
            targets: [seq, batch].
            of_logits: as `CrossEntropy`, called for one chunk after the other, in order.
            weights: of the targets, [seq, batch]; None: all are 1.
        """

        def loss(part: Tensor, part_targets: Tensor, part_weights: Tensor | None) -> Tensor:
            logits = self.logits_of(part).flatten(0, 1)  # [tokens, vocabulary/tp]
            return of_logits(logits, part_targets, scale, part_weights)

        # Chunks compute weight gradients in the forward. A split backward computes them in the W pass, which
        # needs the gradient of all logits: no chunks.
        if not self.chunk or self.project.weight.deferred:
            return loss(x, targets.reshape(-1), None if weights is None else weights.reshape(-1))
        return loss_in_chunks(loss, x, targets, self.project.weight, self.chunk_length(x, targets), weights)

    def chunk_length(self, x: Tensor, targets: Tensor) -> int:
        """Return the number of positions of x in a chunk.

        They are those of this rank, so that the tp ranks that split the sequence have `chunk` tokens
        together.
        """
        return max(self.chunk * len(x) // targets.numel(), 1)


class Stage(nn.Module):
    """The units `units` of the model on this rank: 0 is the embedding, 1 … L the layers, L + 1 the head.

    `forward` takes tokens [seq, batch] (first stage) or the previous stage's activations [seq (/tp), batch,
    hidden]. It returns activations, or the scaled sum of the token losses (last stage).

    Args:
        weights: this rank's stored tensors by name.
        gatherer: called before and after each unit. Under ZeRO-3 it gathers and frees the unit's weights,
            otherwise it waits until the weights of the last update have arrived.
        dtype: compute precision.
        objective: what is minimized in place of the cross-entropy of tokens.
    """

    def __init__(
        self,
        config: Config,
        units: Sequence[int],
        weights: Weights,
        gatherer: WeightGatherer,
        mesh: Mesh,
        dtype: torch.dtype,
        objective: Objective | None = None,
    ):
        super().__init__()
        model, train, ops = config.model, config.train, CompiledOps(config.train.compile)
        options = LayerOptions.of(config, 0, ops)
        sequence_parallel = options.sequence_parallel
        self.units, self.gatherer, self.dtype, self.seed = units, gatherer, dtype, config.run.seed
        self.model_config, self.lora_dropout = model, config.lora.dropout
        self.head_unit = last = head_unit(model)
        self.embedding = None
        if 0 in units:
            positions = weights.get("positions.weight")
            self.embedding = ParallelEmbedding(
                weights["embedding.weight"], positions, mesh.tp, sequence_parallel, model.embedding_scale
            )
            if model.embedding_norm:
                from megalite.model.normed_embedding import NormedEmbedding

                freed = config.parallel.zero == 3  # before the backward
                self.embedding = NormedEmbedding(model, weights, mesh, options, freed)
        self.embedding_dropout = Dropout(
            model.embedding_dropout, Site.EMBEDDING, 0, mesh.tp, sequence_parallel
        )
        self.layers = nn.ModuleDict()  # by unit
        for unit in units:
            if 0 < unit < last:
                layer_options = LayerOptions.of(config, unit - 1, ops)
                self.layers[str(unit)] = make_layer(model, unit - 1, weights, mesh, layer_options)
        self.single, self.joined = [self._layer(int(unit)) for unit in self.layers], self._joined()
        loss = CrossEntropy(mesh.tp, model.vocabulary, train.label_smoothing, train.z_loss)
        has_logits = last in units and model.output_head == "vocabulary"
        self.head = Head(model, weights, mesh, options, loss, train.loss_chunk) if has_logits else None
        self.further_losses: MultiTokenPrediction | None = None
        if self.head is not None and further_losses(model):
            from megalite.model.mtp.modules import MultiTokenPrediction

            self.further_losses = MultiTokenPrediction(config, self.head, weights, mesh, ops, loss)
        self.sequence_losses: HeadLosses | None = None  # also set by `training.teacher`
        if self.head is not None and objective is not None:
            from megalite.model.objective.losses import SequenceLosses

            self.sequence_losses = SequenceLosses(self.head, objective, mesh)
        elif last in units and objective is not None:
            from megalite.model.objective.reward import RewardLosses

            self.sequence_losses = RewardLosses(model, weights, mesh, options, objective)
        # what kinds of blocks add to the state of each microbatch
        inputs = (kind.inputs(model, dtype) for kind in block_kinds(model))
        self._inputs = [add for add in inputs if add is not None]

    def blocks(self, kind: str) -> list[BlockModule]:
        """Return the blocks of a kind, those of MTP modules included."""
        placed = (module for module in self.modules() if isinstance(module, PlacedBlock))
        return [each.block for each in placed if each.spec.kind == kind]

    def forward_state(
        self, microbatch: Microbatch, step: int, training: bool, lengths: Sequence[int] | None = None
    ) -> ForwardState:
        """Return the properties of a microbatch for all units.

        Args:
            step: part of the key of dropout masks.
            lengths: as in `ForwardState`.
        """
        state = ForwardState(
            samples=microbatch.samples,
            step=step,
            seed=self.seed,
            training=training,
            positions=microbatch.positions,
            segments=microbatch.segments,
            document_start=microbatch.document_start,
            part=microbatch.part,
            lora_dropout=self.lora_dropout,
            boundaries=microbatch.boundaries,
            lengths=lengths,
        )
        for add in self._inputs:
            add(state)
        return state

    def trunk(self, x: Tensor, state: ForwardState) -> Tensor:
        """Run all units except the head.

        The input is tokens [seq, batch] or activations; the output is activations [seq (/tp), batch, hidden].
        """
        if self.embedding is not None:
            x = self.gatherer.pre_forward(0, x)  # [seq, batch] token ids
            positions = state.document_positions if self.embedding.positions is not None else None
            x = self.embedding(x, positions)  # [seq (/tp), batch, hidden]
            x = self.embedding_dropout(self.gatherer.post_forward(0, x), state)
        for run in self.joined if torch.is_grad_enabled() else self.single:
            x = run(x, state)
        return x

    def _layer(self, unit: int) -> Callable[[Tensor, ForwardState], Tensor]:
        """Return a function that computes a layer."""
        layer, gatherer = self.layers[str(unit)], self.gatherer

        # Both calls are part of the autograd graph under ZeRO-3: in backward post_forward gathers the
        # weights, pre_forward frees them.
        def run(x: Tensor, state: ForwardState) -> Tensor:
            return gatherer.post_forward(unit, layer(gatherer.pre_forward(unit, x), state))

        return run

    def _joined(self) -> list[Callable[[Tensor, ForwardState], Tensor]]:
        """Return functions that compute the layers one after the other, of which as many as possible are one
        node of autograd's graph."""
        runs: list[Callable[[Tensor, ForwardState], Tensor]] = []
        for joins, group in groupby(map(int, self.layers), lambda unit: self.layers[str(unit)].is_node):
            units = list(group)
            if not joins:
                runs.extend(map(self._layer, units))
                continue
            operations: list[Differentiable] = []
            for unit in units:
                layer = self.layers[str(unit)]
                assert isinstance(layer, Layer)
                operations += self.gatherer.between_boundaries(unit, layer.placed)
            runs.append(as_node(operations))
        return runs

    def forward(
        self, x: Tensor, microbatch: Microbatch, state: ForwardState, loss_scale: float | Tensor
    ) -> StageOutput:
        state.targets, state.loss_scale, state.query_scale = microbatch.targets, loss_scale, loss_scale
        if microbatch.queries is not None:
            state.counted = microbatch.queries.counted
            state.query_scale = loss_scale * microbatch.queries.factor
        x = self.trunk(x, state)
        further = self.further_losses if state.training else None
        head = self.sequence_losses or further or self.head
        if head is None:
            return StageOutput(x, state.statistics)
        x = self.gatherer.pre_forward(self.head_unit, x)
        own, loss = head.losses(x, microbatch, state)  # [] each
        # detached: the sum over microbatches must not keep their graphs
        statistics = {"loss": own.detach(), **state.statistics}
        return StageOutput(self.gatherer.post_forward(self.head_unit, loss), statistics)

    def logits(self, x: Tensor, state: ForwardState) -> Tensor:
        """Return the logits of the last stage, [seq, batch, vocabulary/tp]."""
        assert self.head is not None, "only the last stage has logits"
        x = self.gatherer.pre_forward(self.head_unit, self.trunk(x, state))
        return self.gatherer.post_forward(self.head_unit, self.head.logits(x))
