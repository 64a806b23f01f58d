"""One rank's side of a round in which parts of matrices travel to their owners, and results back: one
all-to-all each over the stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megalite.mesh.mesh import MeshAxis
from megalite.optimizer.matrix_owners import MatrixPiece, OwnedMatrix
from megalite.parallel.all_to_all import all_to_all


class Round:
    """Up to one matrix for each owner.

    Args:
        axis: the ranks of the stage; None if there is only this one.
        like: an empty tensor of the device and dtype of all values.

    Attributes:
        kept: this rank's pieces of matrices, with their matrices, at most one of each: values are given and
        returned in this order. own: the matrix that this rank orthogonalises, if any.
    """

    def __init__(self, matrices: Sequence[OwnedMatrix], axis: MeshAxis | None, like: Tensor):
        self._like, self.rank = like, 0 if axis is None else axis.rank
        self.axis = axis if any(matrix.travels for matrix in matrices) else None
        self.own = next((matrix for matrix in matrices if matrix.owner == self.rank), None)
        self.kept = [
            (matrix, piece) for matrix in matrices for piece in matrix.kept if piece.rank == self.rank
        ]
        # Both ends list the pieces of a message in one order: matrices are sorted by owner, pieces of a
        # matrix by rank.
        self._sends = [
            (matrix, piece)
            for matrix in matrices
            for piece in matrix.sent
            if self.rank == piece.rank != matrix.owner
        ]
        self._receives = [piece for piece in self.own.sent if piece.rank != self.rank] if self.own else []
        self._returns = [piece for piece in self.own.kept if piece.rank != self.rank] if self.own else []
        self._results = [(matrix, piece) for matrix, piece in self.kept if matrix.owner != self.rank]

    def gather(self, values: Sequence[Tensor]) -> Callable[[], Tensor | None]:
        """Start sending flat values of the kept pieces to the owners. Returns a function that waits for the
        own matrix, a new tensor."""
        held = {id(matrix): (piece, value) for (matrix, piece), value in zip(self.kept, values, strict=True)}

        def part_of(matrix: OwnedMatrix, wanted: MatrixPiece) -> Tensor:
            piece, value = held[id(matrix)]
            return value[wanted.start - piece.start : wanted.stop - piece.start]

        outgoing = [(matrix.owner, part_of(matrix, piece)) for matrix, piece in self._sends]
        arrived = self._exchange(outgoing, [(piece.rank, piece) for piece in self._receives])

        def finish() -> Tensor | None:
            parts = arrived()
            if self.own is None:
                return None
            flat = self._like.new_empty(len(self.own.parts), self.own.stop - self.own.start)
            own = [(piece, part_of(self.own, piece)) for piece in self.own.sent if piece.rank == self.rank]
            for piece, value in (*own, *zip(self._receives, parts, strict=True)):
                flat[piece.part, piece.start - self.own.start : piece.stop - self.own.start] = value
            return _whole(self.own, flat)

        return finish

    def scatter(self, result: Tensor | None) -> Callable[[], list[Tensor]]:
        """Start sending the result to the ranks that keep pieces. Returns a function that waits for those of
        the kept pieces.

        `result`: the own matrix, orthogonalised.
        """
        flat = [] if result is None or self.own is None else _flat_parts(self.own, result)

        def part_of(matrix: OwnedMatrix, piece: MatrixPiece) -> Tensor:
            return flat[piece.part][piece.start - matrix.start : piece.stop - matrix.start]

        outgoing = [(piece.rank, part_of(self.own, piece)) for piece in self._returns if self.own]
        arrived = self._exchange(outgoing, [(matrix.owner, piece) for matrix, piece in self._results])

        def finish() -> list[Tensor]:
            results = iter(arrived())
            return [
                part_of(matrix, piece) if matrix.owner == self.rank else next(results)
                for matrix, piece in self.kept
            ]

        return finish

    def _exchange(
        self, outgoing: Sequence[tuple[int, Tensor]], incoming: Sequence[tuple[int, MatrixPiece]]
    ) -> Callable[[], Sequence[Tensor]]:
        """Start sending values to ranks, and receiving pieces from ranks. Returns a function that waits for
        these."""
        if self.axis is None:
            return list
        sizes, received = [0] * self.axis.size, [0] * self.axis.size
        for rank, value in outgoing:
            sizes[rank] += value.numel()
        lengths = [piece.stop - piece.start for _, piece in incoming]
        for (rank, _), length in zip(incoming, lengths, strict=True):
            received[rank] += length
        x = torch.cat([value for _, value in outgoing]) if outgoing else self._like
        pending = all_to_all(x, self.axis, sizes, received)
        return lambda: pending.wait().split(lengths)


def _whole(matrix: OwnedMatrix, flat: Tensor) -> Tensor:
    """The matrix, [A, B], from its parts, each flat: [parts, elements]."""
    if len(matrix.parts) == 1 or matrix.segment.split == 0:
        return flat.view(matrix.segment.shape)
    return torch.cat([part.view(place.shape) for part, place in zip(flat, matrix.parts, strict=True)], dim=1)


def _flat_parts(matrix: OwnedMatrix, whole: Tensor) -> list[Tensor]:
    """The inverse of `_whole`."""
    return [part.reshape(-1) for part in whole.chunk(len(matrix.parts), dim=matrix.segment.split or 0)]
