"""Mapping of our tensors to those of a Hugging Face model, for import, export and check.

The names come from the family's table (`config.family_names`). In this package `theirs` is a Hugging Face
name or tensor, `ours` megalite's. Families that order heads or their channels in another way than megalite
have places that list rows: see head_order.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product
from math import prod
from typing import TYPE_CHECKING

from megalite.config.sections.model import ModelConfig
from megalite.families.module_names import CONVOLUTIONS, EACH_HEAD, MTP_COPIES, Names, names_of
from megalite.huggingface.head_order import (
    by_head,
    decoupled_channels,
    grouped_heads,
    rotated_channels,
    rows_of,
)
from megalite.model.mtp.losses import layer_count
from megalite.model.parameters import model_specs, weight_shapes

if TYPE_CHECKING:
    from torch import Tensor

_ROTATED = ("q", "k", "q_norm", "k_norm")


@dataclass(frozen=True)
class TensorPlace:
    """The place of one of our tensors: rows of a Hugging Face tensor, or columns if it is transposed.

    Norms of each head are one matrix there, of `columns` columns, or one tensor a head: then `theirs` has {}
    where their numbers are. The experts of a layer are many tensors of equal shape, our rows in this order:
    `pieces` completes their names in `theirs`. In a fused file they are one tensor [experts, rows, columns],
    with `experts` set; with `each_transposed` [experts, columns, rows]. A tensor that has further dimensions
    of one element there, such as the weights of a convolution, has that shape as `stored_shape`.
    """

    theirs: str
    shape: tuple[int, ...]  # of the Hugging Face tensor, flattened if it has `columns`
    rows: range | tuple[int, ...]
    transposed: bool
    columns: int | None = None
    pieces: tuple[tuple[int | str, ...], ...] = ()
    experts: int | None = None
    each_transposed: bool = False
    stored_shape: tuple[int, ...] | None = None

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The names and shapes of the Hugging Face tensors."""
        if self.stored_shape is not None and not self.pieces:
            return {self.theirs: self.stored_shape}
        if self.pieces:
            rows = -(-self.shape[0] // len(self.pieces))  # the last one may have fewer
            sizes = [min(rows, self.shape[0] - start) for start in range(0, self.shape[0], rows)]
            others = (1, *self.shape[1:]) if self.stored_shape is not None else self.shape[1:]
            return {
                self.theirs.format(*piece): (size, *others)
                for piece, size in zip(self.pieces, sizes, strict=True)
            }
        if self.experts is not None:
            rows, *columns = self.shape[0] // self.experts, *self.shape[1:]
            return {
                self.theirs: (self.experts, *columns, rows)
                if self.each_transposed
                else (self.experts, rows, *columns)
            }
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

    def fused(self) -> TensorPlace:
        """Return the place of a layer's experts in a file with fused experts, as in transformers 5."""
        down = "{}.{}" not in self.theirs
        stem = self.theirs.partition("experts.{}")[0].replace("block_sparse_moe", "mlp")
        experts = len({piece[0] for piece in self.pieces})
        parts = {str(piece[1]) for piece in self.pieces if len(piece) > 1}
        into = "gate_up_proj" if len(parts) > 1 else next(iter(parts), "")
        return replace(
            self,
            theirs=f"{stem}experts.{'down_proj' if down else into}",
            pieces=(),
            experts=experts,
        )

    def flat(self, experts: Tensor) -> Tensor:
        """Return some experts of a fused tensor, with the rows of all experts concatenated."""
        return (experts.transpose(1, 2) if self.each_transposed else experts).flatten(0, 1)

    def stored(self, whole: Tensor) -> Tensor:
        """Apply the inverse of `flat`; the result is contiguous. Other places return the tensor unchanged."""
        return (
            whole.unflatten(0, (self.experts, -1)).transpose(1, 2).contiguous()
            if self.each_transposed
            else whole
        )

    def read(self, theirs: Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Read a rectangle of our tensor from the Hugging Face tensor of this `shape`.

        The result is a view if the rows are consecutive.
        """
        rows, others = self._select(offsets, sizes)
        return (theirs.t() if self.transposed else theirs)[rows][(slice(None), *others)]

    def write(self, theirs: Tensor, offsets: Sequence[int], values: Tensor) -> None:
        """Write a rectangle of our tensor into the Hugging Face tensor."""
        rows, others = self._select(offsets, values.shape)
        (theirs.t() if self.transposed else theirs)[(rows, *others)] = values

    def _select(self, offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice | list[int], list[slice]]:
        """Return the rows of a rectangle, and its extent in the other dimensions."""
        rows = self.rows[offsets[0] : offsets[0] + sizes[0]]
        others = [slice(low, low + size) for low, size in zip(offsets[1:], sizes[1:], strict=True)]
        return slice(rows.start, rows.stop) if isinstance(rows, range) else list(rows), others


def places(model: ModelConfig, family: str) -> dict[str, TensorPlace]:
    """Return global name → place for all weights of a model, in the order of its units."""
    tensor_places = named_places(model, names_of(model, family))
    shapes = [segment.name for spec in model_specs(model) for segment in spec.segments]
    if homeless := set(shapes) - tensor_places.keys():
        raise AssertionError(f"the table of {family} has no place for {sorted(homeless)}")
    return {name: tensor_places[name] for name in shapes}


def named_places(model: ModelConfig, names: Names) -> dict[str, TensorPlace]:
    """Return global name → place for the weights of a model that a table of names has."""
    shapes = weight_shapes(model)
    tensor_places: dict[str, TensorPlace] = {}
    for theirs, parts in _modules(names, model):
        tensor_places |= {part: _single(theirs, shapes[part], model) for part in parts if part in shapes}
        for suffix in ("weight", "bias"):
            own = [f"{part}.{suffix}" for part in parts if f"{part}.{suffix}" in shapes]
            if own:
                transposed = suffix == "weight" and theirs.endswith(names.transposed)
                if theirs.endswith(names.bare):
                    tensor_places |= _bare(theirs, own[0], shapes[own[0]], model)
                    continue
                if "experts.{}" in theirs:
                    experts = _experts(f"{theirs}.{suffix}", shapes[own[0]], model.num_experts or 0, names)
                    tensor_places[own[0]] = experts.fused() if names.stacked else experts
                    continue
                if own[0].endswith((".experts.in.weight", ".experts.down.weight")):
                    tensor_places[own[0]] = _stacked(f"{theirs}.{suffix}", shapes[own[0]], model)
                    continue
                joined = _joined(f"{theirs}.{suffix}", {name: shapes[name] for name in own}, transposed)
                if suffix == "weight" and theirs.endswith(CONVOLUTIONS):
                    joined = {name: _convolution(place) for name, place in joined.items()}
                if theirs.endswith(EACH_HEAD) and model.qk_norm == "each_head":
                    joined = {name: replace(place, columns=model.head_size) for name, place in joined.items()}
                tensor_places |= {
                    name: _ordered(name.removesuffix(f".{suffix}"), place, model, names)
                    for name, place in joined.items()
                }
    return tensor_places


def _experts(theirs: str, shape: tuple[int, ...], number: int, names: Names) -> TensorPlace:
    """Return the place of a layer's experts, with the modules of `names.expert` in each expert."""
    parts = names.expert if "{}.{}" in theirs else ()
    pieces = product(range(number), parts) if parts else product(range(number))
    return TensorPlace(theirs, shape, range(shape[0]), False, pieces=tuple(pieces))


def _stacked(theirs: str, shape: tuple[int, ...], model: ModelConfig) -> TensorPlace:
    """Return the place of a layer's experts in a family whose files have one tensor of all of them."""
    return TensorPlace(theirs, shape, range(shape[0]), False, experts=model.num_experts or 0)


def _single(theirs: str, shape: tuple[int, ...], model: ModelConfig) -> TensorPlace:
    """Return the place of a tensor that is named like a module.

    Logarithms of a decay by channel are [1, 1, heads, 1] there.
    """
    by_channel = theirs.endswith("A_log") and model.delta_decay == "channel"
    stored_shape = (1, 1, *shape, 1) if by_channel else None
    return TensorPlace(theirs, shape, range(shape[0]), False, stored_shape=stored_shape)


def _convolution(place: TensorPlace) -> TensorPlace:
    """Return the place in the weights of a convolution, [channels, 1, taps] there."""
    channels, taps = place.shape
    return replace(place, stored_shape=(channels, 1, taps))


def evenly_cut(
    by_name: dict[str, TensorPlace], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, TensorPlace]:
    """Return the places in a file that has the convolutions of q, k and v in three tensors of equal size.

    Where transformers writes three tensors, it cuts the weights of all channels evenly, and it reads them one
    after the other.

    Args:
        shapes: those of the tensors in the file.
    """
    cut = dict(by_name)
    for name, place in by_name.items():
        if not (name.endswith(".conv_q.weight") and "q_conv1d" in place.theirs):
            continue
        parts = [name.replace(".conv_q.", f".conv_{part}.") for part in "qkv"]
        sizes, taps = [len(by_name[part].rows) for part in parts], place.shape[1]
        whole = TensorPlace(
            place.theirs.replace("q_conv1d", "{}_conv1d"),
            (sum(sizes), taps),
            range(sum(sizes)),
            False,
            pieces=(("q",), ("k",), ("v",)),
            stored_shape=(sum(sizes), 1, taps),
        )
        if len({*sizes}) > 1 and all(shapes.get(theirs) == shape for theirs, shape in whole.tensors.items()):
            starts = accumulate(sizes, initial=0)
            for part, start, size in zip(parts, starts, sizes, strict=False):
                cut[part] = replace(whole, rows=range(start, start + size))
    return cut


def _bare(theirs: str, ours: str, shape: tuple[int, ...], model: ModelConfig) -> dict[str, TensorPlace]:
    """Return the place of a tensor whose name has no .weight or .bias.

    These are sinks, and stacked experts [experts, in, out] with interleaved gate and up, as in gpt-oss.
    """
    name = f"{theirs}_bias" if ours.endswith(".bias") else theirs
    if "experts" not in theirs:
        return {ours: TensorPlace(name, shape, range(shape[0]), False)}
    experts, each = model.num_experts or 0, shape[0] // (model.num_experts or 1)
    turns = "gate_up" in theirs
    rows = (
        rows_of(tuple(range(experts)), (*range(0, each, 2), *range(1, each, 2)), 0)
        if turns
        else range(shape[0])
    )
    return {ours: TensorPlace(name, shape, rows, False, experts=experts, each_transposed=len(shape) == 2)}


def copies(model: ModelConfig, family: str) -> dict[str, str]:
    """Return tensors that repeat a whole tensor of ours → its global name.

    Multi-token prediction modules share tensors with the model.
    """
    names = names_of(model, family)
    layers = range(model.num_hidden_layers, layer_count(model)) if names.mtp else ()
    head = "embedding" if model.tied_head else "head"
    shared = {theirs: head if ours == "head" else ours for theirs, ours in MTP_COPIES.items()}
    return {
        f"{names.layers}.{layer}.{theirs}.weight": f"{ours}.weight"
        for layer in layers
        for theirs, ours in shared.items()
    }


def _modules(names: Names, model: ModelConfig) -> Iterator[tuple[str, list[str]]]:
    """Yield each Hugging Face module with our modules in it."""
    for theirs, ours in names.ends.items():
        yield theirs, [ours]
    for layer in range(layer_count(model)):
        more = names.mtp if layer >= model.num_hidden_layers else {}
        for theirs, ours in (names.layer | more).items():
            yield f"{names.layers}.{layer}.{theirs}", [f"layers.{layer}.{part}" for part in ours.split()]


def _joined(theirs: str, parts: dict[str, tuple[int, ...]], transposed: bool) -> dict[str, TensorPlace]:
    """Return the places of our tensors in one fused Hugging Face tensor."""
    sizes = [shape[0] for shape in parts.values()]
    width = next(iter(parts.values()))[1:]
    whole = (*width, sum(sizes)) if transposed else (sum(sizes), *width)
    starts = accumulate(sizes, initial=0)
    rows = (range(start, start + size) for start, size in zip(starts, sizes, strict=False))
    return {name: TensorPlace(theirs, whole, own, transposed) for name, own in zip(parts, rows, strict=True)}


def _ordered(name: str, place: TensorPlace, model: ModelConfig, names: Names) -> TensorPlace:
    """Return the place with its rows in our order of heads and channels."""
    part, module = name.rpartition(".")[2], place.theirs.rpartition(".")[0]
    heads_of = next((count for theirs, count in names.by_head.items() if module.endswith(theirs)), None)
    if heads_of is not None:
        heads, rows = getattr(model, heads_of), place.rows
        channels: Sequence[int] = range(len(rows) // heads)
        if name.endswith(".attention.q"):
            channels = rotated_channels(model.head_size, model.rotary_dim, names.interleaved, names.backwards)
        parts = by_head(heads, place.shape[0] // heads, rows[0] // heads, tuple(channels))
        return replace(place, rows=parts)
    if ".attention." not in name:
        return place
    if ".indexer." in name:
        return _of_indexer(part, place, model, names)
    if model.kv_lora_rank is not None:
        return _decoupled(part, place, model, names)
    heads, kv_heads, size, _, rotating = model.attention_shape(int(name.split(".")[1]))
    rotated = part in _ROTATED
    channels = (
        rotated_channels(size, rotating, names.interleaved, names.backwards) if rotated else range(size)
    )
    if names.grouped is not None and names.grouped in place.theirs:
        order = grouped_heads(part, heads, kv_heads)
    elif tuple(channels) != tuple(range(size)):
        order = range(len(place.rows) // size)
    else:
        return place
    start = 0 if names.grouped else place.rows[0]
    return replace(place, rows=rows_of(tuple(order), tuple(channels), start))


def _of_indexer(part: str, place: TensorPlace, model: ModelConfig, names: Names) -> TensorPlace:
    """Return the same for an indexer, the first channels of whose heads rotate."""
    if part == "weights" or not names.interleaved_indexer:
        return place
    rotating, dim = model.qk_rope_head_dim, model.index_head_dim
    channels = (*rotated_channels(rotating, rotating, interleaved=True), *range(rotating, dim))
    return replace(place, rows=rows_of(tuple(range(len(place.rows) // dim)), channels, 0))


def _decoupled(part: str, place: TensorPlace, model: ModelConfig, names: Names) -> TensorPlace:
    """Return the same for latent attention.

    The rotating channels follow the others in each query head and once after the latent.
    """
    plain = {"q": model.qk_nope_head_dim, "q_b": model.qk_nope_head_dim, "kv_a": model.kv_lora_rank or 0}.get(
        part
    )
    if plain is None:
        return place
    channels = tuple(decoupled_channels(plain, model.qk_rope_head_dim, names.interleaved))
    return replace(place, rows=rows_of(tuple(range(len(place.rows) // len(channels))), channels, 0))
