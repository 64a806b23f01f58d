"""Resizing of the embeddings when weights are loaded (`model.resize_embeddings`).

The embedding and an untied head get rows after those in the source, for tokens added to the tokenizer. Their
values depend neither on the layout nor on the rank that computes them: `mean` is the mean of the rows in the
source, summed in fp64; `init` draws the rows that a randomly initialized model of the larger vocabulary has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor

from megalite.checkpoint.api import load
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.manifest import WEIGHT, Manifest
from megalite.config.sections.model import ModelConfig
from megalite.model.parameters import model_specs
from megalite.parallel.spec import Rectangle
from megalite.system import rng

Read = Callable[[Sequence[Rectangle]], None]
"""Fills rectangles of weights, by their names in checkpoints."""
BLOCK = 64 << 20  # bytes of fp64 read at once for the mean


def of_checkpoint(model: ModelConfig, seed: int, manifest: Manifest) -> Read:
    """Return the function that fills rectangles of the weights from a checkpoint of any dtype.

    Raises CheckpointError as `check_rows`.
    """
    read, rows = partial(load, manifest, convert=True), rows_of(manifest)
    if rows is None:
        return read  # which names what is missing
    check_rows(model, rows, str(manifest.directory))
    return resized(model, seed, rows, read)


def rows_of(manifest: Manifest) -> int | None:
    """Return the vocabulary size of a checkpoint's embedding, or None if it has no embedding."""
    table = manifest.tensors.get(f"{WEIGHT}embedding.weight")
    return None if table is None else table.shape[0]


def check_rows(model: ModelConfig, rows: int, source: str) -> None:
    """Raise CheckpointError if weights with `rows` tokens cannot start the model.

    Args:
        source: the directory of the weights, for messages.
    """
    new = model.vocabulary - rows
    if new == 0 or new > 0 and model.resize_embeddings is not None:
        return
    sizes = (
        f"model.vocab_size={model.vocabulary} does not match the {rows} tokens of model.init_from={source}"
    )
    if new < 0:
        raise CheckpointError(
            f"{sizes}. Embeddings cannot be shrunk. Set model.vocab_size={rows} or leave it unset."
        )
    raise CheckpointError(
        f"{sizes}. If {new} tokens were added to the tokenizer, set model.resize_embeddings=mean to add "
        "rows for them. If the data was prepared with a different tokenizer, prepare it again with the "
        f"tokenizer of {source}."
    )


def resized(model: ModelConfig, seed: int, rows: int, read: Read) -> Read:
    """Return a function that reads the weights of `model` from a source with `rows` tokens.

    `read` fills rectangles of the same model with a vocabulary of `rows`.
    """
    if model.resize_embeddings is None or rows == model.vocabulary:
        return read
    return ResizedEmbeddings(model, seed, rows, read)


class ResizedEmbeddings:
    """Reads the first `rows` rows of embedding and head, and computes the others.

    For the mean, a rank that holds new rows reads a whole table once, in blocks.
    """

    def __init__(self, model: ModelConfig, seed: int, rows: int, read: Read):
        self._rows, self._read = rows, read
        segments = (segment for spec in model_specs(model) for segment in spec.segments)
        self._tables = {WEIGHT + segment.name: segment for segment in segments if segment.padded}
        mean = model.resize_embeddings == "mean"
        self._new_rows = cache(self._mean) if mean else partial(self._drawn, seed)

    def __call__(self, rectangles: Sequence[Rectangle]) -> None:
        stored, new = [], []
        for part in rectangles:
            if part.name not in self._tables:
                stored.append(part)
                continue
            first, *others = part.offsets
            count = min(max(self._rows - first, 0), len(part.tensor))  # rows that are read
            if count:
                shape = (self._rows, *part.global_shape[1:])
                stored.append(replace(part, global_shape=shape, tensor=part.tensor[:count]))
            if count < len(part.tensor):
                new.append(replace(part, offsets=(first + count, *others), tensor=part.tensor[count:]))
        self._read(stored)
        for part in new:
            first, column = part.offsets
            count, width = part.tensor.shape
            values = self._new_rows(part.name)
            rows = values if len(values) == 1 else values[first - self._rows : first - self._rows + count]
            part.tensor.copy_(rows[:, column : column + width])

    def _mean(self, name: str) -> Tensor:
        """Return the mean of the stored rows, [1, hidden] in fp64.

        All columns are summed at once, so that a sum does not depend on the columns that a rank holds.
        """
        width = self._tables[name].shape[1]
        length = max(1, BLOCK // (8 * width))
        total = torch.zeros(width, dtype=torch.float64)
        for first in range(0, self._rows, length):
            block = torch.empty(min(length, self._rows - first), width, dtype=torch.float64)
            self._read([Rectangle(name, (self._rows, width), (first, 0), block)])
            total += block.sum(0)
        return (total / self._rows)[None]

    def _drawn(self, seed: int, name: str) -> Tensor:
        """Draw the new rows, [new rows, hidden] in fp32."""
        table = self._tables[name]
        return torch.cat(list(rng.drawn_rows(table, self._rows, table.shape[0], seed)))
