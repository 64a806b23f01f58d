"""The legacy format of Megatron-LM (`megatron_legacy` reads it): a file for each rank, one after another.

The tensors of a file are in a temporary file, which torch.save reads: memory holds one tensor.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.config.errors import ConfigError
from megalite.interchange.export_plan import Export, namespace, param_groups
from megalite.interchange.megatron_legacy import FILE
from megalite.interchange.megatron_order import parameter_order
from megalite.interchange.megatron_places import DOWN, EMBEDDING, HEAD, LAYERS, MegatronTensor
from megalite.interchange.megatron_source import MASTER, MODEL, MOMENTS
from megalite.interchange.megatron_spelling import legacy_local
from megalite.system.progress import Report


@dataclass(frozen=True)
class LocalTensor:
    """A tensor of a rank: its name in its stage, and the part of the whole tensor."""

    name: str
    whole: MegatronTensor
    tp: int


def write_legacy(place: Path, export: Export, progress: Report) -> None:
    """Write the files of all ranks.

    Raises ConfigError if a size of the layout does not divide the model.
    """
    _check(export)
    layout = export.layout
    ranks = [(tp, pp, ep) for pp in range(layout.pp) for tp in range(layout.tp) for ep in range(layout.ep)]
    for number, (tp, pp, ep) in enumerate(ranks):
        name = (
            f"mp_rank_{tp:02d}"
            + (f"_{pp:03d}" if layout.pp > 1 else "")
            + (f"_{ep:03d}" if layout.ep > 1 else "")
        )
        directory = place / name
        directory.mkdir()
        progress("exporting", number, len(ranks), "files")
        _write_rank(directory, export, tp, pp, ep)


def _check(export: Export) -> None:
    """Raise ConfigError if a size of the layout does not divide the model."""
    layout, model = export.layout, export.config.model
    stages = layout.pp * layout.virtual_stages
    if model.num_hidden_layers % stages:
        raise ConfigError(
            f"--pp {layout.pp} and --virtual_stages {layout.virtual_stages} do not divide "
            "model.num_hidden_layers="
            f"{model.num_hidden_layers}: each stage must have the same number of layers. Choose other "
            "numbers."
        )
    if layout.virtual_stages > 1 and layout.pp == 1:
        raise ConfigError(f"--virtual_stages {layout.virtual_stages} needs --pp of at least 2.")
    if (model.num_experts or 0) % layout.ep or (layout.ep > 1 and not model.num_experts):
        raise ConfigError(
            f"--ep {layout.ep} does not divide model.num_experts={model.num_experts}. Choose another number."
        )
    for tensor in export.tensors.values():
        dim = _split(tensor, export)
        sizes = () if dim is None else tensor.sections if dim == 0 else (tensor.shape[dim],)
        if tensor.name in (EMBEDDING, HEAD):
            sizes = (export.state.rows,)
        if ".linear_qkv." in tensor.name:
            sizes = (model.kv_heads,)
        if any(size % layout.tp for size in sizes):
            raise ConfigError(
                f"--tp {layout.tp} does not divide {tensor.name}, which has {' + '.join(map(str, sizes))} "
                f"{'key-value heads' if '.linear_qkv.' in tensor.name else 'rows or columns'}. Choose a "
                "smaller one."
            )


def _write_rank(directory: Path, export: Export, tp: int, pp: int, ep: int) -> None:
    layout = export.layout
    chunks = [_chunk(export, tp, chunk * layout.pp + pp, ep) for chunk in range(layout.virtual_stages)]
    memory = _FileTensors(directory / ".tensors", export)
    content: dict[str, Any] = {
        "args": namespace(export),
        "checkpoint_version": 3.0,
        "iteration": export.iteration,
    }
    for index, chunk in enumerate(chunks):
        key = f"model{index}" if layout.virtual_stages > 1 else "model"
        weights: dict[str, Tensor | None] = {local.name: memory.tensor(MODEL, local) for local in chunk}
        stage = f"{index * layout.pp + pp}:"
        weights |= {name.removeprefix(stage): None for name in export.extra_state if name.startswith(stage)}
        content[key] = dict(sorted(weights.items(), key=lambda each: parameter_order(each[0])))
    if export.updates is not None:
        content["optimizer"] = _optimizer(export, chunks, memory)
    content["opt_param_scheduler"] = export.scheduler
    torch.save(content, directory / FILE)
    memory.remove()


def _chunk(export: Export, tp: int, stage: int, ep: int) -> list[LocalTensor]:
    """Return the tensors of a stage in the order of its parameters, which its state dict has, too."""
    layout, model = export.layout, export.config.model
    stages = layout.pp * layout.virtual_stages
    per_stage, per_rank = model.num_hidden_layers // stages, (model.num_experts or 0) // layout.ep
    own = []
    for tensor in export.tensors.values():
        if tensor.expert is not None and tensor.expert // per_rank != ep:
            continue
        local = legacy_local(tensor, export.spelling, model, ep * per_rank)
        if tensor.layer is not None:
            if tensor.layer // per_stage == stage:
                own.append(LocalTensor(f"{LAYERS}{tensor.layer % per_stage}.{local}", tensor, tp))
        elif (tensor.name.startswith("embedding.") and stage == 0) or (
            not tensor.name.startswith("embedding.") and stage == stages - 1
        ):
            own.append(LocalTensor(local, tensor, tp))
    if model.tied_head and stages > 1 and stage == stages - 1:
        own.append(LocalTensor(HEAD, export.tensors[EMBEDDING], tp))
    return sorted(own, key=lambda each: parameter_order(each.name))


def _optimizer(export: Export, chunks: Sequence[Sequence[LocalTensor]], memory: _FileTensors) -> Any:
    """Return the state of the optimizer of a rank, or of one of the experts apart from the others."""
    apart = export.layout.ep > 1
    states = []
    for experts in (False, True) if apart else (False,):
        parameters = [
            local
            for chunk in chunks
            for local in chunk
            if local.whole.parts and (not apart or (local.whole.expert is not None) == experts)
        ]
        if not parameters:
            continue
        states.append(_state(export, parameters, memory, experts))
    return states if len(states) > 1 else states[0]


def _state(
    export: Export, parameters: Sequence[LocalTensor], memory: _FileTensors, experts: bool
) -> dict[str, Any]:
    state: dict[int, dict[str, Any]] = {}
    groups, masters = [], []
    for group in param_groups(export, experts):
        own = [local for local in parameters if local.whole.decays == bool(group["wd_mult"])]
        if not own:
            continue
        numbers = list(range(len(state), len(state) + len(own)))
        for number, local in zip(numbers, own, strict=True):
            state[number] = {kind: memory.tensor(kind, local) for kind in MOMENTS}
            state[number]["step"] = torch.tensor(float(export.updates or 0))
        groups.append(group | {"params": numbers})
        masters.append(
            [memory.tensor(MASTER, local) for local in own if MASTER in export.state.kinds(local.whole)]
        )
    inner = {"state": state, "param_groups": groups}
    return {"optimizer": inner, "fp32_from_fp16_params": masters} if any(masters) else inner


class _FileTensors:
    """The tensors of a rank, each in a memory-mapped file of its own: torch.save writes whole storages."""

    def __init__(self, directory: Path, export: Export):
        self._directory, self._export = directory, export
        self._tensors: dict[tuple[str, int], Tensor] = {}
        directory.mkdir()

    def tensor(self, kind: str, local: LocalTensor) -> Tensor:
        """Return the part of a tensor on the rank."""
        if (kind, id(local)) not in self._tensors:
            state, tensor = self._export.state, local.whole
            part = local_part(state.values(kind, tensor), local, self._export)
            path = self._directory / f"{len(self._tensors)}"
            memory = torch.from_file(str(path), shared=True, size=part.numel(), dtype=part.dtype)
            memory.copy_(part.reshape(-1))
            self._tensors[kind, id(local)] = memory.view(part.shape)
        return self._tensors[kind, id(local)]

    def remove(self) -> None:
        """Remove the files."""
        self._tensors.clear()
        shutil.rmtree(self._directory)


def _split(tensor: MegatronTensor, export: Export) -> int | None:
    down = any(f".{module}." in tensor.name for module in DOWN)
    return 0 if down and not export.spelling.whole_down else tensor.split


def local_part(whole: Tensor, local: LocalTensor, export: Export) -> Tensor:
    """Return the part of a tensor on a tp rank."""
    tp, dim = export.layout.tp, _split(local.whole, export)
    if tp == 1 or dim is None:
        return whole
    if len(local.whole.sections) > 1 and dim == 0:
        return torch.cat([section.chunk(tp)[local.tp] for section in whole.split(local.whole.sections)])
    return whole.chunk(tp, dim)[local.tp]
