"""Which gradients PowerSGD compresses, and as which matrices."""

from __future__ import annotations

from typing import NamedTuple

from megalite.parallel.spec import LocalPart, Segment


class Matrices(NamedTuple):
    """The matrices that a rank's part of a segment consists of: `number` of n × m, one below the other."""

    number: int
    n: int
    m: int


def compressible(segment: Segment, part: LocalPart, rank: int) -> Matrices | None:
    """The matrices of a rank's part of a segment; None if it is sent as it is: a vector, or a matrix whose
    factors are not smaller.

    Experts are compressed one by one, their gate and up apart: an expert's factors follow its own tokens. A
    segment whose gradient is summed over tp ranks afterwards is not compressed: each of these ranks would
    have a different error for the same part of a global tensor, of which a checkpoint stores one.
    """
    if len(part.shape) != 2 or segment.grad_partial_axis is not None or segment.replicas != 1:
        return None
    number = (
        segment.experts * segment.fused * part.shape[0] // segment.shape[0] if segment.axis == "expert" else 1
    )
    n, m = part.shape[0] // number, part.shape[1]
    return Matrices(number, n, m) if (n + m) * rank < n * m else None
