"""What a short convolution answers as a kind of block."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megalite.config.layer_blocks import LAYER_BLOCKS
from megalite.model.block_kind import BlockSpec
from megalite.model.blocks.convolution import parameters
from megalite.model.mixer_kind import MixerKind
from megalite.parallel.spec import ParamSpec

if TYPE_CHECKING:
    from megalite.model.spec_builder import SpecBuilder


class ConvolutionKind(MixerKind):
    """A gated short convolution."""

    name = "convolution"
    slot, context = LAYER_BLOCKS[name]

    def specs(self, build: SpecBuilder, block: BlockSpec) -> list[ParamSpec]:
        return parameters.specs(build, block.name)
