"""Megatron-LM's legacy format (--ckpt-format torch): a file for each rank of tp, pp and ep.

    iter_0000100/mp_rank_01_002/model_optim_rng.pt       tp rank 1, pp rank 2; a third number is the ep rank
        model, or model0, model1, …                      its stage, or its virtual stages
        optimizer                                        state by the number of the parameter (megatron_order)
    iter_0000100/mp_rank_01_002/distrib_optim.pt         of the distributed optimizer (megatron_flat_file)

Virtual stage v of pp rank p follows that of rank p - 1, and virtual stage v - 1 of the last rank. Layers are
numbered from 0 in each. Files are memory-mapped: reading one takes no memory until its tensors are used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint import CheckpointError
from megalite.checkpoint.errors import listing
from megalite.config.sections.model import ModelConfig
from megalite.interchange.inert_pickles import load_pt
from megalite.interchange.megatron_flat_file import FLAT_STATE, FlatFile, is_distributed
from megalite.interchange.megatron_order import parameter_order
from megalite.interchange.megatron_places import DOWN, EMBEDDING, HEAD, LAYERS, MegatronTensor
from megalite.interchange.megatron_source import (
    MASTER,
    MODEL,
    MOMENTS,
    UNREAD,
    WITHOUT,
    check_known,
    facts_of,
    is_tied_copy,
)
from megalite.interchange.megatron_spelling import legacy_local, spelling_of

FILE = "model_optim_rng.pt"
_RANK = re.compile(r"mp_rank_(\d+)(?:_(\d+))?(?:_(\d+))?")


@dataclass
class LegacyStage:
    """One virtual stage of the ranks that share it.

    Attributes:
        ranks: (tp rank, ep rank) → name in the stage → tensor, by kind.
        first_layer: number of its first layer in the model.
        layers: number of its layers.
    """

    first_layer: int
    layers: int
    ranks: dict[tuple[int, int], dict[str, dict[str, Tensor]]] = field(default_factory=dict)


class LegacyCheckpoint:
    """A checkpoint in the legacy format (`megatron_source.MegatronSource`)."""

    format = "legacy"

    def __init__(self, directory: Path):
        self.directory = directory
        ranks = {path: match for path in sorted(directory.iterdir()) if (match := _RANK.fullmatch(path.name))}
        for path in ranks:
            if not (path / FILE).is_file():
                raise CheckpointError(
                    f"{path / FILE} is missing. Check that the copy of {directory} is complete."
                )
        first = load_pt(next(iter(ranks)) / FILE)
        if not isinstance(first, dict) or not {"model", "model0"} & first.keys():
            raise CheckpointError(
                f"{next(iter(ranks)) / FILE} is not a checkpoint of Megatron-LM: expected the keys model, "
                "or model0 "
                "and so on, found "
                f"{', '.join(map(str, first)) if isinstance(first, dict) else type(first).__name__}"
            )
        self._first = first
        self.facts = facts_of(first, next(iter(ranks)) / FILE, _step(first.get("optimizer")))
        numbers = _grid(ranks, self.facts.arguments)
        self.layout = {
            axis: 1 + max(number[place] for number in numbers)
            for place, axis in enumerate(("tp", "pp", "ep"))
        }
        if prod(self.layout.values()) != len(numbers):
            raise CheckpointError(
                f"{directory} has {len(numbers)} directories mp_rank_*, expected all "
                f"{prod(self.layout.values())} of tp {self.layout['tp']}, pp {self.layout['pp']} and ep "
                f"{self.layout['ep']}. Copy the missing ones; if experts have another tp than the other "
                "tensors "
                "(--expert-tensor-parallel-size), save the checkpoint with --ckpt-format torch_dist."
            )
        self._paths = numbers
        self._contents = {number: load_pt(path / FILE) for number, path in numbers.items()}
        self.layout["virtual_stages"] = max(
            1, sum(re.fullmatch(r"model\d+", str(key)) is not None for key in first)
        )
        self._stages = self._read_stages()
        self.spelling = spelling_of(
            [rank[MODEL] for stage in self._stages for rank in stage.ranks.values()],
            whole_down=True,
        )
        self.extra_state = [
            f"{number}:{name}"
            for number, stage in enumerate(self._stages)
            for name in self._extra_states(number, stage)
        ]
        self._places: dict[str, list[tuple[LegacyStage, str, tuple[int, int]]]] = {}
        self._kinds: tuple[str, ...] = (MODEL,)

    def _read_stages(self) -> list[LegacyStage]:
        pp, virtual = self.layout["pp"], self.layout["virtual_stages"]
        stages, first = [], 0
        for chunk in range(virtual):
            for rank in range(pp):
                key = f"model{chunk}" if virtual > 1 else "model"
                stage = LegacyStage(first, 0)
                for (tp, at, ep), content in self._contents.items():
                    if at == rank:
                        stage.ranks[tp, ep] = {MODEL: self._weights(content, key, (tp, at, ep))}
                numbers = {
                    int(name.split(".")[2])
                    for each in stage.ranks.values()
                    for name in each[MODEL]
                    if name.startswith(LAYERS)
                }
                stage.layers = 1 + max(numbers, default=-1)
                first += stage.layers
                stages.append(stage)
        return stages

    def _extra_states(self, number: int, stage: LegacyStage) -> list[str]:
        """Return the names of the states of fp8 in a stage."""
        pp, virtual = self.layout["pp"], self.layout["virtual_stages"]
        key = f"model{number // pp}" if virtual > 1 else "model"
        return [
            name for name in self._contents[0, number % pp, 0][key] if str(name).endswith("._extra_state")
        ]

    def _weights(self, content: Any, key: str, rank: tuple[int, int, int]) -> dict[str, Tensor]:
        path = self._paths[rank] / FILE
        weights = content.get(key) if isinstance(content, dict) else None
        if not isinstance(weights, dict):
            raise CheckpointError(f"{path} has no {key}, which the file of the first rank has")
        if "language_model" in weights:
            raise CheckpointError(
                f"{path} has the modules of Megatron-LM before megatron-core (language_model), which are not "
                "supported. Convert it with Megatron-LM's tools/checkpoint/convert.py to saver core first."
            )
        return {
            str(name): value
            for name, value in weights.items()
            if isinstance(value, Tensor) and not UNREAD.search(str(name))
        }

    def locate(
        self, model: ModelConfig, tensors: Mapping[str, MegatronTensor], *, mtp: bool, optimizer: bool
    ) -> None:
        self._kinds = (MODEL,)
        per_rank = (model.num_experts or 0) // self.layout["ep"]
        for name, tensor in tensors.items():
            self._places[name] = self._find(tensor, model, per_rank)
        self._check_shapes(tensors)
        known: dict[int, set[str]] = {}
        for places in self._places.values():
            for stage, local, _ in places:
                known.setdefault(id(stage), set()).add(local)
        for stage in self._stages:
            for names in stage.ranks.values():
                copy = {name for name in names[MODEL] if is_tied_copy(name, model)}
                check_known(names[MODEL], known.get(id(stage), set()) | copy, self.directory, mtp=mtp)
        if optimizer and self.facts.step is not None:
            distributed = is_distributed(self._first["optimizer"])
            for number, content in self._contents.items():
                if distributed:
                    self._read_buffers(number, model)
                else:
                    self._read_optimizer(number, content)
            self._kinds = (MODEL, *MOMENTS, *([MASTER] if self._has_masters() else []))
        self._check_tied(model, tensors)

    def kinds(self) -> tuple[str, ...]:
        return self._kinds

    def has(self, kind: str, tensor: MegatronTensor) -> bool:
        stage, local, rank = self._places[tensor.name][0]
        return local in stage.ranks[rank].get(kind, {})

    def read(self, kind: str, tensor: MegatronTensor) -> Tensor:
        shards = [stage.ranks[rank][kind][local] for stage, local, rank in self._places[tensor.name]]
        return joined(shards, tensor, str(self.directory))

    def dtype(self, tensor: MegatronTensor) -> torch.dtype:
        stage, local, rank = self._places[tensor.name][0]
        return stage.ranks[rank][MODEL][local].dtype

    def rows(self) -> int:
        for stage in self._stages:
            if EMBEDDING in (names := stage.ranks[0, 0][MODEL]):
                return names[EMBEDDING].shape[0] * self.layout["tp"]
        raise CheckpointError(f"{self.directory} has no {EMBEDDING}, which every model of Megatron-LM has")

    def _find(
        self, tensor: MegatronTensor, model: ModelConfig, per_rank: int
    ) -> list[tuple[LegacyStage, str, tuple[int, int]]]:
        """Return the stage, the name and the ranks of the parts of a tensor over tp."""
        ep = 0 if tensor.expert is None else tensor.expert // per_rank
        local = legacy_local(tensor, self.spelling, model, ep * per_rank)
        if tensor.layer is None:
            stage = next((each for each in self._stages if local in each.ranks[0, ep][MODEL]), None)
        else:
            stage = next(
                (
                    each
                    for each in self._stages
                    if each.first_layer <= tensor.layer < each.first_layer + each.layers
                ),
                None,
            )
            if stage is not None:
                local = f"{LAYERS}{tensor.layer - stage.first_layer}.{local}"
        if stage is None or any(local not in stage.ranks[tp, ep][MODEL] for tp in range(self.layout["tp"])):
            raise CheckpointError(f"{self.directory}: {local} is missing ({tensor.name} of the model)")
        return [(stage, local, (tp, ep)) for tp in range(self.layout["tp"])]

    def _check_shapes(self, tensors: Mapping[str, MegatronTensor]) -> None:
        problems = []
        for name, tensor in tensors.items():
            shapes = [
                tuple(stage.ranks[rank][MODEL][local].shape) for stage, local, rank in self._places[name]
            ]
            if (problem := misfit(shapes, tensor)) is not None:
                problems.append(problem)
        if problems:
            raise CheckpointError(f"{self.directory} does not match its model:{listing(problems)}")
        down = [name for name in tensors if any(f".{module}." in name for module in DOWN)]
        if down and self.layout["tp"] > 1:
            stage, local, rank = self._places[down[0]][0]
            whole = tuple(stage.ranks[rank][MODEL][local].shape) == tensors[down[0]].shape
            self.spelling = type(self.spelling)(
                self.spelling.fused, self.spelling.experts, self.spelling.stacked, whole
            )

    def _check_tied(self, model: ModelConfig, tensors: Mapping[str, MegatronTensor]) -> None:
        """Raise CheckpointError if the copy of a tied embedding differs."""
        if not model.tied_head or EMBEDDING not in tensors:
            return
        for kind in self._kinds:
            if not self.has(kind, tensors[EMBEDDING]):
                continue
            own = [stage.ranks[rank][kind][local] for stage, local, rank in self._places[EMBEDDING]]
            for stage in self._stages:
                for (tp, _), names in stage.ranks.items():
                    copy = names.get(kind, {}).get(HEAD)
                    if copy is not None and not torch.equal(copy, own[tp]):
                        raise CheckpointError(
                            f"{self.directory}: {HEAD} and {EMBEDDING} differ ({kind}), but the model "
                            "shares this tensor"
                        )

    # ---- the state of the optimizer

    def _has_masters(self) -> bool:
        return any(MASTER in rank and rank[MASTER] for stage in self._stages for rank in stage.ranks.values())

    def _read_buffers(self, number: tuple[int, int, int], model: ModelConfig) -> None:
        """Find the tensors of the distributed optimizer's state of one rank's parameters."""
        tp, pp, ep = number
        path = self._paths[number] / FLAT_STATE
        if ep and not path.is_file():
            return  # its parameters are those of another rank's file
        flat = FlatFile(path, self.facts.arguments)
        chunks = [stage for place, stage in enumerate(self._stages) if place % self.layout["pp"] == pp]
        shares_embedding = model.tied_head and self.layout["pp"] > 1
        for experts in (False, True) if self.layout["ep"] > 1 else (False,):
            stored = [
                {
                    name: tensor
                    for name, tensor in stage.ranks[tp, ep][MODEL].items()
                    if not name.endswith("expert_bias")
                    and (".experts." in name and self.layout["ep"] > 1) == experts
                }
                for stage in chunks
            ]
            parts = flat.parts(stored, experts, limited=pp == 0, shares_embedding=shares_embedding)
            for stage, states in zip(chunks, parts, strict=True):
                for kind, tensors in states.items():
                    stage.ranks[tp, ep].setdefault(kind, {}).update(tensors)

    def _read_optimizer(self, number: tuple[int, int, int], content: dict[str, Any]) -> None:
        """Find the tensors of the state of one rank's parameters."""
        tp, pp, ep = number
        path = self._paths[number] / FILE
        chunks = [stage for place, stage in enumerate(self._stages) if place % self.layout["pp"] == pp]
        names = [
            (stage, name)
            for stage in chunks
            for name in sorted(
                (
                    name
                    for name in stage.ranks[tp, ep][MODEL]
                    if not name.endswith("expert_bias") and not name.startswith("mtp.")
                ),
                key=parameter_order,
            )
        ]
        state = content.get("optimizer")
        for each in state if isinstance(state, list) else [state]:
            inner, masters = each, list[Any]()
            if isinstance(each, dict) and "optimizer" in each:
                inner, masters = each["optimizer"], each.get("fp32_from_fp16_params") or []
            if not isinstance(inner, dict) or not {"state", "param_groups"} <= inner.keys():
                raise CheckpointError(f"{path}: expected the state and param_groups of an optimizer")
            for index, group in enumerate(inner["param_groups"]):
                selected = _selected(names, group, (tp, ep), self.layout["ep"] > 1)
                self._assign(path, index, group, selected, inner["state"], (tp, ep))
                half = [
                    (stage, name)
                    for stage, name in selected
                    if stage.ranks[tp, ep][MODEL][name].element_size() == 2
                ]
                if masters:
                    _match(path, index, half, masters[index], (tp, ep), MASTER)

    def _assign(
        self,
        path: Path,
        index: int,
        group: Mapping[str, Any],
        selected: Sequence[tuple[LegacyStage, str]],
        state: Mapping[Any, Any],
        rank: tuple[int, int],
    ) -> None:
        numbers = group["params"]
        for kind in MOMENTS:
            if missing := [number for number in numbers if kind not in state.get(number, {})]:
                raise CheckpointError(f"{path}: parameter {missing[0]} of the optimizer has no {kind}")
            _match(path, index, selected, [state[number][kind] for number in numbers], rank, kind)


