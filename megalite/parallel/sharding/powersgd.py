"""PowerSGD (Vogels et al. 2019): gradient matrices are reduced as two thin factors; the compression error is added to the next gradient.

With G_i the gradient of dp rank i, E_i the rank's error, and Q the right factor of the previous step:

    M_i = G_i + E_i         P = Σ M_i Q, orthonormalised         Q = Σ M_iᵀ P         Σ M_i ≈ P Qᵀ, the gradient of this step

    E_i = M_i − P Qᵀ / dp   so that the sum of E_i is the error of this step's gradient: nothing is lost, it is applied later

Gradients here are sums over ranks, not means.
Communication in backward: an all-reduce of P when the bucket is complete, together with the uncompressed rest of the bucket, then an
all-reduce of Q, both over the data axis. Every rank computes P Qᵀ from the same bits. Forward: none.

P is orthonormalised by Householder reflections, which yield a basis even for zeros: a factor Q of zeros would otherwise stay zero, and its
matrix would never be updated again. If Q has lost its directions, the next Q comes from that basis.

A new E and Q are adopted only when the step is applied (`confirm`): with non-finite gradients they are discarded with the step. Until then
the old and the new ones are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite import rng
from megalite.mesh import Mesh, MeshAxis
from megalite.parallel.collectives import all_reduce_together
from megalite.parallel.sharding.buckets import BucketLayout
from megalite.parallel.spec import LocalPart, Rectangle, Segment


@dataclass(eq=False)
class Matrix:
    """A segment whose gradient is compressed: this tp rank's part of it, [n, m] with padding, which starts at `start` of its bucket.

    The error is stored without the loss scale, which changes from step to step.
    """

    segment: Segment
    part: LocalPart
    start: int
    error: Tensor  # [n, m]
    factor: Tensor  # Q, [m, rank]
    undecided: tuple[Tensor, Tensor] | None = None  # error and factor after a step that may still be discarded

    @property
    def stop(self) -> int:
        return self.start + self.part.numel

    @property
    def name(self) -> str:
        """Name in checkpoints. Each copy of a tied tensor has an error of its own."""
        return f"{self.segment.name}.copy" if self.segment.copy else self.segment.name


@dataclass(eq=False)
class Compression:
    """The compressed reduction of one bucket: its matrices as factors, the `rest`, ranges (start, stop), uncompressed."""

    matrices: Sequence[Matrix]
    rest: Sequence[tuple[int, int]]
    axis: MeshAxis
    loss_scale: float = 1.0  # of the current step

    def reduce(self, full: Tensor) -> Iterator[None]:
        """Sum a bucket ([size]) over the axis, in place, on every rank. Each `next` waits for a collective and starts the one after it."""
        # Views of the bucket, [n, m] each.
        values = [full[matrix.start : matrix.stop].view_as(matrix.error) for matrix in self.matrices]
        rest = [full[start:stop] for start, stop in self.rest]
        for value, matrix in zip(values, self.matrices, strict=True):
            value.add_(matrix.error, alpha=self.loss_scale)
        left = [value @ matrix.factor for value, matrix in zip(values, self.matrices, strict=True)]  # P, [n, rank] each
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
            matrix.undecided = error, factor.clone()  # own memory: how BLAS rounds depends on a matrix's address
            torch.mm(basis, factor.t(), out=value)


class PowerSGD:
    """The compressed matrices of a rank, with their errors and factors.

    Args:
        rank: number of columns of a factor.
        seed: seed of the initial factors.
    """

    def __init__(self, mesh: Mesh, rank: int, seed: int):
        self.at, self.tp, self.data, self.rank, self.seed = mesh.coordinates, mesh.tp, mesh.data, rank, seed
        self.one_copy = mesh.tied_pair is None
        self.matrices: list[Matrix] = []

    def compress(self, layout: BucketLayout, like: Tensor) -> Compression | None:
        """The compression of a bucket whose gradients have the dtype and device of `like`; None if it has nothing to compress.

        A segment whose gradient is summed over tp ranks afterwards is not compressed: each of these ranks would have a different error for
        the same part of a global tensor, of which a checkpoint stores one.
        """
        matrices = []
        for slot in layout.slots:
            start = slot.start
            for segment in slot.spec.segments:
                part = segment.local(self.at)
                if len(part.shape) == 2 and segment.grad_partial_axis is None and segment.replicas == 1:
                    n, m = part.shape
                    if (n + m) * self.rank < n * m:  # else the factors are not smaller than the matrix
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
        """Adopt the errors and factors of the last step if it was applied, else discard them."""
        for matrix in self.matrices:
            if matrix.undecided is not None and applied:
                matrix.error, matrix.factor = matrix.undecided
            matrix.undecided = None

    # ---- checkpoints: errors as [dp, *segment], factors as [tp parts, m, rank]

    def _error(self, matrix: Matrix, values: Tensor, row: int, rows: int, name: str | None = None) -> Rectangle:
        """`values` ([n, m], without the padding) as the error of dp rank `row` of `rows`."""
        shape, offsets = (rows, *matrix.segment.shape), (row, *matrix.part.offsets)
        return Rectangle(f"powersgd_error/{name or matrix.name}", shape, offsets, values[: matrix.part.sizes[0]].unsqueeze(0))

    def _factor(self, matrix: Matrix) -> Rectangle:
        index, parts = (0, 1) if matrix.segment.split is None else (self.tp.rank, self.tp.size)
        return Rectangle(f"powersgd_factor/{matrix.name}", (parts, *matrix.factor.shape), (index, 0, 0), matrix.factor.unsqueeze(0))

    def to_save(self) -> list[Rectangle]:
        """This rank's part of a checkpoint: its errors, and from dp rank 0 the factors, which are the same on all dp ranks."""
        own = [matrix for matrix in self.matrices if matrix.segment.split is not None or self.tp.rank == 0]
        errors = [self._error(matrix, matrix.error, self.data.rank, self.data.size) for matrix in own]
        return errors + [self._factor(matrix) for matrix in own if self.data.rank == 0]

    def restore(self, stored: Mapping[str, tuple[int, ...]], fill: Callable[[list[Rectangle]], None]) -> None:
        """Restore from a checkpoint: this rank's errors, or their mean if another number of ranks saved them.

        The sum over ranks, the part of the gradient that is still to be applied, is the same in both cases. A tied tensor that had two
        copies and has one now gets the errors of both. Matrices and factors that the checkpoint does not contain start anew.

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
        for row in [self.data.rank] if rows == self.data.size else range(rows):  # one rank's errors at a time, which bounds the memory
            fill([self._error(matrix, values, row, rows, name) for (matrix, name), values in zip(known, scratch, strict=True)])
            for (matrix, _), values in zip(known, scratch, strict=True):
                matrix.error.add_(values)
        if rows != self.data.size:
            for matrix in {matrix for matrix, _ in known}:
                matrix.error.div_(self.data.size)
