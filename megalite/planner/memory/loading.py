"""CPU memory that a rank needs besides its states while it reads and quantizes its base (`lora.base`).

Ranges of rows are read in fp32 one after the other (`parallel.quantized.reading`). `threads` of them are
quantized while one more is read, and the codes of one are written to their place. With double quantization
the scales of a whole matrix are kept until they are quantized together. R is the number of elements of a
range, `scratch` that of the form:

    R · (4 · (threads + 1) + scratch · threads + 2), + 10 · R of a file in 4 bits or fp8, + 4 · R of int8
    + 4 · scales of the matrix        with double quantization, which may be followed by more (below)
    + what the source reads at a time     of a checkpoint and of random weights

Pages of files that are mapped into memory, as those of Hugging Face directories, are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

from megalite.assembly.plan import first_place
from megalite.config.errors import ConfigError
from megalite.config.schema import Config
from megalite.families.model_config import hf_config
from megalite.mesh.layout import Coordinates
from megalite.parallel.quantized import layout
from megalite.parallel.quantized.layout import FP32, MOST_THREADS, BaseForm
from megalite.parallel.sharding.buckets import BucketLayout
from megalite.parallel.spec import Segment

HF = "hf:"
WRITING, EXPANDING, EXPANDING_BYTES = 2, 10, 4
"""Bytes of an element whose code is written, of one that is read from a file in few bits, and of one that is
read from a file in int8."""
CHUNK = 64 << 20
"""Largest number of bytes of a chunk of a checkpoint, of which all are read."""
DRAWN_ROWS = 128
"""Rows of random weights that are drawn at a time."""
SCALES, QUANTIZING = 1 << 16, 32
"""Scales that are quantized at a time, and bytes of temporary tensors for one of them."""
SCALE_CODE = 1


def loading_bytes(config: Config, buckets: Sequence[BucketLayout], threads: int = MOST_THREADS) -> int:
    """Return the peak bytes of a rank with these buckets; 0 without a quantized base.

    Args:
        threads: that quantize; the default is their largest number.
    """
    at = first_place(config)
    return max((_matrix(config, *each, at, threads) for each in _matrices(buckets)), default=0)


def _matrices(buckets: Sequence[BucketLayout]) -> Iterator[tuple[Segment, BaseForm]]:
    """Yield the quantized matrices, one of each shape."""
    seen = set[tuple[int, ...]]()
    for slot in (slot for bucket in buckets if bucket.quantized_bytes for slot in bucket.slots):
        for segment in slot.spec.segments:
            if segment.shape not in seen and slot.spec.base is not None:
                seen.add(segment.shape)
                yield segment, slot.spec.base


def _matrix(config: Config, matrix: Segment, form: BaseForm, at: Coordinates, threads: int) -> int:
    """Return the bytes while a matrix is read and quantized."""
    rows, width = matrix.shape[0] if form.double else matrix.local(at).shape[0], matrix.shape[1]
    cut = 2 if width % form.block(width) else 0  # rows of which a range reads a part of a block
    elements = min(layout.rows_at_once(width) + cut, rows) * width
    running = min(threads, -(-rows // layout.rows_at_once(width)))
    start = config.model.initial_weights
    expanding = _expanding(start) if start is not None and start.startswith(HF) else 0
    ranges = elements * (FP32 * (running + 1) + form.sizes.scratch * running + WRITING + expanding)
    ranges += _source(start, matrix)
    if not form.double:
        return ranges
    scales = -(-matrix.numel // form.block(width))
    return FP32 * scales + max(ranges, SCALE_CODE * scales + QUANTIZING * min(scales, SCALES))


@lru_cache(maxsize=64)
def _expanding(start: str) -> int:
    """Return the bytes of an element while its value is computed; 0: the files have it, or cannot be read."""
    try:
        given = hf_config(start.removeprefix(HF)).get("quantization_config")
    except ConfigError:
        return 0
    if not isinstance(given, dict):
        return 0
    return EXPANDING_BYTES if given.get("load_in_8bit") else EXPANDING


def _source(start: str | None, matrix: Segment) -> int:
    """Return the bytes that the source of the weights reads at a time."""
    rows, width = matrix.shape
    if start is not None and start.startswith(HF):
        return 0
    block = FP32 * min(layout.rows_read(width), rows) * width
    if start is None:
        return block + FP32 * min(DRAWN_ROWS, rows) * width
    return block + min(CHUNK, FP32 * rows * width)
