"""Exports in fp8 with a scale per block of 128 x 128, the format of DeepSeek-V3 (`huggingface.fp8` reads it).

A matrix is quantized if both of its sizes are multiples of 128: transformers 5.24 derives the size of a block
from the number of scales, and would read others wrongly. Embedding, head, routers, norms and what else
`parallel.fp8_choice` leaves out stay in bf16.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from megalite_kernels.fp8 import quantize
from safetensors import safe_open
from safetensors.torch import save_file

from megalite.config.sections.model import ModelConfig
from megalite.families.weight_files import INDEX, SAFETENSORS
from megalite.huggingface.fp8 import BLOCK, SCALES
from megalite.huggingface.tensor_places import TensorPlace
from megalite.model.parameters import model_specs
from megalite.parallel.fp8_choice import ROLES

_WEIGHT = ".weight"


def fp8_matrices(model: ModelConfig, by_name: Mapping[str, TensorPlace]) -> set[str]:
    """Return the names in the files of the matrices that an export in fp8 quantizes.

    A tensor that holds several of ours is quantized if all of them are.
    """
    roles = {segment.name: segment.role for spec in model_specs(model) for segment in spec.segments}
    chosen, others = set[str](), set[str]()
    for name, place in by_name.items():
        for theirs, shape in place.tensors.items():
            whole = len(shape) == 2 and not any(size % BLOCK for size in shape)
            fits = whole and roles.get(name) in ROLES and theirs.endswith(_WEIGHT) and not place.transposed
            (chosen if fits else others).add(theirs)
    return chosen - others


def quantize_files(directory: Path, matrices: Iterable[str], linears: Iterable[str]) -> dict[str, Any]:
    """Quantize matrices in the safetensors files of a directory, one file after the other.

    A file is in memory while it is written again.

    Args:
        linears: names of all matrices of the files.

    Returns:
        the quantization_config of config.json.
    """
    chosen, index = set(matrices), directory / f"{SAFETENSORS}{INDEX}"
    names: dict[str, str] = {}
    total = 0
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata()
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118, not a mapping
        for name in chosen & tensors.keys():
            codes, scales = quantize(tensors[name].to(torch.float32), (BLOCK, BLOCK))
            tensors[name], tensors[name + SCALES] = codes, scales
        save_file(tensors, file, metadata)
        names |= dict.fromkeys(tensors, file.name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    if index.is_file():
        content = {"metadata": {"total_size": total}, "weight_map": names}
        index.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": sorted(name.removesuffix(_WEIGHT) for name in set(linears) - chosen),
    }
