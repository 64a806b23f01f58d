"""What delta, mamba and convolution blocks answer alike as kinds of blocks."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from megalite.model.block_kind import BlockKind

if TYPE_CHECKING:
    from megalite.model.block_module import BlockModule
    from megalite.model.cost.recomputed import Group
    from megalite.model.cost.records import BlockCost
    from megalite.model.cost.units import Units


class MixerKind(BlockKind):
    """A kind whose blocks are a `MixerBlock`."""

    joins_output = True

    def recomputed(self, units: Units, cost: BlockCost) -> list[Group]:
        groups: list[Group] = import_module("megalite.model.cost.mixers").recomputed(cost)
        return groups

    def cached(self, block: BlockModule) -> BlockModule:
        cached: BlockModule = self.file("cache").cached(block)
        return cached
