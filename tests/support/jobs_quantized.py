"""Quantized bases on the pool's ranks: their values, and how they are read."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megalite.checkpoint import CheckpointError
from megalite.parallel.quantized.buffers import QuantizedBuffers
from megalite.training.verify import global_tensors
from tests.support.jobs import make_trainer, numbers


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
