"""What Mamba-2 answers as a kind of block."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megalite.config.layer_blocks import LAYER_BLOCKS
from megalite.config.sections.model import ModelConfig
from megalite.model.block_kind import BlockKind, BlockSpec
from megalite.model.blocks.mamba import parameters
from megalite.parallel.spec import ParamSpec

if TYPE_CHECKING:
    from megalite.model.block_module import BlockModule
    from megalite.model.cost.mixers import StateSizes
    from megalite.model.cost.recomputed import Group
    from megalite.model.cost.records import BlockCost, Share
    from megalite.model.cost.units import Units
    from megalite.model.spec_builder import SpecBuilder


class MambaKind(BlockKind):
    """Mamba-2."""

    name = "mamba"
    slot, context = LAYER_BLOCKS[name]
    joins_output = True

    def specs(self, build: SpecBuilder, block: BlockSpec) -> list[ParamSpec]:
        return parameters.specs(build, block.name)

    def replicas(self, model: ModelConfig, tp: int) -> int:
        return parameters.group_replicas(model, tp)

    def output_factor(self, model: ModelConfig) -> float:
        return model.mamba_out_multiplier

    def state_sizes(self, model: ModelConfig, share: Share) -> StateSizes:
        sizes: StateSizes = self.file("context").state_sizes(model, share)
        return sizes

    def recomputed(self, units: Units, cost: BlockCost) -> list[Group]:
        groups: list[Group] = self.file("cost").recomputed(cost)
        return groups

    def cached(self, block: BlockModule) -> BlockModule:
        cached: BlockModule = self.file("cache").cached(block)
        return cached
