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
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from megalite.config.sections.model import ModelConfig
from megalite.mesh.mesh import Mesh
from megalite.model.block_kind import BlockSpec
from megalite.model.block_module import BlockModule
from megalite.model.by_operation import ByOperation
from megalite.model.forward_state import Dropout, ForwardState, Site
from megalite.model.kinds import KINDS, blocks_of
from megalite.model.layer_options import LayerOptions
from megalite.parallel.compiled_ops import CompiledOps
from megalite.parallel.node import Chain, Differentiable, Node, Saved
from megalite.parallel.tensor.norm import LayerNorm, RMSNorm
from megalite.parallel.tensor.norm_weights import NO_WEIGHT, NormWeights
from megalite.parallel.weight import Weights

OUTPUT_DROPOUT = {
    "attention": Site.ATTENTION_OUTPUT,
    "mixer": Site.MIXER_OUTPUT,
    "mlp": Site.MLP_OUTPUT,
}  # by slot


def make_norm(model: ModelConfig, weights: NormWeights, name: str, ops: CompiledOps) -> RMSNorm | LayerNorm:
    """Return the norm of the residual stream or of a block's output with this name."""
    weight = weights.get(f"{name}.weight", NO_WEIGHT)  # with `norm_weight: false` no spec has one
    eps, offset = model.rms_norm_eps, model.norm_offset
    if model.norm == "rms":
        return RMSNorm(weight, eps, offset, model.rounds_normalized, ops)
    return LayerNorm(weight, weights.get(f"{name}.bias"), eps, offset, ops)


class Scale:
    """Computes x · factor."""

    def __init__(self, factor: float):
        self.factor = factor

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.factor

    def compute(self, x: Tensor, saved: Saved) -> Tensor:
        return x * self.factor

    def gradient(self, grad: Tensor, saved: Saved) -> Tensor:
        return grad * self.factor


class PlacedBlock(nn.Module):
    """A block in its place in a layer: [seq (/tp), batch, hidden] -> the same shape.

    Attributes:
        input_norm: the identity if the block has no norm of its own.
        output: what is applied to the block's output before dropout: a factor, its norm, a factor.
    """

    def __init__(
        self, model: ModelConfig, spec: BlockSpec, weights: Weights, mesh: Mesh, options: LayerOptions
    ):
        super().__init__()

        def norm(name: str) -> RMSNorm | LayerNorm:
            return make_norm(model, weights, name, options.ops)

        self.spec = spec
        self.block: BlockModule = KINDS[spec.kind].make(model, spec, weights, mesh, options)
        self.has_no_norm = spec.input_norm is None
        name = f"layers.{spec.layer}.{spec.input_norm}"
        self.input_norm: Any = nn.Identity() if self.has_no_norm else norm(name)
        before, after = KINDS[spec.kind].output_factors(model, spec)
        output: list[Any] = [] if before == 1.0 else [Scale(before)]
        if spec.output_norm:
            output.append(norm(f"{spec.name}.output_norm"))
        if after != 1.0:
            output.append(Scale(after))
        self.output = Chain(output)
        self.dropout = Dropout(
            model.residual_dropout, OUTPUT_DROPOUT[spec.slot], spec.layer, mesh.tp, options.sequence_parallel
        )
        self.adds_directly = not output and self.dropout.probability == 0.0
        # whether `compute` and `gradient` may be used; they pass no dropout masks to adapters
        self.differentiates = self.block.differentiates and options.adapter_dropout == 0.0
        prefixes = (f"{spec.name}.", f"layers.{spec.layer}.{spec.input_norm}.")
        own = (weight for key, weight in weights.items() if key.startswith(prefixes))
        self.trained = next((weight for weight in own if weight.trainable), None)

    def forward(self, x: Tensor, state: ForwardState) -> Tensor:
        """Return x + dropout(output(block(input_norm(x))))."""
        return x + self.dropout(self.output(self.block(self.input_norm(x), state)), state)

    def compute(self, x: Tensor, saved: Saved, state: ForwardState) -> Tensor:
        """Compute the same as `forward`, as a part of a node of the graph."""
        normed = x if self.has_no_norm else self.input_norm.compute(x, saved)
        if self.adds_directly:
            return self.block.compute(normed, saved, state, residual=x)
        out = self.output.compute(self.block.compute(normed, saved, state), saved)
        if self.dropout.probability:
            out = self.dropout.compute(out, saved, state)
        return out.add_(x)

    def gradient(self, grad: Tensor, saved: Saved, state: ForwardState) -> Tensor:
        dout = self.dropout.gradient(grad, saved, state) if self.dropout.probability else grad
        dx = self.block.gradient(self.output.gradient(dout, saved), saved, state)
        # x is also the residual: its gradient there is that of the output
        return dx.add_(grad) if self.has_no_norm else self.input_norm.gradient(dx, saved, dtotal=grad)


