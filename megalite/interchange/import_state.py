"""A checkpoint of another program → a checkpoint: weights, and the state of AdamW if it has that.

One of the source's tensors is in memory at a time. A checkpoint with the state of the optimizer can be
resumed (`checkpoint.load`), any other one starts a run (`model.init_from`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor

from megalite.checkpoint import CheckpointError, directories
from megalite.checkpoint.checksummed_chunks import append_chunk, dtype_name
from megalite.checkpoint.finite import nonfinite, reject
from megalite.checkpoint.manifest import WEIGHT, StoredTensor, encode
from megalite.config.load import to_dict
from megalite.config.rules import MODEL_RULES
from megalite.config.rules.context import RuleContext
from megalite.config.schema import Config
from megalite.config.sections.model import ModelConfig
from megalite.model.parameters import model_specs, weight_shapes
from megalite.parallel.spec import parameter_count
from megalite.system.progress import Report, silent

BLOCK = 64 << 20  # maximum bytes of a chunk, as in checkpoints of training
ORIGIN = "origin.json"
"""File of an imported checkpoint that says what it was imported from, for an export in the same form."""


@dataclass(frozen=True)
class RunPosition:
    """Where a run stood.

    Attributes:
        step: steps done.
        updates: updates of AdamW, which are fewer if steps were skipped.
        samples: samples read.
        loss_scale: `LossScale.state`.
    """

    step: int
    updates: int
    samples: int
    loss_scale: dict[str, float | int] = field(
        default_factory=lambda: {"value": 1.0, "tolerance": 1, "step": 0, "last_overflow": -1}
    )


@dataclass(frozen=True)
class Source:
    """What is imported.

    Attributes:
        name: for messages.
        config: the model, and the options of training that are known.
        kinds: kinds of state besides the weights, such as exp_avg.
        read: kind and global name → its values, as (first row, rows) of consecutive rows; the kind of the
            weights is weight.
        states: further tensors, such as the biases of routers.
        position: None: weights alone.
        origin: JSON data to keep for an export.
        notes: what differs from the source.
    """

    name: str
    config: Config
    kinds: Sequence[str]
    read: Callable[[str, str], Iterable[tuple[int, Tensor]]]
    states: dict[str, Tensor]
    position: RunPosition | None
    origin: dict[str, Any]
    notes: list[str] = field(default_factory=list)


def import_source(source: Source, directory: Path, progress: Report = silent) -> dict[str, Any]:
    """Write a source as a checkpoint, and return a summary for display.

    The checkpoint is published only when it is complete.

    Raises:
        CheckpointError: the import failed.
    """
    check_model(source.config.model, source.name)
    temporary = directories.begin(directory)
    try:
        stored = _store(temporary / "rank_00000.bin", source, progress)
        (temporary / ORIGIN).write_text(json.dumps(source.origin), encoding="utf-8")
        directories.publish(temporary, directory, encode(_state(source), stored))
    except BaseException:
        directories.discard(temporary, directory)
        raise
    return {
        "family": source.origin["format"],
        "parameters": parameter_count(model_specs(source.config.model)),
        "dtypes": sorted({tensor.dtype for name, tensor in stored.items() if name.startswith(WEIGHT)}),
        "step": 0 if source.position is None else source.position.step,
        "optimizer": bool(source.kinds),
        "notes": source.notes,
    }


def check_model(model: ModelConfig, place: str) -> None:
    """Raise CheckpointError if fields of a model are inconsistent."""
    facts = RuleContext(model=model)
    for rule in MODEL_RULES:
        if rule.broken(facts):
            raise CheckpointError(f"{place}: {rule.describe(facts)}")


def _state(source: Source) -> dict[str, Any]:
    state: dict[str, Any] = {"step": 0, "config": to_dict(source.config)}
    if source.position is None:
        return state
    position = source.position
    return state | {
        "step": position.step,
        "samples": position.samples,
        "skipped": position.step - position.updates,
        "loss_scale": position.loss_scale,
        "guard": {"losses": [], "streak": 0},
        "fingerprint": f"{source.name}: unknown",
    }


def _store(path: Path, source: Source, progress: Report) -> dict[str, StoredTensor]:
    """Write every tensor in chunks of whole rows."""
    shapes = weight_shapes(source.config.model)
    total, done = sum(map(prod, shapes.values())) * (1 + len(source.kinds)), 0
    stored: dict[str, StoredTensor] = {}
    bad: dict[str, int] = {}
    with open(path, "wb") as file:
        for kind in (WEIGHT.removesuffix("/"), *source.kinds):
            for name, shape in shapes.items():
                chunks, dtype = [], ""
                for first, values in source.read(kind, name):
                    if number := nonfinite(values):
                        bad[f"{kind} of {name}"] = number
                    for start, block in _blocks(values):
                        at = (first + start, *(0 for _ in shape[1:]))
                        chunks.append(append_chunk(file, at, block.contiguous()))
                    dtype = dtype_name(values.dtype)
                    done += values.numel()
                    progress("importing", done, total, "")
                stored[f"{kind}/{name}"] = StoredTensor(dtype, shape, chunks)
        for name, state in source.states.items():
            stored[name] = StoredTensor(
                dtype_name(state.dtype), tuple(state.shape), [append_chunk(file, (0, 0), state.contiguous())]
            )
        reject(source.name, bad)
        progress("writing to disk")
        file.flush()
        os.fsync(file.fileno())
    return stored


def _blocks(values: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield blocks of whole rows with their first rows."""
    rows = max(1, BLOCK // max(1, prod(values.shape[1:]) * values.itemsize))
    for start in range(0, values.shape[0], rows):
        yield start, values[start : start + rows]


def origin_of(directory: Path, model: ModelConfig) -> dict[str, Any]:
    """Return what a checkpoint, or the one that its run started from, was imported from; empty if not."""
    start = model.initial_weights or ""
    places = [directory, *([] if not start or start.startswith("hf:") else [Path(start)])]
    for place in places:
        if (place / ORIGIN).is_file():
            try:
                content = json.loads((place / ORIGIN).read_text(encoding="utf-8"))
            except ValueError as error:
                raise CheckpointError(f"{place / ORIGIN} is damaged: {error}") from None
            return content if isinstance(content, dict) else {}
    return {}


def plain(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values that JSON has, tuples as lists."""
    return {name: value for name, value in values.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)
