"""Measurement of the bandwidth of the links between ranks (`network.test`).

In each round every rank sends to the rank `stride` places further, for strides 1, 2, 4, …, so that links
within a machine and between machines are tested. All ranks start a round at the same time, and the best round
of each link is used, so that a slow link does not affect the results of others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megalite.mesh.mesh import Mesh
from megalite.parallel.collectives import message

MESSAGE_BYTES = 8 << 20


class LinkTraffic(NamedTuple):
    source: int
    target: int
    bytes_per_second: float


def describe(links: Sequence[LinkTraffic]) -> str:
    """Describe the slowest link and the median in one line."""
    slowest = min(links, key=lambda link: link.bytes_per_second)
    usual = median(link.bytes_per_second for link in links)
    return (
        f"network test: the slowest of {len(links)} links is from rank {slowest.source} to rank "
        f"{slowest.target} with {slowest.bytes_per_second / 1e9:.3g} GB/s; the median is "
        f"{usual / 1e9:.3g} GB/s"
    )


def measure(mesh: Mesh, device: torch.device, seconds: float = 3.0) -> list[LinkTraffic]:
    """Measure the bandwidths between ranks. Collective.

    Takes about `seconds`, with all links in use at the same time. The result is the same on every rank.
    """
    strides = [2**power for power in range((mesh.world.size - 1).bit_length())]
    best: dict[int, float] = {}
    deadline = perf_counter() + seconds
    going_on = True
    while going_on:
        for stride in strides:
            took = _send_on(mesh, device, stride)
            best[stride] = min(took, best.get(stride, took))
        vote: list[Any] = [perf_counter() < deadline]
        # the clock of rank 0 decides for all ranks, which must leave the loop together
        dist.broadcast_object_list(vote, src=0)
        going_on = vote[0]
    own = [
        LinkTraffic((mesh.rank - stride) % mesh.world.size, mesh.rank, MESSAGE_BYTES / took)
        for stride, took in best.items()
    ]
    everyone: list[Any] = [None] * mesh.world.size
    dist.all_gather_object(everyone, own)
    return list(_flat(everyone))


def _flat(lists: Iterable[Iterable[LinkTraffic]]) -> Iterable[LinkTraffic]:
    return (link for each in lists for link in each)


def _send_on(mesh: Mesh, device: torch.device, stride: int) -> float:
    """Send to the rank `stride` places further.

    Returns:
        the time until the message from the rank `stride` places before has arrived, in seconds.
    """
    world, group = mesh.world, mesh.world.group
    target, source = (
        world.ranks[(world.rank + stride) % world.size],
        world.ranks[(world.rank - stride) % world.size],
    )
    outgoing, incoming = (torch.zeros(MESSAGE_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = perf_counter()
    if device.type == "cuda":  # NCCL only matches messages of one batch
        batch = [
            dist.P2POp(dist.isend, outgoing, target, group),
            dist.P2POp(dist.irecv, incoming, source, group),
        ]
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        torch.cuda.synchronize(device)
        return perf_counter() - start
    receive = message(dist.irecv, incoming, source, group, "network test", mesh.activity)
    send = message(dist.isend, outgoing, target, group, "network test", mesh.activity)
    receive.wait()
    took = perf_counter() - start
    send.wait()
    return took
