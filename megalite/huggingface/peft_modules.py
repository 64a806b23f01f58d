"""Location of adapter tensors in PEFT's files, for export and import.

PEFT has one A and one B for each module of a Hugging Face model, in any floating-point dtype; with DoRA also
the lengths of the adapted rows; and modules that are trained in full:

    base_model.model.MODULE.lora_A.weight  [rank, in]      base_model.model.MODULE.lora_B.weight  [out, rank]
    base_model.model.MODULE.lora_magnitude_vector  [out]   base_model.model.MODULE.weight

If a module fuses n of our projections (Phi-3's qkv_proj, GPT-2's c_attn), the rank of its adapter is the sum
of theirs: A is our A's concatenated by rows, and B is block-diagonal with our B's. An import also accepts a
single A for all of them, which each of our projections copies.

The experts of a layer are two fused parameters there, gate and up together and down, each with an adapter of
its own (target_parameters). Rows of B are those of the parameter, in gpt-oss gate and up in turns:

    base_model.model.MODULE.base_layer.lora_A.weight  [experts · rank, in]
    base_model.model.MODULE.base_layer.lora_B.weight  [out, rank · experts], a column an expert
    base_model.model.MODULE.lora_A.weight             the same of down, or of the only parameter that has an
                                                      adapter

In families whose experts transformers 5 fuses, PEFT takes gate_proj, up_proj and down_proj in target_modules
for those experts, whatever is before them, and adapts no module of these names (`_convert_peft_config_moe` in
peft.utils.transformers_weight_conversion). Those of dense layers and of shared experts are therefore given as
target_parameters, MODULE.weight: the tensors and their names are the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.config.sections.lora import LoraConfig
from megalite.config.sections.model import ModelConfig
from megalite.huggingface.merging import saved
from megalite.huggingface.tensor_places import TensorPlace

PREFIX = "base_model.model."
EMBEDDING = "embedding.weight"
FUSED_FAMILIES = (
    *("afmoe", "cohere2_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "ernie4_5_moe"),
    *("exaone_moe", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "hunyuan_v1_moe", "qwen3_moe", "qwen3_next"),
    "solar_open",
)
"""Families whose dense layers or shared experts PEFT cannot find by these names."""
_MIXERS = ("refuses", ".out_proj", "mamba_o")
REFUSED = {
    "falcon_h1": _MIXERS,
    "nemotron_h": _MIXERS,
    "laguna": ("does not load", ".shared_experts.", "gate, up and down"),
}
"""Family → what PEFT does with adapters of modules that have this in their names, and the targets that are
these modules. It renames Laguna's to names that no module has."""
_TAKEN = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class AdaptedModule:
    """A Hugging Face module with the adapted weights that it contains."""

    name: str
    weights: dict[str, TensorPlace]

    def keys(self, dora: bool) -> list[str]:
        """Return PEFT's names of A, B and the magnitudes."""
        return [
            f"{PREFIX}{self.name}.{part}"
            for part in ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")[: 3 if dora else 2]
        ]

    @property
    def shape(self) -> tuple[int, int]:
        """Number of outputs and inputs of the whole module."""
        place = next(iter(self.weights.values()))
        outputs, inputs = reversed(place.shape) if place.transposed else place.shape
        return outputs, inputs

    @property
    def transposed(self) -> bool:
        return any(place.transposed for place in self.weights.values())

    def as_weight(self, family: str) -> bool:
        """Return whether PEFT must target the weight, which it otherwise takes for an expert."""
        return family in FUSED_FAMILIES and self.name.rpartition(".")[2] in _TAKEN

    def rows(self, weight: str) -> list[int]:
        """Return the outputs of the module that belong to one of our weights, in our order."""
        return list(self.weights[weight].rows)

    def all_weights(self, places: dict[str, TensorPlace]) -> dict[str, list[int]]:
        """Return all our weights in the module, including those without adapters, with their rows."""
        return {
            name: list(place.rows) for name, place in places.items() if place.theirs == f"{self.name}.weight"
        }


@dataclass(frozen=True)
class FusedExperts(AdaptedModule):
    """A fused parameter of a layer's experts.

    Attributes:
        inner: the other parameter also has an adapter, which PEFT wraps around this one.
    """

    inner: bool

    @property
    def _place(self) -> TensorPlace:
        return next(iter(self.weights.values()))

    def keys(self, dora: bool) -> list[str]:
        stem = self.name.rpartition(".")[0] + (".base_layer" if self.inner else "")
        return [f"{PREFIX}{stem}.{part}" for part in ("lora_A.weight", "lora_B.weight")]

    def as_weight(self, family: str) -> bool:
        return False

    @property
    def number(self) -> int:
        """Number of experts."""
        return self._place.experts or len({piece[0] for piece in self._place.pieces})

    @property
    def shape(self) -> tuple[int, int]:
        """Number of outputs and inputs of one expert."""
        rows, columns = self._place.shape
        return rows // self.number, columns

    def to_peft(self, b: Tensor) -> Tensor:
        """Convert our B [experts · out, rank] to [out, rank · experts]."""
        theirs = torch.empty_like(b)
        self._place.write(theirs, (0, 0), b)
        return theirs.view(self.number, -1, b.shape[1]).permute(1, 2, 0).flatten(1)

    def from_peft(self, b: Tensor) -> Tensor:
        """Apply the inverse of `to_peft`."""
        theirs = b.view(len(b), -1, self.number).permute(2, 0, 1).flatten(0, 1)
        return self._place.read(theirs, (0, 0), theirs.shape)


def modules_of(places: dict[str, TensorPlace], weights: Iterable[str]) -> list[AdaptedModule]:
    """Return the Hugging Face modules that contain our adapted weights."""
    grouped: dict[str, dict[str, TensorPlace]] = {}
    weights = list(weights)
    for name in weights:
        grouped.setdefault(module_of(places[name]), {})[name] = places[name]
    return [
        _experts(own, weights) if _stacked(own) else AdaptedModule(name, own) for name, own in grouped.items()
    ]


def _stacked(own: dict[str, TensorPlace]) -> bool:
    return any(place.pieces or place.experts for place in own.values())


def _experts(own: dict[str, TensorPlace], weights: Collection[str]) -> FusedExperts:
    """Return the fused parameter with the weights `own`."""
    (name, place), *_ = own.items()
    theirs = (place if place.experts else place.fused()).theirs
    return FusedExperts(theirs, own, name.replace(".in.", ".down.") in weights and ".in." in name)


def module_of(place: TensorPlace) -> str:
    return place.theirs.removesuffix(".weight").removesuffix(".bias")


def saved_keys(
    model: ModelConfig, lora: LoraConfig, places: dict[str, TensorPlace], head: str
) -> dict[str, list[str]]:
    """Return our tensors that are trained in full → their names in PEFT.

    A per-head norm has several names.

    Args:
        head: the module of the model's head. A tied one is stored next to the embedding, with the same
            values, as PEFT does.
    """
    keys = {name: [PREFIX + theirs for theirs in places[name].tensors] for name in saved(model, lora)}
    if model.tied_head and EMBEDDING in keys:
        keys[EMBEDDING].append(f"{PREFIX}{head}.weight")
    return keys