def _selected(
    names: Sequence[tuple[LegacyStage, str]],
    group: Mapping[str, Any],
    rank: tuple[int, int],
    experts_apart: bool,
) -> list[tuple[LegacyStage, str]]:
    """Return the parameters of a group: with or without weight decay, experts or others."""
    decays = bool(group.get("wd_mult", group.get("weight_decay", 0)))
    experts = bool(group.get("is_expert_parallel", False))
    return [
        (stage, name)
        for stage, name in names
        if (stage.ranks[rank][MODEL][name].dim() > 1 and not name.endswith(".bias")) == decays
        and (".experts." in name and experts_apart) == experts
    ]


def _match(
    path: Path,
    index: int,
    selected: Sequence[tuple[LegacyStage, str]],
    values: Sequence[Any],
    rank: tuple[int, int],
    kind: str,
) -> None:
    """Add the tensors of a group, which must have the shapes of its parameters."""
    if len(selected) != len(values):
        raise CheckpointError(
            f"{path}: group {index} of the optimizer has {kind} of {len(values)} parameters, expected "
            "those of "
            f"{len(selected)}, from {selected[0][1] if selected else 'none'} on. Groups other than those "
            "with and "
            f"without weight decay are not supported: {WITHOUT}."
        )
    for (stage, name), value in zip(selected, values, strict=True):
        shape = tuple(stage.ranks[rank][MODEL][name].shape)
        if not isinstance(value, Tensor) or tuple(value.shape) != shape:
            actual = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise CheckpointError(
                f"{path}: {kind} of {name}, in group {index} of the optimizer, has shape {actual}, expected "
                f"{list(shape)}. If the parameters have another order, {WITHOUT}."
            )
        stage.ranks[rank].setdefault(kind, {})[name] = value


