"""How long communication takes: rings and trees over the links that a group of ranks really has. Seconds and bytes.

Ranks are laid out tp innermost, then dp, then pp (`megalite.mesh`), so a group is a size and a stride: tp has stride 1, dp stride tp, pp
stride tp · dp. A node holds neighbouring ranks.

A ring passes the ranks of a node one after the other over the inner link and leaves the node once. Every member has a network card of its
own, and as many rings run as the group has members on a node, each over another card (NCCL does so): between nodes it has their sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megalite.planning.hardware import Device

START = 5e-6
"""Seconds from the call of a collective to its first byte, with the kernel that carries it."""


@dataclass(frozen=True)
class Group:
    """Ranks that communicate, `local` of them on each of `nodes` nodes."""

    size: int
    local: int
    nodes: int


def group(device: Device, size: int, stride: int, world: int = 0) -> Group:
    """A group of equally spaced ranks; where they do not fill nodes evenly, the fewest that any node has.

    Args:
        world: ranks that such groups fill one after the other. Where a node does not hold whole groups, some lie across its end, and all
            others wait for them; without it every group that may lie inside a node does.
    """
    if (block := size * stride) <= device.per_node:
        if world <= device.per_node or device.per_node % block == 0:
            return Group(size, size, 1)
        local = max(1, math.gcd(block, device.per_node) // stride)
        return Group(size, local, size // local)
    local = max(1, device.per_node // stride)
    while size % local:
        local -= 1
    return Group(size, local, size // local)


@dataclass(frozen=True)
class Fabric:
    """Collectives of a device's groups.

    Args of all: size, the bytes of the whole (of what every rank has before an all-reduce or reduce-scatter, and after an all-gather).
    """

    device: Device

    def bandwidth(self, ranks: Group) -> float:
        """Bytes/s at which a ring moves."""
        within, between = self.device.within.bandwidth, self.device.between.bandwidth
        if ranks.nodes == 1:
            return within
        return between if ranks.local == 1 else min(within, ranks.local * between)

    def _hops(self, ranks: Group) -> float:
        """Latency of once around the ring."""
        leaving = ranks.nodes if ranks.nodes > 1 else 0
        return (ranks.size - leaving) * self.device.within.latency + leaving * self.device.between.latency

    def half(self, size: float, ranks: Group) -> float:
        """An all-gather or a reduce-scatter, by a ring: (n - 1)/n of the bytes pass each link, in n - 1 steps."""
        if ranks.size == 1 or size == 0:
            return 0.0
        share = (ranks.size - 1) / ranks.size
        return START + share * (size / self.bandwidth(ranks) + self._hops(ranks))

    def all_reduce(self, size: float, ranks: Group) -> float:
        """The faster of a ring, 2 (n - 1)/n of the bytes in 2 (n - 1) steps, and of two trees, twice the bytes in about 2 log n steps."""
        if ranks.size == 1 or size == 0:
            return 0.0
        share = 2 * (ranks.size - 1) / ranks.size
        ring = share * (size / self.bandwidth(ranks) + self._hops(ranks))
        depth = (ranks.local - 1) * self.device.within.latency + math.log2(ranks.nodes) * self.device.between.latency
        tree = 2 * (size / self.bandwidth(ranks) + depth)
        return START + min(ring, tree)

    def send(self, size: float, world: int) -> float:
        """A message between neighbouring stages of a world of ranks: where some share a node and others do not, the slower way counts."""
        inside = self.device.messages or self.device.within
        link = inside if world <= self.device.per_node else self.device.between
        return START + link.latency + size / link.bandwidth