def as_node(operations: Sequence[Differentiable]) -> Callable[[Tensor, ForwardState], Tensor]:
    """Return a function that computes placed blocks as one node of the graph.

    Between them may be starts and ends of units (`Stage`).
    """
    placed = (operation for operation in operations if isinstance(operation, PlacedBlock))
    trained = next((each.trained for each in placed if each.trained is not None), None)
    joined = Chain(operations)

    def node(x: Tensor, state: ForwardState) -> Tensor:
        return Node.apply(x, None if trained is None else trained.tensor, joined, state)

    return node


class Layer(nn.Module):
    """A list of blocks that add to the residual stream: [seq (/tp), batch, hidden] -> the same shape.

    Attributes:
        placed: the blocks, in the order of the forward.
        nodes: functions that compute the layer one after the other: blocks joined to nodes of autograd's
            graph, and others. Empty if no blocks can be joined: `by_operation` then computes the layer.
    """

    def __init__(self, model: ModelConfig, layer: int, weights: Weights, mesh: Mesh, options: LayerOptions):
        super().__init__()
        self.placed = [PlacedBlock(model, spec, weights, mesh, options) for spec in blocks_of(model, layer)]
        self.blocks = nn.ModuleList(self.placed)
        self.by_operation = ByOperation(self.placed)
        # `compute` under activation checkpointing
        self.recomputed: Callable[[Tensor, ForwardState], Tensor] | None = None
        self.nodes = self._nodes()

    def _nodes(self) -> list[Callable[[Tensor, ForwardState], Tensor]]:
        """Return `nodes`."""
        if any(block.spec.beside for block in self.placed):
            return []
        nodes: list[Callable[[Tensor, ForwardState], Tensor]] = []
        for differentiates, group in groupby(self.placed, key=lambda block: block.differentiates):
            blocks = list(group)
            nodes.extend([as_node(blocks)] if differentiates else blocks)
        return nodes if any(block.differentiates for block in self.placed) else []

    @property
    def is_node(self) -> bool:
        """Whether the whole layer may be a part of a node of the graph."""
        return len(self.nodes) == 1 and self.recomputed is None

    def forward(self, x: Tensor, state: ForwardState) -> Tensor:
        run = self.compute if self.recomputed is None or not torch.is_grad_enabled() else self.recomputed
        return run(x, state)

    def compute(self, x: Tensor, state: ForwardState) -> Tensor:
        """Compute the layer without recomputation.

        In training the nodes compute it, also without a graph: a forward that is repeated has the same bits.
        """
        if not self.nodes or not state.training:
            return self.by_operation(x, state)
        for node in self.nodes:
            x = node(x, state)
        return x


def make_layer(model: ModelConfig, layer: int, weights: Weights, mesh: Mesh, options: LayerOptions) -> Layer:
    module = Layer(model, layer, weights, mesh, options)
    if options.recompute not in ("none", "selective"):
        from megalite.model.recomputation import recomputing

        exchanged = mesh.cp.size > 1 and options.share.context == "ulysses"
        module.recomputed = recomputing(module, options.recompute, exchanged)
    return module
