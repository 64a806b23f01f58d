"""PowerSGD (Vogels et al. 2019): matrices of gradients travel as two thin factors, and what that loses is added to the next step's.

With G_i the gradient of dp rank i, E_i what this rank still owes, and Q the right factor of the step before:

    M_i = G_i + E_i         P = Σ M_i Q, made orthonormal         Q = Σ M_iᵀ P         Σ M_i ≈ P Qᵀ, the gradient of this step

    E_i = M_i − P Qᵀ / dp   so that the E_i add up to what is missing: nothing is ever lost, it comes later

Gradients here are sums over ranks, not means. P starts its way when the bucket is complete, together with all of the bucket that is not
compressed; Q follows. Every rank computes P Qᵀ from the same bits.
P is made orthonormal by Householder reflections, which give a basis even of zeros: a factor Q of zeros would stay so for ever, and its
matrix would never move again. Where Q has no direction left, the next one comes from that basis.

A new E and Q count only once the step is applied (`confirm`): gradients that are not finite are thrown away with the step. Until then both
are kept, the old and the new.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite import rng
from megalite.mesh import Mesh, MeshAxis
from megalite.parallel.collectives import all_reduce_together
from megalite.parallel.sharding.buckets import Bucket
from megalite.parallel.spec import LocalPart, Rectangle, Segment


@dataclass(eq=False)
class Matrix:
    """A segment whose gradient is compressed: this tp rank's part of it, [n, m] with padding, which starts at `start` of its bucket.

    The error is that of gradients without a loss scale, which changes from step to step.
    """

    segment: Segment
    part: LocalPart
    start: int
    error: Tensor  # [n, m]
    factor: Tensor  # Q, [m, rank]
    undecided: tuple[Tensor, Tensor] | None = None  # error and factor after a step that may still be thrown away

    @property
    def stop(self) -> int:
        return self.start + self.part.numel

    @property
    def name(self) -> str:
        """Each copy of a tied tensor has an error of its own."""
        return f"{self.segment.name}.copy" if self.segment.copy else self.segment.name


@dataclass(eq=False)
class Compression:
    """How one bucket is reduced: its matrices through their factors, the `rest`, (start, stop) each, as it is."""

    matrices: Sequence[Matrix]
    rest: Sequence[tuple[int, int]]
    axis: MeshAxis
    loss_scale: float = 1.0  # of this step

    def reduce(self, full: Tensor) -> Iterator[None]:
        """Sum a bucket ([size]) over the axis, in place, on every rank. Each `next` awaits a collective and starts the one that follows."""
        values = [full[matrix.start : matrix.stop].view_as(matrix.error) for matrix in self.matrices]
        rest = [full[start:stop] for start, stop in self.rest]
        for value, matrix in zip(values, self.matrices, strict=True):
            value.add_(matrix.error, alpha=self.loss_scale)
        left = [value @ matrix.factor for value, matrix in zip(values, self.matrices, strict=True)]
        wait = all_reduce_together([*left, *rest], self.axis)
        yield
        sums = wait()
        for own, total in zip(rest, sums[len(left) :], strict=True):
            own.copy_(total)
        left = [torch.linalg.qr(each).Q for each in sums[: len(left)]]
        wait = all_reduce_together([value.t() @ basis for value, basis in zip(values, left, strict=True)], self.axis)
        yield
        for matrix, value, basis, factor in zip(self.matrices, values, left, wait(), strict=True):
            error = torch.addmm(value, basis, factor.t(), beta=1 / self.loss_scale, alpha=-1 / (self.loss_scale * self.axis.size))
            matrix.undecided = error, factor.clone()  # memory of its own: how BLAS rounds depends on where a matrix lies
            torch.mm(basis, factor.t(), out=value)


class PowerSGD:
    """What a rank knows of the matrices that it compresses.

    Args:
        rank: columns of a factor.
        seed: of the first factors.
    """

    def __init__(self, mesh: Mesh, rank: int, seed: int):
        self.at, self.tp, self.data, self.rank, self.seed = mesh.coordinates, mesh.tp, mesh.data, rank, seed
        self.one_copy = mesh.tied_pair is None
        self.matrices: list[Matrix] = []

    def compress(self, layout: Bucket, like: Tensor) -> Compression | None:
        """The compression of a bucket whose gradients are `like` this in dtype and device; None where it has nothing to compress.

        A segment whose gradient is summed over tp ranks afterwards is not compressed: each of them would owe something else, for one and
        the same part of a global tensor.
        """
        matrices = []
        for slot in layout.slots:
            start = slot.start
            for segment in slot.spec.segments:
                part = segment.local(self.at)
                if len(part.shape) == 2 and segment.grad_partial_axis is None and segment.replicas == 1:
                    n, m = part.shape
                    if (n + m) * self.rank < n * m:
                        factor = rng.normal((m, self.rank), self.seed, segment.name, "powersgd").to(like)
                        matrices.append(Matrix(segment, part, start, like.new_zeros(n, m), factor))
                start += part.numel
        if not matrices:
            return None
        self.matrices += matrices
        edges = [0, *(edge for matrix in matrices for edge in (matrix.start, matrix.stop)), layout.size]
        rest = [(low, high) for low, high in zip(edges[::2], edges[1::2], strict=True) if low < high]
        return Compression(matrices, rest, self.data)

    def confirm(self, applied: bool) -> None:
        """Take over what the last step left, or, where it was thrown away, forget it."""
        for matrix in self.matrices:
            if matrix.undecided is not None and applied:
                matrix.error, matrix.factor = matrix.undecided
            matrix.undecided = None

    # ---- checkpoints: errors as [dp, *segment], factors as [tp parts, m, rank]

    def _error(self, matrix: Matrix, values: Tensor, row: int, rows: int, name: str | None = None) -> Rectangle:
        """`values` ([n, m], padding left out) as the error of one of `rows` dp ranks."""
        shape, offsets = (rows, *matrix.segment.shape), (row, *matrix.part.offsets)
        return Rectangle(f"powersgd_error/{name or matrix.name}", shape, offsets, values[: matrix.part.sizes[0]].unsqueeze(0))

    def _factor(self, matrix: Matrix) -> Rectangle:
        index, parts = (0, 1) if matrix.segment.split is None else (self.tp.rank, self.tp.size)
        return Rectangle(f"powersgd_factor/{matrix.name}", (parts, *matrix.factor.shape), (index, 0, 0), matrix.factor.unsqueeze(0))

    def to_save(self) -> list[Rectangle]:
        """This rank's share of a checkpoint: its errors, and the factors, which all dp ranks know, from the first of them."""
        own = [matrix for matrix in self.matrices if matrix.segment.split is not None or self.tp.rank == 0]
        errors = [self._error(matrix, matrix.error, self.data.rank, self.data.size) for matrix in own]
        return errors + [self._factor(matrix) for matrix in own if self.data.rank == 0]

    def restore(self, stored: Mapping[str, tuple[int, ...]], fill: Callable[[list[Rectangle]], None]) -> None:
        """Take over what a checkpoint holds: this rank's errors, or, where another number of ranks saved them, their mean per rank.

        The sum over ranks, which is what the gradients are still owed, is the same in both cases. A tied tensor that had two copies and has
        one now takes what was owed to both. Matrices and factors that the checkpoint does not know start afresh.

        Args:
            stored: global shapes by name.
            fill: fills rectangles from the checkpoint.
        """
        names = [(matrix, name) for matrix in self.matrices for name in (matrix.name, *([f"{matrix.name}.copy"] if self.one_copy else []))]
        known = [(matrix, name) for matrix, name in names if f"powersgd_error/{name}" in stored]
        for matrix in self.matrices:
            matrix.error.zero_()  # a checkpoint that turned out to be damaged may have filled some
        fill([each for each in map(self._factor, self.matrices) if stored.get(each.name) == each.global_shape])
        if not known:
            return
        rows = stored[f"powersgd_error/{known[0][1]}"][0]
        scratch = [torch.zeros_like(matrix.error) for matrix, _ in known]
        for row in [self.data.rank] if rows == self.data.size else range(rows):  # one at a time: there may be many
            fill([self._error(matrix, values, row, rows, name) for (matrix, name), values in zip(known, scratch, strict=True)])
            for (matrix, _), values in zip(known, scratch, strict=True):
                matrix.error.add_(values)
        if rows != self.data.size:
            for matrix in {matrix for matrix, _ in known}:
                matrix.error.div_(self.data.size)
