"""Settings and connections of NCCL's communicators. Imports no torch before a communicator is made; without NCCL nothing here is called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

Edge = tuple[int, int]
"""Indices on the pp axis (source, target) between which messages are sent."""
CHANNEL_CTAS = 4
"""Thread blocks of a message between stages. A receive that is posted early spins with all of its blocks on the multiprocessors that the
computation could use, and by default there are up to 32; a few of them already fill a link. Buffers are per block, too."""
BYTES_PER_CTA = 8 << 20
"""Buffers of one block at one end of a connection. Estimate: about 0.5 GB for a peer with 32 blocks in both directions."""


def channel_options() -> Any:
    """Options of a pipeline channel: few thread blocks."""
    options = _options(urgent=False)
    if hasattr(options, "config"):  # builds with an older NCCL have none
        options.config.max_ctas = CHANNEL_CTAS
    return options


def urgent_options() -> Any:
    """Options of a group whose collectives computation waits for: the device starts their blocks before those of queued computations."""
    return _options(urgent=True)


def _options(urgent: bool) -> Any:
    import torch.distributed as dist

    return dist.ProcessGroupNCCL.Options(is_high_priority_stream=urgent)


def chain(size: int, down: bool = False) -> tuple[Edge, ...]:
    """The edges from each rank to the next, or down to the previous one."""
    up = tuple((rank, rank + 1) for rank in range(size - 1))
    return tuple((target, source) for source, target in up) if down else up


def connect(group: ProcessGroup, edges: Sequence[Edge], ranks: Sequence[int], own: int, device: torch.device) -> None:
    """Connect the peers of this rank on a channel, for the direction that each edge has, by one message on it.

    NCCL connects peers at their first message, separately for each direction, and allocates the buffers of a connection then.

    Args:
        ranks: the global ranks of the pp axis, which edges are indices of.
        own: this rank's index among them.
    """
    import torch
    import torch.distributed as dist

    sends = [dist.P2POp(dist.isend, torch.ones(1, device=device), ranks[target], group) for source, target in edges if source == own]
    receives = [dist.P2POp(dist.irecv, torch.ones(1, device=device), ranks[source], group) for source, target in edges if target == own]
    for work in dist.batch_isend_irecv([*sends, *receives]) if sends or receives else ():
        work.wait()


def connection_bytes(edges: Sequence[Edge], rank: int) -> int:
    """Memory of a rank's connections on a channel: each edge that it has is an end with its own buffers."""
    return sum(rank in edge for edge in edges) * CHANNEL_CTAS * BYTES_PER_CTA
