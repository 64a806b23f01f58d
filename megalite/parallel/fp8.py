"""Matmuls of stored matrices in fp8 (`train.fp8`): operands are quantized where they are multiplied.

    forward           y = q(x) q(W)ᵀ     x has scales along its channels
    input gradient    dx = q(dy) q(W)    dy has scales along the outputs
    weight gradient   dyᵀ x, in the compute dtype

The gradient passes through the quantization unchanged. Scales follow from the elements of their block, so
that there is no state between steps. Weights are quantized once after each update, with `mxfp8` along both
dimensions. ZeRO-3 gathers codes that were quantized as shards (`sharding.weight_codes`); other weights that
only exist while they are used are quantized at each use. Whatever else a layer communicates is in the compute
dtype. No communication.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

import torch
from megalite_kernels.fp8 import BLOCK, Quantized, Recipe, quantize, quantize_mx
from megalite_kernels.fp8_matmul import multiply, multiply_experts
from megalite_kernels.groups import Groups
from torch import Tensor

from megalite.config.sections.train import TrainConfig
from megalite.parallel.expert.grouped_matmul import ExpertMatmuls
from megalite.parallel.fp8_choice import FORWARD_ONLY, fp8_choice
from megalite.parallel.matmuls import Matmuls
from megalite.parallel.sharding.store import ParameterStore
from megalite.parallel.sharding.weight_codes import WeightCodes

Operand = Literal["x", "w", "dy"]
"""Input of a layer, weight, gradient of the output."""


class Fp8Format(NamedTuple):
    """Recipe, and whether fp32 scales are powers of two."""

    recipe: Recipe
    power_of_two: bool

    def activations(self, rows: Tensor) -> Quantized:
        """Quantize [tokens, channels] with scales along the channels."""
        if self.recipe == "mxfp8":
            return quantize_mx(rows)
        return quantize(rows, (1, BLOCK), self.power_of_two)


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
        self, matmuls: Fp8Matmuls, operand: Operand, values: Tensor, codes: Quantized, groups: Groups | None
    ) -> None:
        """Called when x or dy is quantized: [tokens, channels].

        Args:
            groups: the number of rows of each expert, if the matmul is one of experts.
        """

    def multiplied(
        self,
        matmuls: Fp8Matmuls,
        operand: Operand,
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
        rows: the number of its leading rows that multiply in fp8; the others do in the compute dtype.
        forward_only: compute input gradients in the compute dtype.
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
        *,
        rows: int,
        forward_only: bool = False,
        gathered: Quantized | None = None,
    ):
        super().__init__(tensor)
        self.fp8, self.updates = fp8, updates
        self.gathered = None if gathered is None else QuantizedWeight(0, gathered, gathered.t)
        self.rows, self.forward_only = rows, forward_only
        self._quantized: QuantizedWeight | None = None
        self.largest_scales: dict[Operand, Tensor] = {}

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        rows = x.flatten(0, -2)
        out = self._multiply("x", rows)
        if self.rows < len(self.tensor):
            out = torch.cat((out, rows @ self.tensor[self.rows :].t()), 1)
        if bias is not None:
            out += bias
        return out.view(*x.shape[:-1], -1)

    def input_gradient(self, grad: Tensor) -> Tensor:
        if self.forward_only:
            return super().input_gradient(grad)
        rows = grad.flatten(0, -2)
        dx = self._multiply("dy", rows[:, : self.rows])
        if self.rows < len(self.tensor):
            dx.addmm_(rows[:, self.rows :], self.tensor[self.rows :])
        return dx.view(*grad.shape[:-1], -1)

    def _multiply(self, operand: Operand, rows: Tensor, groups: Groups | None = None) -> Tensor:
        """Quantize rows of x or dy and multiply them with the weight."""
        weight = self.quantized()
        matrix = weight.along_inputs if operand == "x" else weight.along_outputs
        codes = self.fp8.activations(rows)
        largest, before = largest_scale(codes, groups), self.largest_scales.get(operand)
        self.largest_scales[operand] = largest if before is None else torch.maximum(before, largest)
        if self.observer is not None:
            self.observer.rounded(self, operand, rows, codes, groups)
        if groups is None:
            out = multiply(codes, matrix, rows.dtype)
        else:
            out = multiply_experts(codes, matrix, groups, rows.dtype)
        if self.observer is not None:
            self.observer.multiplied(self, operand, rows, codes, groups, out)
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
        *,
        experts: int,
        gathered: Quantized | None = None,
    ):
        if gathered is not None:  # [experts, out, in]
            gathered = Quantized(*(each.view(experts, -1, each.shape[1]) for each in gathered))
        super().__init__(tensor, fp8, updates, rows=len(tensor), gathered=gathered)
        self.experts = experts

    def experts_forward(self, rows: Tensor, groups: Groups) -> Tensor:
        return self._multiply("x", rows, groups)

    def experts_input_gradient(self, grad: Tensor, groups: Groups) -> Tensor:
        return self._multiply("dy", grad, groups)

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
        if bucket.layout.coded:
            bucket.codes = WeightCodes(
                bucket.layout, bucket.start, bucket.stop, train.fp8_power_of_two, store.device
            )
        # weights that only exist while they are used have no codes to keep
        updates = None if bucket.shard is not None else lambda: store.gatherer.updates
        for index, slot in enumerate(bucket.layout.slots):
            rows = fp8_choice(slot.spec, store.at, train, layers).rows
            if not rows:
                continue
            weight, segment = store.weights[slot.spec.name], slot.spec.segments[0]
            gathered = None if bucket.codes is None else bucket.codes.matrix(index)
            if segment.experts > 1:
                weight.matmuls = Fp8ExpertMatmuls(
                    weight.tensor,
                    fp8,
                    updates,
                    experts=segment.experts * rows // segment.shape[0],  # on this rank
                    gathered=gathered,
                )
            else:
                forward_only = segment.role in FORWARD_ONLY
                weight.matmuls = Fp8Matmuls(
                    weight.tensor, fp8, updates, rows=rows, forward_only=forward_only, gathered=gathered
                )
        if bucket.codes is not None:
            bucket.free()  # only now: a view of tensors without memory cannot be made
