"""One rank's side of a round of the exchange.

Pieces of matrices are sent to their owners, and results back, with one all-to-all over the stage in each
direction.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megalite.mesh.mesh import MeshAxis
from megalite.optimizer.muon.ownership import MatrixPiece, OwnedMatrix
from megalite.parallel.all_to_all import all_to_all
from megalite.parallel.collectives import Pending


class _Transfer:
    """All-to-all in flight.

    Args:
        pending: None: nothing is received.
        lengths: elements of each piece that this rank receives.
    """

    def __init__(self, pending: Pending | None, lengths: list[int]):
        self._pending, self._lengths = pending, lengths

    def wait(self) -> Sequence[Tensor]:
        """Return the received pieces, flat."""
        return () if self._pending is None else self._pending.wait().split(self._lengths)


class Round:
    """Round of the exchange, with at most one matrix for each owner.

    Gather and scatter are each started and then finished once.

    Args:
        axis: the ranks of the stage; None if there is only this one.
        like: an empty tensor of the device and dtype of all values.

    Attributes:
        pieces: the pieces that this rank keeps state of, at most one of each matrix, with their matrices: the
            order of values and results.
        own: the matrix that this rank orthogonalizes, if any.
    """

    def __init__(self, matrices: Sequence[OwnedMatrix], axis: MeshAxis | None, like: Tensor):
        self._like, self.rank = like, 0 if axis is None else axis.rank
        rank = self.rank
        self.axis = axis if any(matrix.travels for matrix in matrices) else None
        owned = [matrix for matrix in matrices if matrix.owner == rank]
        self.own = owned[0] if owned else None
        self.pieces = _pieces_of(rank, [(matrix, matrix.scattered) for matrix in matrices])
        # Both ends list the pieces of a message in one order: matrices are sorted by owner, pieces of a
        # matrix by rank.
        others = [matrix for matrix in matrices if matrix.owner != rank]
        self._sends = _pieces_of(rank, [(matrix, matrix.gathered) for matrix in others])
        self._results = _pieces_of(rank, [(matrix, matrix.scattered) for matrix in others])
        gathered, scattered = (self.own.gathered, self.own.scattered) if self.own else ((), ())
        self._own_parts = [piece for piece in gathered if piece.rank == rank]
        self._receives = [piece for piece in gathered if piece.rank != rank]
        self._returns = [piece for piece in scattered if piece.rank != rank]
        self._gather: tuple[_Transfer, list[Tensor]] | None = None  # and the values of `_own_parts`
        self._scatter: tuple[_Transfer, list[Tensor]] | None = None  # and the own matrix as flat parts

    def start_gather(self, values: Sequence[Tensor]) -> None:
        """Start sending flat values of `pieces` to the owners."""
        held = {
            id(matrix): (piece, value) for (matrix, piece), value in zip(self.pieces, values, strict=True)
        }

        def part_of(matrix: OwnedMatrix, wanted: MatrixPiece) -> Tensor:
            piece, value = held[id(matrix)]
            return value[wanted.start - piece.start : wanted.stop - piece.start]

        outgoing = [(matrix.owner, part_of(matrix, piece)) for matrix, piece in self._sends]
        transfer = self._exchange(outgoing, [(piece.rank, piece) for piece in self._receives])
        own = [] if self.own is None else [part_of(self.own, piece) for piece in self._own_parts]
        self._gather = transfer, own

    def finish_gather(self) -> Tensor | None:
        """Wait for the pieces of this rank's matrix, and return it as a new tensor.

        Returns None if this rank owns no matrix.
        """
        assert self._gather is not None, "start_gather comes first"
        (transfer, own_values), self._gather = self._gather, None
        received = transfer.wait()
        if self.own is None:
            return None
        start, stop = self.own.start, self.own.stop
        flat = self._like.new_empty(len(self.own.parts), stop - start)
        pieces, values = (*self._own_parts, *self._receives), (*own_values, *received)
        for piece, value in zip(pieces, values, strict=True):
            flat[piece.part, piece.start - start : piece.stop - start] = value
        return _whole(self.own, flat)

    def start_scatter(self, result: Tensor | None) -> None:
        """Start sending the result to the ranks that keep pieces.

        Args:
            result: the own matrix, orthogonalized; None: this rank owns no matrix.
        """
        flat = [] if result is None or self.own is None else _flat_parts(self.own, result)
        outgoing = []
        if self.own is not None:
            outgoing = [(piece.rank, _values_of(self.own, flat, piece)) for piece in self._returns]
        transfer = self._exchange(outgoing, [(matrix.owner, piece) for matrix, piece in self._results])
        self._scatter = transfer, flat

    def finish_scatter(self) -> list[Tensor]:
        """Wait for the results, and return them flat, in the order of `pieces`."""
        assert self._scatter is not None, "start_scatter comes first"
        (transfer, flat), self._scatter = self._scatter, None
        received = iter(transfer.wait())
        return [
            _values_of(matrix, flat, piece) if matrix.owner == self.rank else next(received)
            for matrix, piece in self.pieces
        ]

    def _exchange(
        self, outgoing: Sequence[tuple[int, Tensor]], incoming: Sequence[tuple[int, MatrixPiece]]
    ) -> _Transfer:
        """Start sending values to ranks, and receiving pieces from ranks."""
        if self.axis is None:
            return _Transfer(None, [])
        send_sizes, receive_sizes = [0] * self.axis.size, [0] * self.axis.size
        for rank, value in outgoing:
            send_sizes[rank] += value.numel()
        lengths = [piece.stop - piece.start for _, piece in incoming]
        for (rank, _), length in zip(incoming, lengths, strict=True):
            receive_sizes[rank] += length
        x = torch.cat([value for _, value in outgoing]) if outgoing else self._like
        return _Transfer(all_to_all(x, self.axis, send_sizes, receive_sizes), lengths)


def _pieces_of(
    rank: int, matrices: Sequence[tuple[OwnedMatrix, Sequence[MatrixPiece]]]
) -> list[tuple[OwnedMatrix, MatrixPiece]]:
    """Return the pieces on a rank, with their matrices."""
    return [(matrix, piece) for matrix, pieces in matrices for piece in pieces if piece.rank == rank]


def _values_of(matrix: OwnedMatrix, flat: Sequence[Tensor], piece: MatrixPiece) -> Tensor:
    """Return the values of a piece, a view of the matrix's flat parts."""
    return flat[piece.part][piece.start - matrix.start : piece.stop - matrix.start]


def _whole(matrix: OwnedMatrix, flat: Tensor) -> Tensor:
    """Return the matrix, [A, B], from its parts, each flat: [parts, elements]."""
    if len(matrix.parts) == 1 or matrix.segment.split == 0:
        return flat.view(matrix.segment.shape)
    parts = [values.view(part.shape) for values, part in zip(flat, matrix.parts, strict=True)]
    return torch.cat(parts, dim=1)


def _flat_parts(matrix: OwnedMatrix, whole: Tensor) -> list[Tensor]:
    """Return the inverse of `_whole`."""
    return [part.reshape(-1) for part in whole.chunk(len(matrix.parts), dim=matrix.segment.split or 0)]
