"""Export of a checkpoint as one GGUF file: its keys, then its tensors, one in memory at a time."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megalite_kernels import xielu
from torch import Tensor

from megalite.checkpoint import Manifest, directories
from megalite.checkpoint.checksummed_chunks import dtype_name
from megalite.checkpoint.manifest import WEIGHT
from megalite.config.errors import ConfigError
from megalite.config.load import from_dict
from megalite.config.sections.model import ModelConfig
from megalite.data.tokenizer.tokenizers import SentencePieceTokenizer
from megalite.gguf.architectures import Architecture
from megalite.gguf.metadata import context_length, metadata, rope_tensors
from megalite.gguf.supported import architecture_of
from megalite.gguf.tensors import GgufTensor, tensors_of
from megalite.gguf.tokenizer import tokenizer_keys
from megalite.huggingface.convert import Prepared, prepared
from megalite.huggingface.files import ConversionError
from megalite.huggingface.merging import Adapters
from megalite.huggingface.router_bias import bias_names, to_export
from megalite.huggingface.tokenizer_export import ExportedTokenizer, token_ids, write_tokenizer
from megalite.model.parameters import model_specs
from megalite.parallel.spec import parameter_count
from megalite.system.progress import Report, silent

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUTER = "router."
"""What our names of the routers' biases by layer begin with."""


def export_gguf(
    source: Path | Manifest,
    target: Path,
    *,
    like: Path | None = None,
    family: str | None = None,
    dtype: torch.dtype | None = None,
    tokenizer: str | None = None,
    allow_tokenizer_change: bool = False,
    pre: str | None = None,
    progress: Report = silent,
) -> dict[str, Any]:
    """Export a checkpoint as a GGUF file with its tokenizer, and return a summary for display.

    Args:
        source, like, family, tokenizer, allow_tokenizer_change: as of `huggingface.convert.export_model`.
        dtype: dtype of matrices; by default the widest stored one. Vectors, norms, routers and convolutions
            are in fp32 in any case.
        pre: llama.cpp's name of the tokenizer's pre-tokenizer, if its rules do not tell it.

    Raises:
        ConfigError, CheckpointError: the export failed. The file is renamed to `target` only when it is
            complete.
    """
    directories.check_free(target)
    gguf = library()
    contents = prepared(source, like, family, tokenizer, allow_tokenizer_change)
    name, notes = str(contents.config["model_type"]), list[str]()
    model = replace(contents.model, mtp_layers=0)
    if contents.model.mtp_layers:
        notes.append("multi-token prediction modules are not exported to GGUF files")
    architecture = architecture_of(model, name)
    if (context := context_length(model, architecture)) < model.max_position_embeddings:
        notes.append(
            f"the context is limited to {context} tokens, the sliding window: llama.cpp's architecture "
            f"{architecture.name} has no windows"
        )
    reader = _Reader(contents, model, name)
    dtype = dtype or reader.widest
    keys = _general(gguf, target.name.removesuffix(".gguf"), dtype)
    keys |= {f"{architecture.name}.{key}": value for key, value in metadata(model, architecture).items()}
    keys |= _activation(model, reader)
    ids = token_ids(contents.tokenizer, from_dict(contents.manifest.state["config"]), contents.like)
    progress("reading the tokenizer")
    keys |= _tokenizer(contents.tokenizer, model.vocabulary, ids, pre)
    tensors = tensors_of(model, architecture, bool(reader.biases))
    tensors += [
        GgufTensor(each, tuple(values.shape), (), _constant(values))
        for each, values in rope_tensors(model).items()
    ]
    with _new_file(target) as temporary:
        _write(gguf, temporary, architecture, keys, tensors, reader, dtype, progress)
    return {
        "family": name,
        "architecture": architecture.name,
        "parameters": parameter_count(model_specs(model)),
        "dtypes": [dtype_name(dtype)],
        "tokenizer": contents.tokenizer.name,
        "notes": [*notes, *contents.tokenizer.notes],
    }


def library() -> Any:
    """Return the package gguf. Raises ConfigError if it is not installed."""
    try:
        import gguf
    except ImportError as error:
        raise ConfigError(
            f"--format gguf requires the package gguf ({error}). Install it with `pip install "
            "'megalite[gguf]'`."
        ) from None
    return gguf


