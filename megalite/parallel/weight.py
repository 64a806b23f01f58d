"""A stored parameter with its memory, and the queue of weight-gradient products.

Weight gradients do not pass through autograd. The backward of each operation gives its contribution to the `Weight`, which adds it where
the gradient accumulates: in a flat bucket, in at least fp32. That saves a copy and an addition per tensor, keeps microbatches in ascending
order, lets a bucket be reduced the moment it is complete, and lets a schedule defer weight gradients to its W passes.

The life of a gradient: a contribution arrives (`accumulate`, `accumulate_rows`, or `accumulate_product` through the `WeightGradQueue`), the
last one of a reduction completes the weight in its bucket (`Bucket.complete`), and the last weight starts the bucket's reduction.
No communication here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from megalite.parallel.spec import ParamSpec

if TYPE_CHECKING:
    from megalite.parallel.tensor.lora import Adapter


class Bucket(Protocol):
    """What a weight knows of the bucket that its gradient accumulates in (`parallel.sharding.gradient_bucket`)."""

    def open(self) -> None:
        """Allocate the buffer that gradients accumulate in, and set `grad` of every weight of the bucket."""

    def complete(self, weight: Weight, reduction: int) -> None:
        """Count a weight that has all contributions of the step's `reduction`-th reduction."""


class WeightProduct(NamedTuple):
    """A linear layer's weight gradient, not yet computed: grad_outputᵀ · inputs."""

    weight: Weight
    grad_output: Tensor  # [tokens, out]
    inputs: Tensor  # [tokens, in]


class WeightGradQueue:
    """Weight-gradient products: computed at once, or kept until the schedule's W pass of their (stage, microbatch).

    Attributes:
        deferred: whether products are kept for W passes, in the present run of a schedule.
        backward: (stage, microbatch) that products belong to.
    """

    def __init__(self) -> None:
        self.deferred = False
        self._products: dict[tuple[int, int], list[WeightProduct]] = {}
        self.backward = (0, 0)

    def begin_run(self, deferred: bool) -> None:
        """A schedule begins to execute; what an aborted run has left is dropped."""
        self.deferred = deferred
        self._products.clear()

    def begin_backward(self, stage: int, microbatch: int) -> None:
        """Products that are put from now on belong to this backward."""
        self.backward = (stage, microbatch)

    def put(self, product: WeightProduct) -> None:
        """Compute a product now, or keep it."""
        if self.deferred:
            self._products.setdefault(self.backward, []).append(product)
        else:
            product.weight.add_product(product.grad_output, product.inputs)

    def run(self, stage: int, microbatch: int) -> None:
        """Compute the products of one backward, in the order in which they were put."""
        for weight, grad_output, inputs in self._products.pop((stage, microbatch), ()):
            weight.add_product(grad_output, inputs)


