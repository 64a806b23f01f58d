"""The flat buffers in which Megatron-LM's distributed optimizer keeps its state, and the parameters in them.

A rank of tp and pp has, for each of its virtual stages and each dtype of parameters, one buffer of the fp32
master weights and one of each moment; experts that ep divides have buffers of their own. A buffer has the
rank's parts of the parameters in the reverse of the order in which modules are built (`megatron_order`), each
at a multiple of 64 elements, in buckets:

    bucket 0   output_layer.weight, final_layernorm.weight, layers.1.mlp.linear_fc2.weight, …
    bucket 1   …, embedding.word_embeddings.weight

Checkpoints store the buffers and not what is in them. Where a parameter begins follows from the sizes of the
parameters and of the buckets. An import proves it for every element: a master weight has to round to the
weight, which is stored by its name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch

from megalite.interchange.megatron_order import parameter_order

ALIGNMENT = 64
"""Elements to whose multiples the beginnings of parameters are rounded up."""
KINDS = {"param": "fp32_param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
"""What the distributed optimizer calls the kinds of its tensors → the kind here."""
Parameter = TypeVar("Parameter")


class BufferSlot(NamedTuple):
    """The place of a parameter: elements [start, start + size) of a bucket."""

    bucket: int
    start: int
    size: int


def slots(sizes: Sequence[int], buckets: Sequence[int]) -> list[BufferSlot] | None:
    """Return the places of the parameters of a buffer, or None if they do not fill its buckets.

    Args:
        sizes: elements of the parameters, in the order in which modules are built.
        buckets: elements of the buckets, without the padding at their ends.
    """
    places, bucket, end = list[BufferSlot](), 0, 0
    for size in reversed(sizes):
        start = _aligned(end)
        if bucket < len(buckets) and start + size > buckets[bucket]:
            if buckets[bucket] not in (end, start):
                return None
            bucket, start = bucket + 1, 0
        if bucket == len(buckets) or size > buckets[bucket]:
            return None
        places.append(BufferSlot(bucket, start, size))
        end = start + size
    filled = bool(buckets) and bucket == len(buckets) - 1 and buckets[-1] in (end, _aligned(end))
    return places[::-1] if filled or not (sizes or buckets) else None


def bucket_sizes(sizes: Sequence[int], alone: Collection[int], limit: int | None) -> list[int]:
    """Return the elements of the buckets that Megatron-LM forms, without the padding at their ends.

    Args:
        sizes: elements of the parameters, in the order in which modules are built.
        alone: numbers of parameters with a bucket of their own: copies of a tied embedding.
        limit: elements from which a bucket is complete; None: there is one.
    """
    buckets, end = list[int](), 0
    for number in reversed(range(len(sizes))):
        start = _aligned(end)
        if number in alone and start:
            buckets.append(start)
            start = 0
        end = start + sizes[number]
        if number in alone or (limit is not None and end >= limit):
            buckets.append(end)
            end = 0
    return [*buckets, end] if end else buckets


def by_dtype(names: Iterable[str], dtypes: Mapping[str, torch.dtype]) -> dict[torch.dtype, list[str]]:
    """Return dtype → the parameters of one buffer, in the order in which modules are built.

    Args:
        names: of the parameters of a virtual stage, which numbers its layers.
    """
    buffers: dict[torch.dtype, list[str]] = {}
    for name in sorted(names, key=parameter_order):
        buffers.setdefault(dtypes[name], []).append(name)
    return buffers


def _aligned(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT
