"""What Mamba-2 answers as a kind of block."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megalite.config.layer_blocks import LAYER_BLOCKS
from megalite.config.sections.model import ModelConfig
from megalite.model.block_kind import BlockSpec
from megalite.model.blocks.mamba import parameters
from megalite.model.mixer_kind import MixerKind
from megalite.parallel.spec import ParamSpec

if TYPE_CHECKING:
    from megalite.model.cost.mixers import StateSizes
    from megalite.model.cost.records import Share
    from megalite.model.spec_builder import SpecBuilder


class MambaKind(MixerKind):
    """Mamba-2."""

    name = "mamba"
    slot, context = LAYER_BLOCKS[name]

    def specs(self, build: SpecBuilder, block: BlockSpec) -> list[ParamSpec]:
        return parameters.specs(build, block.name)

    def replicas(self, model: ModelConfig, tp: int) -> set[int]:
        return {parameters.group_replicas(model, tp)}

    def output_factor(self, model: ModelConfig) -> float:
        return model.mamba_out_multiplier

    def state_sizes(self, model: ModelConfig, share: Share) -> StateSizes:
        sizes: StateSizes = self.file("context").state_sizes(model, share)
        return sizes
