"""Base class of the modules that compute blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from megalite.model.forward_state import ForwardState
from megalite.parallel.node import Saved

Operation = Callable[..., Any]
"""A function of a layer whose tensors activation checkpointing may drop and compute again."""
Caller = Callable[..., Any]
"""Calls an operation: (operation, *arguments) -> the operation's outputs."""


def call(operation: Operation, *arguments: Any) -> Any:
    """Call an operation and keep its activations, as layers do without recomputation."""
    return operation(*arguments)


class BlockModule(nn.Module):
    """Computes a block: [seq (/tp), batch, hidden] -> the same shape.

    Attributes:
        call: calls the operations that `operations` lists, and `last`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.call: Caller = call

    def operations(self) -> Mapping[str, Operation]:
        """Return the operations that `train.recompute` may name."""
        return {}

    @property
    def last(self) -> Operation:
        """Return the operation that computes the block's output: a part of the block, or all of it."""
        return self

    def forward(self, x: Tensor, state: ForwardState) -> Tensor:
        """Compute the block operation by operation: each is a node of the graph."""
        raise NotImplementedError

    # ---- the whole block as one node of the graph, see `parallel.node`

    @property
    def differentiates(self) -> bool:
        """Return whether the block has its own backward, `gradient`, with the options of the run."""
        return False

    def compute(self, x: Tensor, saved: Saved, state: ForwardState, residual: Tensor | None = None) -> Tensor:
        """Return the same as `forward`, a new tensor, to which `residual` is added."""
        raise NotImplementedError

    def gradient(self, grad: Tensor, saved: Saved, state: ForwardState) -> Tensor:
        """Return the gradient of x, and accumulate those of the weights."""
        raise NotImplementedError
