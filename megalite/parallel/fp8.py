"""Matmuls of stored matrices in fp8 (`train.fp8`): operands are quantized where they are multiplied.

    forward           y = q(x) q(W)ᵀ     x has scales along its channels
    input gradient    dx = q(dy) q(W)    dy has scales along the outputs
    weight gradient   dyᵀ x, in the compute dtype; with `train.fp8_weight_gradients` q(dyᵀ) q(x), with scales
                      along the tokens of both

The gradient passes through the quantization unchanged. Scales follow from the elements of their block, so
that there is no state between steps. Weights are quantized once after each update, with `mxfp8` along both
dimensions. ZeRO-3 gathers codes that were quantized as shards (`sharding.weight_codes`); other weights that
only exist while they are used are quantized at each use. Sums over ranks are in the compute dtype. Under
sequence parallelism linears gather codes in place of a tensor of which nothing else is read
(`Matmuls.forward_operand`). No communication.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import torch
from megalite_kernels.fp8 import BLOCK, Quantized, Recipe, quantize, quantize_mx
from megalite_kernels.fp8_matmul import (
    add_transposed_product,
    add_transposed_products,
    multiply,
    multiply_experts,
)
from megalite_kernels.groups import Groups
from torch import Tensor

from megalite.config.sections.train import TrainConfig
from megalite.parallel.expert.grouped_matmul import ExpertMatmuls
from megalite.parallel.fp8_choice import Fp8Choice, Fp8Options, fp8_choice
from megalite.parallel.matmuls import Matmuls
from megalite.parallel.sharding.store import ParameterStore
from megalite.parallel.sharding.weight_codes import WeightCodes

if TYPE_CHECKING:
    from megalite.parallel.matmuls import Operand

OperandName = Literal["x", "w", "dy"]
"""Input of a layer, weight, gradient of the output."""
OPERANDS: tuple[OperandName, ...] = ("x", "w", "dy")
PRODUCTS: dict[OperandName, str] = {"x": "forward", "dy": "input_gradient"}
"""Operand → the product that it is multiplied in with the weight."""


class Fp8Format(NamedTuple):
    """Recipe, and whether fp32 scales are powers of two."""

    recipe: Recipe
    power_of_two: bool

    def activations(self, rows: Operand) -> Quantized:
        """Quantize rows with scales along their channels: [.., channels] -> [tokens, channels].

        Codes are returned as they are.
        """
        if isinstance(rows, Quantized):
            return Quantized(rows.codes.flatten(0, -2), rows.scales.flatten(0, -2))
        rows = rows.flatten(0, -2)
        if self.recipe == "mxfp8":
            return quantize_mx(rows)
        return quantize(rows, (1, BLOCK), self.power_of_two)

    def along_tokens(self, rows: Operand) -> Quantized:
        """Quantize [tokens, channels] with scales along the tokens; codes are returned as they are."""
        return rows if isinstance(rows, Quantized) else quantize(rows, (BLOCK, 1), self.power_of_two)

    def operand(self, x: Tensor) -> Quantized:
        """Quantize [.., channels] as `activations`, in its shape."""
        codes, scales = self.activations(x)
        return Quantized(codes.view(x.shape), scales.view(*x.shape[:-1], -1))


class QuantizedWeight(NamedTuple):
    """A weight at a number of updates, with scales along its inputs and along its outputs.

    Its shapes are [.., out, in] and [.., in, out]. With square blocks the second is a view of the first.
    """

    updates: int
    along_inputs: Quantized
    along_outputs: Quantized


class Fp8Observer(Protocol):
    """What instruments see of fp8 matmuls (`Fp8Matmuls.observer`)."""

    def rounded(
        self,
        matmuls: Fp8Matmuls,
        operand: OperandName,
        values: Tensor,
        codes: Quantized,
        groups: Groups | None,
    ) -> None:
        """Called when x or dy is quantized: [tokens, channels].

        Args:
            groups: the number of rows of each expert, if the matmul is one of experts.
        """

    def multiplied(
        self,
        matmuls: Fp8Matmuls,
        operand: OperandName,
        values: Tensor,
        codes: Quantized,
        groups: Groups | None,
        out: Tensor,
    ) -> None:
        """Called after x or dy is multiplied with the weight: [tokens, channels] -> [tokens, outputs].

        Args:
            values: what the codes were quantized from.
        """


class Fp8Matmuls(Matmuls):
    """Matmuls of a matrix in fp8.

    Args:
        tensor: the weight in compute dtype, as for `Matmuls`.
        choice: the rows that multiply in fp8; the others do in the compute dtype.
        updates: returns the number of updates of the weights so far; None: do not keep the codes.
        gathered: codes and scales of the matrix, which ZeRO-3 gathers; None: compute them from the weight.

    Attributes:
        observer: an instrument; None in steps that are not measured.
        largest_scales: the largest scale of each operand since they were last cleared, [] each: infinite or
            NaN if an element was.
    """

    adds_residual = False
    observer: Fp8Observer | None = None

    def __init__(
        self,
        tensor: Tensor,
        fp8: Fp8Format,
        updates: Callable[[], int] | None,
        choice: Fp8Choice,
        gathered: Quantized | None = None,
    ):
        super().__init__(tensor)
        self.fp8, self.updates, self.choice, self.dtype = fp8, updates, choice, tensor.dtype
        self.gathered = None if gathered is None else QuantizedWeight(0, gathered, gathered.t)
        self.rows = choice.rows
        self._quantized: QuantizedWeight | None = None
        self.largest_scales: dict[OperandName, Tensor] = {}

    def forward(self, x: Operand, bias: Tensor | None = None) -> Tensor:
        out = self._multiply("x", x)
        if not self.choice.forward:
            assert isinstance(x, Tensor)
            out = torch.cat((out, x.flatten(0, -2) @ self.tensor[self.rows :].t()), 1)
        if bias is not None:
            out += bias
        return out.view(*x.shape[:-1], -1)

    def input_gradient(self, grad: Operand) -> Tensor:
        if self.choice.input_gradient:
            return self._multiply("dy", grad).view(*grad.shape[:-1], -1)
        if self.choice.partial_gradient:
            return super().input_gradient(grad)
        assert isinstance(grad, Tensor)
        rows = grad.flatten(0, -2)
        dx = self._multiply("dy", rows[:, : self.rows])
        return dx.addmm_(rows[:, self.rows :], self.tensor[self.rows :]).view(*grad.shape[:-1], -1)

    def forward_operand(self, x: Tensor) -> Operand:
        return self.fp8.operand(x) if self.choice.forward and self.observer is None else x

    def input_gradient_operand(self, grad: Tensor) -> Operand:
        return self.fp8.operand(grad) if self.choice.input_gradient and self.observer is None else grad

    def add_weight_gradient(
        self, grad: Tensor, grad_output: Tensor, inputs: Operand, groups: Groups | None, overwrite: bool
    ) -> None:
        if not self.choice.weight_gradient:
            return super().add_weight_gradient(grad, grad_output, inputs, groups, overwrite)
        left, right = self.fp8.along_tokens(grad_output), self.fp8.along_tokens(inputs)
        add_transposed_product(grad, left, right, overwrite)

    def weight_gradient_operand(self, inputs: Tensor) -> Operand:
        return self.fp8.along_tokens(inputs.flatten(0, -2)) if self.choice.weight_gradient else inputs

    def _multiply(self, name: OperandName, operand: Operand, groups: Groups | None = None) -> Tensor:
        """Quantize x or dy, unless it is codes already, and multiply it with the weight."""
        weight = self.quantized()
        matrix = weight.along_inputs if name == "x" else weight.along_outputs
        codes = self.fp8.activations(operand)
        largest, before = largest_scale(codes, groups), self.largest_scales.get(name)
        self.largest_scales[name] = largest if before is None else torch.maximum(before, largest)
        if self.observer is not None:
            assert isinstance(operand, Tensor)  # `forward_operand` returns no codes in measured steps
            values = operand.flatten(0, -2)
            self.observer.rounded(self, name, values, codes, groups)
        if groups is None:
            out = multiply(codes, matrix, self.dtype)
        else:
            out = multiply_experts(codes, matrix, groups, self.dtype)
        if self.observer is not None:
            self.observer.multiplied(self, name, values, codes, groups, out)
        return out

    def quantized(self) -> QuantizedWeight:
        """Return the codes of the weight, computed again after an update."""
        if self.gathered is not None:
            self.largest_scales["w"] = largest_scale(self.gathered.along_inputs)
            return self.gathered
        if self.updates is None:
            return self._quantize(0)
        updates = self.updates()
        if self._quantized is None or self._quantized.updates != updates:
            self._quantized = self._quantize(updates)
        return self._quantized

    @torch.no_grad()
    def _quantize(self, updates: int) -> QuantizedWeight:
        matrix = self._matrix().detach()
        if self.fp8.recipe == "mxfp8":
            along_inputs, along_outputs = quantize_mx(matrix), quantize_mx(matrix.transpose(-1, -2))
        else:
            along_inputs = quantize(matrix, (BLOCK, BLOCK), self.fp8.power_of_two)
            along_outputs = along_inputs.t
        self.largest_scales["w"] = largest_scale(along_inputs)
        return QuantizedWeight(updates, along_inputs, along_outputs)

    def matrix(self) -> Tensor | None:
        """Return the matrix that is not rounded, as [.., rows, in]; None if only its codes are gathered."""
        return self._matrix().detach() if self.gathered is None else None

    def _matrix(self) -> Tensor:
        """Return what is quantized, [rows, in]."""
        return self.tensor[: self.rows]


class Fp8ExpertMatmuls(Fp8Matmuls, ExpertMatmuls):
    """Matmuls of the stacked matrices of experts in fp8.

    Args:
        experts: number of the matrices.
    """

    def __init__(
        self,
        tensor: Tensor,
        fp8: Fp8Format,
        updates: Callable[[], int] | None,
        choice: Fp8Choice,
        experts: int,
        gathered: Quantized | None = None,
    ):
        if gathered is not None:  # [experts, out, in]
            gathered = Quantized(*(each.view(experts, -1, each.shape[1]) for each in gathered))
        super().__init__(tensor, fp8, updates, choice, gathered)
        self.experts = experts

    def experts_forward(self, rows: Tensor, groups: Groups) -> Tensor:
        return self._multiply("x", rows, groups)

    def experts_input_gradient(self, grad: Tensor, groups: Groups) -> Tensor:
        return self._multiply("dy", grad, groups)

    def add_weight_gradient(
        self, grad: Tensor, grad_output: Tensor, inputs: Operand, groups: Groups | None, overwrite: bool
    ) -> None:
        if not self.choice.weight_gradient:
            return super().add_weight_gradient(grad, grad_output, inputs, groups, overwrite)
        assert groups is not None and isinstance(inputs, Tensor)
        padded = groups.padded(len(inputs), BLOCK)  # no block has rows of two experts, or of two microbatches
        left, right = (self.fp8.along_tokens(padded.pad(rows)) for rows in (grad_output, inputs))
        each = grad.view(self.experts, -1, grad.shape[1])
        add_transposed_products(each, left, right, padded.groups, overwrite)

    def _matrix(self) -> Tensor:
        """Return what is quantized, [experts, out, in]."""
        return self.tensor.view(self.experts, -1, self.tensor.shape[1])


def largest_scale(codes: Quantized, groups: Groups | None = None) -> Tensor:
    """Return the largest scale, []; infinite or NaN if an element of the operand is.

    Those of `mxfp8` are returned as bytes, of which 255 is NaN. Rows of no group have no values.
    """
    scales = codes.scales
    if scales.dtype == torch.float8_e8m0fnu:
        scales = scales.view(torch.uint8)
    if groups is not None:
        scales = scales.where(groups.holds_rows(len(scales)).unsqueeze(1), 0)
    return scales.amax() if scales.numel() else scales.new_zeros(())


def attach_fp8(store: ParameterStore, train: TrainConfig, layers: int) -> None:
    """Let the matrices that `fp8_choice` names multiply in fp8.

    Buckets of matrices that are `coded` get the codes that are gathered.

    Args:
        layers: number of layers of the model, without modules for further tokens.
    """
    assert train.fp8 != "none"
    fp8 = Fp8Format(train.fp8, train.fp8_power_of_two)
    for bucket in store.buckets:
        codes: WeightCodes | None = None
        if bucket.layout.coded:
            codes = bucket.codes = WeightCodes(
                bucket.layout, bucket.start, bucket.stop, train.fp8_power_of_two, store.device
            )
        # weights that only exist while they are used have no codes to keep
        updates = None
        if bucket.shard is None:
            count = "updates" if bucket.layout.trainable else "loads"
            updates = partial(getattr, store.gatherer, count)
        for index, slot in enumerate(bucket.layout.slots):
            choice = fp8_choice(slot.spec, store.at, Fp8Options.of(train), layers)
            if not choice.rows:
                continue
            weight, segment = store.weights[slot.spec.name], slot.spec.segments[0]
            gathered = None if codes is None else codes.matrix(index)
            if segment.experts > 1:
                experts = segment.experts * choice.rows // segment.shape[0]  # on this rank
                weight.matmuls = Fp8ExpertMatmuls(weight.tensor, fp8, updates, choice, experts, gathered)
            else:
                weight.matmuls = Fp8Matmuls(weight.tensor, fp8, updates, choice, gathered)
        if codes is not None:
            bucket.free()  # only now: a view of tensors without memory cannot be made
