"""A block that mixes the tokens of a row by a state: a projection, a mixer, and an output projection.

    packed = x Wᵢₙ           column-parallel: each tp rank has the parts of its heads
    y      = mixer(packed)   along the row, each head by itself
    out    = y Wₒᵤₜ          row-parallel

Kinds of blocks differ in their mixer and in what is packed. Communicates in the projections, and as the mixer
says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from megalite.model.block_kind import BlockSpec
from megalite.model.block_module import BlockModule, Operation
from megalite.model.forward_state import ForwardState, Site
from megalite.parallel.context.whole_rows import AcrossRows
from megalite.parallel.node import Node, Saved
from megalite.parallel.tensor.linear import RowParallelLinear
from megalite.parallel.weight import Weights


class Projection(Protocol):
    """Computes what a mixer reads: [seq (/tp), batch, hidden] -> [seq, batch, width].

    `mask` is the dropout of an adapter's input.
    """

    def __call__(self, x: Tensor, mask: Any = None) -> Tensor: ...
    def compute(self, x: Tensor, saved: Saved, mask: Any = None) -> Tensor: ...
    def gradient(self, grad: Tensor, saved: Saved, mask: Any = None) -> Tensor: ...


class Mixer(Protocol):
    """Mixes the tokens of rows: [seq, batch, width of the projection] -> [seq, batch, channels/tp].

    Attributes:
        across: computes what goes along rows. Generation replaces it.
    """

    across: AcrossRows

    def compute(self, packed: Tensor, saved: Saved, state: ForwardState) -> Tensor: ...
    def gradient(self, grad: Tensor, saved: Saved, state: ForwardState) -> Tensor: ...


class MixerBlock(BlockModule):
    """Projection, mixer and output projection: [seq (/tp), batch, hidden] -> the same shape.

    Args:
        block: its place; the layer is part of the keys of dropout.
        masks: the dropout of the inputs of the projection's adapters; None: of the projection's input.
    """

    def __init__(
        self,
        into: Projection,
        mixer: Mixer,
        out: RowParallelLinear,
        block: BlockSpec,
        weights: Weights,
        masks: Callable[[ForwardState], Any] | None = None,
    ):
        super().__init__()
        self.into = into
        self.mixer, self.out, self.layer = mixer, out, block.layer
        self.masks = masks or partial(ForwardState.adapter_mask, site=Site.MIXER_IN_ADAPTER, layer=self.layer)
        own = (weight for key, weight in weights.items() if key.startswith(f"{block.name}."))
        self.trained = next((weight for weight in own if weight.trainable), None)

    def forward(self, x: Tensor, state: ForwardState) -> Tensor:
        packed = self.call(self.into, x, self.masks(state))
        y = self.call(self.mix, packed, state)  # [seq, batch, channels/tp]
        out: Tensor = self.call(self.out, y, state.adapter_mask(Site.MIXER_OUT_ADAPTER, self.layer))
        return out

    def mix(self, packed: Tensor, state: ForwardState) -> Tensor:
        """Compute the mixer as a node of the graph."""
        anchor = None if self.trained is None else self.trained.tensor
        return Node.apply(packed, anchor, self.mixer, state)

    def operations(self) -> Mapping[str, Operation]:
        return {"mixer_in": self.into, "mixer": self.mix}

    @property
    def last(self) -> Operation:
        return self.out

    @property
    def differentiates(self) -> bool:
        return True

    def compute(self, x: Tensor, saved: Saved, state: ForwardState, residual: Tensor | None = None) -> Tensor:
        packed = self.into.compute(x, saved)
        y = self.mixer.compute(packed, saved, state)
        return self.out.compute(y, saved, residual=residual)

    def gradient(self, grad: Tensor, saved: Saved, state: ForwardState) -> Tensor:
        dy = self.out.gradient(grad, saved)
        dpacked = self.mixer.gradient(dy, saved, state)
        dx: Tensor = self.into.gradient(dpacked, saved)
        return dx
