"""A stored parameter with its memory and its gradient.

Weight gradients bypass autograd. The backward of each operation passes its contribution to the `Weight`,
which adds it to the gradient's slice of a flat bucket, in at least fp32. This saves a copy and an addition
per tensor, keeps microbatches in ascending order, starts the reduction of a bucket as soon as it is complete,
and allows a schedule to defer weight gradients to its W passes.

The life cycle of a gradient: a contribution is added (`accumulate`, `accumulate_rows`, or `accumulate_matmul`
through the `WeightGradQueue`); the last one of a reduction completes the weight in its bucket
(`GradientBucket.complete`); the last weight of the bucket starts the reduction. This module does no
communication.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from megalite.parallel.matmuls import Matmuls, add
from megalite.parallel.spec import ParamSpec
from megalite.parallel.weight_grad_queue import WeightGradQueue, WeightMatmul

if TYPE_CHECKING:
    from megalite_kernels.groups import Groups

    from megalite.parallel.expert.grouped_matmul import ExpertAdapter
    from megalite.parallel.matmuls import Operand
    from megalite.parallel.tensor.lora import Adapter


class GradientSink(Protocol):
    """Interface of the bucket in which a gradient accumulates (`parallel.sharding.gradient_bucket`)."""

    def open(self) -> None:
        """Allocate the buffer in which gradients accumulate, and set `grad` of every weight in the bucket."""

    def complete(self, weight: Weight, reduction: int) -> None:
        """Count a weight that has all contributions of the step's reduction number `reduction` (from 0)."""


class Weight:
    """A stored tensor with its description (`spec`), its value (`tensor`), and its gradient (`grad`).

    Contributions are counted per weight and reduction. The first contribution to a buffer overwrites it, and
    the others are added: zeroing the buffer first would round differently and require one more pass over the
    memory.

    Attributes:
        tensor: a leaf in compute precision, a view of a flat bucket, of the spec's local shape.
        grad: a view of a flat gradient bucket, of the same shape; None while the bucket has no buffer.
        grad_dtype: accumulate dtype of the gradient; None if the weight is not trained.
        bucket: reduces completed gradients; None if they are not reduced.
        matmuls: computes its matmuls.
        adapter: the LoRA adapter of its matmuls.
        expert_adapter: the LoRA adapters of the experts that are stacked in it.
    """

    def __init__(
        self,
        spec: ParamSpec,
        tensor: Tensor,
        grad_dtype: torch.dtype | None,
        queue: WeightGradQueue,
        bucket: GradientSink | None = None,
    ):
        self.spec = spec
        self.tensor = tensor
        self.grad: Tensor | None = None
        self.grad_dtype, self.trainable = grad_dtype, grad_dtype is not None
        self.bucket = bucket
        self.matmuls = Matmuls(tensor)
        self.adapter: Adapter | None = None
        self.expert_adapter: ExpertAdapter | None = None
        self._queue = queue
        self._expected = self._arrived = 0  # contributions of the step
        self._per_reduction = 1  # contributions to one reduction
        self._one_contribution = False
        # nothing has been added to `grad` in this reduction: its content is undefined
        self._uninitialized = True
        self._separate_embedding_grad: Tensor | None = None

    @property
    def deferred(self) -> bool:
        """Whether weight-gradient matmuls are deferred to the W passes of the schedule."""
        return self._queue.deferred

    def begin_step(self, microbatches: int, reductions: int) -> None:
        """Expect the contributions of a step.

        These are microbatches · spec.contributions, in `reductions` equal groups.
        """
        self._expected, self._arrived = microbatches * self.spec.contributions, 0
        self._per_reduction = self._expected // reductions
        self._uninitialized = True
        if self._separate_embedding_grad is not None:
            self._separate_embedding_grad.zero_()

    def release_grad(self) -> None:
        """Drop `grad`, zeroed if it has no contribution, because its buffer is being reduced.

        The next contribution allocates a new one.
        """
        if self._uninitialized and self.grad is not None:
            self.grad.zero_()
        self.grad, self._uninitialized = None, True

    def separate_embedding_grad(self, buffer: Tensor) -> None:
        """Accumulate the embedding's gradient of a tied tensor in a separate buffer.

        The buffer is reduced separately and added at the end of the step. The order of the sum is then that
        of two pipeline stages, head + embedding: bitwise equal under every pp.
        """
        self._separate_embedding_grad = buffer

    def accumulate(self, value: Tensor) -> None:
        """Add a gradient with the shape of the tensor; it is cast to the accumulate dtype."""
        if not self.trainable:
            return
        self._add(value)
        self._count()

    def accumulate_matmul(self, grad_output: Tensor, inputs: Operand, groups: Groups | None = None) -> None:
        """Add grad_outputᵀ · inputs ([tokens, out], [tokens, in]), now or in the W pass of the schedule.

        Args:
            groups: number of tokens of each expert.
        """
        if not self.trainable:
            return
        if self._queue.deferred:
            self._queue.put(WeightMatmul(self, grad_output, inputs, groups))
        else:  # the same as `put`, without a record
            self.add_matmul(grad_output, inputs, groups)

    def accumulate_rows(self, rows: Tensor, values: Tensor, separately: bool = True) -> None:
        """Add values[i] to row rows[i] ([n], [n, width]), the gradient of a lookup. Equal rows are summed.

        Args:
            separately: use the separate buffer of the tensor, if it has one.
        """
        if not self.trainable:
            return
        target = self._open_grad()  # also for a separate buffer, because the bucket is reduced in either case
        if separately and self._separate_embedding_grad is not None:
            target = self._separate_embedding_grad
        elif self._uninitialized:
            target.zero_()  # not overwritten, because a lookup only writes some of the rows
            self._uninitialized = False
        target.index_add_(0, rows, values.to(target.dtype))
        self._count()

    @contextmanager
    def accumulate_as_one(self) -> Iterator[None]:
        """Count all contributions inside the block as one, which is complete at its end."""
        self._one_contribution = True
        yield
        self._one_contribution = False
        if self.trainable:
            self._count()

    def add_matmul(self, grad_output: Tensor, inputs: Operand, groups: Groups | None) -> None:
        """Compute and add grad_outputᵀ · inputs now. Called by the queue."""
        grad = self._open_grad() if self.grad is None else self.grad  # [out, in]
        self.matmuls.add_weight_gradient(grad, grad_output, inputs, groups, self._uninitialized)
        self._uninitialized = False
        self._count()

    def finish_step(self) -> None:
        """Complete a weight that the step did not use, with a zero gradient.

        Otherwise its bucket would never be reduced.

        Raises:
            RuntimeError: only some of the contributions have arrived, so that the gradient is wrong.
        """
        if 0 < self._arrived < self._expected:
            raise RuntimeError(
                f"{self.spec.name}: received only {self._arrived} of {self._expected} gradient "
                "contributions in this step"
            )
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
        add(self._open_grad() if self.grad is None else self.grad, value, self._uninitialized)
        self._uninitialized = False

    def _count(self) -> None:
        """Count a contribution; the last one of a reduction completes the weight in its bucket."""
        if self._one_contribution:
            return
        self._arrived += 1
        if self._arrived > self._expected:
            raise RuntimeError(
                f"{self.spec.name}: received more than {self._expected} gradient contributions in one step"
            )
        if self._arrived % self._per_reduction == 0:
            self._complete()

    def _complete(self) -> None:
        # no contribution, or all went to the separate buffer: reduce zeros, not garbage
        if self._uninitialized and self.grad is not None:
            self.grad.zero_()
            self._uninitialized = False
        if self.bucket is not None:
            self.bucket.complete(self, self._arrived // self._per_reduction - 1)


Weights = Mapping[str, Weight]
"""The weights of a rank, by stored name."""
