"""PowerSGD (Vogels et al. 2019), which reduces gradient matrices as two low-rank factors with error feedback.

With G_i the gradient of data rank i, E_i the error of the rank, and Q the right factor of the previous step:

    M_i = G_i + E_i         P = Σ M_i Q, orthonormalized         Q = Σ M_iᵀ P
    Σ M_i ≈ P Qᵀ            the gradient of this step
    E_i = M_i − P Qᵀ / n    so that the sum of E_i is the error of this step's gradient: nothing is lost, it
                            is applied later

Gradients here are sums over n ranks, not means. Communication in backward: an all-reduce of P when the bucket
is complete, together with the uncompressed rest of the bucket, then an all-reduce of Q, both over the data
axis; for experts, which are compressed one by one, over the ranks that hold the same ones. Every rank
computes P Qᵀ from the same bits. Forward: none.

P is orthonormalized by Householder reflections, which yield a basis even for zeros: a factor Q of zeros would
otherwise stay zero, and its matrix would never be updated again. If Q has lost its directions, the next Q
comes from that basis.

A new E and Q are adopted only when the step is applied (`confirm`): with non-finite gradients they are
discarded with the step. Until then the old and the new ones are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.mesh.mesh import Mesh, MeshAxis
from megalite.parallel.collectives import all_reduce_together
from megalite.parallel.sharding.buckets import BucketLayout
from megalite.parallel.sharding.compressible import Matrices, compressible
from megalite.parallel.spec import LocalPart, Rectangle, Segment
from megalite.system import rng


@dataclass(eq=False)
class CompressedMatrix:
    """A segment with a compressed gradient.

    It is this rank's part of the segment with padding, which begins at `start` of its bucket: one matrix, or
    those of the experts on this rank, whose tensors then have one more dimension at the front. The error is
    stored without the loss scale, which changes from step to step.
    """

    segment: Segment
    part: LocalPart
    start: int
    axis: MeshAxis  # whose ranks' gradients are summed
    error: Tensor  # [n, m], of experts [matrices, n, m]
    factor: Tensor  # Q, [m, rank], of experts [matrices, m, rank]
    # error and factor after a step that may still be discarded
    undecided: tuple[Tensor, Tensor] | None = None

    @property
    def stop(self) -> int:
        return self.start + self.part.numel

    @property
    def name(self) -> str:
        """Name in checkpoints. Each copy of a tied tensor has its own error."""
        return f"{self.segment.name}.copy" if self.segment.copy else self.segment.name


@dataclass(eq=False)
class Compression:
    """Compressed reduction of one bucket.

    Its matrices are reduced as factors, and the `rest`, ranges (start, stop), is reduced uncompressed.
    """

    matrices: Sequence[CompressedMatrix]
    rest: Sequence[tuple[int, int]]
    axis: MeshAxis
    loss_scale: float = 1.0  # of the current step

    def reduce(self, full: Tensor) -> Iterator[None]:
        """Sum a bucket ([size]) over the axis, in place, on every rank.

        Each `next` waits for a collective and starts the next one.
        """
        # Views of the bucket, [n, m] each, of experts [matrices, n, m].
        values = [full[matrix.start : matrix.stop].view_as(matrix.error) for matrix in self.matrices]
        rest = [full[start:stop] for start, stop in self.rest]
        for value, matrix in zip(values, self.matrices, strict=True):
            value.add_(matrix.error, alpha=self.loss_scale)
        # P, [n, rank] each
        left = [value @ matrix.factor for value, matrix in zip(values, self.matrices, strict=True)]
        wait = all_reduce_together([*left, *rest], self.axis)
        yield
        sums = wait()
        for own, total in zip(rest, sums[len(left) :], strict=True):
            own.copy_(total)
        left = [torch.linalg.qr(each).Q for each in sums[: len(left)]]
        wait = all_reduce_together(
            [value.mT @ basis for value, basis in zip(values, left, strict=True)], self.axis
        )
        yield
        for matrix, value, basis, factor in zip(self.matrices, values, left, wait(), strict=True):
            plus_product = torch.addmm if value.dim() == 2 else torch.baddbmm
            error = plus_product(
                value,
                basis,
                factor.mT,
                beta=1 / self.loss_scale,
                alpha=-1 / (self.loss_scale * self.axis.size),
            )
            # separate memory, because the rounding of BLAS depends on the address of a matrix
            matrix.undecided = error, factor.clone()
            torch.matmul(basis, factor.mT, out=value)


class PowerSGD:
    """Compressed matrices of a rank, with their errors and factors.

    Args:
        rank: number of columns of a factor.
        seed: seed of the initial factors.
    """

    def __init__(self, mesh: Mesh, rank: int, seed: int):
        self.at, self.rank, self.seed = mesh.coordinates, rank, seed
        self.axes = {"dense": mesh.data, "expert": mesh.expert_data}  # by domain
        self.one_copy = mesh.tied_pair is None
        self.matrices: list[CompressedMatrix] = []

    def compress(self, layout: BucketLayout, like: Tensor) -> Compression | None:
        """Return the compression of a bucket, or None if nothing in it is compressed.

        Args:
            like: a tensor with the dtype and device of the gradients.
        """
        axis, matrices = self.axes[layout.domain], list[CompressedMatrix]()
        if axis.size == 1:  # experts that no other rank holds
            return None
        for slot in layout.slots:
            start = slot.start
            for segment in slot.spec.segments:
                part = segment.local(self.at)
                if stack := compressible(segment, part, self.rank):
                    factor = self._initial_factor(segment, part, stack).to(like)
                    error = like.new_zeros(*factor.shape[:-2], stack.n, stack.m)
                    matrices.append(CompressedMatrix(segment, part, start, axis, error, factor))
                start += part.numel
        if not matrices:
            return None
        self.matrices += matrices
        edges = [0, *(edge for matrix in matrices for edge in (matrix.start, matrix.stop)), layout.size]
        rest = [(low, high) for low, high in zip(edges[::2], edges[1::2], strict=True) if low < high]
        return Compression(matrices, rest, axis)

    def _initial_factor(self, segment: Segment, part: LocalPart, stack: Matrices) -> Tensor:
        """Return Q for the first step, [m, rank], or [matrices, m, rank] for experts.

        The factor of each expert is drawn by its number in the layer, so that it is the same for any ep.
        """
        shape = stack.m, self.rank
        if segment.axis != "expert":
            return rng.normal(shape, self.seed, segment.name, "powersgd")
        first = part.offsets[0] // stack.n
        return torch.stack(
            [
                rng.normal(shape, self.seed, segment.name, "powersgd", first + index)
                for index in range(stack.number)
            ]
        )

    def confirm(self, applied: bool) -> None:
        """Adopt the errors and factors of the last step if it was applied, otherwise discard them."""
        for matrix in self.matrices:
            if matrix.undecided is not None and applied:
                matrix.error, matrix.factor = matrix.undecided
            matrix.undecided = None

    # ---- checkpoints: errors as [ranks of the axis, *segment], factors as [tp parts or experts' matrices, m,
    # rank]

    def _error(
        self, matrix: CompressedMatrix, values: Tensor, row: int, rows: int, name: str | None = None
    ) -> Rectangle:
        """Return `values` as the error of rank `row` of `rows`.

        They have the shape of the error without padding.
        """
        shape, offsets = (rows, *matrix.segment.shape), (row, *matrix.part.offsets)
        held = values.view(matrix.part.shape)[: matrix.part.sizes[0]]
        return Rectangle(f"powersgd_error/{name or matrix.name}", shape, offsets, held.unsqueeze(0))

    def _factor(self, matrix: CompressedMatrix) -> Rectangle:
        index, parts = (0, 1) if matrix.segment.split is None else self.at[matrix.segment.axis]
        values = matrix.factor.view(-1, *matrix.factor.shape[-2:])
        count = values.shape[0]
        return Rectangle(
            f"powersgd_factor/{matrix.name}",
            (parts * count, *values.shape[1:]),
            (index * count, 0, 0),
            values,
        )

    def to_save(self) -> list[Rectangle]:
        """Return this rank's part of a checkpoint.

        It contains its errors and, on rank 0 of the axis, the factors, which are the same on all ranks.
        """
        own = [
            matrix
            for matrix in self.matrices
            if matrix.segment.split is not None or self.at[matrix.segment.axis].rank == 0
        ]
        errors = [self._error(matrix, matrix.error, matrix.axis.rank, matrix.axis.size) for matrix in own]
        return errors + [self._factor(matrix) for matrix in own if matrix.axis.rank == 0]

    def restore(self, stored: Mapping[str, tuple[int, ...]], fill: Callable[[list[Rectangle]], None]) -> None:
        """Restore the state from a checkpoint.

        This rank's errors are restored, or their mean if they were saved by a different number of ranks. The
        sum over ranks, the part of the gradient that is still to be applied, is the same in both cases. A
        tied tensor that had two copies and now has one gets the errors of both. Matrices and factors that are
        not in the checkpoint are initialized.

        Args:
            stored: global shapes by name.
            fill: fills rectangles from the checkpoint.
        """
        names = [
            (matrix, name)
            for matrix in self.matrices
            for name in (matrix.name, *([f"{matrix.name}.copy"] if self.one_copy else []))
        ]
        known = [(matrix, name) for matrix, name in names if f"powersgd_error/{name}" in stored]
        for matrix in self.matrices:
            matrix.error.zero_()  # a damaged checkpoint may have filled some
        fill(
            [each for each in map(self._factor, self.matrices) if stored.get(each.name) == each.global_shape]
        )
        for axis in self.axes.values():
            self._restore_errors(
                axis, [(matrix, name) for matrix, name in known if matrix.axis is axis], stored, fill
            )

    def _restore_errors(
        self,
        axis: MeshAxis,
        known: Sequence[tuple[CompressedMatrix, str]],
        stored: Mapping[str, tuple[int, ...]],
        fill: Callable[[list[Rectangle]], None],
    ) -> None:
        """Restore the errors of the matrices of an axis from the given names in the checkpoint."""
        if not known:
            return
        rows = stored[f"powersgd_error/{known[0][1]}"][0]
        scratch = [torch.zeros_like(matrix.error) for matrix, _ in known]
        # one rank's errors at a time, to limit memory
        for row in [axis.rank] if rows == axis.size else range(rows):
            fill(
                [
                    self._error(matrix, values, row, rows, name)
                    for (matrix, name), values in zip(known, scratch, strict=True)
                ]
            )
            for (matrix, _), values in zip(known, scratch, strict=True):
                matrix.error.add_(values)
        if rows != axis.size:
            for matrix in {matrix for matrix, _ in known}:
                matrix.error.div_(axis.size)
