"""Memory of the quantized matrices of a bucket (`lora.base`): one run of bytes, whole or a ZeRO-3 shard.

Codes and scales are sharded and gathered as they are, bytes: of nf4 0.56 for an element, with double
quantization 0.52. No communication.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megalite.mesh.layout import Coordinates
from megalite.parallel.quantized.matmuls import QuantizedExpertMatmuls, QuantizedMatmuls, QuantizedPart
from megalite.parallel.sharding.buckets import BucketLayout


class QuantizedBuffers:
    """Bytes of a bucket, of which this rank keeps [start, stop).

    Args:
        shard: [stop - start] uint8, this rank's part; None: it keeps all of them.

    Attributes:
        full: [bytes] uint8; with a shard it has memory only while it is used.
        parts: the parts of the segments of each matrix.
    """

    def __init__(
        self, layout: BucketLayout, at: Coordinates, rank: int, shard: Tensor | None, device: torch.device
    ):
        self.layout = layout
        self.full = torch.zeros(layout.quantized_bytes, dtype=torch.uint8, device=device)
        self.shard = shard
        self.start = 0 if shard is None else rank * len(shard)
        form = layout.slots[0].spec.base
        assert form is not None
        self.parts = [
            [
                QuantizedPart(segment, at, form, place, self.full)
                for segment, place in zip(slot.spec.segments, slot.quantized.parts, strict=True)
            ]
            for slot in layout.slots
            if slot.quantized is not None
        ]

    @property
    def kept(self) -> Tensor:
        """The bytes that this rank keeps."""
        return self.full if self.shard is None else self.shard

    @property
    def tensors(self) -> Sequence[Tensor]:
        """All memory of codes and scales."""
        return self.full, self.kept

    def keeps(self, start: int, stop: int) -> bool:
        """Return whether this rank keeps any of the bytes [start, stop)."""
        return start < self.start + len(self.kept) and stop > self.start

    def write(self, start: int, data: Tensor) -> None:
        """Write bytes from `start` on, as far as this rank keeps them."""
        low = max(start, self.start)
        high = min(start + len(data), self.start + len(self.kept))
        if low < high:
            self.kept[low - self.start : high - self.start] = data[low - start : high - start]

    def matmuls(self, index: int, tensor: Tensor) -> QuantizedMatmuls:
        """Return the matmuls of the matrix in a slot, whose weight is `tensor`, without memory."""
        experts = self.layout.slots[index].spec.segments[0].experts
        return (QuantizedMatmuls if experts == 1 else QuantizedExpertMatmuls)(tensor, self.parts[index])
