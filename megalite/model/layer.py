"""One layer: a list of blocks, each with its norms, scale and dropout, that add to the residual stream.

    x + Σ dropout(scale · output_norm(block(input_norm(x))))     of blocks that stand beside each other
    one such sum after the other                                 of blocks that follow each other

Which blocks a layer has, and where its norms are, says `kinds.blocks_of`; a block is a module of its kind's
room (`blocks/KIND/block.py`). What varies between families (norm kind and placement, biases, gating,
positions) is decided in `__init__` from the fields of `ModelConfig`; `forward` has no conditions on
parallelism. Communicates only in the blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from megalite.config.sections.model import ModelConfig
from megalite.mesh.mesh import Mesh
from megalite.model.block_kind import BlockSpec
from megalite.model.block_module import BlockModule, Caller, call
from megalite.model.forward_state import Dropout, ForwardState, Site
from megalite.model.kinds import KINDS, blocks_of
from megalite.model.layer_options import LayerOptions
from megalite.parallel.compiled_ops import CompiledOps
from megalite.parallel.node import Node, Saved
from megalite.parallel.tensor.norm import LayerNorm, RMSNorm, add_and_norm
from megalite.parallel.weight import Weights

OUTPUT_DROPOUT = {"attention": Site.ATTENTION_OUTPUT, "mlp": Site.MLP_OUTPUT}  # by slot


def make_norm(model: ModelConfig, weights: Weights, name: str, ops: CompiledOps) -> nn.Module:
    if model.norm == "rms":
        return RMSNorm(weights[f"{name}.weight"], model.rms_norm_eps, model.norm_offset, ops)
    return LayerNorm(
        weights[f"{name}.weight"], weights.get(f"{name}.bias"), model.rms_norm_eps, model.norm_offset, ops
    )


class Scale(nn.Module):
    """Computes x · factor."""

    def __init__(self, factor: float):
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class PlacedBlock(nn.Module):
    """A block in its place in a layer: [seq (/tp), batch, hidden] -> the same shape.

    Attributes:
        input_norm: the identity if the block has no norm of its own.
        output: what is applied to the block's output before dropout: its norm, and the residual multiplier.
    """

    def __init__(
        self, model: ModelConfig, spec: BlockSpec, weights: Weights, mesh: Mesh, options: LayerOptions
    ):
        super().__init__()

        def norm(name: str | None) -> nn.Module:
            return nn.Identity() if name is None else make_norm(model, weights, name, options.ops)

        self.spec = spec
        self.block: BlockModule = KINDS[spec.kind].make(model, spec, weights, mesh, options)
        self.input_norm = norm(spec.input_norm and f"layers.{spec.layer}.{spec.input_norm}")
        output = [norm(f"{spec.name}.output_norm" if spec.output_norm else None)]
        if model.residual_multiplier != 1.0:
            output.append(Scale(model.residual_multiplier))
        self.output = nn.Sequential(*output)
        self.dropout = Dropout(
            model.residual_dropout, OUTPUT_DROPOUT[spec.slot], spec.layer, mesh.tp, options.sequence_parallel
        )
        # Whether `compute` and `gradient` differentiate the block with its norm as one node of the graph.
        self.is_node = (
            self.block.differentiates
            and isinstance(self.input_norm, RMSNorm | LayerNorm)
            and spec.output_norm is False
            and model.residual_multiplier == 1.0
            and model.residual_dropout == 0.0
            and options.adapter_dropout == 0.0
        )
        trained = [
            weight
            for name, weight in weights.items()
            if name.startswith(f"{spec.name}.") and weight.trainable
        ]
        self.anchor = trained[0] if trained else None  # see `Node`

    def forward(self, x: Tensor, state: ForwardState) -> Tensor:
        """Return x + dropout(output(block(input_norm(x))))."""
        if self.is_node:
            return Node.apply(x, self.anchor and self.anchor.tensor, self, state)
        return x + self.dropout(self.output(self.block(self.input_norm(x), state)), state)

    def compute(self, x: Tensor, saved: Saved, state: ForwardState) -> Tensor:
        normed = self.input_norm.compute(x, saved)
        return self.block.compute(normed, saved, state, x)

    def gradient(self, grad: Tensor, saved: Saved, state: ForwardState) -> Tensor:
        dnormed = self.block.gradient(grad, saved, state)
        return self.input_norm.gradient(dnormed, saved, grad)


class Layer(nn.Module):
    """A list of blocks that add to the residual stream: [seq (/tp), batch, hidden] -> the same shape.

    Attributes:
        placed: the blocks, in the order of the forward.
        following: for each block but the first, the block before it, the block, and the operation that
            returns the residual sum between them with its norm.
    """

    def __init__(self, model: ModelConfig, layer: int, weights: Weights, mesh: Mesh, options: LayerOptions):
        super().__init__()
        self.placed = [PlacedBlock(model, spec, weights, mesh, options) for spec in blocks_of(model, layer)]
        self.blocks = nn.ModuleList(self.placed)
        self.following = [(*pair, partial(self._join, *pair)) for pair in pairwise(self.placed)]
        # `compute` under activation checkpointing
        self.recomputed: Callable[[Tensor, ForwardState], Tensor] | None = None
        self.call: Caller = call
        one_by_one = not any(block.spec.beside for block in self.placed)
        self.by_block = one_by_one and any(block.is_node for block in self.placed)

    def forward(self, x: Tensor, state: ForwardState) -> Tensor:
        run = self.compute if self.recomputed is None or not torch.is_grad_enabled() else self.recomputed
        return run(x, state)

    def compute(self, x: Tensor, state: ForwardState) -> Tensor:
        """Compute the layer without recomputation."""
        if not self.by_block or not torch.is_grad_enabled():
            return self.compute_by_operation(x, state)
        for block in self.placed:
            x = block(x, state)
        return x

    def compute_by_operation(self, x: Tensor, state: ForwardState) -> Tensor:
        """Compute the layer with a node of the graph for each operation, which `call` may treat alone."""
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

    @staticmethod
    def _join(
        before: PlacedBlock, block: PlacedBlock, x: Tensor, output: Tensor, state: ForwardState
    ) -> tuple[Tensor, Tensor]:
        """Return the residual sum after a block, and its norm: fused for RMSNorm, one pass over memory."""
        return add_and_norm(x, before.dropout(before.output(output), state), block.input_norm)

    def call_through(self, caller: Caller) -> None:
        """Make the layer call its operations through `caller`, which may drop their activations."""
        self.call, self.by_block = caller, False
        for block in self.placed:
            block.block.call = caller


def _summed(x: Tensor, branches: Sequence[Tensor]) -> Tensor:
    for branch in branches:
        x = x + branch
    return x


def make_layer(model: ModelConfig, layer: int, weights: Weights, mesh: Mesh, options: LayerOptions) -> Layer:
    module = Layer(model, layer, weights, mesh, options)
    if options.recompute not in ("none", "selective"):
        from megalite.model.recomputation import recomputing

        exchanged = mesh.cp.size > 1 and options.context == "ulysses"
        module.recomputed = recomputing(module, options.recompute, exchanged)
    return module
