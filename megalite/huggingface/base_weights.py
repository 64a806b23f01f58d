"""The frozen base of adapters, read from where a run starts (`model.init_from`), or drawn from its seed.

Checkpoints of a run whose base is quantized (`lora.base`) have no base: it never changes, and it is much
larger than what is trained. Whoever opens such a checkpoint reads the base again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from megalite.config.load import from_dict
from megalite.config.schema import Config
from megalite.huggingface import convert as converting
from megalite.huggingface.nf4 import Nf4Tensors
from megalite.huggingface.weights_identity import weights_identity
from megalite.model.adapter_parameters import with_adapters
from megalite.model.parameters import model_specs
from megalite.parallel.quantized.layout import BaseForm
from megalite.parallel.quantized.reading import BASE
from megalite.parallel.spec import Rectangle, Segment
from megalite.system import rng


class BaseWeights:
    """The weights from which a run started, without its adapter (`quantized.reading.BaseSource`)."""

    def __init__(self, config: Config):
        start = config.model.initial_weights
        self.name = f"random weights of run.seed = {config.run.seed}" if start is None else start
        self._read = _reader(config)
        hf = start is not None and start.startswith(converting.HF)
        self._directory = Path(str(start).removeprefix(converting.HF)) if hf else None

    def rows(self, matrix: Segment, first: int, stop: int) -> Tensor:
        values = torch.empty(stop - first, *matrix.shape[1:])
        offsets = first, *(0 for _ in matrix.shape[1:])
        part = Rectangle(WEIGHT + matrix.name, matrix.shape, offsets, values)
        self._read([part])
        reject(self.name, {part.name: nonfinite(values)})
        return values

    def nested(self, matrix: Segment) -> nf4.NestedScales | None:
        if self._source is None:
            return None
        place, weights = self._source.places[matrix.name], self._source.weights
        # parts of a fused matrix have no scales of their own
        whole = place.rows == range(place.shape[0]) and not place.transposed and len(place.tensors) == 1
        return weights.nested(place.theirs) if whole and isinstance(weights, Nf4Tensors) else None

    @cached_property
    def _source(self) -> converting.HuggingFaceSource | None:
        return None if self._directory is None else converting.HuggingFaceSource.of(self._directory)


def _reader(config: Config) -> Read:
    """Return a function that fills rectangles of the weights of step 0. It raises CheckpointError."""
    start = config.model.initial_weights
    if start is None:
        return _drawn(config)
    if start.startswith(converting.HF):
        read = converting.starting_weights(config.model, config.run.seed, beside_adapter=True)
        assert read is not None
        return read
    return of_checkpoint(config.model, config.run.seed, checkpoint.manifest_of(checkpoint.find(Path(start))))


def identity(config: Config) -> str:
    """Return what identifies the base of a run, for its checkpoints. Raises CheckpointError."""
    start = config.model.initial_weights
    return f"random, run.seed = {config.run.seed}" if start is None else weights_identity(start)


def check_same(config: Config, own: str, state: Mapping[str, Any], directory: Path) -> None:
    """Raise CheckpointError if a base is not the one of a checkpoint.

    Args:
        own: `identity` of the base.
        state: of the checkpoint in `directory`.
    """
    if own != state.get(BASE, own):
        start = config.model.initial_weights or f"random weights of run.seed = {config.run.seed}"
        raise CheckpointError(
            f"{directory} has adapters, and no base ({config.lora.base}), which was of other weights than "
            f"{start} has now. Restore these, or name the directory with the weights of before in "
            "model.init_from."
        )


def _drawn(config: Config) -> Read:
    """Return a function that fills rectangles with the weights of step 0 of a run from random weights."""
    segments = {
        WEIGHT + segment.name: segment for spec in model_specs(config.model) for segment in spec.segments
    }

    def read(rectangles: Sequence[Rectangle]) -> None:
        for part in rectangles:
            first, *others = part.offsets
            rows = rng.drawn_rows(segments[part.name], first, first + len(part.tensor), config.run.seed)
            columns = (slice(at, at + size) for at, size in zip(others, part.tensor.shape[1:], strict=True))
            part.tensor.copy_(torch.cat([*rows])[(slice(None), *columns)])

    return read


def base_of(config: Config, state: Mapping[str, Any], directory: Path) -> BaseWeights:
    """Return the base of a checkpoint. Raises CheckpointError if it is another one than it was.

    Args:
        config: of the run that has written the checkpoint.
        state: of the checkpoint in `directory`.
    """
    check_same(config, identity(config), state, directory)
    return BaseWeights(config)


def with_base(manifest: Manifest) -> Manifest:
    """Return the manifest of a checkpoint with the values of its quantized base, if it has one.

    These are the weights that the adapters were trained on: the values of codes and scales, in the compute
    precision of the run.
    """
    config = from_dict(manifest.state.get("config", {}))
    if config.lora.base == "none":
        return manifest
    base = base_of(config, manifest.state, manifest.directory)
    form = BaseForm(config.lora.base, config.lora.double_quant)
    dtype, tensors, matrices = DTYPES[config.train.precision], dict(manifest.tensors), {}
    for spec in with_adapters(model_specs(config.model), config.lora):
        for segment in spec.segments if spec.base is not None else ():
            name, sizes = WEIGHT + segment.name, segment.shape
            chunk = Chunk((0, 0), sizes, name, 0, segment.numel * dtype.itemsize, "")
            tensors[name], matrices[name] = StoredTensor(dtype_name(dtype), sizes, [chunk]), segment
    return WithBase(manifest.directory, manifest.state, tensors, manifest.files, matrices, base, form)


@dataclass(frozen=True)
class WithBase(Manifest):
    """The manifest of a checkpoint that has no base, and the values of the base.

    A matrix of the base is one chunk, whose file is its name.
    """

    matrices: dict[str, Segment]
    base: BaseWeights
    form: BaseForm

    def read(self, chunks: Iterable[Chunk]) -> Iterator[tuple[Chunk, NDArray[np.uint8]]]:
        own = [*chunks]
        yield from super().read([chunk for chunk in own if chunk.file not in self.matrices])
        for chunk in (each for each in own if each.file in self.matrices):
            segment = self.matrices[chunk.file]
            whole = self.base.rows(segment, 0, segment.shape[0])
            block = self.form.block(segment.shape[1])
            nested = self.base.nested(segment) if self.form.double else None
            values = block_formats.rounded(whole, self.form.name, block, self.form.double, nested)
            dtype = getattr(torch, self.tensors[chunk.file].dtype)
            yield chunk, values.to(dtype).view(-1).view(torch.uint8).numpy()
