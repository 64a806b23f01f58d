"""Column- and row-parallel linear layers (Shoeybi et al. 2019; Korthikanti et al. 2022).

            without sequence parallelism                with sequence parallelism
    column  forward  none                               forward  all-gather of the input along the sequence
            backward all-reduce of the input gradient   backward all-gather of the input again (only the part
                                                                 is kept), reduce-scatter
    row     forward  all-reduce of the output           forward  reduce-scatter along the sequence
            backward none                               backward all-gather of the output gradient

The backward of the column layer starts the communication of its input gradient, computes its weight gradient,
and only then waits, so that the two overlap. If neither its weight nor an adapter is trained, its input is
neither saved nor gathered again. Weight gradients do not pass through autograd, which receives None for them:
`Weight.accumulate_matmul` adds them to the bucket of the weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megalite.mesh.mesh import MeshAxis
from megalite.parallel.collectives import all_gather, all_reduce, reduce_scatter
from megalite.parallel.compiled_ops import CompiledOps
from megalite.parallel.weight import Weight

if TYPE_CHECKING:
    from megalite.parallel.tensor.lora import AccumulateAdapter, Mask


def _matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute x · weightᵀ (+ bias) on flattened rows: [seq, batch, in] -> [seq, batch, out]."""
    rows = x.reshape(-1, x.shape[-1])
    out = torch.mm(rows, weight.t()) if bias is None else torch.addmm(bias, rows, weight.t())
    return out.view(*x.shape[:-1], weight.shape[0])


def _input_gradient(
    grad: Tensor, weight: Weight, saved: Sequence[Tensor], mask: Mask | None
) -> tuple[Tensor, AccumulateAdapter | None]:
    """Compute the input gradient grad · weight: [seq, batch, out] -> [seq, batch, in].

    Returns:
        the gradient including the contribution of an adapter, and a function that accumulates the gradients
        of the adapter.
    """
    if weight.adapter is not None:
        return weight.adapter.backward(grad, saved, mask)
    return torch.mm(grad.reshape(-1, grad.shape[-1]), weight.tensor).view(
        *grad.shape[:-1], weight.tensor.shape[1]
    ), None


def _accumulate_linear(
    weight: Weight, bias: Weight | None, grad: Tensor, inputs: Tensor, rest: AccumulateAdapter | None
) -> None:
    """Accumulate bias and weight gradients.

    Args:
        grad: [seq, batch, out].
        inputs: [seq, batch, in].
        rest: accumulates the gradients of the adapter.
    """
    rows = grad.reshape(-1, grad.shape[-1])  # [tokens, out]
    if bias is not None and bias.trainable:
        bias.accumulate(rows.sum(0, dtype=bias.grad_dtype))
    weight.accumulate_matmul(rows, inputs.reshape(-1, inputs.shape[-1]))
    if rest is not None:
        rest(inputs)


