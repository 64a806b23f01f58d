"""Grouped matmul of rows sorted by expert with the matrix of each expert. No communication.

The loop over experts is the reference, and is used on a CPU. On a GPU one grouped kernel computes all matmuls
in bf16, without the host knowing the number of rows of each expert. In other precisions the loop waits for
these numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megalite_kernels.grouped_weight_grad import add_grouped_gradient
from megalite_kernels.groups import Groups
from torch import Tensor

from megalite.parallel.matmuls import Matmuls
from megalite.parallel.node import Saved
from megalite.parallel.tensor.linear import Activation
from megalite.parallel.weight import Weight

_ALIGNED = 16  # bytes: torch's grouped kernel reads rows of this alignment


def matmul_loop(rows: Tensor, matrices: Tensor, groups: Groups) -> Tensor:
    """Multiply the rows of each group by its matrix: [n, in], [groups, in, out] -> [n, out].

    Rows that belong to no group are undefined.
    """
    out = rows.new_empty(rows.shape[0], matrices.shape[2])
    for own, matrix, into in zip(groups.split(rows), matrices, groups.split(out), strict=True):
        torch.mm(own, matrix, out=into)
    return out


def grouped_matmul(rows: Tensor, matrices: Tensor, groups: Groups) -> Tensor:
    """Compute `matmul_loop`, with one grouped kernel on a GPU in bf16."""
    aligned = all(size * rows.itemsize % _ALIGNED == 0 for size in matrices.shape[1:])
    # kernels might not support empty tensors
    if rows.is_cpu or rows.dtype != torch.bfloat16 or not aligned or not len(rows):
        return matmul_loop(rows, matrices, groups)
    return torch.nn.functional.grouped_mm(rows, matrices, offs=groups.ends)


class ExpertMatmuls(Matmuls):
    """Matmuls of the stacked matrices of several experts, [experts · out, in], in their own dtype."""

    def experts_forward(self, rows: Tensor, groups: Groups) -> Tensor:
        """Return the product of each expert's rows with its matrix: [n, in] -> [n, out].

        Args:
            groups: the number of rows of each expert, in whose order they are sorted.
        """
        return grouped_matmul(rows, self._each(groups).transpose(1, 2), groups)

    def experts_input_gradient(self, grad: Tensor, groups: Groups) -> Tensor:
        """Return the gradient of the rows of `experts_forward`: [n, out] -> [n, in]."""
        return grouped_matmul(grad, self._each(groups), groups)

    def _each(self, groups: Groups) -> Tensor:
        """Return the matrices as [experts, out, in]."""
        return self.tensor.view(len(groups), -1, self.tensor.shape[1])


def expert_matmuls(weight: Weight) -> ExpertMatmuls:
    """Return the matmuls of a weight's experts, in another format if the weight has one."""
    own = weight.matmuls
    return own if isinstance(own, ExpertMatmuls) else ExpertMatmuls(weight.tensor)


def _sums(rows: Tensor, groups: Groups, dtype: torch.dtype) -> Tensor:
    """Sum the rows of each group, one group after the other, flat.

    On a GPU these are matmuls with ones, which add in a fixed order.
    """
    if rows.is_cpu:
        return torch.cat([own.sum(0, dtype=dtype) for own in groups.split(rows)])
    total = torch.empty(len(groups), rows.shape[1], 1, dtype=dtype, device=rows.device)
    add_grouped_gradient(total, rows, rows.new_ones(len(rows), 1), groups, overwrite=True)
    return total.flatten()


class ExpertAdapter:
    """LoRA adapters of this rank's experts in one stored tensor.

    y_e += scale · B_e A_e x for the rows of each expert e.

    All experts of a stored tensor have the same LoRA rank. Gate and up of an expert share one A, as in PEFT's
    adapters of fused parameters. No communication.

    Args:
        a: matrices A, [experts · rank, in].
        b: matrices B, [experts · out, rank].
        scale: factor on B A.
    """

    def __init__(self, a: Weight, b: Weight, scale: float):
        self.a, self.b, self.scale = a, b, scale
        self.number = a.tensor.shape[0] // b.tensor.shape[1]

    def add(self, rows: Tensor, out: Tensor, groups: Groups) -> Tensor:
        """Add scale · B A rows to `out` ([n, in], [n, out], sorted by expert).

        Returns:
            scale · A rows, [n, rank].
        """
        low = grouped_matmul(rows, self._each(self.a).transpose(1, 2), groups).mul_(self.scale)
        out.add_(grouped_matmul(low, self._each(self.b).transpose(1, 2), groups))
        return low

    def add_gradient(self, grad: Tensor, drows: Tensor, groups: Groups) -> Tensor:
        """Add the gradient of the rows through B A to `drows`, given that of the output.

        Returns:
            the gradient of A rows, [n, rank].
        """
        dlow = grouped_matmul(grad, self._each(self.b), groups).mul_(self.scale)
        drows.add_(grouped_matmul(dlow, self._each(self.a), groups))
        return dlow

    def accumulate(self, grad: Tensor, rows: Tensor, low: Tensor, dlow: Tensor, groups: Groups) -> None:
        """Accumulate both weight gradients, given the arguments and results of the other two methods."""
        self.a.accumulate_matmul(dlow, rows, groups)
        self.b.accumulate_matmul(grad, low, groups)

    def _each(self, weight: Weight) -> Tensor:
        return weight.tensor.view(self.number, -1, weight.tensor.shape[1])


