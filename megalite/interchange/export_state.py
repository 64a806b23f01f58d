"""Tensors of a checkpoint as whole tensors of Megatron-LM, computed one at a time."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from megalite import checkpoint
from megalite.checkpoint import CheckpointError, Manifest
from megalite.checkpoint.inspect import whole
from megalite.config.sections.model import ModelConfig
from megalite.huggingface.router_bias import BIAS
from megalite.interchange.megatron_places import EMBEDDING, HEAD, MegatronTensor, router_biases
from megalite.interchange.megatron_source import MASTER, MODEL, MOMENTS
from megalite.parallel.spec import Rectangle


class StateToExport:
    """The weights, and the state of AdamW, of a checkpoint.

    Args:
        dtype: of the weights; None: as they are stored.
        wide: weights that keep their stored dtype in any case.
        rows: of embedding and head; those beyond the vocabulary are zero.
        optimizer: with state of the optimizer.
        distributed: of the distributed optimizer, which has master weights of all parameters.

    Raises:
        CheckpointError: tensors are missing.
    """

    def __init__(
        self,
        manifest: Manifest,
        model: ModelConfig,
        tensors: Mapping[str, MegatronTensor],
        *,
        dtype: torch.dtype | None,
        wide: Collection[str] = (),
        rows: int,
        optimizer: bool,
        distributed: bool = False,
    ):
        self.manifest, self.tensors, self.rows, self.distributed = manifest, tensors, rows, distributed
        self._wide, self._dtype, self._kinds = (
            frozenset(wide),
            dtype,
            (MODEL, *MOMENTS) if optimizer else (MODEL,),
        )
        self._biases = self._router_biases(model)
        self._full = {}
        for tensor in tensors.values():
            for part in tensor.parts:
                for kind in self._kinds:
                    name = _stored(kind, part.ours)
                    if name not in manifest.tensors:
                        raise CheckpointError(
                            f"{manifest.directory} does not contain the tensor {name} of its model"
                        )
                    self._full[name] = getattr(torch, manifest.tensors[name].dtype)

    def kinds(self, tensor: MegatronTensor) -> tuple[str, ...]:
        """Return the kinds of a tensor in an export: MODEL, MASTER of 16-bit or all parameters, MOMENTS."""
        if not tensor.parts or MOMENTS[0] not in self._kinds:
            return (MODEL,)
        has_master = self.distributed or self.dtype(MODEL, tensor).itemsize == 2
        return (MODEL, *([MASTER] if has_master else []), *MOMENTS)

    def dtype(self, kind: str, tensor: MegatronTensor) -> torch.dtype:
        """Return the dtype of a tensor."""
        if not tensor.parts:
            return torch.float32
        stored = self._full[_stored(kind, tensor.parts[0].ours)]
        return stored if kind != MODEL or self._dtype is None or tensor.name in self._wide else self._dtype

    def shape(self, tensor: MegatronTensor) -> tuple[int, ...]:
        """Return the shape with rows of padding."""
        return (self.rows, *tensor.shape[1:]) if tensor.name in (EMBEDDING, HEAD) else tensor.shape

    def values(self, kind: str, tensor: MegatronTensor) -> Tensor:
        """Compute a tensor of a kind."""
        if not tensor.parts:
            return self._biases[tensor.name]
        full = torch.zeros(
            (self.shape(tensor)[0], *tensor.flat[1:]), dtype=self._full[_stored(kind, tensor.parts[0].ours)]
        )
        for part in tensor.parts:
            name = _stored(kind, part.ours)
            stored = self.manifest.tensors[name]
            values = torch.empty((len(part.rows), *stored.shape[1:]), dtype=full.dtype)
            at = (part.first, *(0 for _ in stored.shape[1:]))
            checkpoint.load(self.manifest, [Rectangle(name, stored.shape, at, values)])
            if isinstance(part.rows, range):
                full[part.rows.start : part.rows.stop] = values
            else:
                full[list(part.rows)] = values
        return full.to(self.dtype(kind, tensor)).reshape(self.shape(tensor))

    def _router_biases(self, model: ModelConfig) -> dict[str, Tensor]:
        names = router_biases(model)
        if BIAS not in self.manifest.tensors:
            return {name: torch.zeros(model.num_experts or 0) for name in names.values()}
        stored = self.manifest.tensors[BIAS]
        bias = torch.from_numpy(whole(self.manifest, stored)).view(torch.float64).squeeze(-1)
        if not names and bias.any():
            raise CheckpointError(
                f"{self.manifest.directory} has biases of routers, but model.router_balance is not bias: "
                "Megatron-LM "
                "would have none"
            )
        return {name: bias[layer].float() for layer, name in names.items()}


def _stored(kind: str, ours: str) -> str:
    return f"{'weight' if kind in (MODEL, MASTER) else kind}/{ours}"
