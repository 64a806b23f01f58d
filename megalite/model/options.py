"""Options of how a layer is computed, as opposed to what it computes."""

from __future__ import annotations

from dataclasses import dataclass

from megalite.config.schema import Config
from megalite.parallel.compiled_ops import CompiledOps


@dataclass(frozen=True)
class LayerOptions:
    """Options of one layer.

    Attributes:
        sequence_parallel: False where tp is 1.
        recompute: what backward computes again: none, selective or full.
        expert_dispatch: how tokens reach their experts.
        ops: the functions between linears, eager or compiled.
    """

    sequence_parallel: bool
    recompute: str
    expert_dispatch: str
    ops: CompiledOps

    @staticmethod
    def of(config: Config, layer: int, ops: CompiledOps) -> LayerOptions:
        parallel = config.parallel
        return LayerOptions(parallel.sequence_parallel and parallel.tp > 1, config.train.recompute_of(layer), parallel.expert_dispatch, ops)
