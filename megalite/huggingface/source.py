"""Hugging Face directories as sources of our tensors: the model, the names in the files, and rectangles of
weights, read one block at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from megalite.checkpoint.errors import listing
from megalite.checkpoint.finite import nonfinite, reject
from megalite.config.errors import ConfigError
from megalite.config.rules import MODEL_RULES
from megalite.config.rules.context import RuleContext
from megalite.config.sections.model import ModelConfig
from megalite.families.model_config import from_hf_config, hf_config
from megalite.families.module_names import Names, names_of
from megalite.huggingface import bits_and_bytes
from megalite.huggingface.files import ConversionError, TensorFiles
from megalite.huggingface.kept_tensors import kept_names
from megalite.huggingface.router_bias import bias_names, bias_shape, states
from megalite.huggingface.tensor_places import TensorPlace, copies, evenly_cut, places
from megalite.huggingface.xielu_constants import constants, wrong

HF = "hf:"
"""Prefix of the name of such a directory where a checkpoint could be named, too."""


@dataclass(frozen=True)
class HuggingFaceSource:
    """A complete Hugging Face directory with its model, its family, and the mapping of its tensors."""

    directory: Path
    model: ModelConfig
    family: str
    weights: TensorFiles
    places: dict[str, TensorPlace]
    biases: dict[int, str]
    copies: dict[str, list[str]]
    """Our tensor → tensors that repeat it."""
    kept: tuple[str, ...] = ()
    """Tensors that are kept aside."""
    nonfinite: dict[str, int] = field(default_factory=dict)
    """Tensor that was read → number of its NaN and infinite values, if there are any."""

    @staticmethod
    def of(directory: Path, mtp: bool = True) -> HuggingFaceSource:
        """Open a directory without reading weights.

        Args:
            mtp: with its modules of multi-token prediction, if it has them: transformers keeps their number
                and drops their weights.

        Raises:
            ConfigError: its model is not supported.
            ConversionError: a file is damaged.
        """
        config = hf_config(directory)
        model, family = ModelConfig(**from_hf_config(config)), str(config["model_type"])
        if model.vocab_size is None:
            raise ConfigError(f"{directory}/config.json has no vocab_size.")
        _check(model)
        weights, names = opened(directory), names_of(model, family)
        stored = stored_names(weights, names)
        further = tuple(
            stored(f"{names.layers}.{model.num_hidden_layers + index}.")
            for index in range(max(model.mtp_layers, 1))
        )
        if not mtp or not any(name.startswith(further) for name in weights):
            model = replace(model, mtp_layers=0)
        bound = _bound(weights, model, family, further if names.mtp and not model.mtp_layers else ())
        biases = {at: stored(name) for at, name in bias_names(model, family).items()}
        repeated: dict[str, list[str]] = {}
        for theirs, ours in copies(model, family).items():
            if stored(theirs) in weights:
                repeated.setdefault(ours, []).append(stored(theirs))
        kept = tuple(kept_names(weights, names, mtp))
        return HuggingFaceSource(directory, model, family, weights, bound, biases, repeated, kept)

    @cached_property
    def states(self) -> dict[str, Tensor]:
        """The states of routers."""
        return states(self.model, self.biases, self.weights)

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Read a rectangle of one of our tensors, and of the tensors that repeat it.

        Values that are not finite are reported by `check_finite`.
        """
        values, tensors = self._read(name, offsets, sizes), self.places[name].tensors
        if self.nonfinite.keys().isdisjoint(tensors) and nonfinite(values):
            self.nonfinite.update(
                {theirs: number for theirs in tensors if (number := nonfinite(self.weights[theirs]))}
            )
        return values

    def reads_rows(self, name: str) -> bool:
        """Return whether rows of one of our matrices are read without others."""
        place = self.places[name]
        in_order = not (place.transposed or place.each_transposed) and place.stored_shape is None
        return in_order and place.columns is None and (bool(place.pieces) or len(place.tensors) == 1)

    def check_finite(self) -> None:
        """Raise CheckpointError if tensors that were read contain NaN or infinite values."""
        routers = {theirs: nonfinite(self.weights[theirs]) for theirs in self.biases.values()}
        reject(str(self.directory), self.nonfinite | routers)

    def _read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        place = self.places[name]
        for theirs in self.copies.get(name, ()):
            own, other = (place.read(self.weights[each], offsets, sizes) for each in (place.theirs, theirs))
            if not torch.equal(own, other):
                raise ConversionError(
                    f"{self.directory}: {theirs} and {place.theirs} differ, but the model shares this tensor"
                )
        # a layer's experts are large: only those in the rectangle are read
        if number := (len(place.pieces) if place.stored_shape is None else 0) or place.experts:
            length, (low, *others) = place.shape[0] // number, offsets
            first, last = low // length, (low + sizes[0] - 1) // length
            if not place.pieces:
                own = place.flat(self.weights.experts(place.theirs, first, last + 1))
                return place.read(own, (low - first * length, *others), sizes)
            parts = [
                self.weights.rows(
                    place.theirs.format(*place.pieces[each]),
                    max(low - each * length, 0),
                    min(low + sizes[0] - each * length, length),
                )
                for each in range(first, last + 1)
            ]
            return place.read(parts[0] if len(parts) == 1 else torch.cat(parts), (0, *others), sizes)
        if self.reads_rows(name) and sizes[0]:
            there = place.rows[offsets[0] : offsets[0] + sizes[0]]
            low, high = min(there), max(there) + 1
            rows = range(len(there)) if isinstance(there, range) else tuple(row - low for row in there)
            own = self.weights.rows(place.theirs, low, high)
            return replace(place, rows=rows).read(own, (0, *offsets[1:]), sizes)
        pieces = [self.weights[theirs] for theirs in place.tensors]
        whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return place.read(whole.view(place.shape), offsets, sizes)


