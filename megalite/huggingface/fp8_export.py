"""Exports in fp8 with a scale per block of 128 x 128, the format of DeepSeek-V3 (`huggingface.fp8` reads it).

A matrix is quantized if both of its sizes are multiples of 128: transformers 5.24 derives the size of a block
from the number of scales, and would read others wrongly. Embedding, head, routers, norms and what else
`parallel.fp8_choice` leaves out stay in bf16.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from megalite_kernels.fp8 import quantize
from torch import Tensor

from megalite.config.sections.model import ModelConfig
from megalite.huggingface.fp8 import BLOCK, SCALES
from megalite.huggingface.quantized_files import WEIGHT, linears_of, matrices_of, rewrite
from megalite.huggingface.tensor_places import TensorPlace
from megalite.parallel.fp8_choice import ROLES


def quantize_export(
    directory: Path, model: ModelConfig, by_name: Mapping[str, TensorPlace]
) -> dict[str, Any]:
    """Quantize the matrices of an export, and return the quantization_config of its config.json."""
    chosen = matrices_of(model, by_name, ROLES, lambda shape: not any(size % BLOCK for size in shape))
    rewrite(directory, chosen, _quantized)
    others = sorted(name.removesuffix(WEIGHT) for name in set(linears_of(by_name)) - chosen)
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": others,
    }


def _quantized(name: str, matrix: Tensor) -> dict[str, Tensor]:
    codes, scales = quantize(matrix.to(torch.float32), (BLOCK, BLOCK))
    return {name: codes, name + SCALES: scales}
