"""What the feed-forward answers as a kind of block."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megalite.config.layer_blocks import LAYER_BLOCKS
from megalite.config.sections.model import ModelConfig
from megalite.model.block_kind import BlockKind, BlockSpec
from megalite.model.blocks.feed_forward import parameters
from megalite.parallel.spec import ParamSpec

if TYPE_CHECKING:
    from megalite.model.cost.recomputed import Group
    from megalite.model.cost.records import BlockCost
    from megalite.model.cost.units import Units
    from megalite.model.spec_builder import SpecBuilder


class FeedForwardKind(BlockKind):
    """A feed-forward that computes each position by itself."""

    name = "feed_forward"
    slot, context = LAYER_BLOCKS[name]
    output_operation = "mlp_out"

    def specs(self, build: SpecBuilder, block: BlockSpec) -> list[ParamSpec]:
        return parameters.specs(build, block.name, build.model.intermediate_size)

    def output_factor(self, model: ModelConfig) -> float:
        return 1.0 if model.mlp_multipliers is None else model.mlp_multipliers[1]

    def recomputed(self, units: Units, cost: BlockCost) -> list[Group]:
        groups: list[Group] = self.file("cost").recomputed(cost)
        return groups
