"""An operation, or a whole block, as one node of autograd's graph.

An operation is computed and differentiated by two plain methods: `compute` appends what the backward needs to
a list, and `gradient` takes it from there, in the reverse order. Operations are therefore put together like
functions: the `compute` of a block calls those of its linears and norms, its `gradient` calls theirs in the
reverse order. Either way the graph has one node, and autograd's cost is that of one node. This module does no
communication.
"""

from __future__ import annotations

from itertools import chain, islice
from typing import Any, Protocol

import torch
from torch import Tensor

Saved = list[tuple[Any, ...]]
"""What `compute` keeps for `gradient`: a stack with one entry for each operation, its tensors (or None)."""


class Operation(Protocol):
    """A function of one tensor with its backward; `context` are further arguments, the same for both."""

    def compute(self, x: Tensor, saved: Saved, *context: Any) -> Tensor:
        """Return the output, a new tensor, and append an entry to `saved`."""

    def gradient(self, grad: Tensor, saved: Saved, *context: Any) -> Tensor | None:
        """Return the gradient of x, pop the entry, and accumulate the gradients of weights."""


class Node(torch.autograd.Function):
    """Computes `operation.compute(x, saved, *context)`.

    `anchor` is a trained weight of the operation, or None: with it the output has a gradient even if x has
    none. Its own gradient does not pass through autograd (`parallel.weight`).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor | None, operation: Operation, *context: Any) -> Tensor:
        saved: Saved = []
        out = operation.compute(x, saved, *context)
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
        dx = ctx.operation.gradient(grads[0], saved, *ctx.context)
        return (dx, None, None, *(None for _ in ctx.context))