class Weight:
    """A stored tensor: what it is (`spec`), its value (`tensor`), and where its gradient accumulates (`grad`).

    Contributions are counted per weight and reduction. The first contribution to a buffer overwrites it, the others are added: zero-and-add
    would round differently and pass over the memory once more.

    Attributes:
        tensor: a leaf in compute precision, a view of a flat bucket.
        grad: a view of a flat gradient bucket, of the same shape; None while the bucket has no buffer.
        grad_dtype: what gradients accumulate in; None: the weight is not trained.
        bucket: where completed gradients are reduced; None: nowhere.
        adapter: low-rank matrices added to its products (LoRA).
    """

    def __init__(
        self, spec: ParamSpec, tensor: Tensor, grad_dtype: torch.dtype | None, queue: WeightGradQueue, bucket: Bucket | None = None
    ):
        self.spec = spec
        self.tensor = tensor
        self.grad: Tensor | None = None
        self.grad_dtype = grad_dtype
        self.bucket = bucket
        self.adapter: Adapter | None = None
        self._queue = queue
        self._expected = self._arrived = 0  # contributions of the step
        self._per_reduction = 1  # contributions to one reduction
        self._one_contribution = False
        self._uninitialized = True  # nothing has been added to `grad` since it was opened: its content is undefined
        self._separate_embedding_grad: Tensor | None = None

    @property
    def trainable(self) -> bool:
        return self.grad_dtype is not None

    @property
    def deferred(self) -> bool:
        """Whether products are kept for the schedule's W passes."""
        return self._queue.deferred

    def begin_step(self, microbatches: int, reductions: int) -> None:
        """Expect the contributions of a step, in `reductions` equal groups."""
        self._expected, self._arrived = microbatches * self.spec.contributions, 0
        self._per_reduction = self._expected // reductions
        self._uninitialized = True
        if self._separate_embedding_grad is not None:
            self._separate_embedding_grad.zero_()

    def release_grad(self) -> None:
        """The buffer that `grad` is a view of is being reduced and no longer belongs to this weight."""
        self.grad, self._uninitialized = None, True

    def separate_embedding_grad(self, buffer: Tensor) -> None:
        """Accumulate the embedding's use of a tied tensor in a buffer of its own, which is reduced separately and added at the step's end.

        The sum then has the order that two pipeline stages produce, head + embedding: bitwise equal under every pp.
        """
        self._separate_embedding_grad = buffer

    def accumulate(self, value: Tensor) -> None:
        """Add a gradient of the whole tensor's shape."""
        if not self.trainable:
            return
        self._add(value)
        self._count()

    def accumulate_product(self, grad_output: Tensor, inputs: Tensor) -> None:
        """Add grad_outputᵀ · inputs ([tokens, out], [tokens, in]), now or in the schedule's W pass."""
        if self.trainable:
            self._queue.put(WeightProduct(self, grad_output, inputs))

    def accumulate_rows(self, rows: Tensor, values: Tensor) -> None:
        """Add values[i] to row rows[i] ([n], [n, width]): the gradient of a lookup; equal rows add up."""
        if not self.trainable:
            return
        target = self._open_grad()  # before the choice: the bucket is needed in any case
        if self._separate_embedding_grad is not None:
            target = self._separate_embedding_grad
        elif self._uninitialized:
            target.zero_()
            self._uninitialized = False
        target.index_add_(0, rows, values.to(target.dtype))
        self._count()

    @contextmanager
    def accumulate_as_one(self) -> Iterator[None]:
        """Count everything that is added inside as one contribution, complete at the end."""
        self._one_contribution = True
        yield
        self._one_contribution = False
        if self.trainable:
            self._count()

    def add_product(self, grad_output: Tensor, inputs: Tensor) -> None:
        """Compute and add grad_outputᵀ · inputs now. Called by the queue."""
        grad, left = self._open_grad(), grad_output.t()
        if left.dtype != grad.dtype and left.is_cuda:  # the product's fp32 accumulators are added to the target without rounding
            torch.addmm(grad, left, inputs, out_dtype=grad.dtype, beta=0 if self._uninitialized else 1, out=grad)
            self._uninitialized = False
        elif left.dtype != grad.dtype:
            self._add(left @ inputs)
        elif self._uninitialized:
            torch.mm(left, inputs, out=grad)
            self._uninitialized = False
        else:
            grad.addmm_(left, inputs)
        self._count()

    def finish_step(self) -> None:
        """Complete a weight that the step did not use, with a zero gradient.

        Raises:
            RuntimeError: some contributions are missing: training on would be wrong.
        """
        if 0 < self._arrived < self._expected:
            raise RuntimeError(f"{self.spec.name}: {self._arrived} of {self._expected} gradient contributions arrived in this step")
        while self._arrived < self._expected:
            self._arrived += self._per_reduction
            self._complete()

    def _open_grad(self) -> Tensor:
        if self.grad is None:
            assert self.bucket is not None
            self.bucket.open()
        assert self.grad is not None
        return self.grad

    def _add(self, value: Tensor) -> None:
        grad = self._open_grad()
        if self._uninitialized:
            grad.copy_(value)
            self._uninitialized = False
        else:
            grad.add_(value)

    def _count(self) -> None:
        """One contribution has been added; the last one of a reduction completes the weight in its bucket."""
        if self._one_contribution:
            return
        self._arrived += 1
        if self._arrived > self._expected:
            raise RuntimeError(f"{self.spec.name}: more than {self._expected} gradient contributions in one step")
        if self._arrived % self._per_reduction == 0:
            self._complete()

    def _complete(self) -> None:
        if self._uninitialized and self.grad is not None:  # every contribution went elsewhere, or there was none
            self.grad.zero_()
            self._uninitialized = False
        if self.bucket is not None:
            self.bucket.complete(self, self._arrived // self._per_reduction - 1)
