"""A pipeline stage: a contiguous run of the model's units, embedding first and head last where it has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from megalite_kernels.rotary import rotary_tables
from torch import Tensor, nn

from megalite.batch import Microbatch, StageOutput
from megalite.config.schema import Config, ModelConfig
from megalite.mesh import Mesh
from megalite.model.forward_state import Dropout, ForwardState, Site
from megalite.model.options import LayerOptions
from megalite.model.parameters import head_unit
from megalite.model.transformer import Layer, make_norm
from megalite.parallel.compiled_ops import CompiledOps
from megalite.parallel.sharding.weight_gatherer import WeightGatherer
from megalite.parallel.tensor.cross_entropy import CrossEntropy, loss_in_chunks
from megalite.parallel.tensor.embedding import ParallelEmbedding
from megalite.parallel.tensor.linear import ColumnParallelLinear
from megalite.parallel.weight import Weight

CHUNK_ON_GPU = 4096  # tokens: adding to the fp32 weight gradient of a chunk takes a twentieth of its products' time


class Head(nn.Module):
    """Final norm, vocabulary projection and loss: of `chunk` tokens at a time, of all at once where it is 0, by default so on a CPU."""

    def __init__(
        self, model: ModelConfig, weights: Mapping[str, Weight], mesh: Mesh, options: LayerOptions, loss: CrossEntropy, chunk: int | None
    ):
        super().__init__()
        self.norm = make_norm(model, weights, "norm", options.ops)
        name = "embedding.weight" if model.tie_word_embeddings else "head.weight"
        self.project = ColumnParallelLinear(weights[name], None, mesh.tp, options.sequence_parallel)
        self.softcap, self.loss = model.logit_softcap, loss
        self.chunk = (CHUNK_ON_GPU if weights[name].tensor.is_cuda else 0) if chunk is None else chunk

    def logits(self, x: Tensor) -> Tensor:
        """[seq, batch, vocabulary/tp], padded columns included."""
        return self._logits(self.norm(x))

    def _logits(self, normed: Tensor) -> Tensor:
        logits = self.project(normed)
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def forward(self, x: Tensor, targets: Tensor, scale: float) -> Tensor:
        def loss(part: Tensor, its: Tensor) -> Tensor:
            return self.loss(self._logits(part).flatten(0, 1), its, scale)

        normed, weight = self.norm(x), self.project.weight
        if not self.chunk or weight.deferred:  # its product belongs into a weight pass, which needs the gradient of the logits
            return loss(normed, targets.reshape(-1))
        return loss_in_chunks(loss, normed, targets, weight, max(self.chunk * x.shape[0] // targets.numel(), 1))


class Stage(nn.Module):
    """The units [units.start, units.stop) of the model on this rank.

    forward takes tokens (first stage) or the previous stage's activations, and returns activations, or the summed loss (last stage).
    """

    def __init__(
        self,
        config: Config,
        units: Sequence[int],
        weights: Mapping[str, Weight],
        gatherer: WeightGatherer,
        mesh: Mesh,
        dtype: torch.dtype,
    ):
        super().__init__()
        model, train, ops = config.model, config.train, CompiledOps(config.train.compile)
        options = LayerOptions.of(config, 0, ops)
        sequence_parallel = options.sequence_parallel
        self.units, self.gatherer, self.dtype, self.seed = units, gatherer, dtype, config.run.seed
        self.model_config, self.lora_dropout = model, config.lora.dropout
        last = head_unit(model)
        self.embedding = None
        if 0 in units:
            positions = weights.get("positions.weight")
            self.embedding = ParallelEmbedding(weights["embedding.weight"], positions, mesh.tp, sequence_parallel, model.embedding_scale)
        self.embedding_dropout = Dropout(model.embedding_dropout, Site.EMBEDDING, 0, mesh.tp, sequence_parallel)
        self.layers = nn.ModuleDict(
            {str(unit): Layer(model, unit - 1, weights, mesh, LayerOptions.of(config, unit - 1, ops)) for unit in units if 0 < unit < last}
        )
        loss = CrossEntropy(mesh.tp, model.vocabulary, train.label_smoothing, train.z_loss)
        self.head = Head(model, weights, mesh, options, loss, train.loss_chunk) if last in units else None
        self._rotary: dict[tuple[tuple[int, ...], int], tuple[Tensor, Tensor]] = {}  # by starts and length

    def forward_state(self, microbatch: Microbatch, step: int, training: bool) -> ForwardState:
        """What every unit needs to know about a microbatch; `step` keys the dropout masks."""
        state = ForwardState(
            samples=microbatch.samples,
            step=step,
            seed=self.seed,
            training=training,
            positions=microbatch.positions,
            starts=microbatch.starts,
            document_start=microbatch.document_start,
            lora_dropout=self.lora_dropout,
        )
        if self.model_config.position == "rope":
            state.rotary = self._rotary_tables(state)
        return state

    def _rotary_tables(self, state: ForwardState) -> tuple[Tensor, Tensor]:
        """cos and sin of the positions. Positions that are alike in every row, which the host knows by their starts, share them."""
        model, positions = self.model_config, state.document_positions
        alike = state.starts if state.document_start is None else ()
        tables = self._rotary.get((alike, len(positions))) if alike else None
        if tables is None:
            positions = positions.squeeze(1)
            tables = rotary_tables(positions, model.head_size, model.rope_theta, model.rope_scaling, self.dtype, positions.device)
            if alike:
                self._rotary[alike, len(positions)] = tables
        return tables

    def trunk(self, x: Tensor, state: ForwardState) -> Tensor:
        """Everything but the head: tokens or activations in, activations out."""
        if self.embedding is not None:
            x = self.gatherer.pre_forward(0, x)
            x = self.embedding(x, state.document_positions if self.embedding.positions is not None else None)
            x = self.embedding_dropout(self.gatherer.post_forward(0, x), state)
        for name, layer in self.layers.items():
            unit = int(name)
            x = self.gatherer.post_forward(unit, layer(self.gatherer.pre_forward(unit, x), state))
        return x

    def forward(self, x: Tensor, microbatch: Microbatch, state: ForwardState, loss_scale: float) -> StageOutput:
        x = self.trunk(x, state)
        if self.head is None:
            return StageOutput(x)
        unit = head_unit(self.model_config)
        loss = self.gatherer.post_forward(unit, self.head(self.gatherer.pre_forward(unit, x), microbatch.targets, loss_scale))
        return StageOutput(loss, {"loss": loss.detach()})

    def logits(self, x: Tensor, state: ForwardState) -> Tensor:
        """Logits of the last stage, [seq, batch, vocabulary/tp]."""
        assert self.head is not None, "only the last stage has logits"
        unit = head_unit(self.model_config)
        return self.gatherer.post_forward(unit, self.head.logits(self.gatherer.pre_forward(unit, self.trunk(x, state))))