def joined(shards: Sequence[Tensor], tensor: MegatronTensor, place: str) -> Tensor:
    """Return a whole tensor from its parts on the tp ranks."""
    if len(shards) == 1:
        return shards[0]
    if tensor.split is None and tuple(shards[0].shape) == tensor.shape:
        if not all(torch.equal(shards[0], other) for other in shards[1:]):
            raise CheckpointError(
                f"{place}: {tensor.name} differs between tp ranks, which should have the same"
            )
        return shards[0]
    if tensor.split in (None, 0) and len(tensor.sections) > 1:
        sizes = [rows // len(shards) for rows in tensor.sections]
        parts = zip(*(shard.split(sizes) for shard in shards), strict=True)
        return torch.cat([each for section in parts for each in section])
    return torch.cat(list(shards), dim=tensor.split or 0)


def misfit(shapes: Sequence[tuple[int, ...]], tensor: MegatronTensor) -> str | None:
    """Return what is wrong with the shapes of the parts of a tensor on the tp ranks, or None."""
    whole, number = list(tensor.shape), len(shapes)
    actual = list(shapes[0])
    split = tensor.split
    if split is None and actual != whole:  # projections to latents
        split = 0 if any(f".{module}." in tensor.name for module in DOWN) else None
    if split is not None:
        actual = [size * number if dim == split else size for dim, size in enumerate(actual)]
    extra = tensor.name in (EMBEDDING, HEAD) and actual[1:] == whole[1:] and actual[0] >= whole[0]
    if len({*shapes}) > 1 or (actual != whole and not extra):
        parts = f" on each of {number} tp ranks" if number > 1 else ""
        return f"{tensor.name} has shape {list(shapes[0])}{parts}, expected {whole} in all"
    return None


def _grid(
    ranks: Mapping[Path, re.Match[str]], arguments: Mapping[str, Any]
) -> dict[tuple[int, int, int], Path]:
    """Return (tp rank, pp rank, ep rank) → its directory."""
    # the second number is that of a stage, unless there is one stage
    stages = arguments.get("pipeline_model_parallel_size")
    by_stage = stages != 1 or any(match[3] for match in ranks.values())
    numbers = {}
    for path, match in ranks.items():
        tp, second, third = (int(part or 0) for part in match.groups())
        numbers[(tp, second, third) if by_stage else (tp, 0, second)] = path
    return numbers


def _step(optimizer: Any) -> int | None:
    """Return the updates of Adam: of the first parameter, or of its group, or None without state."""
    for each in optimizer if isinstance(optimizer, list) else [optimizer]:
        inner = each.get("optimizer", each) if isinstance(each, dict) else None
        if not isinstance(inner, dict) or not (inner.get("state") or is_distributed(each)):
            continue
        states = [*inner.get("state", {}).values(), *(inner.get("param_groups") or [])]
        step = next((state["step"] for state in states if state.get("step") is not None), 0)
        return int(step.item() if isinstance(step, Tensor) else step)
    return None
