"""Exports in 4 bits, as transformers saves a model that bitsandbytes has quantized.

`huggingface.nf4` reads them. The matrices of layers are quantized; head, embedding, norms, routers and
experts stay in the dtype of the export. A merged model that is quantized again is another one than its
adapter was trained over: the change of its matrices is returned with the export.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from megalite_kernels import nf4
from torch import Tensor

from megalite.config.sections.lora import PROJECTIONS
from megalite.config.sections.model import ModelConfig
from megalite.huggingface.nf4 import STATE
from megalite.huggingface.quantized_files import WEIGHT, linears_of, matrices_of, rewrite
from megalite.huggingface.tensor_places import TensorPlace


def quantize_export(
    directory: Path, model: ModelConfig, by_name: Mapping[str, TensorPlace]
) -> tuple[dict[str, Any], str]:
    """Quantize the matrices of an export.

    Returns:
        the quantization_config of its config.json, and a line about the change of the matrices.
    """
    chosen, squares = matrices_of(model, by_name, PROJECTIONS, lambda shape: True), torch.zeros(2).double()

    def quantized(name: str, matrix: Tensor) -> dict[str, Tensor]:
        blocks, count = nf4.quantize(matrix.reshape(-1)), matrix.numel()
        packed = nf4.pack(blocks.codes)
        values = nf4.values_of(packed, count) * nf4.of_elements(blocks.scales, count)
        exact = matrix.reshape(-1).float()
        squares.add_(torch.stack([(values - exact).square().sum(), exact.square().sum()]).double())
        return {
            name: packed.view(-1, 1),
            f"{name}.absmax": blocks.scales,
            f"{name}.quant_map": nf4.table(exact.device).clone(),
            f"{name}{STATE}": _state(matrix),
        }

    rewrite(directory, chosen, quantized)
    changed = math.sqrt(squares[0] / squares[1]) if chosen else 0.0
    others = sorted(name.removesuffix(WEIGHT) for name in set(linears_of(by_name)) - chosen)
    settings = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": False,
        "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": others,
    }
    return settings, f"nf4 has changed the matrices of layers by {changed:.1%} (rms, of their values)"


def _state(matrix: Tensor) -> Tensor:
    """Return bitsandbytes' description of a quantized matrix, JSON as bytes."""
    dtype = str(matrix.dtype).removeprefix("torch.")
    state = {"quant_type": "nf4", "blocksize": nf4.BLOCK, "dtype": dtype, "shape": list(matrix.shape)}
    return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
