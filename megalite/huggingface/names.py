"""The place of each of our tensors in a Hugging Face model: one table per family, used by import, export and check.

A table maps each Hugging Face module to our modules; each has a weight, a bias or both. A fused module holds several of ours, in this
order, and a transposed module stores its matrix as [in, out]. In this package `theirs` is a Hugging Face name or tensor, `ours` megalite's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING

from megalite.config.schema import ModelConfig
from megalite.model.parameters import model_specs

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Names:
    """A family's table.

    Attributes:
        ends: modules outside the layers.
        layers: prefix of the layers' names.
        layer: modules of one layer.
        base: prefix of the model without its head, which files of such a model do not have.
        transposed: modules whose matrix is stored as [in, out].
        ignored: suffixes of names that are not weights (masks and frequencies, which older versions stored).
    """

    ends: dict[str, str]
    layers: str
    layer: dict[str, str]
    base: str = "model."
    transposed: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)


_ENDS = {"model.embed_tokens": "embedding", "model.norm": "norm", "lm_head": "head"}
_QKV = {"self_attn.q_proj": "attention.q", "self_attn.k_proj": "attention.k", "self_attn.v_proj": "attention.v"}
_GATE_UP = {"mlp.gate_proj": "mlp.gate", "mlp.up_proj": "mlp.up"}
_OUT = {"self_attn.o_proj": "attention.out", "mlp.down_proj": "mlp.down"}
_LINEARS = _QKV | _GATE_UP | _OUT
_QK_NORM = {"self_attn.q_norm": "attention.q_norm", "self_attn.k_norm": "attention.k_norm"}
_BEFORE = {"input_layernorm": "input_norm", "post_attention_layernorm": "mlp_norm"}
_AFTER = {"post_attention_layernorm": "attention.output_norm", "post_feedforward_layernorm": "mlp.output_norm"}
_AROUND = {"input_layernorm": "input_norm", "pre_feedforward_layernorm": "mlp_norm"} | _AFTER
_FUSED = {"self_attn.qkv_proj": "attention.q attention.k attention.v", "mlp.gate_up_proj": "mlp.gate mlp.up"} | _OUT
_GPT2_LINEARS = {
    "attn.c_attn": "attention.q attention.k attention.v",
    "attn.c_proj": "attention.out",
    "mlp.c_fc": "mlp.up",
    "mlp.c_proj": "mlp.down",
}

_LLAMA = Names(_ENDS, "model.layers", _LINEARS | _BEFORE)
FAMILY_NAMES = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "gemma", "smollm3"), _LLAMA),
    "qwen3": Names(_ENDS, "model.layers", _LINEARS | _BEFORE | _QK_NORM),
    "olmo2": Names(_ENDS, "model.layers", _LINEARS | _AFTER | _QK_NORM),
    "gemma2": Names(_ENDS, "model.layers", _LINEARS | _AROUND),
    "phi3": Names(_ENDS, "model.layers", _FUSED | _BEFORE),
    "gpt2": Names(
        {"transformer.wte": "embedding", "transformer.wpe": "positions", "transformer.ln_f": "norm", "lm_head": "head"},
        "transformer.h",
        {"ln_1": "input_norm", "ln_2": "mlp_norm"} | _GPT2_LINEARS,
        base="transformer.",
        transposed=tuple(_GPT2_LINEARS),
        ignored=("attn.bias", "attn.masked_bias"),
    ),
}


@dataclass(frozen=True)
class Place:
    """The place of one of our tensors: rows [start, start + size) of a Hugging Face tensor, or these columns if it is transposed."""

    theirs: str
    shape: tuple[int, ...]  # of the Hugging Face tensor
    start: int
    size: int
    transposed: bool

    @property
    def numel(self) -> int:
        """Number of elements of our tensor."""
        return self.size * prod(self.shape) // self.shape[1 if self.transposed else 0]

    def view(self, theirs: Tensor) -> Tensor:
        """Our tensor, as a view of the Hugging Face tensor."""
        if self.transposed:
            return theirs.narrow(1, self.start, self.size).t()
        return theirs.narrow(0, self.start, self.size)


def places(model: ModelConfig, family: str) -> dict[str, Place]:
    """Our global name → its place, for every weight of a model that the family can express, in the order of the model's units."""
    names = FAMILY_NAMES[family]
    shapes = {segment.name: segment.shape for spec in model_specs(model) for segment in spec.segments}
    found: dict[str, Place] = {}
    for theirs, parts in _modules(names, model.num_hidden_layers):
        for suffix in ("weight", "bias"):
            own = [f"{part}.{suffix}" for part in parts if f"{part}.{suffix}" in shapes]
            if own:
                transposed = suffix == "weight" and theirs.endswith(names.transposed)
                found |= _joined(f"{theirs}.{suffix}", {name: shapes[name] for name in own}, transposed)
    if homeless := shapes.keys() - found.keys():
        raise AssertionError(f"the table of {family} has no place for {sorted(homeless)}")
    return {name: found[name] for name in shapes}


def _modules(names: Names, layers: int) -> Iterator[tuple[str, list[str]]]:
    """Each Hugging Face module with our modules in it."""
    for theirs, ours in names.ends.items():
        yield theirs, [ours]
    for layer in range(layers):
        for theirs, ours in names.layer.items():
            yield f"{names.layers}.{layer}.{theirs}", [f"layers.{layer}.{part}" for part in ours.split()]


def _joined(theirs: str, parts: dict[str, tuple[int, ...]], transposed: bool) -> dict[str, Place]:
    """The places of our tensors that one Hugging Face tensor consists of."""
    sizes = [shape[0] for shape in parts.values()]
    width = next(iter(parts.values()))[1:]
    whole = (*width, sum(sizes)) if transposed else (sum(sizes), *width)
    starts = accumulate(sizes, initial=0)
    return {name: Place(theirs, whole, start, size, transposed) for name, start, size in zip(parts, starts, sizes, strict=False)}
