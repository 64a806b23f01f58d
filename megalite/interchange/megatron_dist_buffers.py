"""The buffers of the distributed optimizer (`megatron_buffers`) in Megatron-LM's torch_dist format.

This is the default of --use-distributed-optimizer, dp_reshardable. Each bucket of a buffer is a tensor:

    optimizer.distributed.dp_group_idx_3.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_1.exp_avg

The group is that of the ranks that share parameters: pp rank · tp + tp rank, or, for experts that ep divides,
(pp rank · ep + ep rank) · tp + tp rank. The optimizer of these is the second of a chain (chained_1.). The
buffers of a group are those of its virtual stages, one after another.

Which layers a stage has is not stored either: it is what fills its buffers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalite.checkpoint import CheckpointError
from megalite.config.sections.model import ModelConfig
from megalite.interchange.dcp_files import DcpDirectory
from megalite.interchange.megatron_buffers import ALIGNMENT, KINDS, BufferSlot, by_dtype, slots
from megalite.interchange.megatron_legacy import joined
from megalite.interchange.megatron_places import DOWN, EMBEDDING, HEAD, LAYERS, MegatronTensor
from megalite.interchange.megatron_source import WITHOUT
from megalite.interchange.megatron_spelling import Spelling, legacy_local

_BUCKET = re.compile(
    r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)"
    r"\.dtype_\(torch\.(\w+), torch\.\w+\)\.bucket_idx_(\d+)\.(\w+)"
)
_OBJECT = re.compile(
    r"(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_(\d+)"
    r"\.(optimizer|grad_scaler|per_bucket_numel|per_bucket_numel_unpadded)(/.*)?"
)
ELSEWHERE = ("overlap_param_gather_with_optimizer_step", "moe_use_legacy_grouped_gemm", "mtp_num_layers")
"""Arguments with which parameters have other places."""


class StoredWeight(NamedTuple):
    """What a checkpoint says of a weight.

    Attributes:
        shape: with rows of padding.
        divided: whether each tp rank has a part of it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    divided: bool


class _Buffer(NamedTuple):
    """A buffer: its dtype, the names of its buckets without the kind, and their elements."""

    dtype: str
    buckets: tuple[str, ...]
    sizes: tuple[int, ...]


class _Parameter(NamedTuple):
    """A parameter as one rank has it.

    Attributes:
        tensor: the name of the whole tensor.
        name: its name in the modules of the rank, with the number of the layer in the model.
    """

    tensor: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class _Part(NamedTuple):
    """Where a rank's part of a tensor is: elements of a bucket from `start` on."""

    bucket: str
    start: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Layout:
    tp: int
    pp: int
    ep: int
    expert_tp: int

    @staticmethod
    def of(arguments: Mapping[str, Any]) -> _Layout:
        tp, pp, ep = (
            int(arguments.get(f"{name}_model_parallel_size") or 1)
            for name in ("tensor", "pipeline", "expert")
        )
        return _Layout(tp, pp, ep, int(arguments.get("expert_tensor_parallel_size") or tp))


