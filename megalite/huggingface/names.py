"""The place of each of our tensors in a Hugging Face model: one table per family, used by import, export and check.

A table maps each Hugging Face module to our modules; each has a weight, a bias or both. A fused module holds several of ours, in this
order, and a transposed module stores its matrix as [in, out]. In this package `theirs` is a Hugging Face name or tensor, `ours` megalite's.
Families that order heads or their channels in another way than megalite have places that list rows: see head_order.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING

from megalite.config.schema import ModelConfig
from megalite.huggingface.head_order import grouped_heads, rotated_channels, rows_of
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
        grouped: the module that holds queries, keys and values by key-value head: its queries, its keys, its values, then the next head's.
        interleaved: rotary embeddings rotate neighbouring channels.
        ignored: suffixes of names that are not weights (masks and frequencies, which older versions stored).
        multimodal: prefix of the whole names in files of a multimodal model, and the prefixes of its other parts, which are not read.
    """

    ends: dict[str, str]
    layers: str
    layer: dict[str, str]
    base: str = "model."
    transposed: tuple[str, ...] = ()
    grouped: str | None = None
    interleaved: bool = False
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)
    multimodal: tuple[str, tuple[str, ...]] | None = None


_ENDS = {"model.embed_tokens": "embedding", "model.norm": "norm", "lm_head": "head"}
_QKV = {"self_attn.q_proj": "attention.q", "self_attn.k_proj": "attention.k", "self_attn.v_proj": "attention.v"}
_GATE_UP = {"mlp.gate_proj": "mlp.gate", "mlp.up_proj": "mlp.up"}
_OUT = {"self_attn.o_proj": "attention.out", "mlp.down_proj": "mlp.down"}
_LINEARS = _QKV | _GATE_UP | _OUT
_EACH_HEAD = ("q_norm", "k_norm", "layernorm.norms.{}")
_STABLELM_NORM = {"self_attn.q_layernorm.norms.{}": "attention.q_norm", "self_attn.k_layernorm.norms.{}": "attention.k_norm"}
_QK_NORM = {"self_attn.q_norm": "attention.q_norm", "self_attn.k_norm": "attention.k_norm"}
_BEFORE = {"input_layernorm": "input_norm", "post_attention_layernorm": "mlp_norm"}
_AFTER = {"post_attention_layernorm": "attention.output_norm", "post_feedforward_layernorm": "mlp.output_norm"}
_AROUND = {"input_layernorm": "input_norm", "pre_feedforward_layernorm": "mlp_norm"} | _AFTER
_GATE_UP_FUSED = {"mlp.gate_up_proj": "mlp.gate mlp.up"}
_FUSED = {"self_attn.qkv_proj": "attention.q attention.k attention.v"} | _GATE_UP_FUSED | _OUT
_GPT2_LINEARS = {
    "attn.c_attn": "attention.q attention.k attention.v",
    "attn.c_proj": "attention.out",
    "mlp.c_fc": "mlp.up",
    "mlp.c_proj": "mlp.down",
}

_FALCON_LINEARS = {
    "self_attention.query_key_value": "attention.q attention.k attention.v",
    "self_attention.dense": "attention.out",
    "mlp.dense_h_to_4h": "mlp.up",
    "mlp.dense_4h_to_h": "mlp.down",
}
_NEOX_LINEARS = {theirs.replace("self_attention", "attention"): ours for theirs, ours in _FALCON_LINEARS.items()}
_ROTATED = ("q", "k", "q_norm", "k_norm")

