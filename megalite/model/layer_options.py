"""Options that determine how a layer is computed, but not its result."""

from __future__ import annotations

from dataclasses import dataclass

from megalite.config.recompute import operations_of
from megalite.config.schema import Config
from megalite.model.cost.records import Share
from megalite.parallel.compiled_ops import CompiledOps


@dataclass(frozen=True)
class LayerOptions:
    """Options of one layer.

    Attributes:
        sequence_parallel: False where tp is 1.
        recompute: activation checkpointing: none, selective, full, or the recomputed operations joined by +.
        expert_dispatch: the method of dispatch and combine.
        share: this rank's part of a microbatch, with the methods of context parallelism.
        ops: the functions between linears, eager or compiled.
        adapter_dropout: the probability of dropout before adapters.
        indexer_warmup: whether attention is dense while indexers are trained.
    """

    sequence_parallel: bool
    recompute: str
    expert_dispatch: str
    share: Share
    ops: CompiledOps
    adapter_dropout: float = 0.0
    indexer_warmup: bool = False

    @staticmethod
    def of(config: Config, layer: int, ops: CompiledOps) -> LayerOptions:
        parallel = config.parallel
        sequence_parallel = parallel.sequence_parallel and parallel.tp > 1
        return LayerOptions(
            sequence_parallel,
            config.train.recompute_of(layer),
            parallel.expert_dispatch,
            Share.of(parallel, config.data.sequence_length, config.train.micro_batch_size),
            ops,
            config.lora.dropout,
            config.train.indexer == "warmup",
        )

    def recomputes(self, operation: str) -> bool:
        """Return whether backward computes an operation of `train.recompute` again by itself."""
        return operation in operations_of(self.recompute)
