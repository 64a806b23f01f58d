"""The pp × dp × cp × tp mesh of ranks and its process groups.

tp is innermost, then cp, dp, pp: rank = ((pp·DP + dp)·CP + cp)·TP + tp, so that the ranks that communicate
most are neighbours on one node. `ParallelDims` has the sizes; `Layout` adds the coordinates of every rank
(pure, for any world size); `Mesh` adds this process's groups, created once, eagerly, in the same order on
every rank. Groups over equal lists of ranks are shared. `python -m megalite.mesh --tp 2 --pp 2 --dp 2` prints
the coordinates of all ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING

from megalite.mesh.groups import ProcessGroups
from megalite.mesh.layout import AXES, PRODUCTS, AxisPlace, Coordinates
from megalite.mesh.layout import Layout as Layout
from megalite.mesh.meeting import Meetings
from megalite.system.activity import Activity

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from megalite.system.shared_memory import SharedMemory

SHARDS = ("shard", "replicate")  # names of groups on the data axis
TOTALS = ("totals_up", "totals_down")  # channels of sums that are passed along the pipeline, and back


@dataclass(frozen=True)
class MeshAxis:
    """This rank's view of one axis (or product of axes): its index among `ranks`, and their process group.

    Attributes:
        traffic: number of collectives issued, by (operation, axis name), for tests and reports.
        activity: the activity record of the mesh, in which collectives note their waits.
        shared: shared memory of the ranks of a tp axis that computes on the CPUs of one host; None otherwise.
    """

    name: str
    rank: int
    size: int
    ranks: tuple[int, ...]
    group: ProcessGroup | None = None  # None if the size is 1
    traffic: Counter[tuple[str, str]] = field(default_factory=Counter, compare=False, repr=False)
    activity: Activity = field(default_factory=Activity, compare=False, repr=False)
    shared: SharedMemory | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Domain:
    """The ranks that hold a kind of parameters.

    Dense parameters are held by all data ranks of a stage, an expert's by the ranks that have this expert.

    Attributes:
        shard: ranks that a bucket's weights, gradients and optimizer state are sharded over (ZeRO).
        replicate: ranks that hold the same shards.
        owners: number of equal parts of a bucket in norms and checkpoints.
        share: index of the part that only this rank counts in norms and stores in checkpoints.
    """

    name: str
    shard: MeshAxis
    replicate: MeshAxis

    @property
    def owners(self) -> int:
        """Number of ranks; each element of a bucket has exactly one of them as its owner."""
        return self.shard.size * self.replicate.size

    @property
    def share(self) -> int:
        # a shard is divided among its replicas
        return self.shard.rank * self.replicate.size + self.replicate.rank


def neighbours(ranks: tuple[int, ...], rank: int, size: int) -> tuple[int, ...]:
    """Return the group of `size` consecutive entries of `ranks` that contains `rank`."""
    first = ranks.index(rank) // size * size
    return ranks[first : first + size]


class Mesh:
    """This process's axes and channels.

    Args:
        dims: sizes of the axes; their product is the world size. Weights, gradients and optimizer state are
            sharded over groups of `dims.shard` neighbours of the data axis; the groups are replicas of each
            other.
        replicas: numbers of neighbouring tp ranks that hold the same part of a tensor, such as a key-value
            head.
        tied: the pipeline ranks with the two copies of a tied embedding; None: there is one copy, or none.
        channels: the point-to-point communicators over the pp axis by name, in the order of creation, each
            with the pairs of pipeline ranks (source, target) that use it.
        staggered_end: whether totals are summed along the pipeline, not over the world: adds their channels
            and the axis of a stage.
        stage_axis: whether the ranks of a stage have an axis also without that.
        counts_tokens: whether the data ranks sum valid tokens in every step: on NCCL gives `counting` a gloo
            group of its own, so that the count needs no device; otherwise it is the data axis.
        background: which of `saving` and `copying` communicate during training: each has a gloo group of its
            own; otherwise it is the world.
        timeout: time after which an operation fails if its peers do not answer; default: torch's.

    Raises:
        ValueError: the number of processes is not the product of the axes' sizes.
    """

    def __init__(
        self,
        dims: Layout,
        *,
        replicas: Collection[int] = (),
        tied: tuple[int, int] | None = None,
        channels: Mapping[str, Sequence[tuple[int, int]]] | None = None,
        staggered_end: bool = False,
        stage_axis: bool = False,
        counts_tokens: bool = False,
        background: Collection[str] = (),
        timeout: timedelta | None = None,
    ):
        import torch.distributed as dist

        self.dims, self.timeout = dims, timeout
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        available = dist.get_world_size() if dist.is_initialized() else 1
        if dims.world != available:
            raise ValueError(f"the mesh {dims} requires {dims.world} ranks, but {available} were started.")
        self.traffic: Counter[tuple[str, str]] = Counter()
        self.activity = Activity()
        urgent = {
            dims.peers(self.rank, ("tp",)),
            neighbours(dims.peers(self.rank, PRODUCTS["data"]), self.rank, dims.shard),
        }
        self._groups = ProcessGroups(timeout, urgent.__contains__)
        self.world = self._axis("world", dims.peers(self.rank, AXES))
        # cp has a communicator of its own: at dp = 1 what attention exchanges would queue behind reductions
        # over the same ranks.
        self.tp, self.cp, self.dp = (
            self._axis(name, dims.peers(self.rank, (name,)), own=name == "cp") for name in ("tp", "cp", "dp")
        )
        # Neighbours that exchange heads, and the ranks at this one's index in every such group.
        self.cp_levels = (
            self._split(self.cp, dims.context_inner, ("cp_inner", "cp_outer"), own=True)
            if dims.context_inner > 1
            else None
        )
        self.data = self._axis("data", dims.peers(self.rank, PRODUCTS["data"]))
        self.shard, self.replicate = self._split(self.data, dims.shard)
        # without experts none of these axes has peers
        stage = dims.peers(self.rank, PRODUCTS["stage"]) if dims.experts else (self.rank,)
        # as cp: rows must not wait
        self.expert = self._axis("expert", neighbours(stage, self.rank, dims.ep), own=True)
        self.expert_data = self._axis("expert_data", stage[stage.index(self.rank) % dims.ep :: dims.ep])
        names = "expert_shard", "expert_replicate"
        self.expert_split = self._split(
            self.expert_data, min(dims.expert_shard, self.expert_data.size), names
        )
        self.sequence = self._axis(
            "sequence", dims.peers(self.rank, ("cp", "tp")) if dims.experts else (self.rank,)
        )
        pp_ranks = dims.peers(self.rank, ("pp",))
        # No group of its own: stages communicate only through the channels.
        self.pp = MeshAxis("pp", pp_ranks.index(self.rank), dims.pp, pp_ranks, None, self.traffic)
        self.replicas = {
            number: self._axis("kv_replica", neighbours(self.tp.ranks, self.rank, number))
            for number in sorted(replicas)
        }
        self.tied_pair = self._tied_pair(tied)
        up = [(rank, rank + 1) for rank in range(dims.pp - 1)]
        totals = (
            dict(zip(TOTALS, (up, [(target, source) for source, target in up]), strict=True))
            if staggered_end
            else {}
        )
        edges = {**(channels or {}), **totals} if dims.pp > 1 else {}
        self.channels = {name: self._groups.new(self.pp.ranks, kind="channel") for name in edges}
        self.stage = (
            self._axis("stage", dims.peers(self.rank, PRODUCTS["stage"]))
            if staggered_end or stage_axis
            else None
        )
        self.saving, self.copying = (
            replace(self.world, name=name, group=self._groups.on_cpu(self.world.ranks))
            if name in background and self.world.size > 1
            else self.world
            for name in ("saving", "copying")
        )
        own = counts_tokens and self.data.size > 1 and dist.get_backend() == "nccl"
        self.counting = (
            replace(self.data, name="counting", group=self._groups.on_cpu(self.data.ranks))
            if own
            else self.data
        )
        self.meet = Meetings(self.activity, timeout)
        self._groups.connect(self.channels, edges, self.pp.ranks, self.pp.rank)
        # only tp: its collectives are on the critical path of every layer
        self.tp = self._with_shared_memory(self.tp)

    @property
    def coordinates(self) -> Coordinates:
        """Return this rank's index and the size of every axis, including derived axes."""
        axes = (self.pp, self.dp, self.cp, self.tp, self.data, self.expert, self.expert_data)
        return Coordinates({axis.name: AxisPlace(axis.rank, axis.size) for axis in axes})

    def domain(self, name: str) -> Domain:
        """Return the ranks that shard and reduce the parameters of a domain: `dense` or `expert`."""
        if name == "dense":
            return Domain(name, self.shard, self.replicate)
        assert name == "expert", name
        return Domain(name, *self.expert_split)

    def _axis(self, name: str, ranks: tuple[int, ...], own: bool = False) -> MeshAxis:
        group = (self._groups.own if own else self._groups.over)(ranks) if len(ranks) > 1 else None
        return MeshAxis(name, ranks.index(self.rank), len(ranks), ranks, group, self.traffic, self.activity)

    def _with_shared_memory(self, axis: MeshAxis) -> MeshAxis:
        import torch.distributed as dist

        if axis.group is None or dist.get_backend(axis.group) != "gloo":
            return axis
        from megalite.system.shared_memory import SharedMemory

        return replace(
            axis, shared=SharedMemory.open(axis.ranks, axis.group, self.timeout or dist.default_pg_timeout)
        )

    def _split(
        self, axis: MeshAxis, size: int, names: Sequence[str] = SHARDS, own: bool = False
    ) -> tuple[MeshAxis, MeshAxis]:
        """Split an axis into groups of `size` neighbours.

        Returns this rank's group, and the ranks at its index in every group.
        """
        group = (
            axis if size == axis.size else self._axis(names[0], neighbours(axis.ranks, self.rank, size), own)
        )
        return group, axis if size == 1 else self._axis(names[1], axis.ranks[axis.rank % size :: size], own)

    def _tied_pair(self, tied: tuple[int, int] | None) -> MeshAxis | None:
        if tied is None:
            return None
        if self.pp.rank in tied:
            return self._axis("tied_pair", tuple(sorted(self.pp.ranks[stage] for stage in tied)))
        # torch names a locally synchronized group after its ranks and the number of groups that the process
        # has made: members agree on the name only if every rank has made the same number. With two pipeline
        # ranks all are in the pair.
        if self.pp.size > 2:
            self._groups.new((self.rank,))
        return None
