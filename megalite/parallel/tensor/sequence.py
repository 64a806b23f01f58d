"""The all-gather along the sequence under sequence parallelism, of tensors or of their fp8 codes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megalite.mesh.mesh import MeshAxis
from megalite.parallel.collectives import Pending, all_gather

if TYPE_CHECKING:
    from megalite.parallel.matmuls import Operand


class PendingSequence:
    """A gather in flight. `wait()` returns its result and may be called once."""

    def __init__(self, x: Operand, pending: list[Pending]):
        self._x, self._pending = x, pending

    def wait(self) -> Operand:
        gathered = [each.wait() for each in self._pending]
        if isinstance(self._x, torch.Tensor):
            return gathered[0]
        codes, scales = (whole.view(part.dtype) for whole, part in zip(gathered, self._x, strict=True))
        return self._x._replace(codes=codes, scales=scales)


def gather_sequence(x: Operand, tp: MeshAxis) -> PendingSequence:
    """Start the all-gather along dim 0 (over tp), [seq/tp, …] -> [seq, …]; of codes and scales alike.

    Codes and scales are sent as bytes, because not every backend knows their dtypes.
    """
    if isinstance(x, torch.Tensor):
        return PendingSequence(x, [all_gather(x, tp)])
    return PendingSequence(x, [all_gather(part.contiguous().view(torch.uint8), tp) for part in x])
