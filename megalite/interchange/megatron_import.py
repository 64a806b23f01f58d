"""Megatron-LM's checkpoints → the source of an import."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint import CheckpointError
from megalite.config.schema import Config
from megalite.huggingface.router_bias import BIAS, LOAD, states
from megalite.interchange.dcp_files import METADATA
from megalite.interchange.import_state import RunPosition, Source, plain
from megalite.interchange.megatron_arguments import check_same, config_of, latent_note, without_padding
from megalite.interchange.megatron_dist import DistCheckpoint
from megalite.interchange.megatron_legacy import LegacyCheckpoint
from megalite.interchange.megatron_places import (
    EMBEDDING,
    HEAD,
    MegatronTensor,
    Part,
    megatron_tensors,
    router_biases,
)
from megalite.interchange.megatron_source import (
    MASTER,
    MODEL,
    MOMENTS,
    Facts,
    MegatronSource,
    iteration_directory,
)


def open_checkpoint(directory: Path) -> MegatronSource:
    """Open a checkpoint in either format, or the one that the tracker file names.

    Raises CheckpointError.
    """
    place = iteration_directory(directory)
    if (place / METADATA).is_file():
        return DistCheckpoint(place)
    if any(place.glob("mp_rank_*")):
        return LegacyCheckpoint(place)
    raise CheckpointError(
        f"{place} is not a checkpoint of Megatron-LM: expected {METADATA} (torch_dist) or mp_rank_* "
        "(legacy), found "
        f"{', '.join(sorted(path.name for path in place.iterdir())[:3]) or 'nothing'}"
    )


def megatron_source(
    directory: Path,
    given: Config | None = None,
    *,
    weights_only: bool = False,
    drop_mtp: bool = False,
    drop_padding: bool = False,
) -> Source:
    """Return the source of an import.

    Args:
        given: the model, where the checkpoint has no arguments, or to compare with these.
        weights_only: leave out the state of the optimizer.
        drop_mtp: leave out MTP modules.
        drop_padding: leave out the rows of embedding and head beyond the vocabulary of the tokenizer.

    Raises:
        CheckpointError: it cannot be read, or is not supported.
    """
    checkpoint = open_checkpoint(directory)
    config, notes = _config(checkpoint, given, drop_padding)
    tensors = megatron_tensors(config.model)
    checkpoint.locate(config.model, tensors, mtp=not drop_mtp, optimizer=not weights_only)
    kinds = checkpoint.kinds()
    by_ours: dict[str, list[tuple[MegatronTensor, Part]]] = {}
    for tensor in tensors.values():
        for part in tensor.parts:
            by_ours.setdefault(part.ours, []).append((tensor, part))
    reader = _MegatronReader(checkpoint)

    def read(kind: str, ours: str) -> Iterator[tuple[int, Tensor]]:
        for tensor, part in by_ours[ours]:
            whole = reader.weight(tensor, kinds) if kind == "weight" else reader.whole(kind, tensor)
            rows = part.rows
            selected = whole[rows.start : rows.stop] if isinstance(rows, range) else whole[list(rows)]
            yield part.first, selected

    rows = checkpoint.rows()
    if rows > config.model.vocabulary:
        notes.append(f"left out {rows - config.model.vocabulary:,} rows of padding of the vocabulary")
    return Source(
        str(directory),
        config,
        [kind for kind in MOMENTS if kind in kinds],
        read,
        _router_states(checkpoint, config, tensors),
        _position(checkpoint.facts, config, notes) if MOMENTS[0] in kinds else None,
        _origin(checkpoint, rows) | {"wide": _wide(checkpoint, tensors)},
        notes,
    )


class _MegatronReader:
    """Reads whole tensors, and keeps the last one: q, k and v are rows of one."""

    def __init__(self, checkpoint: MegatronSource):
        self._checkpoint = checkpoint
        self._last: tuple[str, str] | None = None
        self._values = torch.empty(0)

    def whole(self, kind: str, tensor: MegatronTensor) -> Tensor:
        """Return a tensor [rows, …], without rows of padding."""
        if self._last != (kind, tensor.name):
            values = self._checkpoint.read(kind, tensor)
            if tensor.name in (EMBEDDING, HEAD):
                values = values[: tensor.shape[0]]
            self._last, self._values = (kind, tensor.name), values.reshape(tensor.flat)
        return self._values

    def weight(self, tensor: MegatronTensor, kinds: tuple[str, ...]) -> Tensor:
        """Return the master weight, or the weight if there is none.

        With state of an optimizer, this is at least fp32.
        """
        if MASTER not in kinds or not self._checkpoint.has(MASTER, tensor):
            values = self.whole(MODEL, tensor)
            return values.float() if MOMENTS[0] in kinds and values.element_size() == 2 else values
        if self._last != (MASTER, tensor.name):
            rounded = self.whole(MODEL, tensor)
            master = self.whole(MASTER, tensor)
            if not torch.equal(master.to(rounded.dtype), rounded):
                raise CheckpointError(
                    f"{self._checkpoint.directory}: {tensor.name} differs from its fp32 master weight by "
                    "more than "
                    "rounding. Import the weights alone with --weights_only."
                )
        return self._values


def _config(checkpoint: MegatronSource, given: Config | None, drop_padding: bool) -> tuple[Config, list[str]]:
    """Return the configuration of the model and of training that is known, and notes."""
    arguments, place = checkpoint.facts.arguments, str(checkpoint.directory)
    if not arguments:
        if given is None:
            raise CheckpointError(
                f"{place} has no arguments of Megatron-LM, and so does not say what its model is. Pass "
                "--model with "
                "a configuration, for example one that `megalite import-config` has made of its script."
            )
        return given, []
    config, notes = config_of(arguments, checkpoint.rows(), place)
    notes += latent_note(config.model)
    if drop_padding:
        config = without_padding(config, arguments, checkpoint.rows(), place)
    if given is not None:
        model = (
            given.model
            if given.model.vocab_size
            else replace(given.model, vocab_size=config.model.vocab_size)
        )
        check_same(model, config.model, place)
        config = replace(given, model=model)
    padding = checkpoint.rows() - (arguments.get("vocab_size") or checkpoint.rows())
    if padding > 0 and not drop_padding:
        notes.append(
            f"the vocabulary has {checkpoint.rows():,} rows, {padding:,} of them padding, which take part "
            "in the "
            "loss of Megatron-LM. Leave them out with --drop_padding"
        )
    return config, notes


def _router_states(
    checkpoint: MegatronSource, config: Config, tensors: dict[str, MegatronTensor]
) -> dict[str, Tensor]:
    """Return the states of routers: the biases, and an equal load, which is that of a start."""
    model = config.model
    biases = router_biases(model)
    values = {name: checkpoint.read(MODEL, tensors[name]) for name in biases.values()}
    if model.num_experts and not (biases or model.biased_choice):
        shape = (model.num_hidden_layers, model.num_experts)
        load = torch.full(shape, model.num_experts_per_tok / model.num_experts, dtype=torch.float64)
        return {BIAS: torch.zeros_like(load), LOAD: load}
    return states(model, biases, values)


def _position(facts: Facts, config: Config, notes: list[str]) -> RunPosition:
    updates = facts.iteration if facts.step is None else facts.step
    # a checkpoint of the weights at a step that Adam has not counted
    step = max(facts.iteration, updates)
    samples = step * config.train.global_batch_size if facts.samples is None else facts.samples
    decayed = facts.scheduler.get("num_steps")
    if type(decayed) is int and decayed != samples:
        notes.append(
            f"the schedule of the learning rate stood at sample {decayed:,}, but {samples:,} were read: a "
            "run goes on "
            f"at step {step:,}"
        )
    position = RunPosition(step, updates, samples)
    scaler = facts.loss_scale
    if "scale" not in scaler:
        return position
    scale = scaler["scale"]
    value = float(scale.item() if isinstance(scale, Tensor) else scale)
    growth = int(scaler.get("growth_tracker", 0))
    state = {"value": value, "tolerance": max(1, int(scaler.get("hysteresis_tracker", 1)))}
    return replace(position, loss_scale={**state, "step": step, "last_overflow": step - growth - 1})


def _wide(checkpoint: MegatronSource, tensors: dict[str, MegatronTensor]) -> list[str]:
    """Return the weights in fp32 next to others of 16 bits."""
    wide = [
        name for name, tensor in tensors.items() if tensor.parts and checkpoint.dtype(tensor).itemsize > 2
    ]
    return wide if len(wide) < sum(1 for tensor in tensors.values() if tensor.parts) else []


def _origin(checkpoint: MegatronSource, rows: int) -> dict[str, Any]:
    return {
        "format": f"megatron {checkpoint.format}",
        "arguments": plain(checkpoint.facts.arguments),
        "spelling": asdict(checkpoint.spelling),
        "layout": checkpoint.layout,
        "extra_state": checkpoint.extra_state,
        "rows": rows,
        "scheduler": plain(checkpoint.facts.scheduler),
    }
