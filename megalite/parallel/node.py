"""Operations as one node of autograd's graph.

An operation is computed and differentiated by two plain methods: `compute` appends what the backward needs to
a list, and `gradient` takes it from there, in the reverse order. Operations are therefore put together like
functions: the `compute` of a block calls those of its linears and norms, and its `gradient` calls theirs in
the reverse order. However many they are, the graph has one node, and autograd's cost is that of one node.
This module does no communication.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, islice
from typing import Any, Protocol

import torch
from torch import Tensor

Saved = list[tuple[Any, ...]]
"""What `compute` keeps for `gradient`: a stack whose entries are tuples of tensors (or None)."""


class Differentiable(Protocol):
    """A function of one tensor with its backward; `context` are further arguments, the same for both."""

    def compute(self, x: Tensor, saved: Saved, *context: Any) -> Tensor:
        """Return the output, and append entries to `saved`, if the backward needs any."""

    def gradient(self, grad: Tensor, saved: Saved, *context: Any) -> Tensor:
        """Return the gradient of x, pop the entries, and accumulate the gradients of weights.

        `grad` stays as it is: others may add it to theirs.
        """


class Chain:
    """Operations one after the other."""

    def __init__(self, operations: Sequence[Differentiable]):
        self.operations = operations

    def compute(self, x: Tensor, saved: Saved, *context: Any) -> Tensor:
        for operation in self.operations:
            x = operation.compute(x, saved, *context)
        return x

    def gradient(self, grad: Tensor, saved: Saved, *context: Any) -> Tensor:
        for operation in reversed(self.operations):
            grad = operation.gradient(grad, saved, *context)
        return grad


def in_turn(functions: Sequence[Callable[[Tensor], Tensor]]) -> Callable[[Tensor], Tensor]:
    """Return a function that calls functions of one tensor one after the other."""

    def run(x: Tensor) -> Tensor:
        for function in functions:
            x = function(x)
        return x

    return run


class Node(torch.autograd.Function):
    """Computes `operation.compute(x, saved, *context)`.

    `anchor` is a trained weight of the operation, or None. It only makes the output require a gradient, even
    if x does not: gradients of weights do not pass through autograd (`parallel.weight`).
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor | None, operation: Differentiable, *context: Any
    ) -> Tensor:
        saved: Saved = []
        out = operation.compute(x.detach(), saved, *context)
        ctx.operation, ctx.context = operation, context
        ctx.sizes = [len(entry) for entry in saved]
        ctx.save_for_backward(*chain.from_iterable(saved))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("gradients of gradients are not supported: do not use create_graph=True")
        tensors = iter(ctx.saved_tensors)
        saved: Saved = [tuple(islice(tensors, size)) for size in ctx.sizes]
        # unless the graph is retained, `saved` alone holds them now: operations free them by popping
        ctx.maybe_clear_saved_tensors()
        del tensors
        grad, grads = grads[0], ()
        dx = ctx.operation.gradient(grad, saved, *ctx.context)
        return (dx, None, None, *(None for _ in ctx.context))
