"""Options that determine how a layer is computed, but not its result."""

from __future__ import annotations

from dataclasses import dataclass

from megalite.config.schema import Config
from megalite.parallel.compiled_ops import CompiledOps


@dataclass(frozen=True)
class LayerOptions:
    """Options of one layer.

    Attributes:
        sequence_parallel: False where tp is 1.
        recompute: activation checkpointing: none, selective, full, or the recomputed operations joined by +.
        expert_dispatch: the method of dispatch and combine.
        context: the method of context parallelism, with more than one cp rank.
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
        """Whether attention's backward recomputes its probabilities."""
        return self.recompute == "selective" or "scores" in self.recompute.split("+")

    @property
    def recomputes_experts(self) -> bool:
        """Whether backward runs the forward of MoE blocks again, which must repeat the choice of experts."""
        return self.recompute == "full" or "experts" in self.recompute.split("+")
