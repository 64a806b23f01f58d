"""Tensors of a Hugging Face directory that are no weights of the language model, and that transformers does
not read with it: a vision tower, modules of multi-token prediction.

An imported checkpoint has them in COMPANIONS/KEPT. An export writes them again, unchanged, and the language
model in its place beside them: in a multimodal directory its fields are text_config, and its names begin with
`Names.nested`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from torch import Tensor

from megalite.families.model_config import families
from megalite.families.module_names import Names
from megalite.huggingface.companions import PROCESSOR
from megalite.huggingface.files import NewFile, SafetensorsFile

KEPT = "kept.safetensors"
_MTP = ("mtp", ".layers.")
"""Parts of the prefixes of modules of multi-token prediction."""
_DTYPE = ("dtype", "torch_dtype")


def kept_names(weights: Iterable[str], names: Names, mtp: bool = True) -> list[str]:
    """Return the names of a directory's tensors that are kept aside.

    Args:
        mtp: with those of MTP modules.
    """
    prefixes = tuple(prefix for prefix in names.kept if mtp or not any(part in prefix for part in _MTP))
    return [name for name in weights if name.startswith(prefixes)]


def write_kept(directory: Path, name: str, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors to a safetensors file."""
    shapes = {theirs: (tensor.dtype, tuple(tensor.shape)) for theirs, tensor in tensors.items()}
    with closing(NewFile(directory / name, shapes)) as file:
        for theirs, tensor in tensors.items():
            file.write(theirs, tensor.contiguous())


def stored_kept(directory: Path) -> dict[str, Tensor] | None:
    """Return the tensors that an import has kept aside, views of a memory-mapped file; None if there is no
    file."""
    if not (directory / KEPT).is_file():
        return None
    file = SafetensorsFile(directory / KEPT)
    return {name: file[name] for name in file.names}


def note(names: Iterable[str], kept: tuple[str, ...]) -> list[str]:
    """Return a line about the tensors that are kept aside; none if there are none."""
    names = list(names)
    counts = {prefix: sum(name.startswith(prefix) for name in names) for prefix in kept}
    listed = ", ".join(f"{count} of {prefix}*" for prefix, count in counts.items() if count)
    return [f"tensors kept aside, which an export writes again: {listed}"] if listed else []


def is_nested(like: Path, names: Names, kept: Iterable[str]) -> bool:
    """Return whether a directory is of a multimodal model whose other parts are among the kept tensors."""
    others = any(name.startswith(names.base) for name in kept)
    return bool(names.nested) and others and isinstance(_whole(like).get("text_config"), dict)


def nested_config(like: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of a multimodal model with that of its language model.

    Args:
        like: directory of the multimodal model, whose other fields are unchanged.
    """
    whole = {key: value for key, value in _whole(like).items() if key not in _DTYPE}
    text = {key: value for key, value in whole["text_config"].items() if key not in _DTYPE}
    rope = {**(text.get("rope_parameters") or {}), **(config.get("rope_parameters") or {})}
    own = {key: value for key, value in config.items() if key not in ("architectures", "torch_dtype")}
    outer = {key: own[key] for key in own.keys() & (families().kept - text.keys() | {"tie_word_embeddings"})}
    inner = {key: own[key] for key in own if key not in outer or key in text}
    inner |= {"rope_parameters": rope, "tie_word_embeddings": config["tie_word_embeddings"]}
    return whole | outer | {"torch_dtype": config["torch_dtype"], "text_config": text | inner}


def _whole(like: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((like / "config.json").read_text(encoding="utf-8"))
    return content


def copy_processor(like: Path, target: Path) -> None:
    """Copy the settings of the processor of a multimodal model."""
    for name in PROCESSOR:
        if (like / name).is_file():
            shutil.copyfile(like / name, target / name)
