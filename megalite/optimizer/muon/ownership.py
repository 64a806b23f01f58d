"""The owner of each matrix, and the parts of it that are exchanged: a pure function of the buckets.

    rank 0   rank 1   rank 2   rank 3        the shards of a bucket; q spans two of them, k one, down three
    [ q          |  k ][ down         ...
      → owner of q: rank 0 or 1    → owner of down: rank 1, 2 or 3

Every matrix has one owner among the ranks that hold a part of it. Longest processing time first (Graham
1969): the most expensive matrix goes to the least loaded of its ranks. Each element reaches the owner from
exactly one rank, itself if it holds it; the result goes to every rank that keeps state of it. Matrices are
exchanged in rounds, in which every rank owns at most one, so that buffers are few.

A part of a matrix is the rows or columns of one tp coordinate; key-value heads may have fewer parts than
there are ranks. Ranges are elements of the bucket, in which a part lies at the same place on every tp rank.
Gate, up and down of each expert are matrices of their own, whole on the ranks that hold this expert; other
ranks have other experts at the same place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import NamedTuple

from megalite.mesh.layout import PRODUCTS, AxisPlace, Coordinates, Layout
from megalite.optimizer.registry import is_matrix
from megalite.parallel.sharding.buckets import BucketLayout
from megalite.parallel.spec import LocalPart, Segment


class MatrixPiece(NamedTuple):
    """Piece of a matrix: elements [start, stop) of the bucket on one rank.

    `part` is an index among the parts of the matrix, and `rank` the rank's index in the stage.
    """

    rank: int
    part: int
    start: int
    stop: int


@dataclass(frozen=True)
class OwnedMatrix:
    """A matrix of a stage.

    Attributes:
        bucket: index of its bucket.
        start, stop: where the bucket has a rank's part of it.
        parts: the different parts of it, in order.
        owner: the rank that orthogonalizes it: an index in the stage.
        gathered: pieces that reach the owner, its own included: each element of each part once.
        scattered: pieces that receive the result: all elements that a rank keeps state of.
    """

    segment: Segment
    bucket: int
    start: int
    stop: int
    parts: tuple[LocalPart, ...]
    owner: int
    gathered: tuple[MatrixPiece, ...]
    scattered: tuple[MatrixPiece, ...]

    @property
    def travels(self) -> bool:
        """Whether other ranks take part."""
        return any(piece.rank != self.owner for piece in (*self.gathered, *self.scattered))


class _Peer(NamedTuple):
    """A rank of the stage.

    It has a tp coordinate, the shard of each bucket that it keeps, and the share of it that only it counts.
    """

    tp: int
    shard: int
    share: int


class _MatrixRange(NamedTuple):
    """A matrix, and the elements [start, stop) of a bucket in which every rank of a group has a part of it.

    The group is all ranks of the stage, or the ranks that hold the same experts.
    """

    segment: Segment
    bucket: int
    start: int
    stop: int
    group: _Group

    def overlap(self, other: tuple[int, int]) -> tuple[int, int]:
        """Return the start and stop of the intersection with another range."""
        return max(self.start, other[0]), min(self.stop, other[1])


def cost(segment: Segment) -> float:
    """Return the number of multiply-adds of one Newton-Schulz iteration."""
    short, long = sorted(segment.shape)
    return 2 * short * short * long + short**3


def matrix_rounds(layouts: Sequence[BucketLayout], layout: Layout) -> list[list[OwnedMatrix]]:
    """Return the matrices of a pipeline rank, in rounds of at most one for each owner.

    Args:
        layouts: its buckets.
    """
    stage = _StageOwners(layouts, layout)
    loads, owned = [0.0] * layout.stage_ranks, [list[OwnedMatrix]() for _ in range(layout.stage_ranks)]
    for matrix in sorted(stage.matrices(), key=lambda matrix: -cost(matrix.segment)):  # stable
        parts, part_of = stage.parts(matrix.segment)
        scattered = tuple(stage.kept_pieces(matrix, part_of))
        own = min(scattered, key=lambda piece: (loads[piece.rank], piece.rank))
        loads[own.rank] += cost(matrix.segment)
        gathered = (own, *stage.missing_pieces(matrix, own, part_of))
        owned[own.rank].append(
            OwnedMatrix(
                matrix.segment,
                matrix.bucket,
                matrix.start,
                matrix.stop,
                parts,
                own.rank,
                gathered=gathered,
                scattered=scattered,
            )
        )
    rounds = zip_longest(*owned)  # None: an owner has no more matrices
    return [[matrix for matrix in matrices if matrix is not None] for matrices in rounds]


class _Group:
    """The ranks of a stage that shard a kind of bucket, by their index in the stage.

    Args:
        peers: the ranks.
        shards, shares: number of shards of a bucket, and of parts of it that one rank counts.
    """

    def __init__(self, peers: Mapping[int, _Peer], shards: int, shares: int):
        self.peers, self.shards, self.shares = peers, shards, shares
        # indexed, since a stage may have thousands of ranks
        self.of_shard, self.of_share = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
        for rank, peer in peers.items():
            self.of_shard[peer.shard].append(rank)
            self.of_share[peer.share].append(rank)


class _StageOwners:
    """The parts of a pipeline rank's buckets that each rank of its stage holds."""

    def __init__(self, layouts: Sequence[BucketLayout], layout: Layout):
        self.layouts, self.layout = layouts, layout
        ranks = layout.peers(0, PRODUCTS["stage"])  # in the order of their axis
        peers = {index: self._peer(layout.position(rank)) for index, rank in enumerate(ranks)}
        self.dense = _Group(peers, layout.shard, layout.data)
        # by the index on the expert axis: the group that holds the first experts, the next ones, …
        self.experts = [self._expert_group(index) for index in range(layout.ep)]

    def _peer(self, position: dict[str, int]) -> _Peer:
        replica, shard = divmod(position["dp"] * self.layout.cp + position["cp"], self.layout.shard)
        return _Peer(position["tp"], shard, shard * self.layout.replicate + replica)

    def _expert_group(self, index: int) -> _Group:
        """Return the ranks at one index of the expert axis."""
        layout, peers = self.layout, {}
        shards, shares = min(layout.expert_shard, layout.expert_data), layout.expert_data
        for place, rank in enumerate(range(index, layout.stage_ranks, layout.ep)):
            replica, shard = divmod(place, shards)
            peers[rank] = _Peer(0, shard, shard * (shares // shards) + replica)
        return _Group(peers, shards, shares)

    def matrices(self) -> Iterator[_MatrixRange]:
        """Yield every matrix, in the order of the buckets."""
        at = Coordinates({**self.layout.coordinates(0).axes, "expert": AxisPlace(0, self.layout.ep)})
        for number, bucket in enumerate(self.layouts):
            for slot in bucket.slots:
                start = slot.start
                for segment in slot.spec.segments:
                    stop = start + segment.local(at).numel
                    if is_matrix(segment) and bucket.domain == "expert":
                        yield from self._expert_matrices(segment, number, start, stop)
                    elif is_matrix(segment):
                        yield _MatrixRange(segment, number, start, stop, self.dense)
                    start = stop

    def _expert_matrices(
        self, segment: Segment, bucket: int, start: int, stop: int
    ) -> Iterator[_MatrixRange]:
        """Yield the matrices of all experts of a stored tensor.

        Each rank has some of them at [start, stop) of its bucket.
        """
        rows, inputs = segment.shape
        shape = (rows // (segment.experts * segment.fused), inputs)
        size = shape[0] * inputs
        for index, group in enumerate(self.experts):
            for place in range(start, stop, size):
                name = f"{segment.name}, matrix {(index * (stop - start) + place - start) // size}"
                matrix = replace(segment, name=name, shape=shape, split=None, experts=1, fused=1)
                yield _MatrixRange(matrix, bucket, place, place + size, group)

    def parts(self, segment: Segment) -> tuple[tuple[LocalPart, ...], list[int]]:
        """Return the distinct parts of a matrix, and the index of the part at each tp coordinate."""
        # tp is innermost
        held = [segment.local(self.layout.coordinates(rank)) for rank in range(self.layout.tp)]
        parts = tuple(dict.fromkeys(held))
        return parts, [parts.index(part) for part in held]

    def kept_pieces(self, matrix: _MatrixRange, part_of: Sequence[int]) -> Iterator[MatrixPiece]:
        """Yield the piece of each rank that keeps state of the matrix."""
        group = matrix.group
        for rank in self._touching(matrix, group.shards, group.of_shard):
            peer = group.peers[rank]
            start, stop = matrix.overlap(self.layouts[matrix.bucket].part(peer.shard, group.shards))
            yield MatrixPiece(rank, part_of[peer.tp], start, stop)

    def _touching(self, matrix: _MatrixRange, count: int, ranks: Mapping[int, Sequence[int]]) -> list[int]:
        """Return the ranks whose part of the bucket, one of `count` equal parts, has elements of a matrix."""
        length = self.layouts[matrix.bucket].size // count
        first, last = matrix.start // length, (matrix.stop - 1) // length
        return sorted(rank for part in range(first, last + 1) for rank in ranks[part])

    def missing_pieces(
        self, matrix: _MatrixRange, own: MatrixPiece, part_of: Sequence[int]
    ) -> Iterator[MatrixPiece]:
        """Yield the pieces that the owner receives from the ranks that count their elements.

        The owner itself has `own`.
        """
        counts = [matrix.segment.is_owner(self.layout.coordinates(tp)) for tp in range(self.layout.tp)]
        group = matrix.group
        for rank in self._touching(matrix, group.shares, group.of_share):
            peer = group.peers[rank]
            if not counts[peer.tp]:
                continue
            low, high = matrix.overlap(self.layouts[matrix.bucket].owned(peer.share))
            held = (own.start, own.stop) if part_of[peer.tp] == own.part else (high, high)
            for start, stop in ((low, min(high, held[0])), (max(low, held[1]), high)):
                if start < stop:
                    yield MatrixPiece(rank, part_of[peer.tp], start, stop)
