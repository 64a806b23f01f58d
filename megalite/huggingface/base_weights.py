"""The frozen base of adapters, read from where a run starts (`model.init_from`), or drawn from its seed.

Checkpoints of a run whose base is quantized (`lora.base`) have no base: it never changes, and it is much
larger than what is trained. Whoever opens such a checkpoint reads the base again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megalite_kernels import block_formats, nf4
from numpy.typing import NDArray
from torch import Tensor

from megalite import checkpoint
from megalite.assembly.parts import DTYPES
from megalite.checkpoint import CheckpointError, Manifest
from megalite.checkpoint.checksummed_chunks import Chunk, dtype_name
from megalite.checkpoint.finite import nonfinite, reject
from megalite.checkpoint.manifest import WEIGHT, StoredTensor
from megalite.checkpoint.resized_embeddings import Read, of_checkpoint
from megalite.config.errors import ConfigError
from megalite.config.load import from_dict, to_dict
from megalite.config.schema import Config
from megalite.huggingface.bits_and_bytes import EightBitTensors, FourBitTensors
from megalite.huggingface.initial_weights import starting_weights
from megalite.huggingface.source import HF, HuggingFaceSource
from megalite.huggingface.weights_identity import weights_identity
from megalite.model.adapter_parameters import with_adapters
from megalite.model.parameters import model_specs
from megalite.parallel.quantized.layout import BaseForm, rows_at_once, rows_read
from megalite.parallel.quantized.reading import BASE
from megalite.parallel.spec import Rectangle, Segment
from megalite.system import rng


class BaseWeights:
    """The weights from which a run started, without its adapter (`quantized.reading.BaseSource`).

    Args:
        start: hf:DIR or a checkpoint; None: they are drawn from the seed of the run.
    """

    def __init__(self, config: Config, start: str | None):
        self.name = f"random weights of run.seed = {config.run.seed}" if start is None else start
        self._read = _reader(config, start)
        hf = start is not None and start.startswith(HF)
        self._directory = Path(str(start).removeprefix(HF)) if hf else None
        # the rows that were read last: (name, first row), rows
        self._last: tuple[tuple[str, int], Tensor] | None = None
        self._last_nested: tuple[str, nf4.NestedScales] | None = None

    def rows(self, matrix: Segment, first: int, stop: int) -> Tensor:
        if self._reads_rows(matrix):
            return self._values(matrix, first, stop)
        length, values = rows_read(matrix.shape[1]), torch.empty(stop - first, *matrix.shape[1:])
        for start in range(first // length * length, stop, length):
            block = self._block(matrix, start, min(start + length, matrix.shape[0]))
            low, high = max(first, start), min(stop, start + length)
            values[low - first : high - first] = block[low - start : high - start]
        return values

    def _reads_rows(self, matrix: Segment) -> bool:
        """Return whether any rows are read without others, from a file that is mapped into memory."""
        return self._source is not None and self._source.reads_rows(matrix.name)

    def _block(self, matrix: Segment, first: int, stop: int) -> Tensor:
        key = matrix.name, first
        if self._last is None or self._last[0] != key:
            self._last = None  # freed before the next are read
            self._last = key, self._values(matrix, first, stop)
        return self._last[1]

    def _values(self, matrix: Segment, first: int, stop: int) -> Tensor:
        values = torch.empty(stop - first, *matrix.shape[1:])
        part = Rectangle(WEIGHT + matrix.name, matrix.shape, (first, 0), values)
        self._read([part])
        reject(self.name, {part.name: nonfinite(values)})
        return values

    def nested(self, matrix: Segment, form: BaseForm) -> nf4.NestedScales | None:
        if self._source is None or not isinstance(files := self._source.weights, FourBitTensors):
            return None
        place = self._source.places[matrix.name]
        # parts of a fused matrix have no scales of their own
        whole = place.rows == range(place.shape[0]) and not place.transposed and len(place.tensors) == 1
        return files.nested(place.theirs, form.name) if whole else None

    def scales(self, matrix: Segment, form: BaseForm, first: int, stop: int) -> Tensor | None:
        if form.double:
            nested = self.nested(matrix, form)
            return None if nested is None else nested.values(first, stop)
        if self._source is None or not isinstance(files := self._source.weights, EightBitTensors):
            return None
        place = self._source.places[matrix.name]
        if form.name != "int8" or place.transposed or not files.quantized.issuperset(place.tensors):
            return None
        of_rows = torch.cat([files.scales(theirs) for theirs in place.tensors])
        return of_rows[[*place.rows[first:stop]]]

    @cached_property
    def _source(self) -> HuggingFaceSource | None:
        return None if self._directory is None else HuggingFaceSource.of(self._directory)

    def quantized(self, matrix: Segment, form: BaseForm, first: int = 0, stop: int | None = None) -> Tensor:
        """Return rows [first, stop) of a matrix as they are in a base of this form, [rows, columns] fp32."""
        width, block = matrix.shape[1], form.block(matrix.shape[1])
        low, high = first * width, (matrix.shape[0] if stop is None else stop) * width
        values, start = self._blocks(matrix, block, low, high)
        first, last = start // block, start // block - -len(values) // block
        known = self.scales(matrix, form, first, last)
        scales = known
        if form.double and known is None:
            scales = self._found_scales(matrix, form).values(first, last)
        rounded = block_formats.rounded(values, form.name, block, scales=scales, known=known is not None)
        return rounded[low - start : high - start].view(-1, width)

    def _blocks(self, matrix: Segment, block: int, low: int, high: int) -> tuple[Tensor, int]:
        """Return the whole blocks that elements [low, high) of a matrix touch, and where the first begins."""
        width = matrix.shape[1]
        start, end = low // block * block, min(-(-high // block) * block, matrix.numel)
        row = start // width
        values = self.rows(matrix, row, -(-end // width)).view(-1)
        return values[start - row * width : end - row * width], start

    def _found_scales(self, matrix: Segment, form: BaseForm) -> nf4.NestedScales:
        """Return the quantized scales of a matrix; those of the last one are kept."""
        if self._last_nested is None or self._last_nested[0] != matrix.name:
            width, block = matrix.shape[1], form.block(matrix.shape[1])
            scales = torch.empty(-(-matrix.numel // block))
            step = rows_at_once(width) * width
            for low in range(0, matrix.numel, step):
                values, start = self._blocks(matrix, block, low, min(low + step, matrix.numel))
                own = block_formats.quantize(values, form.name, block).scales
                scales[start // block : start // block + len(own)] = own
            self._last_nested = matrix.name, nf4.quantize_scales(scales)
        return self._last_nested[1]


def _reader(config: Config, start: str | None) -> Read:
    """Return a function that fills rectangles of the weights of step 0. It raises CheckpointError."""
    if start is None:
        return _drawn(config)
    if start.startswith(HF):
        model = replace(config.model, init_from=start)
        read = starting_weights(model, config.run.seed, beside_adapter=True)
        assert read is not None
        return read
    return of_checkpoint(config.model, config.run.seed, checkpoint.manifest_of(checkpoint.find(Path(start))))


def _drawn(config: Config) -> Read:
    """Return a function that fills rectangles with the weights of step 0 of a run from random weights."""
    segments = {
        WEIGHT + segment.name: segment for spec in model_specs(config.model) for segment in spec.segments
    }

    def read(rectangles: Sequence[Rectangle]) -> None:
        for part in rectangles:
            (first, *others), row = part.offsets, 0
            columns = [slice(at, at + size) for at, size in zip(others, part.tensor.shape[1:], strict=True)]
            for rows in rng.drawn_rows(segments[part.name], first, first + len(part.tensor), config.run.seed):
                part.tensor[row : row + len(rows)] = rows[(slice(None), *columns)]
                row += len(rows)

    return read


def quantized_matrices(config: Config) -> dict[str, tuple[Segment, BaseForm]]:
    """Return the matrices of a quantized base by name, with their form."""
    return {
        segment.name: (segment, spec.base)
        for spec in with_adapters(model_specs(config.model), config.lora)
        for segment in spec.segments
        if spec.base is not None
    }


def record(config: Config, start: str | None) -> dict[str, str | None]:
    """Return what a checkpoint keeps of a base: where it was read from, and what identifies its weights.

    Raises:
        CheckpointError: it cannot be read.
    """
    identity = f"random, run.seed = {config.run.seed}" if start is None else weights_identity(start)
    return {"source": start, "identity": identity}


def base_of(config: Config, state: Mapping[str, Any], directory: Path) -> tuple[str | None, BaseWeights]:
    """Return where the base of a checkpoint is, and the base.

    It is where it was read from before, or where `model.init_from` says now.

    Args:
        config: of the run that has written the checkpoint, or that resumes from it.
        state: of the checkpoint in `directory`.

    Raises:
        CheckpointError: the weights of before are in neither.
    """
    before, problems = state[BASE], list[str]()
    for start in dict.fromkeys((before["source"], config.model.initial_weights)):
        name = f"the initialization by run.seed = {config.run.seed}" if start is None else start
        try:
            if record(config, start)["identity"] == before["identity"]:
                return start, BaseWeights(config, start)
            problems.append(f"{name} has other weights now")
        except (CheckpointError, ConfigError, OSError) as error:
            problems.append(f"{name} cannot be read: {str(error).removesuffix('.')}")
    raise CheckpointError(
        f"{directory} has adapters, and no base ({config.lora.base}), which is read from where the run "
        f"started. {'; '.join(problems)}. Restore these weights, or name their new place: with --base in a "
        "command that reads the checkpoint, in model.init_from in a run that resumes, whose next checkpoint "
        "records it."
    )


def moved(manifest: Manifest, named: str | None) -> Manifest:
    """Return the manifest of a checkpoint whose base is where a user says, instead of where it was.

    Args:
        named: hf:DIR or a checkpoint (`--base`); None: the manifest is returned as it is.

    Raises:
        ConfigError: the checkpoint has no quantized base.
        CheckpointError: these weights cannot be read, or the adapters were not trained on them.
    """
    if named is None:
        return manifest
    before = manifest.state.get(BASE)
    if before is None:
        raise ConfigError(
            f"--base {named} has no effect: {manifest.directory} contains all weights of its model. Remove "
            "--base, which is for runs with lora.base."
        )
    config = from_dict(manifest.state["config"])
    config = replace(config, model=replace(config.model, init_from=named))
    try:
        identity = record(config, named)["identity"]
    except (CheckpointError, ConfigError, OSError) as error:
        raise CheckpointError(f"--base {named} cannot be read: {error}") from None
    if identity != before["identity"]:
        was = before["source"] or f"drawn from run.seed = {config.run.seed}"
        raise CheckpointError(
            f"--base {named} has other weights than the base on which {manifest.directory} was trained "
            f"({was}). Name a directory with those weights."
        )
    base = {"source": named, "identity": identity}
    return replace(manifest, state=manifest.state | {"config": to_dict(config), BASE: base})


def with_base(manifest: Manifest) -> Manifest:
    """Return the manifest of a checkpoint with the values of its quantized base, if it has one.

    These are the weights that the adapters were trained on: the values of codes and scales, in the compute
    precision of the run.
    """
    config = from_dict(manifest.state.get("config", {}))
    if config.lora.base == "none":
        return manifest
    _, base = base_of(config, manifest.state, manifest.directory)
    dtype, tensors = DTYPES[config.train.precision], dict(manifest.tensors)
    matrices = {WEIGHT + name: each for name, each in quantized_matrices(config).items()}
    for name, (segment, _) in matrices.items():
        tensors[name] = StoredTensor(dtype_name(dtype), segment.shape, [*_chunks(name, segment, dtype)])
    return WithBase(manifest.directory, manifest.state, tensors, manifest.files, matrices, base)


def _chunks(name: str, matrix: Segment, dtype: torch.dtype) -> Iterator[Chunk]:
    """Yield ranges of the rows of a matrix, as many as are quantized at a time."""
    length, width = matrix.shape
    rows = rows_at_once(width)
    for first in range(0, length, rows):
        count, size = min(rows, length - first), width * dtype.itemsize
        yield Chunk((first, 0), (count, width), name, first * size, count * size, "")


@dataclass(frozen=True)
class WithBase(Manifest):
    """The manifest of a checkpoint that has no base, and the values of the base.

    The file of a chunk of the base is the name of its matrix. Its values are computed when it is read.
    """

    matrices: dict[str, tuple[Segment, BaseForm]]
    base: BaseWeights

    def read(self, chunks: Iterable[Chunk]) -> Iterator[tuple[Chunk, NDArray[np.uint8]]]:
        own = [*chunks]
        yield from super().read([chunk for chunk in own if chunk.file not in self.matrices])
        for chunk in (each for each in own if each.file in self.matrices):
            first, stop = chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0]
            values = self.base.quantized(*self.matrices[chunk.file], first, stop)
            dtype = getattr(torch, self.tensors[chunk.file].dtype)
            yield chunk, values.to(dtype).view(-1).view(torch.uint8).numpy()
