"""Options of how a layer is computed, as opposed to what it computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from megalite.config.schema import Config
from megalite.mesh.mesh import Mesh
from megalite.parallel.compiled_ops import CompiledOps


@dataclass(frozen=True)
class LayerOptions:
    """Options of one layer.

    Attributes:
        sequence_parallel: False where tp is 1.
        recompute: what backward computes again: none, selective, full, or operations joined by +.
        expert_dispatch: how tokens reach their experts.
        context: how attention exchanges the parts of a sequence, with more than one cp rank.
        ops: the functions between linears, eager or compiled.
    """

    sequence_parallel: bool
    recompute: str
    expert_dispatch: str
    context: str
    ops: CompiledOps

    @staticmethod
    def of(config: Config, layer: int, ops: CompiledOps) -> LayerOptions:
        parallel = config.parallel
        sequence_parallel = parallel.sequence_parallel and parallel.tp > 1
        return LayerOptions(
            sequence_parallel,
            config.train.recompute_of(layer),
            parallel.expert_dispatch,
            parallel.context,
            ops,
        )

    @property
    def recomputes_scores(self) -> bool:
        """Whether attention's backward computes its probabilities again."""
        return self.recompute == "selective" or "scores" in self.recompute.split("+")

    def attention_over(self, mesh: Mesh) -> Callable[..., Tensor] | None:
        """Attention of this rank's part of every sequence to the whole (`parallel.context`). None: the rank
        has whole sequences."""
        if mesh.cp.size == 1:
            return None
        from megalite.parallel.context.attend import attention_over

        return attention_over(mesh.cp, self.context, mesh.cp_levels)
