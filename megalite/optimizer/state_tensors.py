"""The tensors in which the state of an optimizer is kept (`optimizer.moments`), without torch.

    fp32    one number per element, in at least fp32
    bf16    one number per element in bf16, stochastically rounded
    8bit    matrices: a code of 8 bits per element, and a scale for each block of consecutive elements of a
            row (`megalite_kernels.moments`); vectors, and matrices without such blocks: fp32

Blocks are counted in the global matrix. No layout cuts one: tensors and shards start at multiples of the
largest block (`alignment`), rows that tensor parallelism splits have blocks that up to `SPLITS` ranks hold
whole, and a layout that would cut one is rejected. So codes and scales are the same on every layout, without
communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from megalite.config.errors import ConfigError
from megalite.mesh.layout import Coordinates
from megalite.parallel.spec import ParamSpec, Segment

Moments = Literal["fp32", "bf16", "8bit"]
LARGEST_BLOCK, SMALLEST_BLOCK = 256, 32  # elements that share a scale
SPLITS = 8  # ranks of an axis that hold whole blocks of a row
SCALES = "absmax"
"""Suffix of the name of the scales of a kind of state: KIND.absmax."""
BYTES = {"bfloat16": 2, "uint8": 1, "float32": 4}


class StateTensor(NamedTuple):
    """A tensor of state that is kept of a segment.

    Attributes:
        name: a checkpoint names it NAME/SEGMENT.
        dtype: None: that of master weights, at least fp32.
        block: number of elements for each of its numbers.
    """

    name: str
    dtype: str | None = None
    block: int = 1

    def bytes(self, elements: int, master: int) -> int:
        """Return its bytes for some elements, if a master weight has `master`."""
        return elements // self.block * (master if self.dtype is None else BYTES[self.dtype])


def kind_of(name: str) -> str:
    """Return the kind of state to which a tensor belongs."""
    return name.removesuffix(f".{SCALES}")


def is_positive(kind: str) -> bool:
    """Return whether a kind of state is never negative: averages of squares, whose codes have no sign."""
    return kind.endswith("_sq")


def block_of(segment: Segment) -> int:
    """Return the number of elements of a block of a segment's 8-bit moments; 0: it keeps fp32.

    The largest power of two of which a row has a whole number, on each of up to 8 ranks if they split it.
    """
    if len(segment.shape) != 2:
        return 0
    width = segment.shape[1]
    if segment.split == 1:
        if width % SPLITS:
            return 0
        width //= SPLITS
    block = min(width & -width, LARGEST_BLOCK)
    return block if block >= SMALLEST_BLOCK else 0


def check_blocks(specs: Sequence[ParamSpec], at: Coordinates) -> None:
    """Raise ConfigError if a rank's part of a trained matrix has no whole blocks."""
    for segment in (segment for spec in specs for segment in spec.segments if segment.trainable):
        block = block_of(segment)
        if block and (width := segment.local(at).shape[1]) % block:
            size = at[segment.axis].size
            raise ConfigError(
                f"optimizer.moments = 8bit is not supported with parallel.{segment.axis} = {size}: {width} "
                f"columns of {segment.name} on a rank are no multiple of its blocks of {block}. Set it to "
                f"bf16 or fp32, or parallel.{segment.axis} to {SPLITS} or less."
            )


def stored_tensors(kind: str, segment: Segment, moments: str) -> tuple[StateTensor, ...]:
    """Return the tensors of one kind of moment of a segment."""
    if moments == "bf16":
        return (StateTensor(kind, "bfloat16"),)
    if moments == "8bit" and (block := block_of(segment)):
        return StateTensor(kind, "uint8"), StateTensor(f"{kind}.{SCALES}", "float32", block)
    return (StateTensor(kind),)
