"""Rounding of the operands of fp8 matmuls, by layer and matrix (`logging.fp8_interval`).

    saturated   share of the elements with the largest code, ±448
    flushed     share of the elements that are not 0 and have the code 0
    error       of an operand: ‖codes · scales - x‖ / ‖x‖; of a product: the same of columns of its result,
                beside those of operands that are not rounded, in the compute dtype

Sums are counted where an operand is quantized, and added over all ranks after the step, so that a layout does
not change them. An element that several ranks hold is counted as often on each layout as the others of its
matrix. Recomputed forwards are not counted. Communication: after a measured step, one all-reduce over tp of
the columns of products that are partial sums, and one over all ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import sqrt
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from megalite_kernels.fp8 import Quantized, dequantize
from megalite_kernels.groups import Groups
from torch import Tensor, nn

from megalite.assembly.fp8_matrices import fp8_matrices
from megalite.mesh.layout import Coordinates
from megalite.monitoring.metrics import BY_LAYER, FLUSHED, ROUNDING, SATURATED, StepMetrics
from megalite.monitoring.observers import Observer
from megalite.parallel.collectives import all_reduce
from megalite.parallel.fp8 import OPERANDS, PRODUCTS, Fp8Matmuls, OperandName
from megalite.parallel.spec import ParamSpec

if TYPE_CHECKING:
    from megalite.training.trainer import Trainer

AHEAD = 1  # number of steps that the trainer may be ahead of the written result
COLUMNS = 8  # of a product, spread over the whole matrix
_MAGNITUDE, _LARGEST_CODE = 0x7F, 0x7E  # bits of e4m3


def operand_sums(values: Tensor, codes: Quantized, factors: Tensor | None = None) -> Tensor:
    """Return [5] fp64: elements, saturated and flushed ones, squares of the errors and of the values.

    Args:
        values: [.., rows, columns].
        factors: what each element counts; None: 1.
    """
    bits = codes.codes.view(torch.uint8) & _MAGNITUDE
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    parts: Sequence[Tensor] = (
        torch.ones_like(bits, dtype=torch.bool),
        bits == _LARGEST_CODE,
        (bits == 0) & (values != 0),
        (dequantize(codes, wide.dtype) - wide).square(),
        wide.square(),
    )
    if factors is not None:
        # where, not a product: rows of no group may be NaN
        parts = [part.where(factors > 0, 0) * factors for part in parts]
    return torch.stack([part.sum(dtype=torch.float64) for part in parts])


class _Matrix(NamedTuple):
    """A matrix of this rank.

    Attributes:
        place: its index in the whole model.
        factors: 1 / the number of tp ranks that hold each of its rows, [rows, 1]; None if they are equal.
        columns: the sampled columns of the product with each operand, of those that this rank has.
        partial: the operand whose product is a partial sum over tp.
    """

    place: int
    factors: Tensor | None
    columns: dict[OperandName, list[int]]
    partial: OperandName | None


def _matrix(index: int, spec: ParamSpec, rows: int, at: Coordinates, device: torch.device) -> _Matrix:
    """Describe a matrix of which this rank multiplies `rows` rows in fp8."""
    first, own = spec.segments[0], spec.segments[0].local(at)
    inputs = _sampled(first.shape[1], own.offsets[1], own.shape[1])
    if first.experts > 1:
        each = first.shape[0] // first.experts
        return _Matrix(index, None, {"x": _sampled(each, 0, each), "dy": inputs}, None)
    factors, outputs = list[float](), list[int]()
    for segment in spec.segments:
        part, start = segment.local(at), len(factors)
        outputs += [start + row for row in _sampled(segment.shape[0], part.offsets[0], part.shape[0])]
        factors += [1 / segment.replicas] * part.shape[0]
    uneven = len(set(factors[:rows])) > 1
    partial: dict[int | None, OperandName] = {0: "dy", 1: "x"} if at["tp"].size > 1 else {}
    return _Matrix(
        index,
        torch.tensor(factors[:rows], device=device).unsqueeze(1) if uneven else None,
        {"x": [row for row in outputs if row < rows], "dy": inputs},
        partial.get(first.split),
    )


def _sampled(whole: int, low: int, length: int) -> list[int]:
    """Return which elements of a part are among COLUMNS of the whole, counted from the start of the part."""
    step = max(whole // COLUMNS, 1)
    return list(range(-low % step, length, step))


class _Sums:
    """Sums of the operands and products of a rank.

    Attributes:
        totals: (index of a matrix, operand or product) → its sums.
        columns: the same → columns of partial products and of those that are not rounded, [2, tokens,
            columns] each.
    """

    def __init__(self) -> None:
        self.totals: dict[tuple[int, str], Tensor] = {}
        self.columns: defaultdict[tuple[int, str], list[Tensor]] = defaultdict(list)

    def add(self, key: tuple[int, str], sums: Tensor) -> None:
        self.totals[key] = self.totals[key] + sums if key in self.totals else sums


class Fp8Statistics(Observer):
    """Observer that measures the operands and products of every `logging.fp8_interval` steps.

    It is the observer of this rank's matmuls (`Fp8Observer`) in these steps only.
    """

    def __init__(self, trainer: Trainer):
        config, self.mesh = trainer.config, trainer.mesh
        assert config.logging.fp8_interval is not None
        self.interval, self.stages = config.logging.fp8_interval, trainer.parts.stages.values()
        specs = fp8_matrices(config)
        self.layers = config.model.num_hidden_layers
        # layer and name within it, as in metrics.jsonl
        self.names = [(spec.unit - 1, spec.name.split(".", 2)[2].removesuffix(".weight")) for spec in specs]
        self._matrices: dict[Fp8Matmuls, _Matrix] = {}
        for index, spec in enumerate(specs):
            weight = trainer.store.weights.get(spec.name)
            if weight is not None:
                assert isinstance(weight.matmuls, Fp8Matmuls)
                rows = weight.matmuls.rows
                self._matrices[weight.matmuls] = _matrix(
                    index, weight.spec, rows, self.mesh.coordinates, trainer.device
                )
        self._device = trainer.device
        # by stage and microbatch, so that a repeated forward (optimistic steps) counts once
        self._forwards: dict[tuple[int, int], _Sums] = {}
        self._now: _Sums | None = None  # None: backward, whose forwards are repetitions
        self._backwards = _Sums()
        self._hooks: list[Any] = []
        self._totals: dict[int, tuple[Tensor, Tensor]] = {}  # by step

    # ---- while a step is measured

    def before(self, step: int) -> None:
        if step % self.interval:
            return
        self._forwards, self._backwards = {}, _Sums()
        for stage in self.stages:
            self._hooks += [
                stage.register_forward_pre_hook(self._begin),
                stage.register_forward_hook(self._end),
            ]
        for matmuls in self._matrices:
            matmuls.observer = self

    def _begin(self, stage: nn.Module, inputs: tuple[Any, ...]) -> None:
        if not torch.is_grad_enabled():  # a pass before the step, such as that of a reference model
            return
        self._now = self._forwards[id(stage), id(inputs[1])] = _Sums()

    def _end(self, stage: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        self._now = None

    def rounded(
        self,
        matmuls: Fp8Matmuls,
        operand: OperandName,
        values: Tensor,
        codes: Quantized,
        groups: Groups | None,
    ) -> None:
        sums, matrix = self._sums(operand), self._matrices[matmuls]
        if sums is None:
            return
        factors = None if matrix.factors is None or operand == "x" else matrix.factors.t()
        if groups is not None:
            factors = groups.holds_rows(len(values)).unsqueeze(1).float()
        sums.add((matrix.place, operand), operand_sums(values, codes, factors))

    def multiplied(
        self,
        matmuls: Fp8Matmuls,
        operand: OperandName,
        values: Tensor,
        codes: Quantized,
        groups: Groups | None,
        out: Tensor,
    ) -> None:
        sums, matrix = self._sums(operand), self._matrices[matmuls]
        whole, columns = matmuls.matrix(), matrix.columns[operand]
        if sums is None or whole is None:
            return
        if operand == "x" and not any((matrix.place, "w") in each.totals for each in self._forwards.values()):
            weight = matmuls.quantized().along_inputs
            sums.add((matrix.place, "w"), operand_sums(whole, weight, matrix.factors))
        sampled = whole[..., columns, :].transpose(-1, -2) if operand == "x" else whole[..., columns]
        if groups is None:
            exact = values @ sampled
        else:
            parts = zip(groups.split(values), sampled, strict=True)
            exact = torch.cat([own @ matrix for own, matrix in parts])
        wide = torch.promote_types(values.dtype, torch.float32)
        both = torch.stack((out[: len(exact), columns].to(wide) - exact.to(wide), exact.to(wide)))
        key = (matrix.place, PRODUCTS[operand])
        if operand == matrix.partial:
            sums.columns[key].append(both)
            return
        squares = both.square()
        if operand == "x" and matrix.factors is not None:
            squares *= matrix.factors.t()[:, columns]
        sums.add(key, squares.sum((1, 2), dtype=torch.float64))

    def _sums(self, operand: OperandName) -> _Sums | None:
        return self._now if operand == "x" else self._backwards

    # ---- between steps

    def after(self, step: int) -> None:
        if step % self.interval:
            return
        for matmuls in self._matrices:
            matmuls.observer = None
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        whole = _Sums()
        for sums in (*self._forwards.values(), self._backwards):
            for key, total in sums.totals.items():
                whole.add(key, total)
            for key, parts in sums.columns.items():
                whole.columns[key] += parts
        self._add_partial(whole)
        self._totals = {
            known: totals for known, totals in self._totals.items() if step - AHEAD <= known < step
        } | {step: self._over_ranks(whole)}
        self._forwards, self._backwards = {}, _Sums()

    def _add_partial(self, sums: _Sums) -> None:
        """Add up the partial products of tp ranks, which have them in the same order."""
        if not sums.columns:
            return
        parts = [torch.cat(parts, 1) for parts in sums.columns.values()]
        flat = all_reduce(torch.cat([part.flatten() for part in parts]), self.mesh.tp).wait()
        if self.mesh.tp.rank == 0:  # counted once
            for key, part, own in zip(
                sums.columns, parts, flat.split([part.numel() for part in parts]), strict=True
            ):
                sums.add(key, own.view_as(part).square().sum((1, 2), dtype=torch.float64))

    def _over_ranks(self, sums: _Sums) -> tuple[Tensor, Tensor]:
        """Return the sums of all ranks: [matrices, operands, 5], [matrices, products, 2]."""
        shapes = (len(self.names), len(OPERANDS), 5), (len(self.names), len(PRODUCTS), 2)
        operands, products = (
            torch.zeros(shape, dtype=torch.float64, device=self._device) for shape in shapes
        )
        for (index, name), total in sums.totals.items():
            if name in OPERANDS:
                operands[index, OPERANDS.index(name)] += total
            else:
                products[index, list(PRODUCTS.values()).index(name)] += total
        flat = all_reduce(torch.cat((operands.flatten(), products.flatten())), self.mesh.world).wait()
        own, others = flat.split([operands.numel(), products.numel()])
        return own.view_as(operands), others.view_as(products)

    def numbers(self, metrics: StepMetrics) -> dict[str, Any]:
        if metrics.step not in self._totals:
            return {}
        operands, products = (totals.tolist() for totals in self._totals[metrics.step])
        scalars, lists = dict[str, Any](), dict[str, Any]()
        for key, name, fractions in _fractions(operands, products):
            values = [_ratio(key, *fraction) for fraction in fractions]
            # of matrices, not of elements, because some are counted on more ranks than others
            known = [value for value in values if value is not None]
            scalars[f"{key}/{name}"] = sum(known) / len(known) if known else None
            for (layer, matrix), value in zip(self.names, values, strict=True):
                lists.setdefault(f"{key}{BY_LAYER}/{matrix}.{name}", [None] * self.layers)[layer] = value
        return scalars | lists


Sums = list[list[list[float]]]
"""[matrices, operands or products, sums]."""


def _fractions(operands: Sums, products: Sums) -> Iterator[tuple[str, str, list[tuple[float, float]]]]:
    """Yield the key, the operand or product, and (part, whole) of each matrix."""
    for place, name in enumerate(OPERANDS):
        rows = [matrix[place] for matrix in operands]
        yield SATURATED, name, [(saturated, elements) for elements, saturated, *_ in rows]
        yield FLUSHED, name, [(flushed, elements) for elements, _, flushed, *_ in rows]
        yield ROUNDING, name, [(error, square) for *_, error, square in rows]
    for place, product in enumerate(PRODUCTS.values()):
        yield ROUNDING, product, [(error, square) for error, square in (each[place] for each in products)]


def _ratio(key: str, part: float, whole: float) -> float | None:
    if not whole > 0:
        return None
    return sqrt(part / whole) if key == ROUNDING else part / whole
