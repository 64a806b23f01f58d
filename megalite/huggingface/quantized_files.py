"""Quantization of matrices in the files of an export: in fp8 (`fp8_export`), or in 4 bits (`nf4_export`).

The files are written in full precision first, and then again, one after the other; a file is in memory while
it is written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from megalite.config.sections.model import ModelConfig
from megalite.families.weight_files import INDEX, SAFETENSORS
from megalite.huggingface.tensor_places import TensorPlace
from megalite.model.parameters import model_specs

WEIGHT = ".weight"


def matrices_of(
    model: ModelConfig,
    by_name: Mapping[str, TensorPlace],
    roles: Collection[str],
    fits: Callable[[tuple[int, ...]], bool],
) -> set[str]:
    """Return the names in the files of the matrices that are quantized.

    A tensor that holds several of ours is quantized if all of them are.

    Args:
        roles: those of the segments that may be quantized.
        fits: whether a matrix of this shape may be.
    """
    role = {segment.name: segment.role for spec in model_specs(model) for segment in spec.segments}
    chosen, others = set[str](), set[str]()
    for name, place in by_name.items():
        for theirs, shape in place.tensors.items():
            is_matrix = len(shape) == 2 and theirs.endswith(WEIGHT) and not place.transposed
            (chosen if is_matrix and role.get(name) in roles and fits(shape) else others).add(theirs)
    return chosen - others


def linears_of(by_name: Mapping[str, TensorPlace]) -> list[str]:
    """Return the names of all matrices of the files."""
    shapes = {theirs: shape for place in by_name.values() for theirs, shape in place.tensors.items()}
    return [theirs for theirs, shape in shapes.items() if len(shape) == 2 and theirs.endswith(WEIGHT)]


def rewrite(
    directory: Path, chosen: Collection[str], quantized: Callable[[str, Tensor], dict[str, Tensor]]
) -> None:
    """Replace matrices in the safetensors files of a directory.

    Args:
        quantized: (name, matrix) -> the tensors that replace it, by name.
    """
    names: dict[str, str] = {}
    total = 0
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata()
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118, not a mapping
        for name in set(chosen) & tensors.keys():
            tensors |= quantized(name, tensors.pop(name))
        save_file(tensors, file, metadata)
        names |= dict.fromkeys(tensors, file.name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = directory / f"{SAFETENSORS}{INDEX}"
    if index.is_file():
        content = {"metadata": {"total_size": total}, "weight_map": names}
        index.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
