"""The state and the end of the convolution's input that a Mamba-2 block keeps in generation."""

from __future__ import annotations

from megalite.model.block_module import BlockModule
from megalite.model.blocks.mamba.block import MambaMixer
from megalite.model.mixer_block import MixerBlock
from megalite.model.mixer_cache import CachedMixer


def cached(block: BlockModule) -> CachedMixer:
    """Return the block that generation uses, see `BlockKind.cached`."""
    assert isinstance(block, MixerBlock) and isinstance(block.mixer, MambaMixer)
    mixer = block.mixer
    channels, taps = mixer.conv.tensor.shape
    return CachedMixer(block, (channels, taps), (mixer.heads, mixer.xbc[1] // mixer.groups, mixer.width))
