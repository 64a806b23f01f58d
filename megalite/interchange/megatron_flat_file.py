"""distrib_optim.pt of Megatron-LM's legacy format: buffers of the distributed optimizer (`megatron_buffers`).

    {buffer: {(dtype, dtype of gradients): {"param": [elements], "exp_avg": …, "exp_avg_sq": …}}}
    [that of dense parameters, that of experts]         if ep divides experts; None if another rank has it

Buckets follow each other without padding between them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint import CheckpointError
from megalite.interchange.inert_pickles import load_pt
from megalite.interchange.megatron_buffers import KINDS, bucket_sizes, by_dtype, slots
from megalite.interchange.megatron_places import EMBEDDING, HEAD
from megalite.interchange.megatron_source import WITHOUT

FLAT_STATE = "distrib_optim.pt"
_LEAST_BUCKET = 40_000_000
"""Elements of a bucket by default, or 1,000,000 for each data-parallel rank if this is more."""


def is_distributed(optimizer: Any) -> bool:
    """Return whether the state of an optimizer is that of the distributed one, whose tensors are apart."""
    first = optimizer[0] if isinstance(optimizer, list) and optimizer else optimizer
    inner = first.get("optimizer") if isinstance(first, dict) else None
    return isinstance(inner, dict) and "param_groups" in inner and "state" not in inner


class FlatFile:
    """The file of one rank.

    Args:
        arguments: of Megatron-LM, which determine the buckets.

    Raises:
        CheckpointError: it cannot be read.
    """

    def __init__(self, path: Path, arguments: Mapping[str, Any]):
        self._path, self._arguments = path, arguments
        if not path.is_file():
            raise CheckpointError(
                f"{path} is missing: it has the state of the distributed optimizer. Copy it, or {WITHOUT}."
            )
        content = load_pt(path)
        self._contents = content if isinstance(content, list) else [content]

    def parts(
        self,
        stages: Sequence[Mapping[str, Tensor]],
        experts: bool,
        *,
        limited: bool,
        shares_embedding: bool,
    ) -> list[dict[str, dict[str, Tensor]]]:
        """Return kind → name → tensor for the parameters of each virtual stage; nothing if another rank has
        them.

        Args:
            stages: name → parameter of the virtual stages.
            experts: the parameters are experts that ep divides.
            limited: whether buckets have a limit in the first virtual stage: on the first stage of pp.
            shares_embedding: whether the first and the last stage have copies of one embedding.

        Raises:
            CheckpointError: the parameters do not fill the buffers.
        """
        of_stages = [{kind: dict[str, Tensor]() for kind in KINDS.values()} for _ in stages]
        content = self._contents[int(experts)] if int(experts) < len(self._contents) else None
        if content is None:
            return of_stages
        buffers = self._buffers(content)
        for chunk, parameters in enumerate(stages):
            dtypes = {name: tensor.dtype for name, tensor in parameters.items()}
            limit = self._limit() if limited and chunk == 0 else None
            for dtype, names in self._by_dtype(dtypes).items():
                stored_dtype, tensors = next(buffers, (None, {}))
                sizes = [parameters[name].numel() for name in names]
                alone = [
                    at for at, name in enumerate(names) if name in (EMBEDDING, HEAD) and shares_embedding
                ]
                buckets = bucket_sizes(sizes, alone, limit)
                places = slots(sizes, buckets)
                if stored_dtype != dtype or places is None or len(tensors["param"]) != sum(buckets):
                    raise self._mismatch(names[0], len(names), sum(buckets), tensors)
                starts = [0, *accumulate(buckets)]
                for name, place in zip(names, places, strict=True):
                    start = starts[place.bucket] + place.start
                    for theirs, kind in KINDS.items():
                        part = tensors[theirs][start : start + place.size]
                        of_stages[chunk][kind][name] = part.view(parameters[name].shape)
        if (rest := next(buffers, None)) is not None:
            raise self._mismatch("the end", 0, 0, rest[1])
        return of_stages

    def _by_dtype(self, dtypes: Mapping[str, torch.dtype]) -> dict[torch.dtype, list[str]]:
        try:
            return by_dtype(dtypes, dtypes)
        except ValueError as error:  # a module that the order does not have
            raise CheckpointError(
                f"{self._path}: the place of a parameter is not known ({error}). Save the checkpoint with "
                f"--ckpt-format torch_dist --dist-ckpt-optim-fully-reshardable, or {WITHOUT}."
            ) from None

    def _buffers(self, content: Any) -> Iterator[tuple[torch.dtype, dict[str, Tensor]]]:
        """Yield the dtype and the tensors of each buffer, in order."""
        if not isinstance(content, dict) or not content.get("buckets_coalesced"):
            raise CheckpointError(
                f"{self._path} has the buffers of the distributed optimizer bucket by bucket, as written by "
                f"Megatron-LM before February 2024, which is not supported. Save the checkpoint with a later "
                f"one, or {WITHOUT}."
            )
        for number in sorted(key for key in content if type(key) is int):
            for (dtype, _), tensors in content[number].items():
                flat = {theirs: tensors.get(theirs) for theirs in KINDS}
                sizes = {tuple(each.shape) if isinstance(each, Tensor) else None for each in flat.values()}
                if len(sizes) != 1 or None in sizes or any(len(shape or ()) != 1 for shape in sizes):
                    raise CheckpointError(
                        f"{self._path} is damaged: expected {', '.join(KINDS)} with the same number of "
                        f"elements in buffer {number}, found {', '.join(map(str, sizes))}"
                    )
                yield dtype, flat

    def _limit(self) -> int | None:
        """Return the elements of a bucket, None: there is one."""
        if not self._arguments.get("overlap_grad_reduce"):
            return None
        ranks = int(self._arguments.get("data_parallel_size") or 1)
        ranks *= int(self._arguments.get("context_parallel_size") or 1)
        return int(self._arguments.get("ddp_bucket_size") or max(_LEAST_BUCKET, 1_000_000 * ranks))

    def _mismatch(
        self, first: str, count: int, expected: int, tensors: Mapping[str, Tensor]
    ) -> CheckpointError:
        stored = len(tensors["param"]) if tensors else 0
        return CheckpointError(
            f"{self._path}: the {count} parameters from {first} on take {expected:,} elements of a buffer of "
            f"the distributed optimizer, found {stored:,}. Save the checkpoint with --ckpt-format torch_dist "
            f"--dist-ckpt-optim-fully-reshardable, or {WITHOUT}."
        )
