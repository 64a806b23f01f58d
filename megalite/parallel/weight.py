"""A stored parameter with its memory, and the queue through which linear layers compute their weight gradients.

Weight gradients do not pass through autograd: the backward of each operation hands them to its `Weight`, which adds them where they
accumulate (a flat bucket, at least fp32) and knows when the last contribution of the step has arrived. That saves a copy and an
addition per tensor, keeps microbatches in ascending order, lets a bucket be reduced the moment it is complete, and lets a
schedule put weight gradients off (`WeightGradients.deferred`) to fill the pipeline's bubble.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megalite.parallel.spec import ParamSpec

if TYPE_CHECKING:
    from megalite.parallel.tensor.lora import Adapter


class WeightGradients:
    """Weight-gradient products of linear layers: run at once, or kept until the schedule asks for them."""

    def __init__(self) -> None:
        self.deferred = False
        self._pending: list[Callable[[], None]] = []

    def put(self, work: Callable[[], None]) -> None:
        if self.deferred:
            self._pending.append(work)
        else:
            work()

    def take(self) -> list[Callable[[], None]]:
        """What was put off since the last call, in order: the weight gradients of one backward."""
        pending, self._pending = self._pending, []
        return pending


class Weight:
    """A stored tensor: what it is (`spec`), its value (`tensor`), and where its gradient accumulates (`grad`).

    `tensor` is a leaf in compute precision, a view of a flat bucket; `grad` is a view of a flat gradient bucket of the same shape, None
    where there is none now. Without `grad_dtype` the tensor is not trained. `adapter` is what changes its products (LoRA).
    """

    def __init__(self, spec: ParamSpec, tensor: Tensor, grad_dtype: torch.dtype | None, queue: WeightGradients):
        self.spec = spec
        self.tensor = tensor
        self.grad: Tensor | None = None
        self.grad_dtype = grad_dtype
        self.adapter: Adapter | None = None
        self._queue = queue
        self._open: Callable[[], None]
        self._on_complete: Callable[[int], None]
        self._expected = self._arrived = 0
        self._each = 1  # contributions to one reduction
        self._in_parts = False
        self._fresh = True
        self._apart: Tensor | None = None  # a second accumulator, see keep_apart

    @property
    def trainable(self) -> bool:
        return self.grad_dtype is not None

    def connect(self, open_: Callable[[], None], on_complete: Callable[[int], None]) -> None:
        """`open_` sets `grad` where it is None; `on_complete(i)` hears that the step's i-th reduction has all that it needs from here."""
        self._open, self._on_complete = open_, on_complete

    def begin_step(self, microbatches: int, reductions: int) -> None:
        """Expect this step's contributions; the first to a buffer overwrites what is there."""
        self._expected, self._arrived = microbatches * self.spec.contributions, 0
        self._each = self._expected // reductions
        self._fresh = True
        if self._apart is not None:
            self._apart.zero_()

    def forget(self) -> None:
        """The buffer that `grad` is a view of has been given away."""
        self.grad, self._fresh = None, True

    def keep_apart(self, buffer: Tensor) -> None:
        """Accumulate the embedding's use of a tied tensor in a buffer of its own, which is reduced and added at the end of the step.

        The sum then has the order that two pipeline stages produce, head + embedding: equal bit for bit under every pp.
        """
        self._apart = buffer

    def accumulate_product(self, grad_output: Tensor, inputs: Tensor) -> None:
        """Add grad_outputᵀ · inputs ([tokens, out], [tokens, in]), now or when the schedule says so."""
        if self.trainable:
            self._queue.put(lambda: self._add_product(grad_output, inputs))

    @property
    def deferred(self) -> bool:
        """Whether products are put off now, for the schedule's weight passes."""
        return self._queue.deferred

    @contextmanager
    def one_contribution(self) -> Iterator[None]:
        """What is added meanwhile are parts of one contribution, complete at the end."""
        self._in_parts = True
        yield
        self._in_parts = False
        if self.trainable:
            self._contributed()

    def _add_product(self, grad_output: Tensor, inputs: Tensor) -> None:
        target, left = self._target(), grad_output.t()
        if left.dtype != target.dtype and left.is_cuda:  # the fp32 accumulators are kept, and added to the target as they are
            torch.addmm(target, left, inputs, out_dtype=target.dtype, beta=0 if self._fresh else 1, out=target)
            self._fresh = False
        elif left.dtype != target.dtype:
            self._add(left @ inputs)
        elif self._fresh:
            torch.mm(left, inputs, out=target)
            self._fresh = False
        else:
            target.addmm_(left, inputs)
        self._contributed()

    def accumulate(self, value: Tensor) -> None:
        """Add a gradient of the whole tensor's shape."""
        if self.trainable:
            self._add(value)
            self._contributed()

    def accumulate_rows(self, rows: Tensor, values: Tensor) -> None:
        """Add values[i] to row rows[i] ([n], [n, width]): the gradient of a lookup; equal rows add up."""
        if not self.trainable:
            return
        target = self._target()
        if self._apart is not None:
            target = self._apart
        elif self._fresh:
            target.zero_()
            self._fresh = False
        target.index_add_(0, rows, values.to(target.dtype))
        self._contributed()

    def _target(self) -> Tensor:
        if self.grad is None:
            self._open()
        assert self.grad is not None
        return self.grad

    def _add(self, value: Tensor) -> None:
        target = self._target()
        if self._fresh:
            target.copy_(value)
            self._fresh = False
        else:
            target.add_(value)

    def _contributed(self) -> None:
        if self._in_parts:
            return
        self._arrived += 1
        if self._arrived > self._expected:
            raise RuntimeError(f"{self.spec.name}: more than {self._expected} gradient contributions in one step")
        if self._arrived % self._each == 0:
            self._complete()

    def _complete(self) -> None:
        if self._fresh and self.grad is not None:
            self.grad.zero_()
            self._fresh = False
        self._on_complete(self._arrived // self._each - 1)

    def finish_step(self) -> None:
        """Give a tensor that the step did not use a zero gradient. Raises where contributions are missing: training on would be wrong."""
        if 0 < self._arrived < self._expected:
            raise RuntimeError(f"{self.spec.name}: {self._arrived} of {self._expected} gradient contributions arrived in this step")
        while self._arrived < self._expected:
            self._arrived += self._each
            self._complete()
