"""Dense feed-forward: column-parallel gate and up, row-parallel down. Communicates in the two linears."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from megalite.config.sections.model import ModelConfig
from megalite.mesh.mesh import Mesh
from megalite.model.block_kind import BlockSpec
from megalite.model.block_module import BlockModule, Operation
from megalite.model.forward_state import ForwardState, Site
from megalite.model.layer_options import LayerOptions
from megalite.parallel.node import Saved
from megalite.parallel.tensor.linear import Activation, ColumnParallelLinear, RowParallelLinear
from megalite.parallel.weight import Weights


class FeedForward(BlockModule):
    """down(act(gate) · up), or down(act(up)): [seq (/tp), batch, hidden] -> the same shape.

    `up` is column-parallel and has gate and up packed. `down` is row-parallel and applies the activation to
    its input, so that the output of the activation is not kept for backward.

    Args:
        layer: the index of its layer, part of the keys of dropout.
        name: the prefix of the stored names of its parameters.
    """

    def __init__(
        self, model: ModelConfig, layer: int, name: str, weights: Weights, mesh: Mesh, options: LayerOptions
    ):
        super().__init__()
        self.layer, tp, sequence_parallel = layer, mesh.tp, options.sequence_parallel
        activation = Activation(model.hidden_act, model.gated_mlp, options.ops)
        if model.mlp_multipliers is not None or model.hidden_act == "xielu":
            from megalite.model.blocks.feed_forward.own_activations import own_activation

            activation = own_activation(model, name, weights, options.ops)
        weight, bias = weights[f"{name}.in.weight"], weights.get(f"{name}.in.bias")
        self.up = ColumnParallelLinear(weight, bias, tp, sequence_parallel)
        weight, bias = weights[f"{name}.down.weight"], weights.get(f"{name}.down.bias")
        self.down = RowParallelLinear(weight, bias, tp, sequence_parallel, activation)

    def forward(self, x: Tensor, state: ForwardState) -> Tensor:
        # [seq, batch, (2 ·) intermediate/tp]
        inner = self.call(self.up, x, state.adapter_mask(Site.UP_ADAPTER, self.layer))
        out: Tensor = self.call(self.down, inner, state.adapter_mask(Site.DOWN_ADAPTER, self.layer))
        return out

    @property
    def differentiates(self) -> bool:
        return True

    def compute(self, x: Tensor, saved: Saved, state: ForwardState, residual: Tensor | None = None) -> Tensor:
        inner = self.up.compute(x, saved, state.adapter_mask(Site.UP_ADAPTER, self.layer))
        return self.down.compute(inner, saved, state.adapter_mask(Site.DOWN_ADAPTER, self.layer), residual)

    def gradient(self, grad: Tensor, saved: Saved, state: ForwardState) -> Tensor:
        dinner = self.down.gradient(grad, saved, state.adapter_mask(Site.DOWN_ADAPTER, self.layer))
        return self.up.gradient(dinner, saved, state.adapter_mask(Site.UP_ADAPTER, self.layer))

    def operations(self) -> Mapping[str, Operation]:
        return {"mlp_in": self.up, "mlp_out": self.down}

    @property
    def last(self) -> Operation:
        return self.down


def make(
    model: ModelConfig, block: BlockSpec, weights: Weights, mesh: Mesh, options: LayerOptions
) -> FeedForward:
    """Return the module of a block, see `BlockKind.make`."""
    return FeedForward(model, block.layer, block.name, weights, mesh, options)
