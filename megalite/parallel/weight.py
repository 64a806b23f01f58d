"""A stored parameter with its memory, and the queue through which linear layers compute their weight gradients.

Weight gradients do not pass through autograd: the backward of each operation hands them to its `Weight`, which adds them where they
accumulate (a flat bucket, at least fp32) and knows when the last contribution of the step has arrived. That saves a copy and an
addition per tensor, keeps microbatches in ascending order, lets a bucket be reduced the moment it is complete, and lets a
schedule put weight gradients off (`WeightGradients.deferred`) to fill the pipeline's bubble.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megalite.parallel.spec import ParamSpec


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

    `tensor` is a leaf in compute precision, a view of a flat bucket; `grad` is a view of a flat gradient bucket of the same shape.
    """

    def __init__(self, spec: ParamSpec, tensor: Tensor, grad: Tensor | None, queue: WeightGradients, on_complete: Callable[[], None]):
        self.spec = spec
        self.tensor = tensor
        self.grad = grad
        self._queue = queue
        self._on_complete = on_complete
        self._expected = self._remaining = 0
        self._fresh = True
        self._apart: Tensor | None = None  # a second accumulator, see keep_apart

    def begin_step(self, microbatches: int) -> None:
        """Expect this step's contributions; the first of them overwrites what the last step left."""
        self._expected = self._remaining = microbatches * self.spec.contributions
        self._fresh = True
        if self._apart is not None:
            self._apart.zero_()

    def keep_apart(self, buffer: Tensor) -> None:
        """Accumulate the embedding's use of a tied tensor in a buffer of its own, which the store reduces and adds at the end of the step.

        The sum then has the order that two pipeline stages produce, head + embedding: equal bit for bit under every pp.
        """
        self._apart = buffer

    def accumulate_product(self, grad_output: Tensor, inputs: Tensor) -> None:
        """Add grad_outputᵀ · inputs ([tokens, out], [tokens, in]), now or when the schedule says so."""
        if self.grad is not None:
            self._queue.put(lambda: self._add_product(grad_output, inputs))

    def _add_product(self, grad_output: Tensor, inputs: Tensor) -> None:
        assert self.grad is not None
        left = grad_output.t()
        if left.dtype != self.grad.dtype:
            self._add(_wide_product(left, inputs, self.grad.dtype))
        elif self._fresh:
            torch.mm(left, inputs, out=self.grad)
            self._fresh = False
        else:
            self.grad.addmm_(left, inputs)
        self._contributed()

    def accumulate(self, value: Tensor) -> None:
        """Add a gradient of the whole tensor's shape."""
        if self.grad is not None:
            self._add(value)
            self._contributed()

    def accumulate_rows(self, rows: Tensor, values: Tensor) -> None:
        """Add values[i] to row rows[i] ([n], [n, width]): the gradient of a lookup; equal rows add up."""
        if self.grad is None:
            return
        if self._apart is None and self._fresh:
            self.grad.zero_()
            self._fresh = False
        target = self.grad if self._apart is None else self._apart
        target.index_add_(0, rows, values.to(target.dtype))
        self._contributed()

    def _add(self, value: Tensor) -> None:
        assert self.grad is not None
        if self._fresh:
            self.grad.copy_(value)
            self._fresh = False
        else:
            self.grad.add_(value)

    def _contributed(self) -> None:
        self._remaining -= 1
        if self._remaining < 0:
            raise RuntimeError(f"{self.spec.name}: more than {self._expected} gradient contributions in one step")
        if self._remaining == 0:
            self._complete()

    def _complete(self) -> None:
        assert self.grad is not None
        if self._fresh:
            self.grad.zero_()
        self._on_complete()

    def finish_step(self) -> None:
        """Give a tensor that the step did not use a zero gradient. Raises where contributions are missing: training on would be wrong."""
        if 0 < self._remaining < self._expected:
            done = self._expected - self._remaining
            raise RuntimeError(f"{self.spec.name}: {done} of {self._expected} gradient contributions arrived in this step")
        if self._remaining:
            self._remaining = 0
            self._complete()


def _wide_product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """A product of low-precision matrices; on a GPU its fp32 accumulators are kept."""
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=dtype)
    return left @ right
