"""The inputs of a forward pass besides activations: positions, documents, and the keys of dropout.

No communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megalite_kernels.dropout import dropout, dropout_key
from torch import Tensor

from megalite.mesh.mesh import MeshAxis
from megalite.parallel.microbatch import Boundaries
from megalite.parallel.node import Saved

if TYPE_CHECKING:
    from megalite.parallel.context.parts import PositionSegments, SequencePart
    from megalite.parallel.tensor.lora import Mask


class Site(IntEnum):
    """Where a dropout mask is applied in the model; part of the mask's key."""

    EMBEDDING = 0
    ATTENTION = 1
    ATTENTION_OUTPUT = 2
    MLP_OUTPUT = 3
    QKV_ADAPTER, OUT_ADAPTER, UP_ADAPTER, DOWN_ADAPTER = 4, 5, 6, 7
    Q_DOWN_ADAPTER, KV_DOWN_ADAPTER, KV_UP_ADAPTER = 8, 9, 10
    MIXER_OUTPUT, MIXER_IN_ADAPTER, MIXER_OUT_ADAPTER = 11, 12, 13
    LOW_ADAPTER, DECAY_ADAPTER, GATE_ADAPTER = 14, 15, 16


@dataclass
class ForwardState:
    """State of one microbatch that the units read; the same on every stage and tp rank.

    Attributes:
        samples: [batch] global sample indices. With step, seed and positions they are the key of dropout.
        training: False in evaluation: no dropout.
        positions, segments, document_start, part, boundaries: as in `Microbatch`.
        rotary: (cos, sin) tables of `document_positions`; None where the model has no rotary embedding.
        local_rotary: the tables of rope_local_theta, for the layers with a sliding window.
        query_factors: factors on the queries of each position, [seq, 1 or batch, 1, 1]; None where they are
            1.
        lora_dropout: probability of dropout before adapters.
        targets: the targets of the microbatch's loss; None: there is no loss.
        loss_scale: the factor of the loss, and of the auxiliary losses of layers.
        statistics: the statistics of layers, in addition to the loss (`StageOutput`).
        choices: layer → the choice of experts, which the backward uses and recomputation must repeat.
        selections: layer → the rows that its indexer has selected, which recomputation and later layers use.
        counted: as `Queries.counted`.
        query_scale: the factor of losses that are means over all tokens, those without a target included.
        lengths: in generation, the number of tokens of each row in it; None: in training, where all
            rows have as many as there are positions.
    """

    samples: Tensor
    step: int
    seed: int
    training: bool
    positions: Tensor
    segments: PositionSegments
    document_start: Tensor | None = None
    part: SequencePart | None = None
    rotary: tuple[Tensor, Tensor] | None = None
    local_rotary: tuple[Tensor, Tensor] | None = None
    query_factors: Tensor | None = None
    lora_dropout: float = 0.0
    targets: Tensor | None = None
    loss_scale: float | Tensor = 0.0
    statistics: dict[str, Tensor] = field(default_factory=dict)
    choices: dict[int, Any] = field(default_factory=dict)
    selections: dict[int, Tensor] = field(default_factory=dict)
    counted: Tensor | None = None
    query_scale: float | Tensor = 0.0
    boundaries: Boundaries | None = None
    lengths: Sequence[int] | None = None

    def dropout_key(self, site: Site, layer: int) -> int:
        """Return the key of one mask. Key, sample, position and channel determine each of its bits."""
        return dropout_key(self.seed, self.step, int(site), layer)

    def adapter_mask(self, site: Site, layer: int) -> Mask | None:
        """Return the dropout of an adapter's input, or None without dropout.

        The input has all positions, also under sequence parallelism.
        """
        if not self.lora_dropout or not self.training:
            return None
        return partial(
            dropout,
            key=self.dropout_key(site, layer),
            samples=self.samples,
            positions=self.positions,
            p=self.lora_dropout,
        )

    @property
    def document_positions(self) -> Tensor:
        """Position of each token in its document, [seq, batch] or [seq, 1].

        Rotary and learned embeddings use these positions.
        """
        return self.positions if self.document_start is None else self.positions - self.document_start

    @property
    def length(self) -> int:
        """Number of positions of a row, from its first token on.

        Where rows differ, the largest, which is read from the device.
        """
        if self.part is not None:  # its last position may be on another rank
            return self.part.length
        if self.segments:
            return max(start + length for start, length in self.segments)
        return int(self.positions.max()) + 1

    @property
    def first_position(self) -> int:
        """The position that attention counts from.

        This is the first token's position, or 0 for parts of rows, whose positions are among attention's
        arguments.
        """
        assert self.part or len(self.segments) == 1, "positions must be consecutive"
        return 0 if self.part else self.segments[0][0]

    @property
    def first_visible(self) -> Tensor | None:
        """`document_start` relative to `first_position`, or None if all keys are in one document."""
        if self.document_start is None or self.first_position == 0:
            return self.document_start
        # a document may start before the first token
        return (self.document_start - self.first_position).clamp(min=0)


class _Dropout(torch.autograd.Function):
    """Dropout whose backward recomputes the mask from its key."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, key: int, samples: Tensor, positions: Tensor, probability: float
    ) -> Tensor:
        ctx.key, ctx.probability = key, probability
        ctx.save_for_backward(samples, positions)
        return dropout(x, key, samples, positions, probability)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        samples, positions = ctx.saved_tensors
        return dropout(grads[0], ctx.key, samples, positions, ctx.probability), None, None, None, None


@dataclass(frozen=True)
class Dropout:
    """Dropout of activations [seq (/tp), batch, hidden] by a keyed mask, the same on every mesh.

    Under sequence parallelism the activations are the part of the sequence of this rank on `tp`.
    """

    probability: float
    site: Site
    layer: int
    tp: MeshAxis
    sequence_parallel: bool

    def __call__(self, x: Tensor, state: ForwardState) -> Tensor:
        if self.probability == 0.0 or not state.training:
            return x
        return _Dropout.apply(x, *self._mask(x, state))

    def _mask(self, x: Tensor, state: ForwardState) -> tuple[int, Tensor, Tensor, float]:
        """Return the arguments of `megalite_kernels.dropout` after x."""
        first = x.shape[0] * self.tp.rank if self.sequence_parallel else 0
        positions = state.positions.narrow(0, first, x.shape[0])  # [seq (/tp), 1] or [seq (/tp), batch]
        return state.dropout_key(self.site, self.layer), state.samples, positions, self.probability

    def compute(self, x: Tensor, saved: Saved, state: ForwardState) -> Tensor:
        return dropout(x, *self._mask(x, state)) if state.training else x

    def gradient(self, grad: Tensor, saved: Saved, state: ForwardState) -> Tensor:
        return self.compute(grad, saved, state)  # the mask is its own backward
