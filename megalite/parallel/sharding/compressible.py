"""Selection of the gradients that PowerSGD compresses, and their division into matrices."""

from __future__ import annotations

from typing import NamedTuple

from megalite.parallel.spec import LocalPart, Segment


class Matrices(NamedTuple):
    """Matrices of a rank's part of a segment: `number` matrices of n × m, stacked."""

    number: int
    n: int
    m: int


def compressible(segment: Segment, part: LocalPart, rank: int) -> Matrices | None:
    """Return the matrices of a rank's part of a segment, or None if it is not compressed.

    Vectors, and matrices whose factors are not smaller, are not compressed. Experts are compressed one by
    one, with gate and up separately, because the factors of an expert follow its own tokens. A segment whose
    gradient is later summed over tp ranks is not compressed: each of these ranks would have a different error
    for the same part of a global tensor, but a checkpoint stores only one.
    """
    if len(part.shape) != 2 or segment.grad_partial_axis is not None or segment.replicas != 1:
        return None
    number = (
        segment.experts * segment.fused * part.shape[0] // segment.shape[0] if segment.axis == "expert" else 1
    )
    n, m = part.shape[0] // number, part.shape[1]
    return Matrices(number, n, m) if (n + m) * rank < n * m else None