_LLAMA = Names(_ENDS, "model.layers", _LINEARS | _BEFORE)
_FALCON = Names(
    {"transformer.word_embeddings": "embedding", "transformer.ln_f": "norm", "lm_head": "head"},
    "transformer.h",
    _BEFORE | _FALCON_LINEARS,
    base="transformer.",
    grouped="query_key_value",
)
FAMILY_NAMES = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "gemma", "smollm3", "granite", "nemotron", "ministral", "arcee"), _LLAMA),
    "qwen3": Names(_ENDS, "model.layers", _LINEARS | _BEFORE | _QK_NORM),
    **dict.fromkeys(("olmo2", "olmo3"), Names(_ENDS, "model.layers", _LINEARS | _AFTER | _QK_NORM)),
    "gemma2": Names(_ENDS, "model.layers", _LINEARS | _AROUND),
    "gemma3_text": Names(
        _ENDS,
        "model.layers",
        _LINEARS | _AROUND | _QK_NORM,
        multimodal=("language_model.", ("vision_tower.", "multi_modal_projector.")),
    ),
    **dict.fromkeys(("cohere", "cohere2"), Names(_ENDS, "model.layers", _LINEARS | _BEFORE | _QK_NORM, interleaved=True)),
    "stablelm": Names(_ENDS, "model.layers", _LINEARS | _BEFORE | _STABLELM_NORM),
    "starcoder2": Names(_ENDS, "model.layers", _LINEARS | _BEFORE | {"mlp.c_fc": "mlp.up", "mlp.c_proj": "mlp.down"}),
    "glm": Names(_ENDS, "model.layers", _QKV | _GATE_UP_FUSED | _OUT | _BEFORE, interleaved=True),
    "glm4": Names(
        _ENDS,
        "model.layers",
        _QKV
        | _GATE_UP_FUSED
        | _OUT
        | _BEFORE
        | {"post_self_attn_layernorm": "attention.output_norm", "post_mlp_layernorm": "mlp.output_norm"},
        interleaved=True,
    ),
    "gpt_neox": Names(
        {"gpt_neox.embed_in": "embedding", "gpt_neox.final_layer_norm": "norm", "embed_out": "head"},
        "gpt_neox.layers",
        _BEFORE | _NEOX_LINEARS,
        base="gpt_neox.",
        ignored=("rotary_emb.inv_freq", "attention.bias", "attention.masked_bias"),
        grouped="query_key_value",
    ),
    "falcon": _FALCON,
    "falcon, two_norms": replace(_FALCON, layer={"ln_attn": "input_norm", "ln_mlp": "mlp_norm"} | _FALCON_LINEARS),
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
    """The place of one of our tensors: rows of a Hugging Face tensor, in our order, or columns if it is transposed.

    Norms of each head are one matrix there, of `columns` columns, or one tensor a head: then `theirs` has {} where their numbers are.
    """

    theirs: str
    shape: tuple[int, ...]  # of the Hugging Face tensor, flattened if it has `columns`
    rows: range | tuple[int, ...]
    transposed: bool
    columns: int | None = None

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The names and shapes of the Hugging Face tensors."""
        if self.columns is None:
            return {self.theirs: self.shape}
        heads = self.shape[0] // self.columns
        if "{}" in self.theirs:
            return {self.theirs.format(head): (self.columns,) for head in range(heads)}
        return {self.theirs: (heads, self.columns)}

    @property
    def numel(self) -> int:
        """Number of elements of our tensor."""
        return len(self.rows) * prod(self.shape) // self.shape[1 if self.transposed else 0]

    def read(self, theirs: Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """A rectangle of our tensor, given the Hugging Face tensor of this `shape`: a view of it if the rows are consecutive."""
        rows, others = self._select(offsets, sizes)
        return (theirs.t() if self.transposed else theirs)[rows][(slice(None), *others)]

    def write(self, theirs: Tensor, offsets: Sequence[int], values: Tensor) -> None:
        """Write a rectangle of our tensor into the Hugging Face tensor."""
        rows, others = self._select(offsets, values.shape)
        (theirs.t() if self.transposed else theirs)[(rows, *others)] = values

    def _select(self, offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice | list[int], list[slice]]:
        """The rows of a rectangle, and its extent in the other dimensions."""
        rows = self.rows[offsets[0] : offsets[0] + sizes[0]]
        others = [slice(low, low + size) for low, size in zip(offsets[1:], sizes[1:], strict=True)]
        return slice(rows.start, rows.stop) if isinstance(rows, range) else list(rows), others


def names_of(model: ModelConfig, family: str) -> Names:
    """The table of a model's family; some have another one for another `parallel_block`."""
    return FAMILY_NAMES.get(f"{family}, {model.parallel_block}", FAMILY_NAMES[family])


def places(model: ModelConfig, family: str) -> dict[str, Place]:
    """Our global name → its place, for every weight of a model that the family can express, in the order of the model's units."""
    names = names_of(model, family)
    shapes = {segment.name: segment.shape for spec in model_specs(model) for segment in spec.segments}
    found: dict[str, Place] = {}
    for theirs, parts in _modules(names, model.num_hidden_layers):
        for suffix in ("weight", "bias"):
            own = [f"{part}.{suffix}" for part in parts if f"{part}.{suffix}" in shapes]
            if own:
                transposed = suffix == "weight" and theirs.endswith(names.transposed)
                joined = _joined(f"{theirs}.{suffix}", {name: shapes[name] for name in own}, transposed)
                if theirs.endswith(_EACH_HEAD) and model.qk_norm == "each_head":
                    joined = {name: replace(place, columns=model.head_size) for name, place in joined.items()}
                found |= {name: _ordered(name.removesuffix(f".{suffix}"), place, model, names) for name, place in joined.items()}
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
    rows = (range(start, start + size) for start, size in zip(starts, sizes, strict=False))
    return {name: Place(theirs, whole, own, transposed) for name, own in zip(parts, rows, strict=True)}


def _ordered(name: str, place: Place, model: ModelConfig, names: Names) -> Place:
    """The place with its rows in our order of heads and of their channels."""
    part = name.rpartition(".")[2]
    channels = rotated_channels(model.head_size, model.rotary_dim, names.interleaved) if part in _ROTATED else range(model.head_size)
    if names.grouped is not None and names.grouped in place.theirs:
        heads = grouped_heads(part, model.num_attention_heads, model.kv_heads)
    elif tuple(channels) != tuple(range(model.head_size)):
        heads = range(len(place.rows) // model.head_size)
    else:
        return place
    start = 0 if names.grouped else place.rows[0]
    return replace(place, rows=rows_of(tuple(heads), tuple(channels), start))
