"""Who talks to whom: the pp × dp × cp × tp mesh of ranks and its process groups.

tp is innermost, then cp, dp, pp: rank = ((pp·DP + dp)·CP + cp)·TP + tp, so that the ranks that talk most are neighbours on one node.
`ParallelDims` has the sizes, `Layout` adds who sits where (pure, for any world), `Mesh` this process's groups, created once, eagerly, in
one order on every rank; groups over equal rank lists are one group. `python -m megalite.mesh --tp 2 --pp 2 --dp 2` prints who is where.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING

from megalite.activity import Activity
from megalite.layout import AXES, AxisPlace, Coordinates
from megalite.layout import Layout as Layout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from megalite.shared_memory import SharedMemory

PRODUCTS = {"data": ("dp", "cp"), "model": ("pp", "tp"), "stage": ("dp", "cp", "tp"), "world": AXES}
TOTALS = ("totals_up", "totals_down")  # channels of sums that travel along the pipeline, and back


@dataclass(frozen=True)
class MeshAxis:
    """This rank's view of one axis (or product of axes): its place among `ranks`, and the group they talk through.

    `traffic` counts the collectives issued, by (operation, axis): what a step really communicates can be read and tested.
    `shared` is memory that all ranks of a tp axis share, where they compute on CPUs of one host. `activity` is the mesh's own.
    """

    name: str
    rank: int
    size: int
    ranks: tuple[int, ...]
    group: ProcessGroup | None = None  # None where the size is 1: there is nobody to talk to
    traffic: Counter[tuple[str, str]] = field(default_factory=Counter, compare=False, repr=False)
    activity: Activity = field(default_factory=Activity, compare=False, repr=False)
    shared: SharedMemory | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Domain:
    """A kind of parameters by who holds them: dense ones are on all data ranks of a stage, an expert's on those that hold this expert.

    Attributes:
        shard: ranks that share weights, gradients and optimizer state of a bucket between them.
        replicate: ranks that hold the same shards.
        share: which of `owners` equal parts of a bucket this rank alone counts in norms and stores in checkpoints.
    """

    name: str
    shard: MeshAxis
    replicate: MeshAxis

    @property
    def owners(self) -> int:
        """Ranks among which each element of a bucket has one owner."""
        return self.shard.size * self.replicate.size

    @property
    def share(self) -> int:
        return self.shard.rank * self.replicate.size + self.replicate.rank  # replicas divide their shard among themselves


class Mesh:
    """This process's axes and channels.

    Args:
        dims: sizes of the axes; their product is the world size. `dims.shard` neighbours of the data axis share weights, gradients and
            optimizer state between them; the others are replicas of them.
        kv_replicas: tp ranks that hold the same key-value head (1 where there are at least tp heads).
        tied: the pipeline ranks that hold the two copies of a tied embedding, or None.
        channels: names of the point-to-point communicators over the pp axis, in the order of creation.
        timeout: after which an operation whose peers do not answer fails; by default torch's.
        staggered_end: whether totals are summed along the pipeline, not over the world: adds their channels and the axis of a stage.
        background_saves: whether saves talk beside training: gives `saving`, the world otherwise, a group of its own, over CPUs.
    """

    def __init__(
        self,
        dims: Layout,
        *,
        kv_replicas: int = 1,
        tied: tuple[int, int] | None = None,
        channels: Sequence[str] = (),
        staggered_end: bool = False,
        background_saves: bool = False,
        timeout: timedelta | None = None,
    ):
        import torch.distributed as dist

        self.dims, self.timeout = dims, timeout
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        available = dist.get_world_size() if dist.is_initialized() else 1
        if dims.world != available:
            raise ValueError(f"the mesh {dims} needs {dims.world} ranks, but {available} were started")
        self.traffic: Counter[tuple[str, str]] = Counter()
        self.activity = Activity()
        self._groups: dict[tuple[int, ...], ProcessGroup] = {}
        self.world = self._axis("world", dims.peers(self.rank, AXES))
        self.tp, self.cp, self.dp = (self._axis(name, dims.peers(self.rank, (name,))) for name in ("tp", "cp", "dp"))
        self.data = self._axis("data", dims.peers(self.rank, PRODUCTS["data"]))
        self.expert, self.expert_data = self._axis("expert", (self.rank,)), self._axis("expert_data", self.data.ranks)  # every rank has all
        self.shard, self.replicate = self._split(self.data, dims.shard)
        pp_ranks = dims.peers(self.rank, ("pp",))
        self.pp = MeshAxis("pp", pp_ranks.index(self.rank), dims.pp, pp_ranks, None, self.traffic)  # talks through its channels alone
        first = self.tp.rank - self.tp.rank % kv_replicas
        self.kv_replica = self._axis("kv_replica", self.tp.ranks[first : first + kv_replicas])
        self.tied_pair = self._tied_pair(tied)
        names = [*channels, *(TOTALS if staggered_end else ())]
        self.channels = {name: self._new_group(self.pp.ranks) for name in names} if self.pp.size > 1 else {}
        self.stage = self._axis("stage", dims.peers(self.rank, PRODUCTS["stage"])) if staggered_end else None
        own = background_saves and self.world.size > 1
        self.saving = replace(self.world, name="saving", group=self._new_group(self.world.ranks, "gloo")) if own else self.world
        self._warm_up()
        self.tp = self._with_shared_memory(self.tp)

    @property
    def coordinates(self) -> Coordinates:
        """This rank's place on every axis, derived ones included."""
        axes = (self.pp, self.dp, self.cp, self.tp, self.data, self.expert, self.expert_data)
        return Coordinates({axis.name: AxisPlace(axis.rank, axis.size) for axis in axes})

    def domain(self, name: str) -> Domain:
        """Who shares and reduces the parameters of a domain: `dense`, or `expert`."""
        if name == "dense":
            return Domain(name, self.shard, self.replicate)
        assert name == "expert", name
        return Domain(name, self.expert_data, self.expert)  # one expert group: the same ranks, each sharing all

    def _axis(self, name: str, ranks: tuple[int, ...]) -> MeshAxis:
        group = self._group(ranks) if len(ranks) > 1 else None
        return MeshAxis(name, ranks.index(self.rank), len(ranks), ranks, group, self.traffic, self.activity)

    def _with_shared_memory(self, axis: MeshAxis) -> MeshAxis:
        import torch.distributed as dist

        if axis.group is None or dist.get_backend(axis.group) != "gloo":
            return axis
        from megalite.shared_memory import SharedMemory

        return replace(axis, shared=SharedMemory.open(axis.ranks, axis.group, self.timeout or dist.default_pg_timeout))

    def _split(self, axis: MeshAxis, size: int) -> tuple[MeshAxis, MeshAxis]:
        """An axis cut into groups of `size` neighbours: this rank's group, and its counterparts in the others."""
        group, place = divmod(axis.rank, size)
        neighbours, counterparts = axis.ranks[group * size : (group + 1) * size], axis.ranks[place::size]
        shard = axis if size == axis.size else self._axis("shard", neighbours)
        return shard, axis if size == 1 else self._axis("replicate", counterparts)

    def _tied_pair(self, tied: tuple[int, int] | None) -> MeshAxis | None:
        if tied is None or tied[0] == tied[1]:
            return None
        if self.pp.rank in tied:
            return self._axis("tied_pair", tuple(sorted(self.pp.ranks[stage] for stage in tied)))
        # torch names a locally synchronised group after its ranks and the number of groups made so far: every rank must make as many.
        if self.pp.size > 2:
            self._new_group((self.rank,))
        return None

    def _group(self, ranks: tuple[int, ...]) -> ProcessGroup:
        import torch.distributed as dist

        if ranks not in self._groups:
            world = len(ranks) == dist.get_world_size()
            self._groups[ranks] = dist.group.WORLD if world else self._new_group(ranks)  # type: ignore[assignment]
        return self._groups[ranks]

    def _new_group(self, ranks: tuple[int, ...], backend: str | None = None) -> ProcessGroup:
        """Only the members meet: at a thousand ranks nobody waits for groups that are not its own.

        Every rank makes its groups axis by axis in the same order, and equally many, so members never wait for each other in a circle.
        """
        import torch.distributed as dist

        return dist.new_group(list(ranks), timeout=self.timeout, backend=backend, use_local_synchronization=True)

    def _warm_up(self) -> None:
        """Connect every communicator now, in one order: a lazy first use inside the pipeline could hang."""
        import torch
        import torch.distributed as dist

        if not dist.is_initialized() or dist.get_backend() == "fake":
            return
        device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
        for group in (*self._groups.values(), *self.channels.values()):
            dist.all_reduce(torch.ones(1, device=device), group=group)
        if self.saving is not self.world:
            dist.all_reduce(torch.ones(1), group=self.saving.group)
        for group in self.channels.values() if device.type == "cuda" else ():  # NCCL connects senders and receivers apart from collectives
            neighbours = [self.pp.ranks[(self.pp.rank + step) % self.pp.size] for step in (1, -1)]
            sends = [dist.P2POp(dist.isend, torch.ones(1, device=device), peer, group) for peer in neighbours]
            receives = [dist.P2POp(dist.irecv, torch.ones(1, device=device), peer, group) for peer in reversed(neighbours)]
            for work in dist.batch_isend_irecv([*sends, *receives]):
                work.wait()


if __name__ == "__main__":
    from megalite.mesh_map import main

    main()
