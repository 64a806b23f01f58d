"""Quantized bases on the pool's ranks: their values, and how they are read."""

from __future__ import annotations

import weakref
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megalite.assembly.parts import build_parts, make_mesh
from megalite.checkpoint import CheckpointError
from megalite.config.load import from_dict
from megalite.huggingface.base_weights import BaseWeights
from megalite.parallel.quantized import layout, reading
from megalite.parallel.quantized.buffers import QuantizedBuffers
from megalite.planner.memory.loading import loading_bytes
from megalite.training.verify import global_tensors
from tests.support.jobs import make_trainer, mesh_of, numbers


def train(context: Any, config: dict[str, Any], steps: int) -> dict[str, Any]:
    """Train some steps: the numbers, and on rank 0 the weights that are stored."""
    trainer = make_trainer(context, config)
    try:
        results = [trainer.step() for _ in range(steps)]
        return {**numbers(results), "tensors": global_tensors(trainer)}
    finally:
        trainer.close()


def values(context: Any, config: dict[str, Any]) -> dict[str, tuple[tuple[int, ...], Tensor]]:
    """Return this rank's values of each quantized matrix, by name, with the offsets of its part."""
    trainer = make_trainer(context, config)
    try:
        values: dict[str, tuple[tuple[int, ...], Tensor]] = {}
        store = trainer.store
        store.gatherer.begin_run(planned=False)  # with ZeRO-3 a unit is gathered when it begins
        for unit, buckets in store.gatherer.by_unit.items():
            store.gatherer.acquire(unit)
            for bucket in (each for each in buckets if isinstance(each.codes, QuantizedBuffers)):
                for slot, parts in zip(bucket.layout.slots, bucket.codes.parts, strict=True):
                    whole = store.weights[slot.spec.name].matmuls.values()
                    for part, own in zip(parts, whole.split([part.rows for part in parts]), strict=True):
                        values[part.segment.name] = ((part.first_row, part.first_column), own.clone())
            store.gatherer.release(unit)
        return values
    finally:
        trainer.close()


def refusal(context: Any, config: dict[str, Any]) -> str:
    """Return the message with which a trainer does not start."""
    try:
        make_trainer(context, config).close()
    except CheckpointError as error:
        return str(error)
    return ""


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that operations make, until nobody has their memory. Files in memory are not."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.most, self._there = 0, 0, set[int]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(each.untyped_storage()) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        result = function(*args, **(kwargs or {}))
        for each in (each for each in tree_leaves(result) if isinstance(each, Tensor)):
            storage = each.untyped_storage()
            if function is torch.ops.aten.from_file.default or id(storage) in given | self._there:
                continue
            self._there.add(id(storage))
            self.now += storage.nbytes()
            weakref.finalize(storage, self._gone, id(storage), storage.nbytes())
        self.most = max(self.most, self.now)
        return result

    def _gone(self, key: int, size: int) -> None:
        self._there.remove(key)
        self.now -= size


class _Latest:
    """A pool that runs a task when somebody waits for it: until then its arguments are kept, the most at a time."""

    def __init__(self, threads: int, task: Any = None):
        self._task = task

    def __enter__(self) -> _Latest:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def submit(self, function: Any, *arguments: Any) -> _Latest:
        return _Latest(1, (function, arguments))

    def result(self) -> Any:
        (function, arguments), self._task = self._task, None
        return function(*arguments)


def loading(context: Any, config: dict[str, Any], at_once: int) -> tuple[int, int, int]:
    """Read a base in ranges of so many elements, and blocks of four times as many.

    Returns:
        the most bytes besides the states, those planned, and those of the largest matrix of the rank in fp32.
    """
    parsed = from_dict(config)
    with patch.object(layout, "AT_ONCE", at_once), patch.object(layout, "READ", 4 * at_once):
        mesh = mesh_of(context, parsed) if context is not None else make_mesh(parsed)
        store = build_parts(parsed, mesh, "cpu").store
        start = parsed.model.initial_weights
        with patch.object(reading, "ThreadPoolExecutor", _Latest), LiveBytes() as live:
            reading.quantize_base(store, BaseWeights(parsed, start))
        buckets = [bucket.layout for bucket in store.buckets]
        planned = loading_bytes(parsed, buckets, threads=1)
    parts = [part for each in store.buckets if isinstance(each.codes, QuantizedBuffers) for part in each.codes.parts]
    largest = max(own.rows * own.columns for part in parts for own in part)
    return live.most, planned, 4 * largest