class _Column(torch.autograd.Function):
    """y = x Wᵀ + b with W split along its outputs. Communication: see the module."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, layer: ColumnParallelLinear, mask: Mask | None
    ) -> Tensor:
        ctx.layer, ctx.mask, adapter = layer, mask, layer.weight.adapter
        full = all_gather(x, layer.tp).wait() if layer.sequence_parallel else x  # [seq, batch, in]
        out = _matmul(full, weight, None if layer.bias is None else layer.bias.tensor)  # [seq, batch, out/tp]
        saved = () if adapter is None else adapter.forward(full, out, mask)
        # Save x, not `full`: [seq/tp, batch, in] under sequence parallelism; gathering it again in backward
        # costs less than the memory.
        ctx.save_for_backward(x if layer.weight.trainable or adapter is not None else None, *saved)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None]:
        layer, grad = ctx.layer, grads[0]
        x, *saved = ctx.saved_tensors
        # Started first, so that it overlaps with the matmul of the input gradient.
        gathering = all_gather(x, layer.tp) if layer.sequence_parallel and x is not None else None
        reduction = rest = None
        if ctx.needs_input_grad[0]:
            # [seq, batch, in], a partial sum: of this rank's outputs
            dx, rest = _input_gradient(grad, layer.weight, saved, ctx.mask)
            reduction = (
                reduce_scatter(dx, layer.tp)
                if layer.sequence_parallel
                else all_reduce(dx, layer.tp, disposable=True)
            )
        if x is not None:  # between start and wait of the reduction, to overlap with it
            _accumulate_linear(
                layer.weight, layer.bias, grad, x if gathering is None else gathering.wait(), rest
            )
        return (None if reduction is None else reduction.wait()), None, None, None


class ColumnParallelLinear(nn.Module):
    """Linear layer with outputs split over tp: [seq, batch, in] -> [seq, batch, out/tp].

    With sequence parallelism the input is [seq/tp, batch, in] and is gathered first. `mask` is the dropout of
    an adapter's input.
    """

    def __init__(self, weight: Weight, bias: Weight | None, tp: MeshAxis, sequence_parallel: bool):
        super().__init__()
        self.weight, self.bias, self.tp = weight, bias, tp
        self.sequence_parallel = sequence_parallel and tp.size > 1

    def forward(self, x: Tensor, mask: Mask | None = None) -> Tensor:
        return _Column.apply(x, self.weight.tensor, self, mask)


class Activation:
    """Activation of a feed-forward block: act(gate) · up on a packed [gate | up] input, or act(up)."""

    def __init__(self, name: str, gated: bool, ops: CompiledOps):
        self.name = name
        self._forward = ops.gated_forward if gated else ops.plain_forward
        self._backward = ops.gated_backward if gated else ops.plain_backward

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(x, self.name)

    def backward(self, grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradient of x, and the recomputed act(x)."""
        return self._backward(grad, x, self.name)


class _Row(torch.autograd.Function):
    """y = Σ_tp act(x) Wᵀ + b with W split along its inputs. Communication: see the module."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: RowParallelLinear, mask: Mask | None) -> Tensor:
        ctx.layer, ctx.mask, adapter = layer, mask, layer.weight.adapter
        active = x if layer.activation is None else layer.activation.forward(x)  # [seq, batch, in/tp]
        out = _matmul(active, weight)  # [seq, batch, out], a partial sum: this rank has a part of the inputs
        # The adapter adds to `out` before its reduction. `active` is not saved: backward recomputes it
        # from x.
        ctx.save_for_backward(x, *(() if adapter is None else adapter.forward(active, out, mask)))
        summed = (
            reduce_scatter(out, layer.tp)
            if layer.sequence_parallel
            else all_reduce(out, layer.tp, disposable=True)
        )
        out = summed.wait()  # [seq (/tp), batch, out]
        # after the sum, otherwise it would be added tp times
        return out if layer.bias is None else out.add_(layer.bias.tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None]:
        layer, grad = ctx.layer, grads[0]
        # before the gather: the partial gradient for this rank's part of the sequence
        if layer.bias is not None and layer.bias.trainable:
            layer.bias.accumulate(grad.flatten(0, -2).sum(0, dtype=layer.bias.grad_dtype))
        if layer.sequence_parallel:
            grad = all_gather(grad, layer.tp).wait()  # [seq, batch, out]
        inputs, *saved = ctx.saved_tensors
        # [seq, batch, in/tp]: each rank needs only its own
        dx, rest = _input_gradient(grad, layer.weight, saved, ctx.mask)
        if layer.activation is not None:
            # dx of the activation's input; `inputs`: its output, recomputed
            dx, inputs = layer.activation.backward(dx, inputs)
        _accumulate_linear(layer.weight, None, grad, inputs, rest)
        return dx, None, None, None


class RowParallelLinear(nn.Module):
    """Linear layer with inputs split over tp: [seq, batch, in/tp] -> [seq, batch, out], summed over tp.

    With sequence parallelism the output is [seq/tp, batch, out]. The bias is added once, after the sum.
    `activation` is applied to the input first; its output is not saved but recomputed in backward.
    """

    def __init__(
        self,
        weight: Weight,
        bias: Weight | None,
        tp: MeshAxis,
        sequence_parallel: bool,
        activation: Activation | None = None,
    ):
        super().__init__()
        self.weight, self.bias, self.tp = weight, bias, tp
        self.sequence_parallel = sequence_parallel and tp.size > 1
        self.activation = activation

    def forward(self, x: Tensor, mask: Mask | None = None) -> Tensor:
        return _Row.apply(x, self.weight.tensor, self, mask)
