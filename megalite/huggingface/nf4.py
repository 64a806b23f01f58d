"""Weights in 4 bits as transformers saves them with bitsandbytes (`load_in_4bit`), read in fp32.

A matrix NAME is several tensors in the files: NAME, the codes [bytes, 1]; NAME.absmax, the scales of blocks
of 64, or with double quantization their codes; NAME.nested_absmax, the scales of these; NAME.quant_map and
NAME.nested_quant_map, the values of codes; and NAME.quant_state.bitsandbytes__nf4, JSON with the shape and
the offset of scales. What is read are the values in fp32, without a rounding to the dtype that the JSON
names: quantized again, they have the same codes and scales.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from math import isfinite, prod
from typing import Any

import torch
from megalite_kernels import nf4
from torch import Tensor

from megalite.huggingface.files import ConversionError, TensorFiles

STATE = ".quant_state.bitsandbytes__nf4"
_PARTS = (".absmax", ".nested_absmax", ".quant_map", ".nested_quant_map", STATE)
_EXPECTED = {"quant_type": "nf4", "blocksize": nf4.BLOCK, "nested_blocksize": nf4.NESTED}


class Nf4Tensors(TensorFiles):
    """The tensors of a directory, with quantized matrices under their own names.

    Raises ConversionError for a matrix whose parts do not match, or that has another form.
    """

    def __init__(self, weights: TensorFiles):
        self.directory, self._files = weights.directory, weights._files
        self.quantized = {
            name.removesuffix(STATE): self._state(name) for name in sorted(weights) if name.endswith(STATE)
        }
        parts = {f"{name}{end}" for name in self.quantized for end in _PARTS}
        self._names = dict.fromkeys(name for name in weights if name not in parts)
        self._last = lru_cache(maxsize=1)(self._values)  # rows of a matrix are read in several ranges
        for name in self.quantized:
            self._check(name)

    def _part(self, name: str) -> Tensor:
        return self._files[name][name]

    def _state(self, name: str) -> dict[str, Any]:
        try:
            state: dict[str, Any] = json.loads(bytes(self._part(name).tolist()))
            shape, offset = tuple(map(int, state["shape"])), float(state.get("nested_offset", 0.0))
        except (ValueError, TypeError, KeyError) as error:
            raise ConversionError(
                f"{self.directory} is damaged: {name} is not the state of a quantized matrix ({error})"
            ) from None
        for field, value in _EXPECTED.items():
            if state.get(field, value) != value:
                raise ConversionError(
                    f"{self.directory}: {name} says {field} = {state[field]!r}, which is not supported. "
                    f"Supported: {value!r}."
                )
        if not isfinite(offset):
            raise ConversionError(f"{self.directory} is damaged: {name} says nested_offset = {offset}")
        return state | {"shape": shape, "nested_offset": offset}

    def _is_double(self, name: str) -> bool:
        return f"{name}.nested_absmax" in self._files

    def _check(self, name: str) -> None:
        """Raise ConversionError if the parts of a matrix are missing, or have other sizes or values."""
        double, blocks = self._is_double(name), -(-prod(self.shape(name)) // nf4.BLOCK)
        expected = {name: -(-prod(self.shape(name)) // 2), f"{name}.absmax": blocks}
        expected |= {f"{name}.nested_absmax": -(-blocks // nf4.NESTED)} if double else {}
        for part, size in expected.items():
            have = prod(self._files[part].shape(part)) if part in self._files else None
            if have != size:
                what = "is missing" if have is None else f"has {have:,} elements, expected {size:,}"
                raise ConversionError(
                    f"{self.directory} is damaged: {part} {what} for a matrix {list(self.shape(name))}"
                )
        tables = {f"{name}.quant_map": nf4.table(torch.device("cpu"))}
        tables |= {f"{name}.nested_quant_map": nf4.scale_table(torch.device("cpu"))} if double else {}
        for part, table in tables.items():
            if part in self._files and not torch.equal(self._part(part), table):
                raise ConversionError(f"{self.directory}: {part} has other values than the format nf4")
        scales = self._part(f"{name}.nested_absmax" if double else f"{name}.absmax")
        if not (scales.isfinite() & (scales >= 0)).all():
            raise ConversionError(
                f"{self.directory} is damaged: {name} has a negative, infinite or NaN absmax"
            )

    def nested(self, name: str) -> nf4.NestedScales | None:
        """Return the quantized scales of a matrix, or None if they are not quantized."""
        if name not in self.quantized or not self._is_double(name):
            return None
        codes, scales = (self._part(f"{name}.{part}").view(-1) for part in ("absmax", "nested_absmax"))
        return nf4.NestedScales(codes, scales, torch.tensor(self.quantized[name]["nested_offset"]))

    def _values(self, name: str) -> Tensor:
        return self.rows(name, 0, self.shape(name)[0])

    def rows(self, name: str, first: int, stop: int) -> Tensor:
        if name not in self.quantized:
            return super().rows(name, first, stop)
        width = prod(self.shape(name)[1:])
        start, end = first * width, stop * width
        block, last = start // nf4.BLOCK, -(-end // nf4.BLOCK)
        skipped, packed = start - block * nf4.BLOCK, self._part(name).view(-1)
        codes = packed[block * nf4.BLOCK // 2 : -(-end // 2)]
        values = nf4.values_of(codes, end - block * nf4.BLOCK)
        values.mul_(nf4.of_elements(self._scales(name, block, last), len(values)))
        return values[skipped:].view(stop - first, *self.shape(name)[1:])

    def _scales(self, name: str, first: int, stop: int) -> Tensor:
        """Return the scales of blocks [first, stop) of a matrix."""
        nested = self.nested(name)
        if nested is None:
            return self._part(f"{name}.absmax").view(-1)[first:stop]
        return nested.values(first, stop)

    def __getitem__(self, name: str) -> Tensor:
        return self._last(name) if name in self.quantized else super().__getitem__(name)

    def shape(self, name: str) -> tuple[int, ...]:
        state = self.quantized.get(name)
        return super().shape(name) if state is None else state["shape"]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
