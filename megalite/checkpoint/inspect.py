"""Inspection of checkpoints: description, verification, comparison and consolidation.

Only one tensor is in memory at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from math import isfinite, prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite import checkpoint
from megalite.checkpoint import CheckpointError, DamagedError, Manifest, directories
from megalite.checkpoint.manifest import WEIGHT, StoredTensor
from megalite.config import run_files
from megalite.stores.url import is_url
from megalite.system.files import replacing
from megalite.system.progress import Report, silent

SAFETENSORS = {
    **{"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"},
    **{"uint8": "U8", "int64": "I64"},
}


# ---- all checkpoints of a run


@dataclass(frozen=True)
class Entry:
    """One checkpoint of a run.

    Attributes:
        problem: damage visible from its manifest and the sizes of its files, or None.
    """

    name: str
    step: int
    latest: bool
    bytes: int | None
    tensors: int | None
    problem: str | None
    best: bool = False


def entries(path: Path) -> list[Entry]:
    """Return the checkpoints of a run's directory, or of its checkpoints/ directory, in order.

    Raises CheckpointError if there are none.
    """
    if is_url(path):
        from megalite.checkpoint.stored_data import fetched_run

        path = fetched_run(path)
    folder = path / run_files.CHECKPOINTS if (path / run_files.CHECKPOINTS).is_dir() else path
    steps = sorted(directories.numbered(folder).items())
    if not steps:
        raise CheckpointError(
            f"No checkpoints found in {path}. Expected a run directory or its checkpoints/ directory."
        )
    newest, best = checkpoint.latest(folder), directories.best(folder)
    return [replace(_entry(path, number, path == newest), best=path == best) for number, path in steps]


def _entry(directory: Path, step: int, latest: bool) -> Entry:
    try:
        manifest = checkpoint.manifest_of(directory)
    except CheckpointError as error:
        return Entry(directory.name, step, latest, None, None, str(error))
    problem = None
    try:
        manifest.check_files()
    except DamagedError as error:
        problem = str(error)
    return Entry(directory.name, step, latest, sum(manifest.files.values()), len(manifest.tensors), problem)


# ---- one checkpoint


def describe(manifest: Manifest) -> dict[str, Any]:
    """Return state, files and tensors, without values."""
    tensors = {
        name: {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "chunks": len(tensor.chunks),
            "bytes": sum(chunk.bytes for chunk in tensor.chunks),
        }
        for name, tensor in manifest.tensors.items()
    }
    weights = [tensor for name, tensor in manifest.tensors.items() if name.startswith(WEIGHT)]
    parameters = sum(prod(tensor.shape) for tensor in weights)
    return {
        "checkpoint": str(manifest.directory),
        "parameters": parameters,
        "bytes": sum(manifest.files.values()),
        "files": manifest.files,
        "state": manifest.state,
        "tensors": tensors,
    }


def damages(manifest: Manifest, progress: Report = silent) -> list[str]:
    """Return the first damage of each file. Reads every byte."""
    messages, done, total = [], 0, sum(manifest.files.values())
    for file in manifest.files:
        try:
            for chunk, _ in manifest.read(chunk for chunk in manifest.chunks() if chunk.file == file):
                done += chunk.extent
                progress("verifying", done, total, "B")
        except DamagedError as error:
            messages.append(str(error))
    return messages


def whole(manifest: Manifest, tensor: StoredTensor) -> NDArray[np.uint8]:
    """Return a tensor's bytes, [*shape, bytes per element]; works for dtypes that numpy does not have."""
    size = sum(chunk.bytes for chunk in tensor.chunks) // max(prod(tensor.shape), 1)
    values = np.empty((*tensor.shape, size), np.uint8)
    for chunk, data in manifest.read(tensor.chunks):
        place = tuple(slice(low, low + count) for low, count in zip(chunk.offsets, chunk.sizes, strict=True))
        values[place] = data.reshape(*chunk.sizes, size)
    return values


# ---- two checkpoints


@dataclass(frozen=True)
class TensorDifference:
    """A tensor that is not bitwise equal in two checkpoints.

    Attributes:
        what: how it differs.
        max_abs, relative: the largest absolute difference, and its ratio to the largest absolute value of the
            first.
    """

    tensor: str
    what: str
    max_abs: float | None = None
    relative: float | None = None

    def as_json(self) -> dict[str, Any]:
        """Return plain data; NaN and infinities, which JSON does not have, become null."""
        return {
            key: None if isinstance(value, float) and not isfinite(value) else value
            for key, value in asdict(self).items()
        }


def differences(one: Manifest, other: Manifest, progress: Report = silent) -> Iterator[TensorDifference]:
    """Yield every tensor that differs, in the order of names."""
    names = sorted(one.tensors.keys() | other.tensors.keys())
    for number, name in enumerate(names):
        progress("comparing", number, len(names), "tensors")
        a, b = one.tensors.get(name), other.tensors.get(name)
        if a is None or b is None:
            yield TensorDifference(name, f"only in {(other if a is None else one).directory}")
        elif (a.dtype, a.shape) != (b.dtype, b.shape):
            yield TensorDifference(name, f"{a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}")
        else:
            x, y = whole(one, a), whole(other, b)
            if not np.array_equal(x, y):
                yield TensorDifference(name, "values", *_distance(x, y, a.dtype))


def _distance(x: NDArray[np.uint8], y: NDArray[np.uint8], dtype: str) -> tuple[float, float]:
    import torch

    a, b = (torch.from_numpy(data.reshape(-1)).view(getattr(torch, dtype)).double() for data in (x, y))
    largest = (a - b).abs().max().item()
    scale = a.abs().max().item()
    return largest, largest / scale if scale else float("inf")


# ---- consolidation


def consolidate(manifest: Manifest, output: Path, optimizer: bool, progress: Report = silent) -> int:
    """Write whole tensors to one safetensors file, which is renamed to `output` when it is complete.

    Return its size in bytes.

    Args:
        optimizer: write all tensors, by their names in the checkpoint (weight/NAME …); False: only weights,
            by their names in the model.
    """
    names = [name for name in manifest.tensors if optimizer or name.startswith(WEIGHT)]
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "step": str(manifest.state.get("step", ""))}}
    start = 0
    for name in names:
        tensor = manifest.tensors[name]
        stop = start + sum(chunk.bytes for chunk in tensor.chunks)
        kind = SAFETENSORS[tensor.dtype]
        key = name if optimizer else name.removeprefix(WEIGHT)
        header[key] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with replacing(output) as fresh, open(fresh, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            file.write(whole(manifest, manifest.tensors[name]).data)
            progress("writing", file.tell() - len(text) - 8, start, "B")
    return output.stat().st_size