class _Reader:
    """The tensors of a checkpoint by our names, with merged adapters, and the routers' biases by layer."""

    def __init__(self, contents: Prepared, model: ModelConfig, family: str):
        manifest = contents.manifest
        self.adapters = Adapters(manifest, contents.factors)
        exported, layers = to_export(manifest, model, family), bias_names(model, family)
        self.biases = {f"{ROUTER}{layer}": exported[theirs].flatten() for layer, theirs in layers.items()}
        stored = (
            manifest.tensors[WEIGHT + each.name].dtype
            for spec in model_specs(model)
            for each in spec.segments
        )
        self.widest = max((getattr(torch, each) for each in {*stored}), key=lambda each: each.itemsize)

    def __call__(self, name: str) -> Tensor:
        return self.biases[name] if name in self.biases else self.adapters.whole(name)


def _constant(values: Tensor) -> Callable[[], Tensor]:
    return lambda: values


def _general(gguf: Any, name: str, dtype: torch.dtype) -> dict[str, Any]:
    kinds = gguf.LlamaFileType
    types = {torch.float32: kinds.ALL_F32, torch.bfloat16: kinds.MOSTLY_BF16, torch.float16: kinds.MOSTLY_F16}
    if dtype not in types:
        raise ConfigError(
            f"--format gguf has no dtype {dtype_name(dtype)}. Legal values: float32, bfloat16 and float16."
        )
    return {
        "general.type": "model",
        "general.name": name,
        "general.file_type": int(types[dtype]),
        "general.quantization_version": int(gguf.GGML_QUANT_VERSION),
    }


def _activation(model: ModelConfig, read: Callable[[str], Tensor]) -> dict[str, Any]:
    """Return the numbers of xIELU: those that are trained are keys here."""
    if model.hidden_act != "xielu":
        return {}
    alphas = {
        f"xielu.{part}": [
            read(f"layers.{layer}.mlp.{part}.weight").item() for layer in range(model.num_hidden_layers)
        ]
        for part in ("alpha_p", "alpha_n")
    }
    return alphas | {"xielu.beta": xielu.BETA, "xielu.eps": xielu.EPS}


def _tokenizer(
    exported: ExportedTokenizer, size: int, ids: dict[str, Any], pre: str | None
) -> dict[str, Any]:
    if exported.name is None:
        return {"tokenizer.ggml.model": "no_vocab"}
    model = exported.tokenizer.content if isinstance(exported.tokenizer, SentencePieceTokenizer) else None
    with tempfile.TemporaryDirectory() as directory:
        write_tokenizer(Path(directory), exported, 0)
        return tokenizer_keys(Path(directory), size, ids, model, pre)


# ---- the file


@contextmanager
def _new_file(target: Path) -> Iterator[Path]:
    """Yield a temporary path, which is renamed when the block ends without an error."""
    temporary = target.with_name(f".{target.name}.new")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        temporary.rename(target)
    except OSError as error:
        raise ConversionError(f"failed to write {target}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def _write(
    gguf: Any,
    path: Path,
    architecture: Architecture,
    keys: dict[str, Any],
    tensors: list[GgufTensor],
    read: Callable[[str], Tensor],
    dtype: torch.dtype,
    progress: Report,
) -> None:
    types = gguf.GGMLQuantizationType
    kinds = {torch.float32: types.F32, torch.bfloat16: types.BF16, torch.float16: types.F16}
    writer = gguf.GGUFWriter(None, architecture.name)
    for key, value in keys.items():
        _add(writer, key, value)
    dtypes = {each.name: torch.float32 if each.fp32 else dtype for each in tensors}
    sizes = {each.name: prod(each.shape) * dtypes[each.name].itemsize for each in tensors}
    for each in tensors:
        kind = kinds[dtypes[each.name]]
        # the dtype of numpy does not count beside the kind, unless it is that of bytes
        writer.add_tensor_info(each.name, each.shape, np.dtype(np.float32), sizes[each.name], kind)
    try:
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        done, total = 0, sum(sizes.values())
        for each in tensors:
            values = each.build(*map(read, each.ours)).to(dtypes[each.name]).contiguous()
            assert tuple(values.shape) == each.shape, f"{each.name} has shape {list(values.shape)}"
            writer.write_tensor_data(values.flatten().view(torch.uint8).numpy())
            done += sizes[each.name]
            progress("exporting", done, total, "B")
    finally:
        writer.close()


def _add(writer: Any, key: str, value: Any) -> None:
    """Add a key of the type of its value; what is None is left out."""
    if value is None:
        return
    kinds = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array", bytes: "array"}
    getattr(writer, f"add_{kinds[type(value)]}")(key, value)
