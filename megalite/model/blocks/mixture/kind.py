"""What a mixture of experts answers as a kind of block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megalite.config.layer_blocks import LAYER_BLOCKS
from megalite.config.schema import Config
from megalite.config.sections.model import ModelConfig
from megalite.model.block_kind import BlockKind, BlockSpec
from megalite.model.blocks.mixture import parameters
from megalite.model.cost.records import Dispatch
from megalite.parallel.spec import ParamSpec

if TYPE_CHECKING:
    import torch

    from megalite.model.block_module import BlockModule
    from megalite.model.cost.recomputed import Group
    from megalite.model.cost.records import BlockCost
    from megalite.model.cost.units import Units
    from megalite.model.spec_builder import SpecBuilder
    from megalite.model.statistics import ModelStatistics


class MixtureKind(BlockKind):
    """A router, the experts that it chooses for each token, and often a shared expert."""

    name = "mixture"
    slot, context = LAYER_BLOCKS[name]
    output_operation = "experts"

    def specs(self, build: SpecBuilder, block: BlockSpec) -> list[ParamSpec]:
        return parameters.specs(build, block.name)

    def idle_parameters(self, model: ModelConfig) -> int:
        return parameters.idle_parameters(model)

    def dispatch(self, model: ModelConfig) -> Dispatch:
        packed = (2 if model.gated_mlp else 1) * model.expert_width
        return Dispatch(
            experts=model.num_experts or 0,
            choices=model.num_experts_per_tok,
            width=model.expert_input,
            kept=model.expert_input + packed,
            operation="experts",
            capacity_factor=model.expert_capacity_factor,
        )

    def statistics(
        self, config: Config, blocks: Sequence[BlockModule], device: torch.device
    ) -> ModelStatistics | None:
        routers: ModelStatistics = self.file("router_states").routers(config, blocks, device)
        return routers

    def output_factor(self, model: ModelConfig) -> float:
        return model.mixture_out_multiplier

    def learns(self, model: ModelConfig) -> bool:
        return model.router_balance != "sequence"

    def recomputed(self, units: Units, cost: BlockCost) -> list[Group]:
        groups: list[Group] = self.file("cost").recomputed(cost)
        return groups
