"""The frozen base of adapters, read from where a run starts (`model.init_from`), or drawn from its seed.

Checkpoints of a run whose base is quantized (`lora.base`) have no base: it never changes, and it is much
larger than what is trained. Whoever opens such a checkpoint reads the base again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megalite_kernels import nf4
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
from megalite.huggingface.weights_identity import weights_identity
from megalite.model.adapter_parameters import with_adapters
from megalite.model.parameters import model_specs
from megalite.parallel.quantized.reading import BASE, ReadRows
from megalite.parallel.spec import Rectangle, Segment
from megalite.system import rng


def read_base(config: Config) -> Read:
    """Return a function that fills rectangles of the weights from which a run started, without its adapter.

    The function raises CheckpointError.
    """
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


def beside_base(config: Config, manifest: Manifest, read: Read) -> Read:
    """Return a function that reads what a checkpoint has, and its base from where the run started.

    Args:
        config: of the run that has written it.
        read: reads from the checkpoint.
    """
    if config.lora.base == "none":
        return read

    @cache
    def start() -> Read:
        check_same(config, identity(config), manifest.state, manifest.directory)
        return read_base(config)

    def read_both(rectangles: Sequence[Rectangle]) -> None:
        base = [part for part in rectangles if part.name not in manifest.tensors]
        read([part for part in rectangles if part.name in manifest.tensors])
        if base:
            start()(base)

    return read_both


def with_base(manifest: Manifest) -> Manifest:
    """Return the manifest of a checkpoint with the values of its quantized base, if it has one.

    These are the weights that the adapters were trained on: the values of codes and scales, in the compute
    precision of the run.
    """
    config = from_dict(manifest.state.get("config", {}))
    if config.lora.base == "none":
        return manifest
    check_same(config, identity(config), manifest.state, manifest.directory)
    dtype, tensors, matrices = DTYPES[config.train.precision], dict(manifest.tensors), {}
    for spec in with_adapters(model_specs(config.model), config.lora):
        for segment in spec.segments if spec.base is not None else ():
            name, sizes = WEIGHT + segment.name, segment.shape
            chunk = Chunk((0, 0), sizes, name, 0, segment.numel * dtype.itemsize, "")
            tensors[name], matrices[name] = StoredTensor(dtype_name(dtype), sizes, [chunk]), segment
    base = rows_by(read_base(config), config.model.initial_weights or "the start of the run")
    return WithBase(
        manifest.directory, manifest.state, tensors, manifest.files, matrices, base, config.lora.double_quant
    )


@dataclass(frozen=True)
class WithBase(Manifest):
    """The manifest of a checkpoint that has no base, and the values of the base.

    A matrix of the base is one chunk, whose file is its name.
    """

    matrices: dict[str, Segment]
    rows: ReadRows
    double: bool

    def read(self, chunks: Iterable[Chunk]) -> Iterator[tuple[Chunk, NDArray[np.uint8]]]:
        own = [*chunks]
        yield from super().read([chunk for chunk in own if chunk.file not in self.matrices])
        for chunk in (each for each in own if each.file in self.matrices):
            segment = self.matrices[chunk.file]
            values = nf4.rounded(self.rows(segment, 0, segment.shape[0]), self.double)
            dtype = getattr(torch, self.tensors[chunk.file].dtype)
            yield chunk, values.to(dtype).view(-1).view(torch.uint8).numpy()


def rows_by(read: Read, source: str) -> ReadRows:
    """Return a function that reads rows of a matrix.

    Args:
        source: where they are from, for the message about values that are not finite.
    """

    def rows(segment: Segment, first: int, stop: int) -> Tensor:
        values = torch.empty(stop - first, *segment.shape[1:])
        part = Rectangle(
            WEIGHT + segment.name, segment.shape, (first, *(0 for _ in segment.shape[1:])), values
        )
        read([part])
        reject(source, {part.name: nonfinite(values)})
        return values

    return rows