class Experts:
    """Feed-forward blocks of this rank's experts: down(act(in(x))) of rows sorted by expert.

    Args:
        into, down: stacked matrices, [experts · (2 ·) width, hidden] and [experts · hidden, width].
        biases: stacked biases, [experts · (2 ·) width] and [experts · hidden].
        number: number of experts on this rank.
    """

    def __init__(
        self,
        into: Weight,
        down: Weight,
        biases: tuple[Weight | None, Weight | None],
        number: int,
        activation: Activation,
    ):
        self.into, self.down, self.biases = into, down, biases
        self.number, self.activation = number, activation
        self.into_matmuls, self.down_matmuls = expert_matmuls(into), expert_matmuls(down)

    @property
    def adapters(self) -> tuple[ExpertAdapter | None, ExpertAdapter | None]:
        """Adapters of both matrices."""
        return self.into.expert_adapter, self.down.expert_adapter

    def add_bias(self, out: Tensor, which: int, groups: Groups) -> None:
        """Add the bias of each expert in the first or second matmul to its rows of `out`."""
        if (bias := self.biases[which]) is not None:
            out.add_(bias.tensor.view(self.number, -1).index_select(0, groups.of_rows(len(out))))

    def accumulate_biases(self, grads: Sequence[Tensor], groups: Groups) -> None:
        """Accumulate the gradients of both biases, given those of the matmul outputs.

        They are zero for an expert without rows.
        """
        for bias, grad in zip(self.biases, grads, strict=True):
            if bias is not None and bias.grad_dtype is not None:
                bias.accumulate(_sums(grad, groups, bias.grad_dtype))

    def compute(self, rows: Tensor, saved: Saved, groups: Groups) -> Tensor:
        """Return the outputs of the experts: [n, hidden] -> [n, hidden].

        Args:
            groups: number of rows of each expert.
        """
        first, second = self.adapters
        inner = self.into_matmuls.experts_forward(rows, groups)  # [n, (2 ·) width]
        self.add_bias(inner, 0, groups)
        low_in = None if first is None else first.add(rows, inner, groups)
        active = self.activation.forward(inner)  # [n, width]
        out = self.down_matmuls.experts_forward(active, groups)  # [n, hidden]
        self.add_bias(out, 1, groups)
        low_down = None if second is None else second.add(active, out, groups)
        kept = rows if self.into.trainable or first is not None else None
        saved.append((kept, inner, low_in, low_down))
        return out

    def gradient(self, grad: Tensor, saved: Saved, groups: Groups) -> Tensor:
        """Return the gradient of the rows; those of the weights are put in the queue."""
        rows, inner, *lows = saved.pop()
        first, second = self.adapters
        dactive = self.down_matmuls.experts_input_gradient(grad, groups)  # [n, width]
        dlow_down = None if second is None else second.add_gradient(grad, dactive, groups)
        dinner, active = self.activation.backward(dactive, inner)
        dx = self.into_matmuls.experts_input_gradient(dinner, groups)  # [n, hidden]
        dlow_in = None if first is None else first.add_gradient(dinner, dx, groups)
        self.down.accumulate_matmul(grad, active, groups)
        self.accumulate_biases((dinner, grad), groups)
        if second is not None and dlow_down is not None:
            second.accumulate(grad, active, lows[1], dlow_down, groups)
        if rows is not None:
            self.into.accumulate_matmul(dinner, rows, groups)
        if first is not None and dlow_in is not None:
            first.accumulate(dinner, rows, lows[0], dlow_in, groups)
        return dx
