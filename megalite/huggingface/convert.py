"""Conversion between Hugging Face directories and checkpoints, and runs that start from such a directory.

One block of a tensor is in memory at a time.

    import     the tensors, views of memory-mapped files, are appended block by block to one file, described
               by a manifest
    export     each stored chunk is written to its place in a safetensors file
    start      each rank copies its parts out of the memory-mapped files

An imported checkpoint stores config.json, tokenizer and generation settings in `huggingface/`, for a later
export.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from math import prod
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from megalite import checkpoint
from megalite.checkpoint import CheckpointError, Manifest, directories, find
from megalite.checkpoint.checksummed_chunks import append_chunk, dtype_name
from megalite.checkpoint.errors import LISTED, listing
from megalite.checkpoint.finite import nonfinite, reject
from megalite.checkpoint.manifest import WEIGHT, StoredTensor, encode
from megalite.checkpoint.resized_embeddings import Read, check_rows, resized
from megalite.config.errors import ConfigError
from megalite.config.load import from_dict, to_dict
from megalite.config.rule import show
from megalite.config.rules import MODEL_RULES
from megalite.config.rules.context import RuleContext
from megalite.config.schema import Config
from megalite.config.sections.model import ModelConfig
from megalite.families.classifiers import padding_of
from megalite.families.model_config import (
    families,
    from_hf_config,
    hf_config,
    loader_of,
    stored_dtype,
    unread_note,
)
from megalite.families.module_names import Names, names_of
from megalite.families.weight_files import ADAPTER_SETTINGS, INDEX, SAFETENSORS, weights_file
from megalite.families.weight_files import unread_note as unread_files
from megalite.huggingface import bits_and_bytes
from megalite.huggingface.companions import COMPANIONS, check_vocabulary, copy_companions
from megalite.huggingface.config_json import meaning, misfit, to_hf_config
from megalite.huggingface.engine_fields import engine_fields
from megalite.huggingface.files import ConversionError, NewFile, TensorFiles
from megalite.huggingface.kept_tensors import (
    KEPT,
    copy_processor,
    is_nested,
    kept_names,
    nested_config,
    note,
    stored_kept,
    write_kept,
)
from megalite.huggingface.merging import Adapters
from megalite.huggingface.model_card import write_card
from megalite.huggingface.mup_export import as_plain_model
from megalite.huggingface.router_bias import PREFIX, bias_names, bias_shape, fill, states, to_export
from megalite.huggingface.tensor_places import TensorPlace, copies, evenly_cut, places
from megalite.huggingface.tokenizer_export import (
    ExportedTokenizer,
    TokenizerChoice,
    choose,
    token_ids,
    write_generation,
    write_tokenizer,
)
from megalite.huggingface.xielu_constants import constants, wrong
from megalite.huggingface.xielu_constants import to_export as xielu_constants
from megalite.model.parameters import model_specs, weight_shapes
from megalite.parallel.spec import Rectangle, parameter_count
from megalite.system.files import write_synced
from megalite.system.progress import Report, silent

HF = "hf:"
BLOCK = 64 << 20  # maximum bytes of a chunk, as in checkpoints of training
SHARD = 5_000_000_000  # maximum bytes of an exported file, unless one tensor is larger
FREE_TO_CHANGE = (
    *(
        "max_position_embeddings",
        "rope_theta",
        "rope_local_theta",
        "rope_scaling",
        "sliding_window",
        "sliding_window_layers",
    ),
    *("initializer_range", "embedding_dropout", "attention_dropout", "residual_dropout"),
    *("router_balance", "router_aux_loss_coef", "router_z_loss_coef", "expert_capacity_factor"),
)
"""Fields in which a run may differ from its initial model, to extend the context or to train with dropout."""


# ---- a Hugging Face directory


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
        weights, names = _opened(directory), names_of(model, family)
        stored = _prefix(weights, names)
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


def _opened(directory: Path) -> TensorFiles:
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
    stored = _prefix(weights, names)
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


def _prefix(weights: Iterable[str], names: Names) -> Callable[[str], str]:
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


# ---- start of a run


def starting_weights(model: ModelConfig, seed: int = 0, beside_adapter: bool = False) -> Read | None:
    """Return a function that fills a rank's rectangles from model.init_from = hf:DIR, or None without it.

    Only the required bytes are read. The directory is opened and checked at the first call.

    Args:
        seed: of new rows that `model.resize_embeddings: init` draws.
        beside_adapter: the directory may hold an adapter, too, since the run reads one.
    """
    name = model.initial_weights or ""
    if not name.startswith(HF):
        return None
    opened = cache(partial(_reader, model, seed, Path(name.removeprefix(HF)), beside_adapter))
    return lambda rectangles: opened()(rectangles)


def _check_no_adapter(directory: Path) -> None:
    """Raise ConversionError if transformers would apply an adapter to the weights of a directory."""
    if (directory / ADAPTER_SETTINGS).is_file():
        raise ConversionError(
            f"{directory} contains an adapter ({ADAPTER_SETTINGS}) next to the weights, and transformers "
            "would apply it. Move the adapter to a separate directory. To start the run from the adapter, "
            "set lora.init_from to this directory."
        )


def _own_shape(model: ModelConfig, directory: Path, different: Sequence[str]) -> str:
    """Return the way to use the architecture of the model in a directory."""
    shape = model.from_hf
    if shape is None or Path(shape).resolve() != directory.resolve():
        return f"Set model.from_hf={directory}."
    return f"Remove {', '.join(f'model.{name}' for name in different)} to use the values of model.from_hf."


def _fitting(source: ModelConfig, model: ModelConfig) -> dict[str, Any]:
    """Return the meaning of a source's model as far as a run's model must have the same.

    The vocabulary may be larger, and the head of a reward model replaces that of a language model.
    """
    changed: dict[str, Any] = {"vocab_size": model.vocab_size}
    if model.output_head == "reward":
        changed |= {"output_head": "reward", "tie_word_embeddings": model.tie_word_embeddings}
    return meaning(source) | changed


def _reader(model: ModelConfig, seed: int, directory: Path, beside_adapter: bool) -> Read:
    """Return a function that fills a rank's rectangles.

    Raises ConversionError if the directory's model is not the run's, or cannot be read.
    """
    if not beside_adapter:
        _check_no_adapter(directory)
    try:
        source = HuggingFaceSource.of(directory)
    except ConfigError as error:
        raise ConversionError(f"model.init_from={HF}{directory}: {error}") from None
    ours, theirs = meaning(model), _fitting(source.model, model)
    check_rows(model, source.model.vocabulary, f"{HF}{directory}")
    different = [name for name in ours if ours[name] != theirs[name] and name not in FREE_TO_CHANGE]
    if ours["mtp_layers"] < theirs["mtp_layers"]:  # some are left out
        different.remove("mtp_layers")
    if different == ["mtp_layers"]:
        has = (
            f"has weights for {theirs['mtp_layers'] or 'no'} modules. Set "
            f"model.mtp_layers={theirs['mtp_layers']}"
        )
        raise ConversionError(
            f"model.mtp_layers={ours['mtp_layers']}, but model.init_from={HF}{directory} {has}."
        )
    if different:
        listed = ", ".join(
            f"model.{name} is {show(ours[name])}, but {show(theirs[name])} in the directory"
            for name in different[:LISTED]
        )
        raise ConversionError(
            f"model.init_from={HF}{directory} does not match the model of this run: {listed}. "
            f"{_own_shape(model, directory, different)}"
        )

    def read(rectangles: Sequence[Rectangle]) -> None:
        for part in rectangles:
            if part.name.startswith(PREFIX):
                fill(part.tensor, source.states.get(part.name), part.offsets)
            else:
                part.tensor.copy_(
                    source.read(part.name.removeprefix(WEIGHT), part.offsets, part.tensor.shape)
                )

    fill_all = resized(model, seed, source.model.vocabulary, read)

    def read_finite(rectangles: Sequence[Rectangle]) -> None:
        fill_all(rectangles)
        source.check_finite()

    return read_finite


# ---- import


def import_model(
    source: Path, directory: Path, progress: Report = silent, mtp: bool = True
) -> dict[str, Any]:
    """Import the weights of a Hugging Face directory as a checkpoint, and return a summary for display.

    Weights keep their dtypes. The checkpoint is published only when it is complete.

    Args:
        mtp: include multi-token prediction modules, if there are any.

    Raises:
        ConfigError, CheckpointError: the import failed.
    """
    directories.check_free(directory)
    _check_no_adapter(source)
    theirs = HuggingFaceSource.of(source, mtp)
    check_vocabulary(source, theirs.model.vocabulary)
    temporary = directories.begin(directory)
    try:
        stored = _store(temporary / "rank_00000.bin", theirs, progress)
        (temporary / COMPANIONS).mkdir()
        copy_companions(source, temporary / COMPANIONS)
        if theirs.kept:
            write_kept(temporary / COMPANIONS, KEPT, {name: theirs.weights[name] for name in theirs.kept})
        directories.publish(
            temporary, directory, encode({"step": 0, "config": to_dict(Config(model=theirs.model))}, stored)
        )
    except BaseException:
        directories.discard(temporary, directory)
        raise
    summary = _summary(theirs.model, theirs.family, (tensor.dtype for tensor in stored.values()))
    aside = note(theirs.kept, names_of(theirs.model, theirs.family).kept)
    return summary | {"notes": [*unread_note(hf_config(source)), *unread_files(source), *aside]}


def _store(path: Path, source: HuggingFaceSource, progress: Report) -> dict[str, StoredTensor]:
    """Write every tensor in chunks of whole rows."""
    stored, done, parameters = {}, 0, parameter_count(model_specs(source.model))
    shapes = weight_shapes(source.model)
    with open(path, "wb") as file:
        for name, (length, *others) in ((name, shapes[name]) for name in source.places):
            dtype = source.weights[next(iter(source.places[name].tensors))].dtype
            rows = max(1, BLOCK // (prod(others) * dtype.itemsize))
            offsets = [(start, *(0 for _ in others)) for start in range(0, length, rows)]
            chunks = [
                append_chunk(
                    file, at, source.read(name, at, (min(rows, length - at[0]), *others)).contiguous()
                )
                for at in offsets
            ]
            stored[WEIGHT + name] = StoredTensor(dtype_name(dtype), (length, *others), chunks)
            done += sum(chunk.bytes for chunk in chunks)
            progress("importing", done, parameters * dtype.itemsize, "B")
        for name, state in source.states.items():
            stored[name] = StoredTensor(
                dtype_name(state.dtype), tuple(state.shape), [append_chunk(file, (0, 0), state)]
            )
        source.check_finite()
        progress("writing to disk")
        file.flush()
        os.fsync(file.fileno())
    return stored


def _summary(model: ModelConfig, family: str, dtypes: Iterable[str]) -> dict[str, Any]:
    return {
        "family": family,
        "parameters": parameter_count(model_specs(model)),
        "dtypes": sorted(set(dtypes)),
    }


# ---- export


class Prepared(NamedTuple):
    """What an export starts from.

    Attributes:
        manifest: the checkpoint, with the values of a quantized base.
        model: its model, without `mup`.
        factors: of tensors that are multiplied in return (`mup_export`).
        tokenizer: the tokenizer to export.
        like: the directory that the weights came from, if there is one.
        base: its config.json, empty without it.
        config: the config.json of the export's family, without token ids.
    """

    manifest: Manifest
    model: ModelConfig
    factors: Mapping[str, float]
    tokenizer: ExportedTokenizer
    like: Path | None
    base: dict[str, Any]
    config: dict[str, Any]


def prepared(
    source: Path | Manifest,
    like: Path | None,
    family: str | None,
    tokenizer: str | None,
    allow_tokenizer_change: bool,
) -> Prepared:
    """Open a checkpoint for an export. The arguments are those of `export_model`."""
    from megalite.huggingface.base_weights import with_base  # which reads directories with this module

    manifest = with_base(source if isinstance(source, Manifest) else checkpoint.manifest_of(source))
    manifest.check_files()
    model, factors = as_plain_model(model_of(manifest))
    choice = TokenizerChoice(tokenizer, like, allow_tokenizer_change)
    like = like or origin(manifest.directory, model)
    chosen = choose(manifest, choice, like)
    base = hf_config(like) if like else {}
    config = to_hf_config(model, family or _family_like(model, base))
    return Prepared(manifest, model, factors, chosen, like, base, config)


def export_model(
    source: Path | Manifest,
    target: Path,
    *,
    like: Path | None = None,
    family: str | None = None,
    dtype: torch.dtype | Literal["fp8", "nf4"] | None = None,
    shard: int = SHARD,
    tokenizer: str | None = None,
    allow_tokenizer_change: bool = False,
    progress: Report = silent,
) -> dict[str, Any]:
    """Export a checkpoint as a Hugging Face directory with its tokenizer, and return a summary for display.

    Args:
        source: directory of the checkpoint, or its manifest, for example with averages in place of the
            weights.
        like: Hugging Face directory whose family, token ids, tokenizer and generation settings are exported;
            by default the one that the checkpoint was imported from.
        dtype: dtype of the tensors; by default the stored one. Router biases are in fp32 in any case, and
            modules that transformers keeps in fp32 are not rounded. A name: matrices of layers in fp8
            (`huggingface.fp8_export`) or in 4 bits (`nf4_export`), others in bf16.
        shard: maximum number of bytes of a file.
        tokenizer: byte, FILE.model or a directory; by default the tokenizer of the training data, otherwise
            of `like`.
        allow_tokenizer_change: accept a tokenizer that the weights were not trained with.

    Raises:
        ConfigError, CheckpointError: the export failed. The directory is renamed to `target` only when it is
            complete.
    """
    directories.check_free(target)
    manifest, model, factors, found_tokenizer, like, base, config = prepared(
        source, like, family, tokenizer, allow_tokenizer_change
    )
    left_out = model.mtp_layers > 0 and not names_of(model, config["model_type"]).mtp
    model = replace(model, mtp_layers=0) if left_out else model
    by_name = places(model, config["model_type"])
    stored = _stored(manifest, by_name)
    for theirs, ours in copies(model, config["model_type"]).items():
        by_name[theirs], stored[theirs] = replace(by_name[ours], theirs=theirs), stored[ours]
        factors = {**factors, theirs: factors[ours]} if ours in factors else factors
    quantized, dtype = (dtype, torch.bfloat16) if isinstance(dtype, str) else (None, dtype)
    dtypes, common = _dtypes(stored, dtype, names_of(model, config["model_type"]).fp32)
    ids, of_padding = token_ids(found_tokenizer, from_dict(manifest.state["config"]), like), list[str]()
    if model.output_head == "reward":
        ids, of_padding = padding_of(ids)
    config |= {key: base[key] for key in base.keys() & families().kept} | ids
    config |= {"torch_dtype": dtype_name(common)} | engine_fields(config)
    if entries := families().rows[config["model_type"]].rope_entries.split():
        rope = base.get("rope_parameters") or base.get("rope_scaling") or {}
        config["rope_parameters"] = {
            **{entry: rope[entry] for entry in entries if entry in rope},
            **config["rope_parameters"],
        }
    names = names_of(model, config["model_type"])
    kept = _kept(like, base, config, names)
    nested = like is not None and is_nested(like, names, kept)
    if nested:
        stored_name = _prefix([f"{names.base}{names.nested}"], names)
        by_name = {name: replace(place, theirs=stored_name(place.theirs)) for name, place in by_name.items()}
    summary = _summary(model, config["model_type"], map(dtype_name, dtypes.values()))
    with new_directory(target) as temporary:
        biases = to_export(manifest, model, config["model_type"])
        biases |= xielu_constants(model, config["model_type"], common)
        _write_weights(
            temporary, Adapters(manifest, factors), stored, by_name, dtypes, biases, kept, shard, progress
        )
        changed = list[str]()
        if quantized is not None:
            progress(f"quantizing to {quantized}")
            head = head_in(model, config["model_type"])
            config["quantization_config"], changed = _quantize(quantized, temporary, model, by_name, head)
            summary["dtypes"] = [quantized, *summary["dtypes"]]
        progress("writing the tokenizer")
        whole = config
        if nested and like is not None:
            whole = nested_config(like, config)
            copy_processor(like, temporary)
        write_synced(temporary / "config.json", json.dumps(whole, indent=2) + "\n")
        write_generation(temporary, found_tokenizer, like, ids)
        identity = write_tokenizer(temporary, found_tokenizer, manifest.state["step"])
        write_card(
            temporary,
            manifest,
            identity,
            _shown(summary, whole["architectures"][0]),
            reader=found_tokenizer.reader,
            loader=loader_of(config),
        )
    without = (
        [
            f"multi-token prediction modules are not exported, because {config['model_type']} models do not "
            "have them"
        ]
        if left_out
        else []
    )
    notes = [
        *without,
        *found_tokenizer.notes,
        *of_padding,
        *changed,
        *_rounded(from_dict(manifest.state["config"]), common, like, base),
    ]
    return summary | {"like": like and str(like), "tokenizer": found_tokenizer.name, "notes": notes}


def _quantize(
    form: Literal["fp8", "nf4"],
    directory: Path,
    model: ModelConfig,
    by_name: dict[str, TensorPlace],
    head: str,
) -> tuple[dict[str, Any], list[str]]:
    """Quantize the matrices of an export.

    Returns:
        the quantization_config of its config.json, and notes.
    """
    if form == "fp8":
        from megalite.huggingface import fp8_export

        return fp8_export.quantize_export(directory, model, by_name), []
    from megalite.huggingface import nf4_export

    settings, changed = nf4_export.quantize_export(directory, model, by_name, head)
    return settings, [changed]


def _kept(like: Path | None, base: dict[str, Any], config: dict[str, Any], names: Names) -> dict[str, Tensor]:
    """Return the tensors that were kept aside of the original model, if an export is of its family.

    Args:
        like: directory of the original model, or what an import has copied of it.
        base: its config.json.
        config: that of the export.
    """
    if like is None or not names.kept or base.get("model_type") != config["model_type"]:
        return {}
    if (kept := stored_kept(like)) is not None:
        return kept
    if weights_file(like) is None:
        return {}
    weights = _opened(like)
    return {name: weights[name] for name in kept_names(weights, names)}


def _dtypes(
    stored: dict[str, StoredTensor], dtype: torch.dtype | None, fp32: tuple[str, ...]
) -> tuple[dict[str, torch.dtype], torch.dtype]:
    """Return the dtype of each tensor in the files, and that of the model: the widest of them.

    Tensors whose names end with `fp32` keep a wider dtype than `dtype` and do not count for the model's.
    transformers would otherwise load all weights in fp32 because of them.
    """
    dtypes = {name: dtype or getattr(torch, tensor.dtype) for name, tensor in stored.items()}
    kept = {name for name in stored if name.endswith(fp32)}
    common = max((dtypes[name] for name in dtypes.keys() - kept), key=lambda each: each.itemsize)
    dtypes |= {name: torch.promote_types(dtypes[name], getattr(torch, stored[name].dtype)) for name in kept}
    return dtypes, common


def _rounded(config: Config, dtype: torch.dtype, like: Path | None, base: dict[str, Any]) -> list[str]:
    """Return a note if a run with adapters has rounded the frozen weights that it started from.

    Frozen weights are stored in compute precision.
    """
    theirs = stored_dtype(base)
    if not config.lora.rank or theirs != "float32" or dtype.itemsize >= torch.float32.itemsize:
        return []
    base_form = config.lora.base
    changed = "rounded" if base_form == "none" else f"quantized to {base_form} or rounded"
    return [
        f"the weights are exported in {dtype_name(dtype)}: the run {changed} the weights of {like}, which "
        f"are in {theirs}. Use adapter-export to keep them unchanged"
    ]


@contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """Yield a temporary directory, which is renamed when the block ends without an error.

    Raises ConversionError if it cannot be created or renamed.
    """
    temporary = target.with_name(f".{target.name}.new")
    try:
        shutil.rmtree(temporary, ignore_errors=True)  # left by an interrupted export
        temporary.mkdir(parents=True)
        yield temporary
        temporary.rename(target)
    except OSError as error:
        raise ConversionError(f"failed to write {target}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _shown(summary: dict[str, Any], architecture: str) -> dict[str, str]:
    """Return the rows of the model card."""
    return {
        "architecture": architecture,
        "parameters": f"{summary['parameters']:,}",
        "dtype": ", ".join(summary["dtypes"]),
    }


def model_of(manifest: Manifest) -> ModelConfig:
    """Return the model of a checkpoint. Raises CheckpointError if it has no configuration."""
    if "config" not in manifest.state:
        raise CheckpointError(
            f"{manifest.directory} does not contain a configuration. Use a checkpoint written by `megalite "
            "train` or `megalite convert`."
        )
    return from_dict(manifest.state["config"]).model


def origin(directory: Path, model: ModelConfig) -> Path | None:
    """Return the directory of a model's config.json and tokenizer, or None.

    This is a directory in the checkpoint or in the one that it started from, or the Hugging Face directory.
    """
    start = model.initial_weights or ""
    started = (
        Path(start.removeprefix(HF)) if start.startswith(HF) else find(Path(start or directory)) / COMPANIONS
    )
    places_to_look = [directory / COMPANIONS, started, *([Path(model.from_hf)] if model.from_hf else [])]
    return next((place for place in places_to_look if (place / "config.json").is_file()), None)


def _family_like(model: ModelConfig, base: dict[str, Any]) -> str | None:
    """Return the family of the original model if it still supports this one, otherwise None."""
    name = base.get("model_type")
    rows = families().rows
    return name if name in rows and misfit(model, rows[name]) is None else None


def places_of(model: ModelConfig, directory: Path) -> dict[str, TensorPlace]:
    """Return the places of a model's tensors in the modules of its family, whose names PEFT has."""
    family = family_of(model, directory)
    by_name = places(model, family)
    for theirs, module in names_of(model, family).memory:
        by_name = {
            name: replace(place, theirs=place.theirs.replace(theirs, module))
            for name, place in by_name.items()
        }
    return by_name


