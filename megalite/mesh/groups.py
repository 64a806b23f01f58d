"""The process groups of a mesh.

Each is made once, in the same order on every rank, and connected before the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Kind = Literal["channel", "urgent"]  # see `nccl.options`
Edges = Sequence[tuple[int, int]]  # pairs of ranks (source, target)


class ProcessGroups:
    """Makes the groups of this process. Groups over equal lists of ranks are one group.

    Args:
        timeout: time after which an operation fails if its peers do not answer; None: torch's.
        urgent: whether collectives over these ranks go before others of the device.
    """

    def __init__(self, timeout: timedelta | None, urgent: Callable[[tuple[int, ...]], bool]):
        self._timeout, self._urgent = timeout, urgent
        self._shared: dict[tuple[int, ...], ProcessGroup] = {}
        self._own: list[ProcessGroup] = []
        self._on_cpu: list[ProcessGroup] = []

    def over(self, ranks: tuple[int, ...]) -> ProcessGroup:
        """Return the group over these ranks."""
        import torch.distributed as dist

        if ranks not in self._shared:
            world = len(ranks) == dist.get_world_size()
            kind: Kind | None = "urgent" if self._urgent(ranks) else None
            self._shared[ranks] = dist.group.WORLD if world else self.new(ranks, kind=kind)  # type: ignore[assignment]
        return self._shared[ranks]

    def own(self, ranks: tuple[int, ...]) -> ProcessGroup:
        """Return an urgent group that is not shared with other axes over these ranks.

        Its collectives do not queue behind the collectives of those axes.
        """
        self._own.append(self.new(ranks, kind="urgent"))
        return self._own[-1]

    def on_cpu(self, ranks: tuple[int, ...]) -> ProcessGroup:
        """Return a gloo group of its own."""
        self._on_cpu.append(self.new(ranks, "gloo"))
        return self._on_cpu[-1]

    def new(
        self, ranks: tuple[int, ...], backend: str | None = None, kind: Kind | None = None
    ) -> ProcessGroup:
        """Make a group.

        On gloo only its members synchronize: at a thousand ranks no rank waits for groups that it is not in.

        On NCCL every group is split off the world's communicator (ncclCommSplit), in which the whole world
        takes part. So every rank makes its groups axis by axis in the same order and number; otherwise
        ranks could wait for each other in a cycle.
        """
        import torch.distributed as dist

        options = None
        if kind is not None and dist.get_backend() == "nccl":
            from megalite.system import nccl

            options = nccl.options(kind)
            options._timeout = self._timeout or options._timeout
        return dist.new_group(
            list(ranks),
            timeout=self._timeout,
            backend=backend,
            pg_options=options,
            use_local_synchronization=True,
        )

    def connect(
        self, channels: Mapping[str, ProcessGroup], edges: Mapping[str, Edges], ranks: Sequence[int], own: int
    ) -> None:
        """Connect every communicator, in the same order on every rank.

        If communicators connect lazily, the first use in the pipeline can hang.

        Args:
            channels: point-to-point groups over the same ranks, by name.
            edges: for each channel the pairs of indices among `ranks` that use it.
            own: this process's index among `ranks`.
        """
        import torch
        import torch.distributed as dist

        if not dist.is_initialized() or dist.get_backend() == "fake":
            return
        cuda = dist.get_backend() == "nccl"
        device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        # On NCCL a collective over a channel would connect all its ranks in both directions, and each
        # connection takes memory.
        for group in (*self._shared.values(), *self._own, *(() if cuda else channels.values())):
            dist.all_reduce(torch.ones(1, device=device), group=group)
        for group in self._on_cpu:
            dist.all_reduce(torch.ones(1), group=group)
        for name, group in channels.items() if cuda else ():
            from megalite.system import nccl

            nccl.connect(group, edges[name], ranks, own, device)
