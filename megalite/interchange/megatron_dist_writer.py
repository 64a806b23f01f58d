"""Megatron-LM's torch_dist format (`megatron_dist` reads it), written with one tensor in memory at a time."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megalite.interchange.dcp_writer import NewChunk, NewTensor, write_dcp
from megalite.interchange.export_plan import Export, namespace, param_groups
from megalite.interchange.export_state import StateToExport
from megalite.interchange.megatron_buffers import KINDS
from megalite.interchange.megatron_dist import COMMON, CONFIG
from megalite.interchange.megatron_places import MegatronTensor
from megalite.interchange.megatron_source import MODEL
from megalite.interchange.megatron_spelling import DistPlace, dist_places
from megalite.system.files import write_synced
from megalite.system.progress import Report


def write_dist(place: Path, export: Export, progress: Report) -> None:
    """Write the directory of an iteration."""
    reader = _Sections(export.state, progress)
    new: dict[str, NewTensor] = {}
    for tensor in export.tensors.values():
        places = dist_places(tensor, export.spelling, export.config.model)
        for kind in export.state.kinds(tensor):
            for section, at in enumerate(places):
                rows = export.state.shape(tensor)[0] if len(places) == 1 else tensor.sections[section]
                sizes = (rows, *tensor.shape[1:])
                values = partial(reader.section, kind, tensor, section if len(places) > 1 else None)
                reader.total += torch.Size(sizes).numel()
                chunk = NewChunk((*at.lead, *(0 for _ in sizes)), (*(1 for _ in at.lead), *sizes), values)
                key = at.key if kind == MODEL else f"optimizer.state.{_called(kind, export)}.{at.key}"
                shape, dtype = (*_lead_shape(at, export), *sizes), export.state.dtype(kind, tensor)
                new.setdefault(key, NewTensor(shape, dtype, [])).chunks.append(chunk)
    write_dcp(place, new, {name: [None] for name in export.extra_state})
    torch.save(_common(export), place / COMMON)
    write_synced(place / CONFIG, json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))


class _Sections:
    """Sections of tensors. The last tensor is kept, since its sections follow each other.

    Attributes:
        total: elements that are written in all.
    """

    def __init__(self, state: StateToExport, progress: Report):
        self.total = 0
        self._state, self._progress, self._done = state, progress, 0
        self._last: tuple[str, str] | None = None
        self._values = torch.empty(0)

    def section(self, kind: str, tensor: MegatronTensor, index: int | None) -> torch.Tensor:
        """Compute a section, or with None the whole tensor."""
        if self._last != (kind, tensor.name):
            self._last, self._values = (kind, tensor.name), self._state.values(kind, tensor)
        values = self._values if index is None else self._values.split(tensor.sections)[index]
        self._done += values.numel()
        self._progress("exporting", self._done, self.total, "")
        return values


def _called(kind: str, export: Export) -> str:
    """Return what the optimizer calls a kind of its tensors."""
    if not export.state.distributed:
        return kind
    return next(theirs for theirs, ours in KINDS.items() if ours == kind)


def _lead_shape(at: DistPlace, export: Export) -> Iterator[int]:
    """Yield the first dimensions of a tensor of all layers, or of all experts."""
    if export.spelling.stacked and at.key.startswith("decoder.layers."):
        yield export.config.model.num_hidden_layers
    if re.search(r"\.experts\.experts\.", at.key):
        yield export.config.model.num_experts or 0


def _common(export: Export) -> dict[str, Any]:
    common: dict[str, Any] = {
        "args": namespace(export),
        "checkpoint_version": 3.0,
        "iteration": export.iteration,
        "opt_param_scheduler": export.scheduler,
        "num_floating_point_operations_so_far": 0,
        "content_metadata": {"singleton_local_shards": False, "chained_optim_avoid_prefix": True},
    }
    if not export.spelling.stacked:
        common["content_metadata"]["non_homogeneous_layers"] = True
    if export.updates is not None:
        distributed = export.state.distributed
        inner: dict[str, Any] = {"param_groups": param_groups(export)}
        if not distributed:
            inner["state"] = {"common_step": torch.tensor(float(export.updates))}
        common["optimizer"] = inner
        if distributed:
            common["optimizer"] = {"optimizer": inner, "param_state_sharding_type": "fully_reshardable"}
            common["content_metadata"]["distrib_optim_sharding_type"] = "fully_reshardable"
        elif export.arguments.get("bf16") or export.arguments.get("fp16"):
            common["optimizer"] = {"optimizer": inner}
    return common
