"""What indexed attention answers as a kind of block."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from megalite.config.layer_blocks import LAYER_BLOCKS
from megalite.config.schema import Config
from megalite.config.sections.model import ModelConfig
from megalite.model.block_kind import BlockSpec
from megalite.model.blocks.indexed_attention import parameters
from megalite.model.blocks.latent_attention.kind import LatentAttentionKind
from megalite.parallel.spec import ParamSpec

if TYPE_CHECKING:
    import torch

    from megalite.model.block_module import BlockModule
    from megalite.model.cost.recomputed import Group
    from megalite.model.cost.records import BlockCost, Kernels
    from megalite.model.cost.units import Units
    from megalite.model.spec_builder import SpecBuilder
    from megalite.model.statistics import ModelStatistics


class IndexedAttentionKind(LatentAttentionKind):
    """Latent attention to the rows that an indexer selects."""

    name = "indexed_attention"
    slot, context = LAYER_BLOCKS[name]

    def specs(self, build: SpecBuilder, block: BlockSpec) -> list[ParamSpec]:
        return super().specs(build, block) + parameters.specs(build, block)

    def follows(self, model: ModelConfig, layer: int) -> bool:
        return model.selects_before(layer)

    def counts_queries(self, model: ModelConfig) -> bool:
        return model.index_loss_coef > 0

    def alike(self, model: ModelConfig, layer: int) -> Hashable:
        return super().alike(model, layer), model.selecting_layer(layer) == layer

    def recomputed(self, units: Units, cost: BlockCost) -> list[Group]:
        groups: list[Group] = self.file("cost").recomputed(units, cost)
        return groups

    def keeps_scores(self, model: ModelConfig, kernels: Kernels) -> bool:
        return False

    def statistics(
        self, config: Config, blocks: Sequence[BlockModule], device: torch.device
    ) -> ModelStatistics | None:
        statistics: ModelStatistics | None = self.file("loss").statistics(config, blocks, device)
        return statistics
