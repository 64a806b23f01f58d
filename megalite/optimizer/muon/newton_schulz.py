"""Orthogonalization of a matrix by Newton-Schulz iterations.

See Jordan et al. 2024, "Muon: An optimizer for hidden layers".

With the singular value decomposition U S V' of a matrix, the result is close to U V': each iteration applies
the polynomial a x + b x³ + c x⁵ to the singular values, which after a few iterations lie between 0.7 and 1.2.
In bf16 the bits are torch.optim.Muon's.
"""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS = 1e-7


def orthogonalized(matrix: Tensor, steps: int) -> Tensor:
    """Return the orthogonalized matrix, [A, B].

    The iterations run in the dtype of the argument, which is overwritten.

    torch.optim.Muon is not called: importing torch.optim imports torch._dynamo, and it always runs in bf16.
    """
    a, b, c = COEFFICIENTS
    tall = matrix.size(0) > matrix.size(1)
    x = matrix.T if tall else matrix  # so that the Gram matrix has the size of the shorter side
    x.div_(x.norm().clamp(min=EPS))  # no singular value exceeds 1
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def lr_factor(shape: tuple[int, ...], adjust_lr: str, growth: tuple[float, float] = (1.0, 1.0)) -> float:
    """Return the factor of `muon.adjust_lr` on the learning rate of a whole matrix of a shape.

    Args:
        growth: of its rows and columns (`Segment.growth`). The spectral norm of an update should grow as
            √(rows / columns) does (Yang et al. 2023): the factor is that of the base, times this growth.
    """

    def of(rows: float, columns: float) -> float:
        return sqrt(max(1, rows / columns)) if adjust_lr == "original" else 0.2 * sqrt(max(rows, columns))

    rows, columns = shape
    return of(rows / growth[0], columns / growth[1]) * sqrt(growth[0] / growth[1])
