"""The adapters of a checkpoint (LoRA), and their merge into the adapted weights: W + alpha / rank · B A, in at least fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from megalite.checkpoint import Manifest
from megalite.checkpoint.inspect import WEIGHT, whole
from megalite.checkpoint.manifest import Chunk
from megalite.config.load import from_dict
from megalite.config.schema import LoraConfig, ModelConfig
from megalite.model.parameters import model_specs


def adapted(model: ModelConfig, lora: LoraConfig) -> list[str]:
    """Names of the weights with adapters, in the order of the model."""
    return [segment.name for spec in model_specs(model) for segment in spec.segments if lora.adapts(segment.role)]


def adapter_names(weight: str) -> tuple[str, str]:
    """Names of A and B of a weight."""
    return weight.removesuffix("weight") + "lora_a", weight.removesuffix("weight") + "lora_b"


class Adapters:
    """The adapters of a checkpoint by adapted weight: A [rank, in] and B [out, rank], in their stored dtype. Empty without lora.rank."""

    def __init__(self, manifest: Manifest):
        config = from_dict(manifest.state["config"])
        self.manifest, self.lora = manifest, config.lora
        self.scale = config.lora.alpha / max(config.lora.rank, 1)
        self.pairs = {name: (self._read(a), self._read(b)) for name in adapted(config.model, config.lora) for a, b in [adapter_names(name)]}

    def _read(self, name: str) -> Tensor:
        stored = self.manifest.tensors[WEIGHT + name]
        return torch.from_numpy(whole(self.manifest, stored)).view(getattr(torch, stored.dtype)).squeeze(-1)

    def merged(self, name: str, chunk: Chunk, values: Tensor) -> Tensor:
        """A chunk's values plus its part of alpha / rank · B A; unchanged if the weight has no adapter."""
        if name not in self.pairs:
            return values
        a, b = self.pairs[name]
        rows, columns = (slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
        accumulate_dtype = torch.promote_types(torch.promote_types(values.dtype, a.dtype), torch.float32)
        return torch.addmm(values.to(accumulate_dtype), b[rows].to(accumulate_dtype), a[:, columns].to(accumulate_dtype), alpha=self.scale)
