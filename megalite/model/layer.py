"""One layer: a list of blocks, each with its norms, scale and dropout, that add to the residual stream.

    x + Σ dropout(scale · output_norm(block(input_norm(x))))     of blocks that stand beside each other
    one such sum after the other                                 of blocks that follow each other

Which blocks a layer has, and where its norms are, says `kinds.blocks_of`; a block is a module of its kind's
room (`blocks/KIND/block.py`). What varies between families (norm kind and placement, biases, gating,
positions) is decided in `__init__` from the fields of `ModelConfig`; `forward` has no conditions on
parallelism. Communicates only in the blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from megalite.config.sections.model import ModelConfig
from megalite.mesh.mesh import Mesh
from megalite.model.block_kind import BlockSpec
from megalite.model.block_module import BlockModule, Caller, Operation, call
from megalite.model.cost.recomputed import NORM_OPERATIONS, OUTPUT_OPERATIONS, SUM_OPERATION
from megalite.model.forward_state import Dropout, ForwardState, Site
from megalite.model.kinds import KINDS, blocks_of
from megalite.model.layer_options import LayerOptions
from megalite.parallel.compiled_ops import CompiledOps
from megalite.parallel.tensor.norm import LayerNorm, RMSNorm, add_and_norm
from megalite.parallel.weight import Weight

OUTPUT_DROPOUT = {"attention": Site.ATTENTION_OUTPUT, "mlp": Site.MLP_OUTPUT}  # by slot


def make_norm(model: ModelConfig, weights: Mapping[str, Weight], name: str, ops: CompiledOps) -> nn.Module:
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
        self,
        model: ModelConfig,
        spec: BlockSpec,
        weights: Mapping[str, Weight],
        mesh: Mesh,
        options: LayerOptions,
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
            model.residual_dropout,
            OUTPUT_DROPOUT[spec.slot],
            spec.layer,
            mesh.tp,
            options.sequence_parallel,
        )


class Layer(nn.Module):
    """A list of blocks that add to the residual stream: [seq (/tp), batch, hidden] -> the same shape."""

    def __init__(
        self, model: ModelConfig, layer: int, weights: Mapping[str, Weight], mesh: Mesh, options: LayerOptions
    ):
        super().__init__()
        blocks = [PlacedBlock(model, spec, weights, mesh, options) for spec in blocks_of(model, layer)]
        self.blocks = nn.ModuleList(blocks)
        self._first = blocks[:1]  # in a list: it is registered already
        # what a block reads that follows another one: (the one before it, the block, their sum with its norm)
        self._following = [(*pair, partial(self._join, *pair)) for pair in pairwise(blocks)]
        # `compute` under activation checkpointing
        self.recomputed: Callable[[Tensor, ForwardState], Tensor] | None = None
        self.call: Caller = call

    def forward(self, x: Tensor, state: ForwardState) -> Tensor:
        run = self.compute if self.recomputed is None or not torch.is_grad_enabled() else self.recomputed
        return run(x, state)

    def compute(self, x: Tensor, state: ForwardState) -> Tensor:
        """Compute the layer without recomputation."""
        (block,) = self._first
        normed = self.call(block.input_norm, x)
        output = self.call(block.block, normed, state)
        branches: list[Tensor] = []  # of blocks beside the current one
        for before, block, join in self._following:
            if block.spec.beside:
                branches.append(before.dropout(self.call(before.output, output), state))
                if block.spec.input_norm is not None:
                    normed = self.call(block.input_norm, x)
            else:
                x, normed = self.call(join, _summed(x, branches), output, state)
                branches = []
            output = self.call(block.block, normed, state)
        return _summed(x, branches) + block.dropout(self.call(block.output, output), state)

    def _placed(self) -> list[PlacedBlock]:
        return [*self._first, *(block for _, block, _ in self._following)]

    @staticmethod
    def _join(
        before: PlacedBlock, block: PlacedBlock, x: Tensor, output: Tensor, state: ForwardState
    ) -> tuple[Tensor, Tensor]:
        """Return the residual sum after a block, and its norm: fused for RMSNorm, one pass over memory."""
        return add_and_norm(x, before.dropout(before.output(output), state), block.input_norm)

    def call_through(self, caller: Caller) -> None:
        """Make the layer call its operations through `caller`, which may drop their activations."""
        self.call = caller
        for block in self._placed():
            block.block.call = caller

    def operations(self, names: Container[str]) -> tuple[set[Operation], dict[Operation, Operation]]:
        """Return the operations that names of `train.recompute` stand for.

        The second part has sums of which only the norm is recomputed: the sum → its norm.
        """
        chosen: set[Operation] = set()
        norms: dict[Operation, Operation] = {}
        (first,) = self._first
        if NORM_OPERATIONS[first.spec.slot] in names:
            chosen.add(first.input_norm)
        for before, block, join in self._following:
            norm = NORM_OPERATIONS[block.spec.slot] in names and block.spec.input_norm is not None
            if block.spec.beside:
                if OUTPUT_OPERATIONS[before.spec.slot] in names:
                    chosen |= {before.block.last, before.output}
                if norm:
                    chosen.add(block.input_norm)
            elif SUM_OPERATION in names:
                chosen |= {before.block.last, join}
            elif norm:
                norms[join] = block.input_norm
        for block in self._placed():
            own = {each for name, each in block.block.operations().items() if name in names}
            chosen |= {*own, block.output} if block.block.last in own else own
        return chosen, norms


def _summed(x: Tensor, branches: Sequence[Tensor]) -> Tensor:
    for branch in branches:
        x = x + branch
    return x


def make_layer(
    model: ModelConfig, layer: int, weights: Mapping[str, Weight], mesh: Mesh, options: LayerOptions
) -> Layer:
    module = Layer(model, layer, weights, mesh, options)
    if options.recompute not in ("none", "selective"):
        from megalite.model.recomputation import recomputing

        exchanged = mesh.cp.size > 1 and options.context == "ulysses"
        module.recomputed = recomputing(module, options.recompute, exchanged)
    return module
