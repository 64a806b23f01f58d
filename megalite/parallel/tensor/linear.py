"""Column- and row-parallel linear layers (Shoeybi et al. 2019; Korthikanti et al. 2022).

            without sequence parallelism                with sequence parallelism
    column  forward  none                               forward  all-gather of the input along the sequence
            backward all-reduce of the input gradient   backward all-gather of the input again (only the part
                                                                 is kept), reduce-scatter
    row     forward  all-reduce of the output           forward  reduce-scatter along the sequence
            backward none                               backward all-gather of the output gradient

Of a tensor that only matmuls in fp8 read, codes and scales are gathered (`gather_sequence`).

The backward of the column layer starts the communication of its input gradient, computes its weight gradient,
and only then waits, so that the two overlap. If neither its weight nor an adapter is trained, its input is
neither saved nor gathered again. Weight gradients do not pass through autograd, which receives None for them:
`Weight.accumulate_matmul` adds them to the bucket of the weight. Linears, like norms, are plain objects: they
have no parameters of their own, and to find a module in another one costs the host a search each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megalite.mesh.mesh import MeshAxis
from megalite.parallel.collectives import all_reduce, reduce_scatter
from megalite.parallel.compiled_ops import CompiledOps
from megalite.parallel.node import Node, Saved
from megalite.parallel.tensor.sequence import gather_sequence
from megalite.parallel.weight import Weight

if TYPE_CHECKING:
    from megalite.parallel.matmuls import Operand
    from megalite.parallel.tensor.lora import AccumulateAdapter, Mask


def _input_gradient(
    grad: Operand, weight: Weight, saved: Sequence[Tensor], mask: Mask | None
) -> tuple[Tensor, AccumulateAdapter | None]:
    """Compute the input gradient grad · weight: [seq, batch, out] -> [seq, batch, in].

    Returns:
        the gradient including the contribution of an adapter, and a function that accumulates the gradients
        of the adapter.
    """
    if weight.adapter is not None:
        assert isinstance(grad, Tensor)
        return weight.adapter.backward(grad, saved, mask)
    return weight.matmuls.input_gradient(grad), None


def _accumulate_linear(
    weight: Weight,
    bias: Weight | None,
    grad: Tensor,
    inputs: Operand,
    accumulate_adapter: AccumulateAdapter | None,
) -> None:
    """Accumulate bias and weight gradients.

    Args:
        grad: [seq, batch, out].
        inputs: [seq, batch, in], or `Matmuls.weight_gradient_operand` of them.
        accumulate_adapter: accumulates the gradients of the adapter.
    """
    rows = grad.reshape(-1, grad.shape[-1])  # [tokens, out]
    if bias is not None and bias.trainable:
        bias.accumulate(rows.sum(0, dtype=bias.grad_dtype))
    weight.accumulate_matmul(rows, inputs.flatten(0, -2) if isinstance(inputs, Tensor) else inputs)
    if accumulate_adapter is not None:
        assert isinstance(inputs, Tensor)
        accumulate_adapter(inputs)


class ColumnParallelLinear:
    """Linear layer with outputs split over tp: y = x Wᵀ + b, [seq, batch, in] -> [seq, batch, out/tp].

    With sequence parallelism the input is [seq/tp, batch, in] and is gathered first. `mask` is the dropout of
    an adapter's input. Communication: see the module.
    """

    def __init__(self, weight: Weight, bias: Weight | None, tp: MeshAxis, sequence_parallel: bool):
        self.weight, self.bias, self.tp = weight, bias, tp
        self.sequence_parallel = sequence_parallel and tp.size > 1

    def __call__(self, x: Tensor, mask: Mask | None = None) -> Tensor:
        return Node.apply(x, self.weight.tensor, self, mask)

    def compute(self, x: Tensor, saved: Saved, mask: Mask | None = None) -> Tensor:
        weight, adapter = self.weight, self.weight.adapter
        full: Operand = x  # [seq, batch, in]
        if self.sequence_parallel:
            # an adapter reads x itself
            read = x if adapter is not None else weight.matmuls.forward_operand(x)
            full = gather_sequence(read, self.tp).wait()
        bias = None if self.bias is None else self.bias.tensor
        out = weight.matmuls.forward(full, bias)  # [seq, batch, out/tp]
        kept: tuple[Tensor, ...] = ()
        if adapter is not None:
            assert isinstance(full, Tensor)
            kept = adapter.forward(full, out, mask)
        # Save x, not `full`: [seq/tp, batch, in] under sequence parallelism; gathering it again in backward
        # costs less than the memory.
        saved.append((x if weight.trainable or adapter is not None else None, *kept))
        return out

    def gradient(self, grad: Tensor, saved: Saved, mask: Mask | None = None) -> Tensor:
        x, *kept = saved.pop()
        # Started first, so that it overlaps with the matmul of the input gradient.
        gathering = None
        if self.sequence_parallel and x is not None:
            adapted = self.weight.adapter is not None
            read = x if adapted else self.weight.matmuls.weight_gradient_operand(x)
            gathering = gather_sequence(read, self.tp)
        # [seq, batch, in], a partial sum: of this rank's outputs
        dx, accumulate_adapter = _input_gradient(grad, self.weight, kept, mask)
        reduction = None
        if self.sequence_parallel:
            reduction = reduce_scatter(dx, self.tp)
        elif self.tp.size > 1:
            reduction = all_reduce(dx, self.tp, disposable=True)
        if x is not None:  # between start and wait of the reduction, to overlap with it
            inputs: Operand = x if gathering is None else gathering.wait()
            _accumulate_linear(self.weight, self.bias, grad, inputs, accumulate_adapter)
        return dx if reduction is None else reduction.wait()


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


class RowParallelLinear:
    """Linear layer with inputs split over tp: y = Σ_tp act(x) Wᵀ + b.

    [seq, batch, in/tp] -> [seq, batch, out], with sequence parallelism [seq/tp, batch, out]. The bias is
    added once, after the sum. `activation` is applied to the input first; its output is not saved but
    recomputed in backward. Communication: see the module.
    """

    def __init__(
        self,
        weight: Weight,
        bias: Weight | None,
        tp: MeshAxis,
        sequence_parallel: bool,
        activation: Activation | None = None,
    ):
        self.weight, self.bias, self.tp = weight, bias, tp
        self.sequence_parallel = sequence_parallel and tp.size > 1
        self.activation = activation
        # On a GPU the matmul adds the residual to its fp32 accumulators, which saves a kernel and a rounding.
        # On a CPU the sum is a pass of its own, with the same bits as operation by operation.
        alone = tp.size == 1 and bias is None and weight.adapter is None
        self.adds_residual = alone and weight.tensor.is_cuda and weight.matmuls.adds_residual

    def __call__(self, x: Tensor, mask: Mask | None = None) -> Tensor:
        return Node.apply(x, self.weight.tensor, self, mask)

    def compute(
        self, x: Tensor, saved: Saved, mask: Mask | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """Compute the layer; `residual` ([seq (/tp), batch, out]) is added to the output."""
        weight, adapter = self.weight, self.weight.adapter
        active = x if self.activation is None else self.activation.forward(x)  # [seq, batch, in/tp]
        if residual is not None and self.adds_residual:
            saved.append((x,))
            rows = torch.addmm(residual.flatten(0, 1), active.flatten(0, 1), weight.tensor.t())
            return rows.view_as(residual)
        # [seq, batch, out], a partial sum: this rank has a part of the inputs
        out = weight.matmuls.forward(active)
        # The adapter adds to `out` before its reduction. `active` is not saved: backward recomputes it
        # from x.
        saved.append((x, *(() if adapter is None else adapter.forward(active, out, mask))))
        if self.sequence_parallel:
            out = reduce_scatter(out, self.tp).wait()  # [seq/tp, batch, out]
        elif self.tp.size > 1:
            out = all_reduce(out, self.tp, disposable=True).wait()
        if self.bias is not None:
            out.add_(self.bias.tensor)  # after the sum, otherwise it would be added tp times
        return out if residual is None else out.add_(residual)

    def gradient(self, grad: Tensor, saved: Saved, mask: Mask | None = None) -> Tensor:
        x, *kept = saved.pop()
        # Before the gather: of this rank's part of the sequence under sequence parallelism, which is summed
        # over tp at the end of the step, otherwise whole.
        if self.bias is not None and self.bias.trainable:
            self.bias.accumulate(grad.flatten(0, -2).sum(0, dtype=self.bias.grad_dtype))
        weight, trained = self.weight, self.weight.trainable or self.weight.adapter is not None
        whole: Operand = grad
        if self.sequence_parallel:  # [seq, batch, out]; overlaps with nothing
            # gradients of weights read the gradient itself
            read = grad if trained else weight.matmuls.input_gradient_operand(grad)
            whole = gather_sequence(read, self.tp).wait()
        # [seq, batch, in/tp]: each rank needs only its own
        dx, accumulate_adapter = _input_gradient(whole, weight, kept, mask)
        inputs = x
        if self.activation is not None:
            # dx of the activation's input; `inputs`: its output, recomputed
            dx, inputs = self.activation.backward(dx, x)
        if trained:
            assert isinstance(whole, Tensor)
            _accumulate_linear(weight, None, whole, inputs, accumulate_adapter)
        return dx