class DistBuffers:
    """The buffers of a checkpoint.

    Attributes:
        objects: names of the pickled objects that belong to them.
        tensors: names of the tensors.
    """

    def __init__(self, files: DcpDirectory):
        self._files = files
        self.objects = [name for name in files.objects if _OBJECT.fullmatch(name)]
        self.tensors = [name for name in files.tensors if _BUCKET.fullmatch(name)]
        self._groups: dict[tuple[int, int], list[_Buffer]] = {}
        self._parts: dict[str, list[_Part]] = {}

    def common(self) -> dict[str, Any]:
        """Return the values of the optimizer besides tensors, which all groups have."""
        values: dict[str, Any] = {}
        for name in self.objects:
            match = _OBJECT.fullmatch(name)
            if match and int(match[1]) == 0 and match[2] in ("optimizer", "grad_scaler"):
                values.setdefault(match[2], self._files.read_object(name))
        return values

    def locate(
        self,
        model: ModelConfig,
        tensors: Sequence[MegatronTensor],
        arguments: Mapping[str, Any],
        spelling: Spelling,
        weights: Mapping[str, StoredWeight],
    ) -> None:
        """Find the parts of all tensors.

        Args:
            tensors: those that the optimizer has, in the order of the layers.
            spelling: of the names of the checkpoint.
            weights: by the name of the tensor.

        Raises:
            CheckpointError: the parameters do not fill the buffers, or some are missing.
        """
        for name in ELSEWHERE:
            if arguments.get(name):
                raise self._unknown(f"it was saved with {name}={arguments[name]}")
        self._groups, layout = _groups(self._files, self.tensors), _Layout.of(arguments)
        if layout.expert_tp != layout.tp and layout.ep == 1 and model.num_experts:
            raise self._unknown("experts have another tp than other tensors, and are in the same buffers")
        if (model.num_experts or 0) % layout.ep:
            raise self._unknown(f"{model.num_experts} experts are not divisible by ep {layout.ep}")
        local = _Locals(model, _of_modules(spelling, arguments), layout, weights)
        units, first, self._parts = _units(tensors), 0, {}
        experts: list[list[list[MegatronTensor]]] = [[] for _ in range(layout.pp)]
        for stage in range(layout.pp * self._virtual_stages(layout)):
            chunk, rank = divmod(stage, layout.pp)
            buffers = [self._chunks(0, rank * layout.tp + tp)[chunk] for tp in range(layout.tp)]
            end = self._end(local, units, first, buffers[0], stage)
            for of_rank in buffers:
                self._assign(local.dense(units, first, end), of_rank)
            if apart := local.experts_apart(units[first:end]):
                experts[rank].append(apart)
            first = end
        if first != len(units):
            raise self._unknown(f"its stages end before {units[first][0].name}")
        for rank, stages in enumerate(experts):
            self._assign_experts(rank, stages, local, layout)

    def has(self, tensor: MegatronTensor) -> bool:
        return tensor.name in self._parts

    def read(self, kind: str, tensor: MegatronTensor) -> Tensor:
        """Return a whole tensor of a kind, with rows of padding."""
        theirs = next(theirs for theirs, ours in KINDS.items() if ours == kind)
        shards = [
            self._files.read_range(f"{part.bucket}.{theirs}", part.start, prod(part.shape)).view(part.shape)
            for part in self._parts[tensor.name]
        ]
        return joined(shards, tensor, str(self._files.directory))

    def _chunks(self, optimizer: int, group: int) -> list[list[_Buffer]]:
        """Return the buffers of each virtual stage of a group, which has one for each dtype."""
        chunks: list[list[_Buffer]] = []
        for buffer in self._groups.get((optimizer, group), []):
            if not chunks or any(buffer.dtype == other.dtype for other in chunks[-1]):
                chunks.append([])
            chunks[-1].append(buffer)
        return chunks

    def _virtual_stages(self, layout: _Layout) -> int:
        """Return the number of virtual stages of each rank."""
        numbers = {len(self._chunks(0, group)) for group in range(layout.tp * layout.pp)}
        if len(numbers) > 1 or 0 in numbers:
            raise self._unknown(f"its ranks have buffers of {' or '.join(map(str, sorted(numbers)))} stages")
        return numbers.pop()

    def _end(
        self,
        local: _Locals,
        units: Sequence[Sequence[MegatronTensor]],
        first: int,
        buffers: Sequence[_Buffer],
        stage: int,
    ) -> int:
        """Return the end of the units that fill the buffers of a stage, from its first unit on."""
        elements = sum(sum(buffer.sizes) for buffer in buffers)
        for end in range(first, len(units) + 1):
            own = local.dense(units, first, end)
            total = sum(prod(each.shape) for each in own)
            if total <= elements <= total + ALIGNMENT * len(own) and self._places(own, buffers) is not None:
                return end
        name = units[first][0].name if first < len(units) else "the end"
        raise self._unknown(f"no layers from {name} on fill the {elements:,} elements of stage {stage}")

    def _places(
        self, parameters: Sequence[_Parameter], buffers: Sequence[_Buffer]
    ) -> list[tuple[_Parameter, _Buffer, BufferSlot]] | None:
        """Return where parameters are in the buffers of a stage, or None if they do not fill them."""
        named = {each.name: each for each in parameters}
        try:
            of_dtype = by_dtype(named, {name: each.dtype for name, each in named.items()})
        except ValueError as error:  # a module that the order does not have
            raise self._unknown(str(error)) from None
        if [str(dtype) for dtype in of_dtype] != [f"torch.{buffer.dtype}" for buffer in buffers]:
            return None
        places = []
        for names, buffer in zip(of_dtype.values(), buffers, strict=True):
            own = slots([prod(named[name].shape) for name in names], buffer.sizes)
            if own is None:
                return None
            places += [(named[name], buffer, slot) for name, slot in zip(names, own, strict=True)]
        return places

    def _assign(self, parameters: Sequence[_Parameter], buffers: Sequence[_Buffer]) -> None:
        """Record the parts of one rank."""
        places = self._places(parameters, buffers)
        if places is None:
            raise self._unknown(f"the parameters from {parameters[0].tensor} on do not fill their buffers")
        for parameter, buffer, slot in places:
            part = _Part(buffer.buckets[slot.bucket], slot.start, parameter.shape)
            self._parts.setdefault(parameter.tensor, []).append(part)

    def _assign_experts(
        self, rank: int, stages: Sequence[Sequence[MegatronTensor]], local: _Locals, layout: _Layout
    ) -> None:
        """Record the parts of the experts of a pp rank.

        Args:
            stages: the experts of its virtual stages that have some.
        """
        for ep in range(layout.ep if stages else 0):
            for tp in range(layout.expert_tp):
                group = (rank * layout.ep + ep) * layout.expert_tp + tp
                chunks = self._chunks(1, group)
                if len(chunks) != len(stages):
                    raise self._unknown(f"group {group} of experts has buffers of {len(chunks)} stages")
                for own, buffers in zip(stages, chunks, strict=True):
                    self._assign(
                        [local.parameter(each) for each in own if local.rank_of(each) == ep], buffers
                    )

    def _unknown(self, why: str) -> CheckpointError:
        return CheckpointError(
            f"{self._files.directory} has the state of the distributed optimizer in flat buffers, and where "
            f"parameters are in them could not be determined: {why}. Save the checkpoint with "
            f"--dist-ckpt-optim-fully-reshardable, or {WITHOUT}."
        )


