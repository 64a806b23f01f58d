"""The queue of weight-gradient products, which allows a schedule to defer them to its W passes.

One queue per rank: `ParameterStore` gives it to its weights, which put products in; the pipeline runtime runs
it in a W action. This module does no communication.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from megalite_kernels.groups import Groups

    from megalite.parallel.weight import Weight


class WeightProduct(NamedTuple):
    """A linear layer's weight gradient, not yet computed: grad_outputᵀ · inputs."""

    weight: Weight
    grad_output: Tensor  # [tokens, out]
    inputs: Tensor  # [tokens, in]
    groups: Groups | None = None  # the tokens of each expert, where the weight holds the matrices of several


class WeightGradQueue:
    """Weight-gradient products: computed at once, or kept until the schedule's W pass of their (stage,
    microbatch).

    Keyed by both, since a schedule may run other backwards between a backward and its W pass.

    Attributes:
        deferred: whether the current run of a schedule keeps products for W passes.
        backward: (stage, microbatch) that products belong to.
    """

    def __init__(self) -> None:
        self.deferred = False
        self._products: dict[tuple[int, int], list[WeightProduct]] = {}
        self.backward = (0, 0)

    def begin_run(self, deferred: bool) -> None:
        """Call before a schedule is executed. Drops what an aborted run has left."""
        self.deferred = deferred
        self._products.clear()

    def begin_backward(self, stage: int, microbatch: int) -> None:
        """Assign the products that follow to this backward."""
        self.backward = (stage, microbatch)

    def put(self, product: WeightProduct) -> None:
        """Compute a product now, or keep it."""
        if self.deferred:
            self._products.setdefault(self.backward, []).append(product)
        else:
            product.weight.add_product(*product[1:])

    def run(self, stage: int, microbatch: int) -> None:
        """Compute the products of one backward, in the order in which they were put: that of a backward that
        is not split."""
        for product in self._products.pop((stage, microbatch), ()):
            product.weight.add_product(*product[1:])
