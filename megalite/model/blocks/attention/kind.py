"""What attention answers as a kind of block."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from megalite.config.layer_blocks import LAYER_BLOCKS
from megalite.config.schema import Config
from megalite.config.sections.model import ModelConfig
from megalite.model.block_kind import BlockKind, BlockSpec
from megalite.model.blocks.attention import parameters
from megalite.parallel.spec import ParamSpec

if TYPE_CHECKING:
    import torch

    from megalite.model.block_module import BlockModule
    from megalite.model.cost.recomputed import Group
    from megalite.model.cost.records import BlockCost, Kernels
    from megalite.model.cost.units import Units
    from megalite.model.forward_state import ForwardState
    from megalite.model.spec_builder import SpecBuilder

ROOM = __name__.rpartition(".")[0]


class AttentionKind(BlockKind):
    """Attention with keys and values of its own."""

    name = "attention"
    slot, context = LAYER_BLOCKS[name]
    joins_output = True

    def specs(self, build: SpecBuilder, block: BlockSpec) -> list[ParamSpec]:
        return parameters.specs(build, block)

    def replicas(self, model: ModelConfig, tp: int) -> set[int]:
        return {parameters.kv_replicas(shape.kv_heads, tp) for shape in model.attention_shapes}

    def outdated_after(self, model: ModelConfig) -> int | None:
        return model.longrope_context  # its keys have the factors of shorter sequences

    def inputs(self, model: ModelConfig, dtype: torch.dtype) -> Callable[[ForwardState], None] | None:
        if model.position != "rope":
            return None
        tables: Callable[[ForwardState], None]
        if model.longrope_context is not None:
            tables = import_module(f"{ROOM}.longrope").LongropeInputs(model, dtype)
        else:
            tables = import_module(f"{ROOM}.rotary").RotaryInputs(model, dtype)
        if model.query_scale_beta is not None:
            tables = import_module(f"{ROOM}.query_scale").QueryScaleInputs(model, dtype, tables)
        return tables

    def output_factor(self, model: ModelConfig) -> float:
        return model.attention_in_multiplier * model.attention_out_multiplier

    def alike(self, model: ModelConfig, layer: int) -> Hashable:
        return model.window(layer), model.attention_shape(layer), model.has_sinks(layer)

    def recomputed(self, units: Units, cost: BlockCost) -> list[Group]:
        groups: list[Group] = import_module(f"{ROOM}.cost").recomputed(units, cost)
        return groups

    def window(self, model: ModelConfig, layer: int) -> int | None:
        return model.window(layer)

    def table_values(self, model: ModelConfig, layers: Sequence[int], positions: int) -> int:
        if not any(map(model.uses_rope, layers)):
            return 0
        width = model.rotary_width
        if model.local_rotation is not None:  # the layers with a window have tables of their own
            width += model.local_rotation[0]
        factors = positions if positions > (model.query_scale_positions or positions) else 0
        return 2 * positions * width + factors  # cos and sin

    def keeps_scores(self, model: ModelConfig, kernels: Kernels) -> bool:
        keeps: bool = import_module(f"{ROOM}.cost").keeps_scores(model, kernels)
        return keeps

    def cached(self, block: BlockModule) -> BlockModule:
        cached: BlockModule = self.file("cache").cached(block)
        return cached

    def routes(self, config: Config, device: torch.device, dtype: torch.dtype, documents: bool) -> list[str]:
        lines: list[str] = import_module(f"{ROOM}.kernel_route").routes(config, device, dtype, documents)
        return lines
