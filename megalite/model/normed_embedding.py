"""The embedding with a norm of its output (`model.embedding_norm`).

Under sequence parallelism each tp rank norms its part of the sequence. Communicates as `ParallelEmbedding`.
"""

from __future__ import annotations

from torch import Tensor

from megalite.config.sections.model import ModelConfig
from megalite.mesh.mesh import Mesh
from megalite.model.layer import make_norm
from megalite.model.layer_options import LayerOptions
from megalite.parallel.tensor.embedding import ParallelEmbedding
from megalite.parallel.tensor.norm_weights import CopiedWeight
from megalite.parallel.weight import Weights

NAME = "embedding_norm"


class NormedEmbedding(ParallelEmbedding):
    """norm(embedding): [seq, batch] -> [seq (/tp), batch, hidden].

    Args:
        freed: ZeRO-3: the weights are freed after the forward, and not gathered for the backward of an
            embedding. The norm then keeps a copy of its own.
    """

    def __init__(self, model: ModelConfig, weights: Weights, mesh: Mesh, options: LayerOptions, freed: bool):
        positions, parallel = weights.get("positions.weight"), options.sequence_parallel
        super().__init__(weights["embedding.weight"], positions, mesh.tp, parallel, model.embedding_scale)
        own = {name: weight for name, weight in weights.items() if name.startswith(f"{NAME}.")}
        self.copied = {name: CopiedWeight(weight) for name, weight in own.items()} if freed else {}
        self.norm = make_norm(model, self.copied or own, NAME, options.ops)

    def forward(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        for each in self.copied.values():
            each.copy()
        normed: Tensor = self.norm(super().forward(tokens, positions))
        return normed