def head_of(model: ModelConfig, directory: Path) -> str:
    """Return the name of the head's module in that family."""
    return head_in(model, family_of(model, directory))


def head_in(model: ModelConfig, family: str) -> str:
    """Return the name of the head's module in a family."""
    return next(theirs for theirs, ours in names_of(model, family).ends.items() if ours in ("head", "score"))


def family_of(model: ModelConfig, directory: Path) -> str:
    """Return the original family of a model, or the first one that supports it.

    Args:
        directory: directory of the checkpoint.
    """
    like = origin(directory, model)
    return str(to_hf_config(model, _family_like(model, hf_config(like) if like else {}))["model_type"])


def _stored(manifest: Manifest, by_name: dict[str, TensorPlace]) -> dict[str, StoredTensor]:
    missing = [name for name in by_name if WEIGHT + name not in manifest.tensors]
    if missing:
        raise CheckpointError(f"{manifest.directory} does not contain the tensor {missing[0]} of its model")
    return {name: manifest.tensors[WEIGHT + name] for name in by_name}


def _write_weights(
    directory: Path,
    adapters: Adapters,
    stored: dict[str, StoredTensor],
    by_name: dict[str, TensorPlace],
    dtypes: dict[str, torch.dtype],
    biases: dict[str, Tensor],
    kept: dict[str, Tensor],
    limit: int,
    progress: Report,
) -> None:
    """Write the safetensors files and, if there are several, their index.

    The last file with weights contains the router biases. Tensors that were kept aside are in a file of their
    own.
    """
    shards = list(_shards(by_name, dtypes, limit))
    number = len(shards) + bool(kept)
    names = (
        [SAFETENSORS]
        if number == 1
        else [f"model-{i + 1:05d}-of-{number:05d}.safetensors" for i in range(number)]
    )
    index: dict[str, str] = {}
    done, total = 0, sum(place.numel * dtypes[name].itemsize for name, place in by_name.items())
    if kept:
        write_kept(directory, names[-1], kept)
        index |= dict.fromkeys(kept, names[-1])
    for file_name, own in zip(names, shards, strict=False):
        tensors = {
            theirs: (dtypes[parts[0]], shape)
            for parts in own.values()
            for theirs, shape in by_name[parts[0]].tensors.items()
        }
        more = biases if file_name == names[len(shards) - 1] else {}
        tensors |= {theirs: (bias.dtype, tuple(bias.shape)) for theirs, bias in more.items()}
        index |= dict.fromkeys(more, file_name)
        with closing(NewFile(directory / file_name, tensors)) as file:
            for theirs, bias in more.items():
                file.write(theirs, bias)
            for parts in own.values():
                _write_tensor(
                    file, adapters, {name: stored[name] for name in parts}, by_name, dtypes[parts[0]]
                )
                index |= dict.fromkeys(by_name[parts[0]].tensors, file_name)
                done += sum(by_name[name].numel * dtypes[name].itemsize for name in parts)
                progress("exporting", done, total, "B")
    if number > 1:
        others = sum(tensor.nbytes for tensor in (*biases.values(), *kept.values()))
        content = {
            "metadata": {"total_size": total + others},
            "weight_map": index,
        }
        write_synced(directory / f"{SAFETENSORS}{INDEX}", json.dumps(content, indent=2) + "\n")


