"""Conversion between Hugging Face directories and checkpoints. One block of a tensor is in memory at a time.

    import     the tensors, views of memory-mapped files, are appended block by block to one file, described
               by a manifest
    export     each stored chunk is written to its place in a safetensors file (export_files.py)

An imported checkpoint stores config.json, tokenizer and generation settings in `huggingface/`, for a later
export.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from megalite import checkpoint
from megalite.checkpoint import Manifest, directories
from megalite.checkpoint.checksummed_chunks import append_chunk, dtype_name
from megalite.checkpoint.manifest import WEIGHT, StoredTensor, encode
from megalite.config.load import from_dict, to_dict
from megalite.config.schema import Config
from megalite.config.sections.model import ModelConfig
from megalite.families.classifiers import padding_of
from megalite.families.model_config import families, hf_config, loader_of, stored_dtype, unread_note
from megalite.families.module_names import Names, names_of
from megalite.families.weight_files import unread_note as unread_files
from megalite.families.weight_files import weights_file
from megalite.huggingface.base_weights import with_base
from megalite.huggingface.companions import COMPANIONS, check_vocabulary, copy_companions
from megalite.huggingface.config_json import to_hf_config
from megalite.huggingface.engine_fields import engine_fields
from megalite.huggingface.export_files import dtypes_of, new_directory, stored_weights, write_weights
from megalite.huggingface.initial_weights import check_no_adapter
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
from megalite.huggingface.original import family_like, head_in, model_of, origin
from megalite.huggingface.router_bias import to_export
from megalite.huggingface.source import HuggingFaceSource, opened, stored_names
from megalite.huggingface.tensor_places import TensorPlace, copies, places
from megalite.huggingface.tokenizer_export import (
    ExportedTokenizer,
    TokenizerChoice,
    choose,
    token_ids,
    write_generation,
    write_tokenizer,
)
from megalite.huggingface.xielu_constants import to_export as xielu_constants
from megalite.model.parameters import model_specs, weight_shapes
from megalite.parallel.spec import parameter_count
from megalite.system.files import write_synced
from megalite.system.progress import Report, silent

BLOCK = 64 << 20  # maximum bytes of a chunk, as in checkpoints of training
SHARD = 5_000_000_000  # maximum bytes of an exported file, unless one tensor is larger


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
    check_no_adapter(source)
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

    manifest = with_base(source if isinstance(source, Manifest) else checkpoint.manifest_of(source))
    manifest.check_files()
    model, factors = as_plain_model(model_of(manifest))
    choice = TokenizerChoice(tokenizer, like, allow_tokenizer_change)
    like = like or origin(manifest.directory, model)
    chosen = choose(manifest, choice, like)
    base = hf_config(like) if like else {}
    config = to_hf_config(model, family or family_like(model, base))
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
    stored = stored_weights(manifest, by_name)
    for theirs, ours in copies(model, config["model_type"]).items():
        by_name[theirs], stored[theirs] = replace(by_name[ours], theirs=theirs), stored[ours]
        factors = {**factors, theirs: factors[ours]} if ours in factors else factors
    quantized, dtype = (dtype, torch.bfloat16) if isinstance(dtype, str) else (None, dtype)
    dtypes, common = dtypes_of(stored, dtype, names_of(model, config["model_type"]).fp32)
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
        stored_name = stored_names([f"{names.base}{names.nested}"], names)
        by_name = {name: replace(place, theirs=stored_name(place.theirs)) for name, place in by_name.items()}
    summary = _summary(model, config["model_type"], map(dtype_name, dtypes.values()))
    with new_directory(target) as temporary:
        biases = to_export(manifest, model, config["model_type"])
        biases |= xielu_constants(model, config["model_type"], common)
        write_weights(
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
    weights = opened(like)
    return {name: weights[name] for name in kept_names(weights, names)}


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


def _shown(summary: dict[str, Any], architecture: str) -> dict[str, str]:
    """Return the rows of the model card."""
    return {
        "architecture": architecture,
        "parameters": f"{summary['parameters']:,}",
        "dtype": ", ".join(summary["dtypes"]),
    }
