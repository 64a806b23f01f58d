"""The end of its input that a short convolution keeps in generation."""

from __future__ import annotations

from megalite.model.block_module import BlockModule
from megalite.model.blocks.convolution.block import ConvolutionMixer
from megalite.model.mixer_block import MixerBlock
from megalite.model.mixer_cache import CachedMixer


def cached(block: BlockModule) -> CachedMixer:
    """Return the block that generation uses, see `BlockKind.cached`."""
    assert isinstance(block, MixerBlock) and isinstance(block.mixer, ConvolutionMixer)
    channels, taps = block.mixer.weight.tensor.shape
    return CachedMixer(block, (channels, taps))
