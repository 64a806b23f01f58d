"""Queue of weight-gradient matmuls, which allows a schedule to defer them to its W passes.

There is one queue per rank: `ParameterStore` passes it to its weights, which add matmuls; the pipeline
runtime runs it in a W action. This module does no communication.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from megalite_kernels.groups import Groups

    from megalite.parallel.matmuls import Operand
    from megalite.parallel.weight import Weight


class WeightMatmul(NamedTuple):
    """Weight gradient of a linear layer that has not been computed: grad_outputᵀ · inputs."""

    weight: Weight
    grad_output: Tensor  # [tokens, out]
    inputs: Operand  # [tokens, in]
    groups: Groups | None = None  # number of tokens of each expert, if the weight stacks several matrices


class WeightGradQueue:
    """Queue of weight-gradient matmuls, computed immediately or in the W pass of their backward.

    Matmuls are keyed by stage and microbatch, because a schedule may run other backwards between a backward
    and its W pass.

    Attributes:
        deferred: whether the current run of a schedule keeps matmuls for W passes.
        backward: the current (stage, microbatch).
    """

    def __init__(self) -> None:
        self.deferred = False
        self._matmuls: dict[tuple[int, int], list[WeightMatmul]] = {}
        self.backward = (0, 0)

    def begin_run(self, deferred: bool) -> None:
        """Prepare for executing a schedule, and drop what an aborted run has left."""
        self.deferred = deferred
        self._matmuls.clear()

    def begin_backward(self, stage: int, microbatch: int) -> None:
        """Assign the following matmuls to this backward."""
        self.backward = (stage, microbatch)

    def put(self, matmul: WeightMatmul) -> None:
        """Compute a matmul now, or keep it."""
        if self.deferred:
            self._matmuls.setdefault(self.backward, []).append(matmul)
        else:
            matmul.weight.add_matmul(*matmul[1:])

    def run(self, stage: int, microbatch: int) -> None:
        """Compute the matmuls of one backward, in the order in which they were added.

        This is the same order as in a backward that is not split.
        """
        for matmul in self._matmuls.pop((stage, microbatch), ()):
            matmul.weight.add_matmul(*matmul[1:])