class _Locals:
    """The parameters of ranks."""

    def __init__(
        self, model: ModelConfig, spelling: Spelling, layout: _Layout, weights: Mapping[str, StoredWeight]
    ):
        self._model, self._spelling, self._layout, self._weights = model, spelling, layout, weights
        self._per_rank = (model.num_experts or 0) // layout.ep

    def dense(self, units: Sequence[Sequence[MegatronTensor]], first: int, end: int) -> list[_Parameter]:
        """Return the parameters of a stage, without experts that ep divides."""
        own = [each for unit in units[first:end] for each in unit if not self._is_apart(each)]
        parameters = list(map(self.parameter, own))
        if self._model.tied_head and 0 < first < end == len(units):  # its copy of the embedding
            embedding = next(each for each in units[0] if each.name == EMBEDDING)
            parameters.append(self.parameter(embedding)._replace(tensor=HEAD, name=HEAD))
        return parameters

    def experts_apart(self, units: Sequence[Sequence[MegatronTensor]]) -> list[MegatronTensor]:
        """Return the experts of a stage, if ep divides them."""
        return [each for unit in units for each in unit if self._is_apart(each)]

    def _is_apart(self, tensor: MegatronTensor) -> bool:
        return tensor.expert is not None and self._layout.ep > 1

    def rank_of(self, expert: MegatronTensor) -> int:
        """Return the ep rank of an expert."""
        return (expert.expert or 0) // self._per_rank

    def parameter(self, tensor: MegatronTensor) -> _Parameter:
        first = 0 if tensor.expert is None else self.rank_of(tensor) * self._per_rank
        name = legacy_local(tensor, self._spelling, self._model, first)
        name = name if tensor.layer is None else f"{LAYERS}{tensor.layer}.{name}"
        ranks = self._layout.tp if tensor.expert is None else self._layout.expert_tp
        return _Parameter(tensor.name, name, self._shape(tensor, ranks), self._weights[tensor.name].dtype)

    def _shape(self, tensor: MegatronTensor, ranks: int) -> tuple[int, ...]:
        weight = self._weights[tensor.name]
        split = tensor.split
        if split is None and any(f".{module}." in tensor.name for module in DOWN) and weight.divided:
            split = 0
        return tuple(size // ranks if dim == split else size for dim, size in enumerate(weight.shape))


def _of_modules(spelling: Spelling, arguments: Mapping[str, Any]) -> Spelling:
    """Return the spelling of a checkpoint's modules, which torch_dist stores under the names of others."""
    fused = () if arguments.get("transformer_impl") == "local" else spelling.fused
    experts: Any = "grouped" if arguments.get("moe_grouped_gemm") else "local"
    return replace(spelling, fused=fused, experts=experts, stacked=False)


def _groups(files: DcpDirectory, names: Sequence[str]) -> dict[tuple[int, int], list[_Buffer]]:
    """Return (optimizer of the chain, group) → its buffers, in order."""
    shapes = {name: tensor.shape for name, tensor in files.tensors.items()}
    by_group: dict[tuple[int, int], dict[tuple[int, str], dict[int, str]]] = {}
    for name in names:
        chained, group, number, dtype, bucket, kind = _matched(name)
        bucket_name = name.removesuffix(f".{kind}")
        alike = {shapes.get(f"{bucket_name}.{each}") for each in KINDS}
        if len(shapes[name]) != 1 or alike != {shapes[name]}:
            raise CheckpointError(
                f"{files.directory} is damaged: expected {', '.join(KINDS)} of the same length in "
                f"{bucket_name}"
            )
        if kind == "param":
            buffer = by_group.setdefault((chained, group), {}).setdefault((number, dtype), {})
            buffer[bucket] = bucket_name
    return {
        group: [
            _Buffer(
                dtype,
                tuple(buckets[bucket] for bucket in sorted(buckets)),
                tuple(prod(files.tensors[f"{buckets[bucket]}.param"].shape) for bucket in sorted(buckets)),
            )
            for (_, dtype), buckets in sorted(buffers.items())
        ]
        for group, buffers in by_group.items()
    }


def _matched(name: str) -> tuple[int, int, int, str, int, str]:
    match = _BUCKET.fullmatch(name)
    assert match is not None
    chained, group, number, dtype, bucket, kind = match.groups()
    return int(chained or 0), int(group), int(number), dtype, int(bucket), kind


def _units(tensors: Sequence[MegatronTensor]) -> list[list[MegatronTensor]]:
    """Return what is not divided between stages: embeddings, each layer, and what follows the layers."""
    units: dict[int, list[MegatronTensor]] = {}
    last = 1 + max((each.layer for each in tensors if each.layer is not None), default=-1)
    for tensor in tensors:
        outside = -1 if tensor.name.startswith("embedding.") else last
        units.setdefault(outside if tensor.layer is None else tensor.layer, []).append(tensor)
    return [units[number] for number in sorted(units)]
