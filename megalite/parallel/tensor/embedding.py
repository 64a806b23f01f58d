"""Embedding with rows split over tp by vocabulary.

Forward: each rank looks up the tokens of its vocabulary range and sets the rows of the others to zero; then
all-reduce, or reduce-scatter along the sequence under sequence parallelism. Backward: each rank accumulates
the rows of its own tokens; no communication, or all-gather of the gradient along the sequence under sequence
parallelism.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.mesh.mesh import MeshAxis
from megalite.parallel.collectives import all_gather, all_reduce, reduce_scatter
from megalite.parallel.weight import Weight


class _Embed(torch.autograd.Function):
    """Lookup of this rank's vocabulary range. Communication: see the module."""

    @staticmethod
    def forward(
        ctx: Any, table: Tensor, tokens: Tensor, positions: Tensor | None, layer: ParallelEmbedding
    ) -> Tensor:
        ctx.layer = layer
        rows, outside = tokens, None
        if layer.tp.size > 1:
            local = tokens - layer.first  # [seq, batch], row in this rank's part of the table
            outside = (local < 0) | (local >= table.shape[0])  # tokens of other ranks
            rows = local.masked_fill(outside, 0)
        out = F.embedding(rows, table)  # [seq, batch, hidden]
        if outside is not None:
            # each token then has one nonzero term in the sum over tp
            out.masked_fill_(outside.unsqueeze(-1), 0)
            # [seq (/tp), batch, hidden]
            out = (reduce_scatter if layer.sequence_parallel else all_reduce)(out, layer.tp).wait()
        if layer.scale is not None:
            out = out * layer.scale
        if layer.positions is not None:
            assert positions is not None
            positions = layer.own_sequence(positions)
            out += layer.positions.tensor[positions]  # after the sum, otherwise they would be added tp times
        ctx.save_for_backward(rows, outside, positions)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None, None]:
        layer, grad = ctx.layer, grads[0]
        if not layer.weight.trainable:
            return None, None, None, None
        rows, outside, positions = ctx.saved_tensors
        if layer.positions is not None and layer.positions.trainable:
            layer.positions.accumulate(_summed_by_position(grad, positions, layer.positions.tensor.shape[0]))
        if layer.sequence_parallel:
            grad = all_gather(grad, layer.tp).wait()  # [seq, batch, hidden]: a token's row may be on any rank
        if layer.scale is not None:
            grad = grad * layer.scale
        if outside is not None:
            # tokens of other ranks add zero to row 0, so that no shape depends on data
            grad = grad.masked_fill(outside.unsqueeze(-1), 0)
        layer.weight.accumulate_rows(rows.reshape(-1), grad.flatten(0, 1), layer.first_stage)
        return None, None, None, None


def _summed_by_position(grad: Tensor, positions: Tensor, rows: int) -> Tensor:
    """Compute the gradient of the position table, [rows, hidden], in at least fp32.

    Its order of additions is fixed. `index_add_` on a GPU adds with atomics, in any order: without sequence
    parallelism the tp ranks, which all compute this same gradient and exchange nothing, would diverge.
    """
    values = grad.to(torch.promote_types(grad.dtype, torch.float32))  # [seq (/tp), batch, hidden]
    return torch.ops.aten.embedding_dense_backward(values, positions.expand(grad.shape[:2]), rows, -1, False)


class ParallelEmbedding(nn.Module):
    """Token embedding, and optionally learned position embedding.

    tokens [seq, batch] -> [seq, batch, hidden], or [seq/tp, …] under sequence parallelism.

    Args:
        positions: the learned position table, or None.
        scale: factor on the token embedding, or None.

    Attributes:
        first_stage: whether it is the model's first unit, whose gradient may be accumulated separately from
            that of the last stage.
    """

    first_stage = True

    def __init__(
        self,
        weight: Weight,
        positions: Weight | None,
        tp: MeshAxis,
        sequence_parallel: bool,
        scale: float | None = None,
    ):
        super().__init__()
        self.weight, self.positions, self.tp, self.scale = weight, positions, tp, scale
        self.sequence_parallel = sequence_parallel and tp.size > 1
        self.first = tp.rank * weight.tensor.shape[0]

    def own_sequence(self, x: Tensor) -> Tensor:
        """Return this rank's part of a tensor over the whole sequence: [seq, …] -> [seq/tp, …].

        It is split like the activations.
        """
        return x.chunk(self.tp.size)[self.tp.rank] if self.sequence_parallel else x

    def forward(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        """Embed the tokens.

        Args:
            positions: [seq, 1 or batch], required with a position table.
        """
        return _Embed.apply(self.weight.tensor, tokens, positions, self)
