"""LoRA adapters of a checkpoint and their merge into the weights, in at least fp32.

A weight becomes W + scale · B A; with trained row lengths (DoRA) each of its rows is then multiplied by (‖W‖
+ δ) / ‖W + scale · B A‖.
"""

from __future__ import annotations

from collections.abc import Mapping
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
from megalite.model.spec_builder import REWARD


def adapted(model: ModelConfig, lora: LoraConfig) -> dict[str, str]:
    """Return the weights with adapters in model order: name → role."""
    return {
        each.name: each.role
        for spec in model_specs(model)
        for each in spec.segments
        if lora.adapts(each.role)
    }


def saved(model: ModelConfig, lora: LoraConfig) -> list[str]:
    """Return the tensors of the model that are trained next to the adapters.

    These are those of `lora.modules_to_save`, and the head of a reward model.
    """
    wanted = (*(lora.modules_to_save or ()), REWARD) if lora.rank else ()
    return [each.name for spec in model_specs(model) for each in spec.segments if each.role in wanted]


def parts_of(lora: LoraConfig) -> tuple[str, ...]:
    """Return the tensors of one adapter."""
    return (A, B, MAGNITUDE) if lora.dora else (A, B)


@dataclass(frozen=True)
class LowRankUpdate:
    """Low-rank update of one weight: A [rank, in], B [out, rank] and the factor on B A.

    With DoRA, δ [out] has been added to the lengths of the rows.

    Those of a layer's experts are stacked: A [experts · rank, in], B [experts · out, rank].
    """

    a: Tensor
    b: Tensor
    scale: float
    delta: Tensor | None = None

    def added(self, values: Tensor, rows: slice = slice(None), columns: slice = slice(None)) -> Tensor:
        """Return a part of W + scale · B A, in at least fp32."""
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
    """Adapters of a checkpoint by adapted weight, in their stored dtype. Empty without lora.rank.

    Args:
        factors: of weights that are multiplied besides, adapted or not.
    """

    def __init__(self, manifest: Manifest, factors: Mapping[str, float] = {}):
        self.multiplied = factors
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
        """Read a whole tensor of the checkpoint."""
        stored = self.manifest.tensors[WEIGHT + name]
        return torch.from_numpy(whole(self.manifest, stored)).view(getattr(torch, stored.dtype)).squeeze(-1)

    def row_lengths(self, name: str, merged: bool = False) -> Tensor:
        """Return the row lengths of a weight, as it is or `merged` with B A, in at least fp32."""
        weight = self.read(name)
        values = self.pairs[name].added(weight) if merged else weight
        return torch.linalg.vector_norm(values, dim=1, dtype=torch.promote_types(values.dtype, torch.float32))

    def _factors(self, name: str) -> Tensor:
        """Return (‖W‖ + δ) / ‖W + scale · B A‖ of each row of a weight.

        As in training, it is 1 for rows of length 0.
        """
        pair, lengths = self.pairs[name], self.row_lengths(name, merged=True)
        assert pair.delta is not None
        return torch.where(lengths == 0, 1, (self.row_lengths(name) + pair.delta) / lengths)

    def merged(self, name: str, chunk: Chunk, values: Tensor) -> Tensor:
        """Return the values of a chunk merged with its part of the adapter, if the weight has one."""
        if name in self.pairs:
            rows, columns = (
                slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True)
            )
            values = self._with_adapter(name, values, rows, columns)
        return self._multiplied(name, values)

    def whole(self, name: str) -> Tensor:
        """Return a whole weight, merged as by `merged`."""
        values = self.read(name)
        return self._multiplied(name, self._with_adapter(name, values) if name in self.pairs else values)

    def _with_adapter(
        self, name: str, values: Tensor, rows: slice = slice(None), columns: slice = slice(None)
    ) -> Tensor:
        pair = self.pairs[name]
        added = pair.added(values, rows, columns)
        return added if pair.delta is None else added * self.factors(name)[rows].unsqueeze(1)

    def _multiplied(self, name: str, values: Tensor) -> Tensor:
        return values * self.multiplied[name] if name in self.multiplied else values
