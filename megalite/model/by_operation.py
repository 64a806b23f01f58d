"""A layer with a node of autograd's graph for each operation of its blocks.

    x + Σ dropout(scale · output_norm(block(input_norm(x))))     of blocks that stand beside each other
    one such sum after the other                                 of blocks that follow each other

Recomputation drops the tensors of some operations, blocks beside each other share an input, and a kind of
block may have no backward of its own. No communication but that of the blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megalite.model.block_module import Caller, call
from megalite.model.forward_state import ForwardState
from megalite.parallel.tensor.norm import RMSNorm

if TYPE_CHECKING:
    from megalite.model.layer import PlacedBlock


class ByOperation:
    """Computes a layer operation by operation: [seq (/tp), batch, hidden] -> the same shape.

    Attributes:
        placed: the blocks, in the order of the forward.
        following: for each block but the first, the block before it, the block, and the operation that
            returns the residual sum between them with its norm.
        call: calls the operations.
    """

    def __init__(self, placed: Sequence[PlacedBlock]):
        self.placed = placed
        self.following = [(*pair, partial(_join, *pair)) for pair in pairwise(placed)]
        self.call: Caller = call

    def __call__(self, x: Tensor, state: ForwardState) -> Tensor:
        block = self.placed[0]
        normed = self.call(block.input_norm, x)
        output = self.call(block.block, normed, state)
        branches: list[Tensor] = []  # of blocks beside the current one
        for before, block, join in self.following:
            if block.spec.beside:
                branches.append(before.dropout(self.call(before.output, output), state))
                if block.spec.input_norm is not None:
                    normed = self.call(block.input_norm, x)
            else:
                x, normed = self.call(join, _summed(x, branches), output, state)
                branches = []
            output = self.call(block.block, normed, state)
        return _summed(x, branches) + block.dropout(self.call(block.output, output), state)

    def call_through(self, caller: Caller) -> None:
        """Make the layer call its operations through `caller`, which may drop their activations."""
        self.call = caller
        for block in self.placed:
            block.block.call = caller


def _summed(x: Tensor, branches: Sequence[Tensor]) -> Tensor:
    for branch in branches:
        x = x + branch
    return x


def _join(
    before: PlacedBlock, block: PlacedBlock, x: Tensor, output: Tensor, state: ForwardState
) -> tuple[Tensor, Tensor]:
    """Return the residual sum after a block, and its norm: fused for RMSNorm, one pass over memory."""
    return add_and_norm(x, before.dropout(before.output(output), state), block.input_norm)


class _AddRMSNorm(torch.autograd.Function):
    """Forward: x + branch and its norm, fused. Backward: one gradient for both inputs. No communication."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, branch: Tensor, weight: Tensor | None, norm: RMSNorm
    ) -> tuple[Tensor, Tensor]:
        total, y, rstd = norm.ops.add_rms_norm(x, branch, weight, norm.eps, norm.offset, norm.rounded)
        ctx.save_for_backward(total, rstd)
        ctx.norm = norm
        return total, y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        dx = ctx.norm.gradient(grads[1], [ctx.saved_tensors], dtotal=grads[0])
        return dx, dx, None, None


def add_and_norm(x: Tensor, branch: Tensor, norm: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Return x + branch and its norm, all [seq (/tp), batch, hidden].

    With an RMSNorm this takes one pass over memory.
    """
    if isinstance(norm, RMSNorm):
        return _AddRMSNorm.apply(x, branch, norm.weight.tensor, norm)
    total = x + branch
    return total, norm(total)
