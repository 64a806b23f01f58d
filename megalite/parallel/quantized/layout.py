"""Where the codes and scales of quantized frozen matrices are in the memory of a rank (`lora.base`).

The matrix that is quantized is a global tensor of the model, a segment: flattened row by row and cut into
blocks that share a scale, so that no layout changes a code or a scale. A rank keeps the codes of its part,
and of each row of the part the scales of the blocks that the row touches; a block that the part cuts is on
both neighbours. All of them are one run of bytes for a bucket, so that ZeRO-3 shards and gathers them
together:

    bucket    [ matrix 0 | matrix 1 | … | padding ]
    matrix    [ codes of its segments | their scales | scales of scales and offsets ]

Sizes depend only on sizes of parts, not on their positions: all ranks of an axis have the same layout. Plain
data, which a planner evaluates without a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from megalite.mesh.layout import Coordinates
from megalite.parallel.spec import ParamSpec, Segment

NESTED = 256  # scales that share a scale of their own (double quantization)
AT_ONCE = 1 << 18
"""Elements that a thread quantizes at a time, which bounds temporary tensors."""
MOST_THREADS = 8
"""That quantize ranges of rows at the same time."""
READ = 1 << 23
"""Elements that are read at a time, whole rows, from a source that does not read less in less time."""
ALIGN = 16  # bytes: every array of a matrix starts at a multiple
FP32 = 4  # bytes


class FormSizes(NamedTuple):
    """Sizes of a form (`megalite_kernels.block_formats`).

    Attributes:
        block: elements that share a scale; None: a row.
        codes: codes in a byte.
        scale: bytes of a scale.
        scratch: bytes of temporary tensors for an element that is quantized (`block_formats.quantize`), its
            code included.
        in_rows: whether a block may not reach into another row.
    """

    block: int | None
    codes: int
    scale: int
    scratch: int
    in_rows: bool = True


FORMS = {
    "nf4": FormSizes(64, 2, FP32, 6, in_rows=False),
    "fp4": FormSizes(64, 2, FP32, 6, in_rows=False),
    "int8": FormSizes(None, 1, FP32, 10),
    "mxfp4": FormSizes(32, 2, 1, 12),
}


class BaseForm(NamedTuple):
    """The form of a quantized base: its name (`lora.base`), and whether scales are quantized, too."""

    name: str
    double: bool = False

    @property
    def sizes(self) -> FormSizes:
        return FORMS[self.name]

    def block(self, width: int) -> int:
        """Return the number of elements of a block in a matrix of this many columns."""
        return self.sizes.block or width

    @property
    def bytes_per_element(self) -> float:
        """Return the bytes of an element and its part of scales, in a large matrix."""
        code, scale = 1 / self.sizes.codes, self.sizes.scale if self.sizes.block else 0.0
        if self.double:
            scale = 1 + FP32 / NESTED
        return code + scale / (self.sizes.block or 1)

    def fits(self, width: int) -> bool:
        """Return whether a matrix of this many columns has whole blocks."""
        return not self.sizes.in_rows or width % self.block(width) == 0


class Bytes(NamedTuple):
    """Bytes [start, stop) of a bucket."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class PartBytes:
    """The bytes of a rank's part of a segment.

    Attributes:
        codes: two codes a byte, rows one after the other.
        scales: [rows, touched], fp32, or uint8 with double quantization.
        touched: number of blocks that a row of the part touches at most.
        nested: scales of the scales, fp32, for blocks of 256 from the first that the rows touch; else empty.
        offset: one fp32 number with double quantization; else empty.
    """

    codes: Bytes
    scales: Bytes
    touched: int
    nested: Bytes
    offset: Bytes


@dataclass(frozen=True)
class MatrixBytes:
    """The bytes of a stored matrix: its parts, one for each segment, and the end of the last array."""

    parts: tuple[PartBytes, ...]
    stop: int


def _touched(count: int, size: int, aligned: bool) -> int:
    """Return the number of blocks of `size` elements that `count` consecutive elements touch at most.

    Args:
        aligned: whether they start with a block, if they are whole blocks.
    """
    return count // size if aligned and count % size == 0 else (count + size - 2) // size + 1


def _scales(form: BaseForm, rows: int, columns: int, segment: Segment) -> tuple[int, int]:
    """Return how many blocks a row of a part touches, and how many blocks of scales its rows touch."""
    width = segment.shape[1]
    block = form.block(width)
    if form.sizes.block is None:
        return 1, 0
    aligned = width % block == 0  # parts are equal: they start at multiples of `columns`
    if not form.double:
        nested = 0
    elif rows == segment.shape[0]:
        nested = _divided(_divided(segment.numel, block), NESTED)
    else:
        nested = _touched(_touched(rows * width, block, aligned), NESTED, False)
    return _touched(columns, block, aligned), nested


def _divided(value: int, divisor: int) -> int:
    """Return the quotient, rounded up."""
    return -(-value // divisor)


def rows_at_once(width: int) -> int:
    """Return the number of rows of a range that a thread quantizes, an even one."""
    return max(AT_ONCE // width // 2 * 2, 2)


def rows_read(width: int) -> int:
    """Return the number of rows that are read at a time from such a source."""
    return max(READ // width, 1)


def matrix_bytes(spec: ParamSpec, at: Coordinates, start: int) -> MatrixBytes:
    """Return where the arrays of a quantized matrix are, of which the first starts at byte `start`."""
    form, position = spec.base, start
    assert form is not None

    def take(sizes: Sequence[int]) -> list[Bytes]:
        """Return consecutive arrays of these sizes, and move on to the next multiple of ALIGN."""
        nonlocal position
        arrays = []
        for size in sizes:
            arrays.append(Bytes(position, position + size))
            position += size
        position = _divided(position, ALIGN) * ALIGN
        return arrays

    shapes = [segment.local(at).shape for segment in spec.segments]
    counts = [
        _scales(form, shape[0], shape[1], segment)
        for shape, segment in zip(shapes, spec.segments, strict=True)
    ]
    width = 1 if form.double else form.sizes.scale
    codes = take([_divided(prod(shape), form.sizes.codes) for shape in shapes])
    scales = take([shape[0] * touched * width for shape, (touched, _) in zip(shapes, counts, strict=True)])
    nested = take([number * FP32 * form.double for _, number in counts])
    offsets = take([FP32 * form.double for _ in shapes])
    parts = map(PartBytes, codes, scales, (touched for touched, _ in counts), nested, offsets)
    return MatrixBytes(tuple(parts), position)
