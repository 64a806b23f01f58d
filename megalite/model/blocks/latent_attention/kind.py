"""What latent attention answers as a kind of block."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megalite.config.layer_blocks import LAYER_BLOCKS
from megalite.model.block_kind import BlockSpec
from megalite.model.blocks.attention.kind import AttentionKind
from megalite.model.blocks.latent_attention import parameters
from megalite.parallel.spec import ParamSpec

if TYPE_CHECKING:
    from megalite.model.spec_builder import SpecBuilder


class LatentAttentionKind(AttentionKind):
    """Attention whose keys and values are computed from latents."""

    name = "latent_attention"
    slot, context = LAYER_BLOCKS[name]

    def specs(self, build: SpecBuilder, block: BlockSpec) -> list[ParamSpec]:
        return parameters.specs(build, block.name)