def opened(directory: Path) -> TensorFiles:
    """Open the weights of a directory. Quantized weights are read in bf16."""
    weights = TensorFiles(directory)
    if any(name.endswith("_blocks") for name in weights):
        from megalite.huggingface import mxfp4

        return mxfp4.Mxfp4Tensors(weights)
    if any(map(bits_and_bytes.is_quantized, weights)):
        return bits_and_bytes.opened(weights)
    if any(name.endswith("_scale_inv") for name in weights):
        from megalite.huggingface import fp8

        return fp8.Fp8Tensors(weights)
    return weights


def _check(model: ModelConfig) -> None:
    """Raise ConfigError if fields of the model are inconsistent."""
    facts = RuleContext(model=model)
    for rule in MODEL_RULES:
        if rule.broken(facts):
            raise ConfigError(rule.describe(facts))


def _bound(
    weights: TensorFiles, model: ModelConfig, family: str, unread: tuple[str, ...]
) -> dict[str, TensorPlace]:
    """Return the places with the stored names.

    Args:
        unread: prefixes of tensors that are ignored.

    Raises:
        ConversionError: tensors are missing, unknown or have another shape.
    """
    names = names_of(model, family)
    stored = stored_names(weights, names)
    by_name, tied = places(model, family), model.tied_head
    if any(name.endswith("experts.gate_up_proj") for name in weights):
        by_name = {name: _fused(place) for name, place in by_name.items()}
    heads = (theirs for theirs, ours in names.ends.items() if ours in ("head", "score"))
    head = stored(f"{next(heads)}.weight")
    # of a file in which names have a prefix
    other_parts = (*unread, *names.kept, *(names.multimodal[1] if names.multimodal and stored("") else ()))
    if names.spellings:
        there = {*weights}
        by_name = {name: _spelled(place, names, stored, there) for name, place in by_name.items()}
        convolutions = (place.theirs for name, place in by_name.items() if ".mixer.conv_" in name)
        sizes = {
            theirs: weights.shape(stored(theirs)) for theirs in convolutions if stored(theirs) in weights
        }
        by_name = evenly_cut(by_name, sizes)
    expected = {
        stored(theirs): shape for place in by_name.values() for theirs, shape in place.tensors.items()
    }
    expected |= dict.fromkeys(map(stored, bias_names(model, family).values()), bias_shape(model, family))
    problems = [f"{name} is missing" for name in expected if name not in weights]
    expected |= {stored(theirs): by_name[ours].shape for theirs, ours in copies(model, family).items()}
    expected |= {stored(theirs): () for theirs in constants(model, family)}
    for name in weights:
        shape = weights.shape(name)
        if name in expected and shape != expected[name]:
            problems.append(f"{name} has shape {list(shape)}, expected {list(expected[name])}")
        elif name not in expected and not (
            name.endswith(names.ignored) or name.startswith(other_parts) or (tied and name == head)
        ):
            problems.append(f"{name} is not a tensor of a {family} model")
    problems = problems or wrong(constants(model, family), weights, stored)
    if problems:
        raise ConversionError(
            f"The weights in {weights.directory} do not match its config.json:{listing(problems)}"
        )
    if (
        tied
        and head in weights
        and not torch.equal(weights[head], weights[stored(by_name["embedding.weight"].theirs)])
    ):
        raise ConversionError(
            f"{weights.directory}: {head} differs from the embedding, although config.json sets "
            "tie_word_embeddings"
        )
    return {name: replace(place, theirs=stored(place.theirs)) for name, place in by_name.items()}


def _spelled(place: TensorPlace, names: Names, stored: Callable[[str], str], there: set[str]) -> TensorPlace:
    """Return the place with the spelling of its name that a file has.

    Args:
        there: the names in the file.
    """
    if any(stored(theirs) in there for theirs in place.tensors):
        return place
    others = (
        replace(place, theirs=place.theirs.replace(ours, theirs))
        for theirs, ours in names.spellings
        if ours in place.theirs
    )
    return next((each for each in others if all(stored(theirs) in there for theirs in each.tensors)), place)


def _fused(place: TensorPlace) -> TensorPlace:
    """Return the place in a file that stores the experts of a layer as one tensor, as transformers 5 does."""
    return (
        place.fused()
        if place.pieces
        else replace(place, theirs=place.theirs.replace("block_sparse_moe.", "mlp."))
    )


def stored_names(weights: Iterable[str], names: Names) -> Callable[[str], str]:
    """Return a function that converts a family's name of a tensor to the stored name."""
    inner = f"{names.base}{names.nested}"
    if names.nested and any(name.startswith(inner) for name in weights):
        return lambda name: f"{inner}{name.removeprefix(names.base)}" if name.startswith(names.base) else name
    whole = names.multimodal[0] if names.multimodal else ""
    if whole and any(name.startswith(whole) for name in weights):
        return lambda name: f"{whole}{name}"
    if any(name.startswith(names.base) for name in weights):
        return lambda name: name
    return lambda name: name.removeprefix(names.base)  # files of a model without its head
