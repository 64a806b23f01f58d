"""Settings and connections of NCCL's communicators. Imported where NCCL is used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

CHANNEL_CTAS = 4
"""Thread blocks of a message between stages. A receive that is posted early spins with all of its blocks on
the multiprocessors that the computation could use, and by default there are up to 32; a few of them already
fill a link. Buffers are per block, too."""


def options(kind: Literal["channel", "urgent"]) -> Any:
    """Return the options of a group.

    Args:
        kind: a pipeline channel gets few thread blocks; for an urgent group, whose collectives computation
            waits for, the device starts their blocks before those of queued computations.
    """
    import torch.distributed as dist

    settings = dist.ProcessGroupNCCL.Options(is_high_priority_stream=kind == "urgent")
    if kind == "channel" and hasattr(settings, "config"):  # builds with an older NCCL have none
        settings.config.max_ctas = CHANNEL_CTAS
    return settings


def connect(
    group: ProcessGroup,
    edges: Sequence[tuple[int, int]],
    ranks: Sequence[int],
    own: int,
    device: torch.device,
) -> None:
    """Connect the peers of this rank on a channel, for the direction that each edge has, by one message on
    it.

    NCCL connects peers at their first message, separately for each direction, and allocates the buffers of a
    connection then.

    Args:
        edges: messages on the pp axis, (source, target).
        ranks: the global ranks of the pp axis, which edges are indices of.
        own: this rank's index among them.
    """
    import torch
    import torch.distributed as dist

    sends = [
        dist.P2POp(dist.isend, torch.ones(1, device=device), ranks[target], group)
        for source, target in edges
        if source == own
    ]
    receives = [
        dist.P2POp(dist.irecv, torch.ones(1, device=device), ranks[source], group)
        for source, target in edges
        if target == own
    ]
    for work in dist.batch_isend_irecv([*sends, *receives]) if sends or receives else ():
        work.wait()
