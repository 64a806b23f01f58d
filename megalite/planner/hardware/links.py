"""The time of communication: rings and trees over the links between a group's ranks. Seconds and bytes.

Ranks are laid out tp innermost, then cp, dp and pp (`megalite.mesh`), so a group is a size and a stride: tp
has stride 1, cp stride tp, as has data = dp · cp, pp stride tp · cp · dp. A node holds consecutive ranks.

A ring passes through the ranks of a node over the link inside the node, and leaves the node once. Every rank
has its own network card, and as in NCCL there are as many rings as the group has ranks on a node, each over
another card, so bandwidth between nodes is their sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from megalite.planner.hardware.devices import Device

START = 5e-6
"""Seconds from the call of a collective to its first byte, including the launch of its kernel."""


@dataclass(frozen=True)
class Group:
    """A group of communicating ranks, with `local` ranks on each of `nodes` nodes."""

    size: int
    local: int
    nodes: int


def group(device: Device, size: int, stride: int, world: int = 0) -> Group:
    """Return a group of equally spaced ranks.

    If they do not fill nodes evenly, `local` is the smallest number on any node.

    Args:
        world: number of ranks that consecutive groups of this kind fill. If a node does not hold whole
            groups, some groups span two nodes, and all others wait for them. By default, a group that fits
            into a node is inside one.
    """
    return placed(device.per_node, size, stride, world)


@cache
def placed(per_node: int, size: int, stride: int, world: int) -> Group:
    """Return the group for nodes with `per_node` ranks."""
    if (block := size * stride) <= per_node:
        if world <= per_node or per_node % block == 0:
            return Group(size, size, 1)
        local = max(1, math.gcd(block, per_node) // stride)
        return Group(size, local, size // local)
    local = max(1, per_node // stride)
    while size % local:
        local -= 1
    return Group(size, local, size // local)


@dataclass(frozen=True)
class Fabric:
    """Times of collectives over a device's groups.

    In all methods `size` is the bytes of the whole tensor: what every rank holds before an all-reduce or
    reduce-scatter, or after an all-gather.
    """

    device: Device

    def bandwidth(self, ranks: Group) -> float:
        """Return the bytes/s of a ring."""
        within, between = self.device.within.bandwidth, self.device.between.bandwidth
        if ranks.nodes == 1:
            return within
        return between if ranks.local == 1 else min(within, ranks.local * between)

    def _hops(self, ranks: Group) -> float:
        """Return the latency of one pass around the ring."""
        leaving = ranks.nodes if ranks.nodes > 1 else 0
        return (ranks.size - leaving) * self.device.within.latency + leaving * self.device.between.latency

    def half(self, size: float, ranks: Group) -> float:
        """Return the time of an all-gather or a reduce-scatter with a ring.

        (n - 1)/n of the bytes pass over each link, in n - 1 steps.
        """
        if ranks.size == 1 or size == 0:
            return 0.0
        share = (ranks.size - 1) / ranks.size
        return START + share * (size / self.bandwidth(ranks) + self._hops(ranks))

    def all_reduce(self, size: float, ranks: Group) -> float:
        """Return the time of the faster of a ring and a double tree.

        A ring moves 2 (n - 1)/n of the bytes in 2 (n - 1) steps, a tree twice the bytes in about
        2 log n steps.
        """
        if ranks.size == 1 or size == 0:
            return 0.0
        share = 2 * (ranks.size - 1) / ranks.size
        ring = share * (size / self.bandwidth(ranks) + self._hops(ranks))
        depth = (ranks.local - 1) * self.device.within.latency + math.log2(
            ranks.nodes
        ) * self.device.between.latency
        tree = 2 * (size / self.bandwidth(ranks) + depth)
        return START + min(ring, tree)

    def all_to_all(self, size: float, ranks: Group) -> float:
        """Return the time of an all-to-all: each rank sends 1/n of its `size` bytes to each other rank.

        Bytes for other nodes pass through the rank's own network card.
        """
        if ranks.size == 1 or size == 0:
            return 0.0
        inside = (ranks.local - 1) / ranks.size * size / self.device.within.bandwidth
        outside = (ranks.size - ranks.local) / ranks.size * size / self.device.between.bandwidth
        link = self.device.within if ranks.nodes == 1 else self.device.between
        return START + link.latency + max(inside, outside)

    def hop(self, size: float, ranks: Group) -> float:
        """Return the time in which every rank sends `size` bytes to the next rank of a ring.

        The slowest are those with the next rank on another node.
        """
        if ranks.size == 1 or size == 0:
            return 0.0
        link = self.device.within if ranks.nodes == 1 else self.device.between
        return START + link.latency + size / link.bandwidth

    def send(self, size: float, world: int) -> float:
        """Return the time of a message between neighbouring stages.

        It uses the link between nodes, unless the whole world is inside one node.
        """
        inside = self.device.messages or self.device.within
        link = inside if world <= self.device.per_node else self.device.between
        return START + link.latency + size / link.bandwidth
