"""The adapters of a checkpoint (LoRA), and their merge into the adapted weights, in at least fp32.

A weight becomes W + scale · B A; with trained row lengths (DoRA) each of its rows is then multiplied by (‖W‖
+ δ) / ‖W + scale · B A‖.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from megalite.checkpoint import Manifest
from megalite.checkpoint.checksummed_chunks import Chunk
from megalite.checkpoint.inspect import whole
from megalite.checkpoint.manifest import WEIGHT
from megalite.config.load import from_dict
from megalite.config.sections.lora import LoraConfig
from megalite.config.sections.model import ModelConfig
from megalite.model.adapter_parameters import MAGNITUDE, A, B, name_of
from megalite.model.parameters import model_specs


def adapted(model: ModelConfig, lora: LoraConfig) -> dict[str, str]:
    """The weights with adapters, in the order of the model: name → role."""
    return {
        each.name: each.role
        for spec in model_specs(model)
        for each in spec.segments
        if lora.adapts(each.role)
    }


def saved(model: ModelConfig, lora: LoraConfig) -> list[str]:
    """The model's own tensors that are trained next to the adapters (`lora.modules_to_save`)."""
    wanted = (lora.rank and lora.modules_to_save) or ()
    return [each.name for spec in model_specs(model) for each in spec.segments if each.role in wanted]


def parts_of(lora: LoraConfig) -> tuple[str, ...]:
    """The tensors of one adapter."""
    return (A, B, MAGNITUDE) if lora.dora else (A, B)


@dataclass(frozen=True)
class LowRankUpdate:
    """One weight's A [rank, in], B [out, rank] and factor on B A; δ [out] is what has been added to the rows'
    lengths (DoRA).

    Those of a layer's experts are stacked: A [experts · rank, in], B [experts · out, rank].
    """

    a: Tensor
    b: Tensor
    scale: float
    delta: Tensor | None = None

    def added(self, values: Tensor, rows: slice = slice(None), columns: slice = slice(None)) -> Tensor:
        """A part of W plus that of scale · B A, in at least fp32."""
        dtype = torch.promote_types(torch.promote_types(values.dtype, self.a.dtype), torch.float32)
        a, b, added = self.a[:, columns].to(dtype), self.b[rows].to(dtype), values.to(dtype, copy=True)
        rank = b.shape[1]
        each = len(self.b) * rank // len(self.a)  # rows of one expert; all rows of another weight
        first, start = rows.start or 0, 0
        while start < len(b):
            expert, within = divmod(first + start, each)
            stop = min(start + each - within, len(b))
            added[start:stop].addmm_(b[start:stop], a[expert * rank : (expert + 1) * rank], alpha=self.scale)
            start = stop
        return added


class Adapters:
    """The adapters of a checkpoint by adapted weight, in their stored dtype. Empty without lora.rank."""

    def __init__(self, manifest: Manifest):
        config = from_dict(manifest.state["config"])
        self.manifest, self.model, self.lora = manifest, config.model, config.lora
        self.pairs = {
            name: self._pair(name, role) for name, role in adapted(config.model, config.lora).items()
        }
        self.factors = cache(self._factors)

    def _pair(self, weight: str, role: str) -> LowRankUpdate:
        a, b, *delta = (self.read(name_of(weight, part)) for part in parts_of(self.lora))
        return LowRankUpdate(a, b, self.lora.scale_of(role), *delta)

    def read(self, name: str) -> Tensor:
        """A whole tensor of the checkpoint."""
        stored = self.manifest.tensors[WEIGHT + name]
        return torch.from_numpy(whole(self.manifest, stored)).view(getattr(torch, stored.dtype)).squeeze(-1)

    def row_lengths(self, name: str, merged: bool = False) -> Tensor:
        """The lengths of the rows of a weight, as it is or `merged` with B A, in at least fp32."""
        weight = self.read(name)
        values = self.pairs[name].added(weight) if merged else weight
        return torch.linalg.vector_norm(values, dim=1, dtype=torch.promote_types(values.dtype, torch.float32))

    def _factors(self, name: str) -> Tensor:
        """(‖W‖ + δ) / ‖W + scale · B A‖ of each row of a weight; 1 for rows of length 0, as in training."""
        pair, lengths = self.pairs[name], self.row_lengths(name, merged=True)
        assert pair.delta is not None
        return torch.where(lengths == 0, 1, (self.row_lengths(name) + pair.delta) / lengths)

    def merged(self, name: str, chunk: Chunk, values: Tensor) -> Tensor:
        """A chunk's values with its part of the adapter; unchanged if the weight has none."""
        if name not in self.pairs:
            return values
        pair = self.pairs[name]
        rows, columns = (
            slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True)
        )
        added = pair.added(values, rows, columns)
        if pair.delta is None:
            return added
        return added * self.factors(name)[rows].unsqueeze(1)