def _shards(
    by_name: dict[str, TensorPlace], dtypes: dict[str, torch.dtype], limit: int
) -> Iterator[dict[str, list[str]]]:
    """Yield the files, each of at most `limit` bytes: name of a Hugging Face tensor → names of our tensors in
    it.
    """
    joined: dict[str, list[str]] = {}
    for name, place in by_name.items():
        joined.setdefault(place.theirs, []).append(name)
    shard: dict[str, list[str]] = {}
    size = 0
    for theirs, names in joined.items():
        more = sum(by_name[name].numel * dtypes[name].itemsize for name in names)
        if shard and size + more > limit:
            yield shard
            shard, size = {}, 0
        shard[theirs], size = names, size + more
    yield shard


def _write_tensor(
    file: NewFile,
    adapters: Adapters,
    parts: dict[str, StoredTensor],
    by_name: dict[str, TensorPlace],
    dtype: torch.dtype,
) -> None:
    """Write one Hugging Face tensor with merged adapters.

    It is written chunk by chunk if all chunks are consecutive whole rows, otherwise it is assembled first.
    """
    place = by_name[next(iter(parts))]
    by_rows = (
        (place.theirs in place.tensors or bool(place.pieces))
        and not (place.transposed or place.each_transposed)
        and all(
            isinstance(by_name[name].rows, range) and chunk.sizes[1:] == each.shape[1:]
            for name, each in parts.items()
            for chunk in each.chunks
        )
    )
    whole = None if by_rows else torch.empty(place.shape, dtype=dtype)
    for name, tensor in parts.items():
        for chunk, data in adapters.manifest.read(tensor.chunks):
            values = adapters.merged(
                name, chunk, torch.from_numpy(data).view(getattr(torch, tensor.dtype)).view(chunk.sizes)
            )
            if whole is None:
                _write_rows(file, place, by_name[name].rows[0] + chunk.offsets[0], values.to(dtype))
            else:
                by_name[name].write(whole, chunk.offsets, values.to(dtype))
    if whole is not None:
        for theirs, piece in zip(place.tensors, place.stored(whole).chunk(len(place.tensors)), strict=True):
            file.write(theirs, piece)


def _write_rows(file: NewFile, place: TensorPlace, row: int, values: Tensor) -> None:
    """Write consecutive whole rows. Rows of a layer's experts belong to several tensors."""
    width = prod(place.shape[1:])
    length = place.shape[0] // max(len(place.pieces), 1)  # rows of one tensor
    while len(values):
        number, first = divmod(row, length)
        own = values[: length - first]
        file.write(
            place.theirs.format(*place.pieces[number]) if place.pieces else place.theirs, own, first * width
        )
        row, values = row + len(own), values[len(own) :]
