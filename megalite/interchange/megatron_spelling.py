"""How a checkpoint of Megatron-LM spells the names of its tensors.

Names differ with the layer specification (Transformer Engine fuses a norm into the matrix that follows it),
the implementation of experts, and the format. torch_dist may store all layers as one tensor, and stores the
parts of in_proj and conv1d as tensors of their own. A spelling is what a checkpoint does in each of these,
found from its names (`spelling_of`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from megalite.config.sections.model import ModelConfig
from megalite.interchange.megatron_places import LAYERS, MegatronTensor

_QKV, _IN, _FC1 = (
    f"{module}.layer_norm_"
    for module in ("self_attention.linear_qkv", "self_attention.in_proj", "mlp.linear_fc1")
)
NORMS = {
    "attention": ("input_layernorm.", _QKV),
    "delta": ("input_layernorm.", _IN),
    "mamba": ("norm.", "mixer.in_proj.layer_norm_"),
    "feed_forward": ("pre_mlp_layernorm.", _FC1),
    "mixture": ("pre_mlp_layernorm.", _FC1),
    "q_latent": ("self_attention.q_layernorm.", "self_attention.linear_q_up_proj.layer_norm_"),
    "kv_latent": ("self_attention.kv_layernorm.", "self_attention.linear_kv_up_proj.layer_norm_"),
}
"""The norm of a block, or of a latent → how its names begin by itself, and fused into a matrix."""
IN_TRANSFORMER_ENGINE = tuple(name for name in NORMS if name != "mixture")
PARTS = {
    ("mixer.in_proj", 5): ("z", "x", "B", "C", "dt"),
    ("mixer.conv1d", 3): ("x", "B", "C"),
    ("self_attention.in_proj", 6): ("query", "key", "value", "z", "beta", "alpha"),
    ("self_attention.conv1d", 3): ("query", "key", "value"),
}
"""Module and number of its sections → what torch_dist appends to the name for each of them."""
_LOCAL_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.(weight|bias)")


@dataclass(frozen=True)
class Spelling:
    """The spelling of a checkpoint.

    Attributes:
        fused: norms that are fused into a matrix, names of NORMS.
        experts: names of experts in the legacy format: local_experts.N.linear_fc1.weight (SequentialMLP), or
            linear_fc1.weightN (TEGroupedMLP).
        stacked: whether torch_dist has one tensor for all layers.
        whole_down: whether each tp rank of the legacy format has the whole projections to latents, as with
            Transformer Engine.
    """

    fused: tuple[str, ...] = IN_TRANSFORMER_ENGINE
    experts: Literal["local", "grouped"] = "grouped"
    stacked: bool = False
    whole_down: bool = True

    def local(self, tensor: MegatronTensor, model: ModelConfig) -> str:
        """Return the name of a tensor in its layer, without regard to experts, or its whole name."""
        if tensor.layer is None:
            return tensor.name
        name = tensor.local
        for norm in _norms_of(name, tensor.layer, model):
            plain, fused = NORMS[norm]
            if norm in self.fused:
                return fused + name.removeprefix(plain)
        return name


@dataclass(frozen=True)
class DistPlace:
    """A tensor of torch_dist, or the part of it at some indices of its first dimensions."""

    key: str
    lead: tuple[int, ...]


def dist_places(tensor: MegatronTensor, spelling: Spelling, model: ModelConfig) -> list[DistPlace]:
    """Return where torch_dist has the sections of a tensor: one place for all, or one for each."""
    if tensor.layer is None:
        return [DistPlace(tensor.name, ())]
    name, lead = spelling.local(tensor, model), tuple[int, ...]()
    if match := _LOCAL_EXPERT.fullmatch(name):
        name, lead = f"mlp.experts.experts.{match[2]}.{match[3]}", (int(match[1]),)
    prefix = LAYERS if spelling.stacked else f"{LAYERS}{tensor.layer}."
    lead = (tensor.layer, *lead) if spelling.stacked else lead
    parts = PARTS.get((name.rpartition(".")[0], len(tensor.sections)))
    if parts is None:
        return [DistPlace(prefix + name, lead)]
    return [DistPlace(f"{prefix}{name}.{part}", lead) for part in parts]


def legacy_local(
    tensor: MegatronTensor, spelling: Spelling, model: ModelConfig, first_expert: int = 0
) -> str:
    """Return the name of a tensor in its layer of the legacy format.

    Args:
        first_expert: the first expert of the rank.
    """
    name = spelling.local(tensor, model)
    if match := _LOCAL_EXPERT.fullmatch(name):
        number = int(match[1]) - first_expert
        if spelling.experts == "grouped":
            return f"mlp.experts.{match[2]}.{match[3]}{number}"
        return f"mlp.experts.local_experts.{number}.{match[2]}.{match[3]}"
    return name


def spelling_of(stages: Iterable[Collection[str]], whole_down: bool) -> Spelling:
    """Return the spelling of a checkpoint.

    Args:
        stages: the names in each stage: every one numbers its layers.
    """
    layers: list[set[str]] = []
    stacked = True
    for names in stages:
        own: dict[str, set[str]] = {}
        for name in names:
            if name.startswith(LAYERS):
                number, _, rest = name.removeprefix(LAYERS).partition(".")
                stacked &= not number.isdigit()
                own.setdefault(number if number.isdigit() else "", set()).add(
                    rest if number.isdigit() else f"{number}.{rest}"
                )
        layers += own.values()
    fused = [norm for norm in NORMS if any(_has_fused(norm, each) for each in layers)]
    grouped = any(
        re.match(r"mlp\.experts\.linear_fc1\.(weight|bias)\d", name) for each in layers for name in each
    )
    return Spelling(tuple(fused), "grouped" if grouped else "local", stacked, whole_down)


def _has_fused(norm: str, names: set[str]) -> bool:
    """Return whether a layer with these names has a norm fused into a matrix."""
    mixture = any(name.startswith("mlp.experts.") for name in names)
    if norm in ("feed_forward", "mixture") and mixture != (norm == "mixture"):
        return False
    return any(name.startswith(NORMS[norm][1]) for name in names)


def _norms_of(name: str, layer: int, model: ModelConfig) -> Iterator[str]:
    """Yield the norms of a layer to which a name may belong."""
    kinds = model.block_names(layer)
    for norm, (plain, _) in NORMS.items():
        if name.startswith(plain) and (norm.endswith("_latent") or norm in kinds):
            yield norm
