"""Memory-mapped weights of a Hugging Face directory.

Pages of a file are read on access and do not count as memory of the process.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint import CheckpointError
from megalite.checkpoint.checksummed_chunks import dtype_name
from megalite.families.weight_files import INDEX, MODEL, weights_file
from megalite.system.text import abbreviated

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
LETTERS = {dtype: letters for letters, dtype in DTYPES.items()}
QUANTIZED = {
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}
"""Dtypes of quantized tensors and their scales (`megalite.huggingface.mxfp4`, `fp8`, `bits_and_bytes`)."""
STORED = DTYPES | QUANTIZED
LONGEST_HEADER = 100_000_000  # bytes; the limit of the safetensors library


class ConversionError(CheckpointError):
    """Raised if a Hugging Face directory cannot be read or written. The message names the file and the
    tensor.
    """


POINTER = b"version https://git-lfs"
"""Start of a Git LFS pointer file."""


class SafetensorsFile:
    """A safetensors file: 8 bytes with the length of a JSON header, the header, and the data of all tensors.

    Raises ConversionError.
    """

    def __init__(self, path: Path):
        self.path = path
        size = _size_of(path)
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(size - 8, LONGEST_HEADER):
                file.seek(0)
                if file.read(len(POINTER)) == POINTER:
                    raise ConversionError(
                        f"{path} is a Git LFS pointer, not the weights. Run `git lfs pull` in that directory"
                    )
                raise ConversionError(f"{path} is not a safetensors file or is truncated ({size:,} bytes)")
            try:
                header = json.loads(file.read(length))
                header.pop("__metadata__", None)
                self._entries = {name: _entry(**fields) for name, fields in header.items()}
            except (ValueError, TypeError, AttributeError, KeyError) as error:
                raise ConversionError(
                    f"{path} is not a valid safetensors file: could not parse the header ({error})"
                ) from None
        self._start = 8 + length
        self._check(size)

    def _check(self, size: int) -> None:
        expected = self._start + max((stop for _, _, _, stop in self._entries.values()), default=0)
        if size != expected:
            raise ConversionError(
                f"{self.path} is damaged: expected {expected:,} bytes according to its header, but got "
                f"{size:,}"
            )
        for name, (letters, shape, start, stop) in self._entries.items():
            if letters not in STORED:
                raise ConversionError(
                    f"{self.path}: {name} has unsupported type {letters}. Quantized weights are not "
                    "supported; use the bf16 weights."
                )
            if not 0 <= start <= stop or stop - start != prod(shape) * STORED[letters].itemsize:
                raise ConversionError(
                    f"{self.path} is damaged: {name} ({letters} {list(shape)}) does not match its byte "
                    f"range {start:,} to {stop:,}"
                )

    @property
    def names(self) -> list[str]:
        return list(self._entries)

    @cached_property
    def _bytes(self) -> Tensor:
        return torch.from_file(str(self.path), shared=False, size=self.path.stat().st_size, dtype=torch.uint8)

    def dtype(self, name: str) -> torch.dtype:
        return STORED[self._entries[name][0]]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name][1]

    def __getitem__(self, name: str) -> Tensor:
        letters, shape, start, stop = self._entries[name]
        part = self._bytes[self._start + start : self._start + stop]
        if (self._start + start) % STORED[letters].itemsize:
            part = part.clone()  # old files do not align their data, which a view in another dtype needs
        return part.view(STORED[letters]).view(shape)


def _entry(dtype: str, shape: list[int], data_offsets: list[int]) -> tuple[str, tuple[int, ...], int, int]:
    start, stop = data_offsets
    return dtype, tuple(int(size) for size in shape), int(start), int(stop)


class PickledFile:
    """A file written by torch.save, loaded without running code from its pickle.

    Raises ConversionError.
    """

    def __init__(self, path: Path):
        _size_of(path)
        try:
            content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        # torch raises RuntimeError, UnpicklingError, EOFError and others for a file that it cannot read
        except Exception as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise ConversionError(f"Could not load {path} with weights_only=True: {reason}") from None
        if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
            raise ConversionError(f"{path} is not a state dict: expected a mapping of names to tensors")
        self._tensors: dict[str, Tensor] = content

    @property
    def names(self) -> list[str]:
        return list(self._tensors)

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]


class TensorFiles(Mapping[str, Tensor]):
    """All tensors of a directory, from a single file or from the files of an index.

    As in transformers, the last file wins if several contain the same name.

    Args:
        names: files and indices in order of preference.
    """

    def __init__(self, directory: Path, names: Sequence[str] = MODEL):
        self.directory = directory
        self._files: dict[str, SafetensorsFile | PickledFile] = {}
        listed = _files_of(directory, names)
        for file in sorted(listed):
            opened = (
                SafetensorsFile(directory / file)
                if file.endswith(".safetensors")
                else PickledFile(directory / file)
            )
            self._files |= dict.fromkeys(opened.names, opened)
        if missing := [
            (file, name) for file, each in listed.items() for name in each if name not in self._files
        ]:
            file, name = missing[0]
            raise ConversionError(f"{directory / file} does not contain {name}, although the index lists it")
        # a subclass may offer others than are stored
        self._names: Mapping[str, object] = self._files

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._files[name][name]
        if not tensor.is_floating_point() or tensor.dtype not in LETTERS:
            raise ConversionError(
                f"{self.directory}: {name} has unsupported type {dtype_name(tensor.dtype)}. "
                "Quantized weights are not supported."
            )
        return tensor

    def raw(self, name: str) -> Tensor:
        """Return a tensor of any type as it is stored."""
        return self._files[name][name]

    def rows(self, name: str, first: int, stop: int) -> Tensor:
        """Return rows [first, stop) of a tensor."""
        return self[name][first:stop]

    def experts(self, name: str, first: int, stop: int) -> Tensor:
        """Return a range of experts of a tensor that contains all experts of a layer."""
        return self[name][first:stop]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._files[name].shape(name)

    def __contains__(self, name: object) -> bool:  # Mapping's own reads the tensor
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise ConversionError(
            f"Could not read {path}: {error.strerror}. Check that the download is complete."
        ) from None


def _files_of(directory: Path, names: Sequence[str]) -> dict[str, list[str]]:
    """Return file → its tensors in the index; the list is empty without an index. Raises ConversionError."""
    if not directory.is_dir():
        raise ConversionError(f"There is no directory {directory}")
    file = weights_file(directory, names)
    if file is None:
        whole = [name for name in names if not name.endswith(INDEX)]
        parts = " or an index" if len(whole) < len(names) else ""
        others = sorted(
            path.name
            for path in directory.iterdir()
            if path.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf")
        )
        advice = (
            f", but found only {abbreviated(others, 3)}. Check that the download is complete"
            if others
            else ""
        )
        raise ConversionError(
            f"No weights found in {directory}. Expected {' or '.join(whole)}{parts}{advice}"
        )
    return _shards(file) if file.name.endswith(INDEX) else {file.name: []}


def _shards(index: Path) -> dict[str, list[str]]:
    tensors: dict[str, list[str]] = {}
    try:
        for name, file in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items():
            if Path(file).name != file:
                raise ValueError(f"{file} is not a file name")
            tensors.setdefault(file, []).append(name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConversionError(f"{index} is damaged: {error}") from None
    return tensors


class NewFile:
    """A new safetensors file with given tensors, whose parts may be written in any order."""

    def __init__(self, path: Path, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]):
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end, starts = 0, {}
        # aligns every tensor
        for name, (dtype, shape) in sorted(tensors.items(), key=lambda each: -each[1][0].itemsize):
            starts[name], end = end, end + prod(shape) * dtype.itemsize
            header[name] = {
                "dtype": LETTERS[dtype],
                "shape": list(shape),
                "data_offsets": [starts[name], end],
            }
        text = json.dumps(header).encode()
        text += b" " * (-(8 + len(text)) % 64)
        self._starts = {name: 8 + len(text) + start for name, start in starts.items()}
        self._file = open(path, "wb")  # noqa: SIM115 (closed by `close`)
        self._file.write(len(text).to_bytes(8, "little") + text)

    def write(self, name: str, values: Tensor, first: int = 0) -> None:
        """Write contiguous values, of the tensor's dtype, at its element `first`."""
        self._file.seek(self._starts[name] + first * values.itemsize)
        self._file.write(values.view(-1).view(torch.uint8).numpy().data)

    def close(self) -> None:
        """Sync the file to disk and close it."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
