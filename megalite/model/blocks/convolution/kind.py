"""What a short convolution answers as a kind of block."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megalite.config.layer_blocks import LAYER_BLOCKS
from megalite.model.block_kind import BlockKind, BlockSpec
from megalite.model.blocks.convolution import parameters
from megalite.parallel.spec import ParamSpec

if TYPE_CHECKING:
    from megalite.model.block_module import BlockModule
    from megalite.model.cost.recomputed import Group
    from megalite.model.cost.records import BlockCost
    from megalite.model.cost.units import Units
    from megalite.model.spec_builder import SpecBuilder


class ConvolutionKind(BlockKind):
    """A gated short convolution."""

    name = "convolution"
    slot, context = LAYER_BLOCKS[name]
    joins_output = True

    def specs(self, build: SpecBuilder, block: BlockSpec) -> list[ParamSpec]:
        return parameters.specs(build, block.name)

    def recomputed(self, units: Units, cost: BlockCost) -> list[Group]:
        groups: list[Group] = self.file("cost").recomputed(cost)
        return groups

    def cached(self, block: BlockModule) -> BlockModule:
        cached: BlockModule = self.file("cache").cached(block)
        return cached
