"""Megatron-LM's torch_dist format: a DCP directory, with the values besides tensors in common.pt or in it.

optimizer.state.exp_avg.KEY      state of the optimizer of the tensor KEY; chained_N. may precede it
optimizer.state.fp32_param.KEY   its fp32 master weight; param in fully_reshardable
optimizer.distributed.…          buffers of the distributed optimizer (`megatron_dist_buffers`)
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint import CheckpointError
from megalite.checkpoint.errors import listing
from megalite.config.sections.model import ModelConfig
from megalite.interchange.dcp_files import DcpDirectory
from megalite.interchange.inert_pickles import load_pt
from megalite.interchange.megatron_buffers import KINDS
from megalite.interchange.megatron_dist_buffers import DistBuffers, StoredWeight
from megalite.interchange.megatron_places import EMBEDDING, HEAD, MegatronTensor
from megalite.interchange.megatron_source import MASTER, MODEL, MOMENTS, WITHOUT, check_known, facts_of
from megalite.interchange.megatron_spelling import dist_places, spelling_of

COMMON, CONFIG = "common.pt", "metadata.json"
_STATE = re.compile(r"(chained_\d+\.)?optimizer\.state\.(exp_avg|exp_avg_sq|fp32_param|param)\.(.+)")


class DistCheckpoint:
    """A checkpoint in torch_dist format (`megatron_source.MegatronSource`)."""

    format = "torch_dist"

    def __init__(self, directory: Path):
        self.directory = directory
        self.layout: dict[str, int] = {}
        _check_backend(directory / CONFIG)
        self._files = DcpDirectory(directory)
        self._buffers = DistBuffers(self._files)
        self._keys: dict[tuple[str, str], str] = {}
        flat = set(self._buffers.tensors)
        for key in (key for key in self._files.tensors if key not in flat):
            match = _STATE.fullmatch(key)
            self._keys[(KINDS.get(match[2], match[2]), match[3]) if match else (MODEL, key)] = key
        self._model = [key for kind, key in self._keys if kind == MODEL]
        self.spelling = spelling_of([self._model], whole_down=True)
        common = self._common()
        if values := self._buffers.common():
            common["optimizer"] = values
        self.facts = facts_of(common, directory / COMMON, _step(common.get("optimizer")))
        self.extra_state = [name for name in self._files.objects if "._extra_state" in name]
        self._places: dict[str, list[Any]] = {}
        self._kinds: tuple[str, ...] = (MODEL,)

    def locate(
        self, model: ModelConfig, tensors: Mapping[str, MegatronTensor], *, mtp: bool, optimizer: bool
    ) -> None:
        self._places = {name: dist_places(tensor, self.spelling, model) for name, tensor in tensors.items()}
        expected = {place.key for places in self._places.values() for place in places}
        states = [key for key in (*self._model, *self._files.objects) if _is_state(key)]
        others = [key for key in states if key not in self._buffers.objects]
        if optimizer and (unread := [key for key in others if key not in self._values]):
            raise CheckpointError(
                f"{self.directory}: {unread[0]} is state of an optimizer in a form that is not supported. "
                f"Save the checkpoint with --dist-ckpt-optim-fully-reshardable, or {WITHOUT}."
            )
        known = expected | set(states)
        check_known([*self._model, *self._files.objects], known | self._values, self.directory, mtp=mtp)
        kinds = (MODEL, *MOMENTS, MASTER) if optimizer else (MODEL,)
        self._kinds = tuple(kind for kind in kinds if any(stored == kind for stored, _ in self._keys))
        self._check_shapes(tensors)
        if optimizer and self._buffers.tensors:
            self._locate_buffers(model, tensors)
            self._kinds = kinds

    def _locate_buffers(self, model: ModelConfig, tensors: Mapping[str, MegatronTensor]) -> None:
        weights = {}
        for name, tensor in tensors.items():
            place = self._places[name][0]
            stored, at = self._files.tensors[self._keys[MODEL, place.key]], len(place.lead)
            divided = any(chunk.sizes[at] < stored.shape[at] for chunk in stored.chunks)
            rows = self.rows() if name in (EMBEDDING, HEAD) else tensor.shape[0]
            weights[name] = StoredWeight((rows, *tensor.shape[1:]), stored.dtype, divided)
        own = [tensor for tensor in tensors.values() if tensor.parts]
        self._buffers.locate(model, own, self.facts.arguments, self.spelling, weights)

    def kinds(self) -> tuple[str, ...]:
        return self._kinds

    def has(self, kind: str, tensor: MegatronTensor) -> bool:
        if kind != MODEL and self._buffers.tensors:
            return self._buffers.has(tensor)
        return all((kind, place.key) in self._keys for place in self._places[tensor.name])

    def read(self, kind: str, tensor: MegatronTensor) -> Tensor:
        if kind != MODEL and self._buffers.tensors:
            return self._buffers.read(kind, tensor)
        parts = [
            self._files.read(self._keys[kind, place.key], place.lead) for place in self._places[tensor.name]
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def dtype(self, tensor: MegatronTensor) -> torch.dtype:
        return self._files.tensors[self._keys[MODEL, self._places[tensor.name][0].key]].dtype

    def rows(self) -> int:
        if EMBEDDING not in self._files.tensors:
            raise CheckpointError(
                f"{self.directory} has no {EMBEDDING}, which every model of Megatron-LM has"
            )
        return self._files.tensors[EMBEDDING].shape[0]

    def _common(self) -> dict[str, Any]:
        """Return the values besides tensors: of common.pt, or of objects in the directory."""
        self._values: set[str] = set()
        path = self.directory / COMMON
        if path.is_file():
            content = load_pt(path)
            if not isinstance(content, dict):
                raise CheckpointError(
                    f"{path} is damaged: expected a dictionary, found {type(content).__name__}"
                )
            return content
        common: dict[str, Any] = {}
        for name in self._files.objects:
            first, *rest = name.split(".")
            if first in (
                "args",
                "iteration",
                "checkpoint_version",
                "opt_param_scheduler",
                "content_metadata",
            ):
                self._values.add(name)
                value = self._files.read_object(name)
                if rest:
                    common.setdefault(first, {})[".".join(rest)] = value
                else:
                    common[first] = value
            elif first == "optimizer" or first.startswith("chained_"):
                self._values.add(name)
                if rest and rest[-1] in ("common_step", "step"):
                    common["optimizer"] = {"state": {"common_step": self._files.read_object(name)}}
        return common

    def _check_shapes(self, tensors: Mapping[str, MegatronTensor]) -> None:
        problems = []
        for name, tensor in tensors.items():
            for kind in self._kinds:
                places = self._places[name]
                missing = [place.key for place in places if (kind, place.key) not in self._keys]
                if missing:
                    if kind == MODEL or (kind in MOMENTS and tensor.parts):
                        problems.append(f"{'' if kind == MODEL else f'{kind} of '}{missing[0]} is missing")
                    continue
                rows, columns = 0, tuple[int, ...]()
                for place in places:
                    stored = self._files.tensors[self._keys[kind, place.key]].shape
                    shape = stored[len(place.lead) :]
                    if any(at >= size for at, size in zip(place.lead, stored, strict=False)):
                        problems.append(
                            f"{place.key} has no part {list(place.lead)}: its shape is {list(stored)}"
                        )
                    rows, columns = rows + (shape[0] if shape else 0), shape[1:]
                extra = name in (EMBEDDING, HEAD) and rows >= tensor.shape[0]
                if columns != tensor.shape[1:] or (rows != tensor.shape[0] and not extra):
                    problems.append(
                        f"{'' if kind == MODEL else f'{kind} of '}{places[0].key} has shape "
                        f"{[rows, *columns]}, expected {list(tensor.shape)}"
                    )
        if problems:
            raise CheckpointError(f"{self.directory} does not match its model:{listing(problems)}")


def _is_state(key: str) -> bool:
    return key.startswith("optimizer.") or ".optimizer." in key


def _check_backend(path: Path) -> None:
    """Raise CheckpointError if the directory has another format of megatron-core."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        backend = content["sharded_backend"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    if backend != "torch_dist":
        raise CheckpointError(
            f"{path}: sharded_backend is {backend!r}, but only torch_dist is supported. Save the "
            "checkpoint with "
            "--ckpt-format torch_dist."
        )


def _step(optimizer: Any) -> int | None:
    """Return the updates of Adam, in the state of an optimizer or of chained ones."""
    if isinstance(optimizer, dict):
        if isinstance(optimizer.get("state"), dict) and "common_step" in optimizer["state"]:
            return _number(optimizer["state"]["common_step"])
        for group in optimizer.get("param_groups", ()):
            if isinstance(group, dict) and group.get("step") is not None:
                return _number(group["step"])
        steps = (_step(value) for value in optimizer.values() if isinstance(value, dict))
        return next((step for step in steps if step is not None), None)
    return None


def _number(value: Any) -> int:
    return int(value.item() if isinstance(value, Tensor) else value)
