"""Weights in 4 and 8 bits as transformers saves them with bitsandbytes, read in fp32.

`load_in_4bit`: a matrix NAME is several tensors in the files: NAME, the codes [bytes, 1]; NAME.absmax, the
scales of blocks of 64, or with double quantization their codes; NAME.nested_absmax, the scales of these;
NAME.quant_map and NAME.nested_quant_map, the values of codes; and NAME.quant_state.bitsandbytes__nf4, or
…__fp4, JSON with the shape and the offset of scales.

`load_in_8bit`: NAME, the codes [rows, columns] in int8; MODULE.SCB, the scales of rows; and
MODULE.weight_format, 0 for rows one after the other.

What is read are the values in fp32, without a rounding to the dtype in which the model computed: quantized
again, they have the same codes and scales.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from functools import lru_cache
from math import isfinite, prod
from typing import Any

import torch
from megalite_kernels import nf4
from megalite_kernels.block_formats import FORMATS
from torch import Tensor

from megalite.huggingface.files import ConversionError, TensorFiles

STATE = ".quant_state.bitsandbytes__"
"""End of the name of the description of a matrix in 4 bits, before its format."""
WEIGHT, ROWS, FORMAT = ".weight", ".SCB", ".weight_format"
"""Ends of the names of a module in 8 bits: its codes, the scales of their rows, and their order."""
_PARTS = (".absmax", ".nested_absmax", ".quant_map", ".nested_quant_map")
_EXPECTED = {"blocksize": nf4.BLOCK, "nested_blocksize": nf4.NESTED}


def is_quantized(name: str) -> bool:
    """Return whether a directory with a tensor of this name is read here."""
    return STATE in name or name.endswith(ROWS)


def opened(weights: TensorFiles) -> QuantizedTensors:
    """Return the tensors of a directory that has such names. Raises ConversionError."""
    return (EightBitTensors if any(name.endswith(ROWS) for name in weights) else FourBitTensors)(weights)


class QuantizedTensors(TensorFiles):
    """The tensors of a directory, with quantized matrices under their own names.

    Args:
        quantized: their names.
        parts: names of the tensors besides these that belong to them.
    """

    def __init__(self, weights: TensorFiles, quantized: Iterable[str], parts: Collection[str]):
        self.directory, self._files = weights.directory, weights._files
        self.quantized = {*quantized}
        self._names = dict.fromkeys(name for name in weights if name not in parts)
        # rows of a matrix are read in several ranges
        self._last = lru_cache(maxsize=1)(lambda name: self.rows(name, 0, self.shape(name)[0]))

    def __getitem__(self, name: str) -> Tensor:
        return self._last(name) if name in self.quantized else super().__getitem__(name)

    def _check_size(self, name: str, size: int, matrix: str) -> None:
        have = prod(self._files[name].shape(name)) if name in self._files else None
        if have != size:
            what = "is missing" if have is None else f"has {have:,} elements, expected {size:,}"
            raise ConversionError(
                f"{self.directory} is damaged: {name} {what} for a matrix {list(self.shape(matrix))}"
            )

    def _check_scales(self, scales: Tensor, matrix: str) -> None:
        if not (scales.isfinite() & (scales >= 0)).all():
            raise ConversionError(
                f"{self.directory} is damaged: {matrix} has a negative, infinite or NaN absmax"
            )


class FourBitTensors(QuantizedTensors):
    """The tensors of a directory in 4 bits.

    Raises ConversionError for a matrix whose parts do not match, or that has another form.
    """

    def __init__(self, weights: TensorFiles):
        names = {name: name.partition(STATE)[0] for name in sorted(weights) if STATE in name}
        parts = {f"{name}{end}" for name in names.values() for end in _PARTS}
        super().__init__(weights, names.values(), parts | names.keys())
        self._states = {matrix: self._state(name) for name, matrix in names.items()}
        for name in self._states:
            self._check(name)

    def _state(self, name: str) -> dict[str, Any]:
        try:
            state: dict[str, Any] = json.loads(bytes(self.raw(name).tolist()))
            shape, offset = tuple(map(int, state["shape"])), float(state.get("nested_offset", 0.0))
        except (ValueError, TypeError, KeyError) as error:
            raise ConversionError(
                f"{self.directory} is damaged: {name} is not the state of a quantized matrix ({error})"
            ) from None
        form = name.partition(STATE)[2]
        for field, value in {"quant_type": form, **_EXPECTED}.items():
            if state.get(field, value) != value or form not in nf4.TABLES:
                legal = ", ".join(map(repr, nf4.TABLES)) if field == "quant_type" else repr(value)
                raise ConversionError(
                    f"{self.directory}: {name} says {field} = {state.get(field, form)!r}, which is not "
                    f"supported. Supported: {legal}."
                )
        if not isfinite(offset):
            raise ConversionError(f"{self.directory} is damaged: {name} says nested_offset = {offset}")
        return state | {"quant_type": form, "shape": shape, "nested_offset": offset}

    def _is_double(self, name: str) -> bool:
        return f"{name}.nested_absmax" in self._files

    def _form(self, name: str) -> str:
        return str(self._states[name]["quant_type"])

    def _check(self, name: str) -> None:
        """Raise ConversionError if the parts of a matrix are missing, or have other sizes or values."""
        double, blocks = self._is_double(name), -(-prod(self.shape(name)) // nf4.BLOCK)
        expected = {name: -(-prod(self.shape(name)) // 2), f"{name}.absmax": blocks}
        expected |= {f"{name}.nested_absmax": -(-blocks // nf4.NESTED)} if double else {}
        for part, size in expected.items():
            self._check_size(part, size, name)
        cpu, form = torch.device("cpu"), self._form(name)
        tables = {f"{name}.quant_map": nf4.table(cpu, form)}
        tables |= {f"{name}.nested_quant_map": nf4.scale_table(cpu)} if double else {}
        for part, table in tables.items():
            if part in self._files and not torch.equal(self.raw(part), table):
                raise ConversionError(f"{self.directory}: {part} has other values than the format {form}")
        self._check_scales(self.raw(f"{name}.nested_absmax" if double else f"{name}.absmax"), name)

    def nested(self, name: str, form: str) -> nf4.NestedScales | None:
        """Return the quantized scales of a matrix in a format; None: it is in another, or they are not."""
        if name not in self.quantized or self._form(name) != form:
            return None
        return self._nested(name)

    def _nested(self, name: str) -> nf4.NestedScales | None:
        if not self._is_double(name):
            return None
        codes, scales = (self.raw(f"{name}.{part}").view(-1) for part in ("absmax", "nested_absmax"))
        return nf4.NestedScales(codes, scales, torch.tensor(self._states[name]["nested_offset"]))

    def rows(self, name: str, first: int, stop: int) -> Tensor:
        if name not in self.quantized:
            return super().rows(name, first, stop)
        width = prod(self.shape(name)[1:])
        start, end = first * width, stop * width
        block, last = start // nf4.BLOCK, -(-end // nf4.BLOCK)
        skipped, packed = start - block * nf4.BLOCK, self.raw(name).view(-1)
        codes = packed[block * nf4.BLOCK // 2 : -(-end // 2)]
        values = nf4.values_of(codes, end - block * nf4.BLOCK, self._form(name))
        values.mul_(nf4.of_elements(self._scales(name, block, last), len(values)))
        return values[skipped:].view(stop - first, *self.shape(name)[1:])

    def _scales(self, name: str, first: int, stop: int) -> Tensor:
        """Return the scales of blocks [first, stop) of a matrix."""
        nested = self._nested(name)
        if nested is None:
            return self.raw(f"{name}.absmax").view(-1)[first:stop]
        return nested.values(first, stop)

    def shape(self, name: str) -> tuple[int, ...]:
        state = self._states.get(name)
        return super().shape(name) if state is None else state["shape"]


class EightBitTensors(QuantizedTensors):
    """The tensors of a directory in 8 bits.

    Raises ConversionError for a matrix whose parts do not match, or that has another form.
    """

    def __init__(self, weights: TensorFiles):
        ends = (ROWS, FORMAT)
        modules = {name.removesuffix(ROWS).removesuffix(FORMAT) for name in weights if name.endswith(ends)}
        parts = {f"{module}{end}" for module in modules for end in ends}
        super().__init__(weights, (f"{module}{WEIGHT}" for module in modules), parts)
        for name in sorted(self.quantized):
            self._check(name)

    def _check(self, name: str) -> None:
        """Raise ConversionError if the parts of a matrix are missing, or have other sizes or values."""
        if name not in self._files or self.raw(name).dtype is not torch.int8:
            what = "is missing" if name not in self._files else f"has type {self.raw(name).dtype}"
            raise ConversionError(f"{self.directory} is damaged: {name} {what}, expected codes in int8")
        order = f"{name.removesuffix(WEIGHT)}{FORMAT}"
        if order in self._files and self.raw(order).any():
            raise ConversionError(
                f"{self.directory}: {order} = {int(self.raw(order))}, which is not supported: codes are in "
                "the order of a GPU. Load the model with transformers, and save it again."
            )
        self._check_size(f"{name.removesuffix(WEIGHT)}{ROWS}", self.shape(name)[0], name)
        self._check_scales(self.scales(name), name)

    def scales(self, name: str) -> Tensor:
        """Return the scales of the rows of a matrix, [rows] fp32."""
        return self.raw(f"{name.removesuffix(WEIGHT)}{ROWS}").view(-1).float()

    def rows(self, name: str, first: int, stop: int) -> Tensor:
        if name not in self.quantized:
            return super().rows(name, first, stop)
        values = self.raw(name)[first:stop].float()
        return values.mul_(FORMATS["int8"].scales(self.scales(name)[first:stop]).unsqueeze(1))
