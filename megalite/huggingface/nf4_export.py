"""Exports in 4 bits, as transformers saves a model that bitsandbytes has quantized.

`huggingface.bits_and_bytes` reads them. The matrices of layers are quantized; head, embedding, norms, routers
and experts stay in the dtype of the export. A merged model that is quantized again is another one than its
adapter was trained over: the change of its matrices is returned with the export.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from megalite_kernels import nf4
from torch import Tensor

from megalite.config.sections.lora import PROJECTIONS
from megalite.config.sections.model import ModelConfig
from megalite.huggingface.bits_and_bytes import STATE
from megalite.huggingface.quantized_files import WEIGHT, linears_of, matrices_of, rewrite
from megalite.huggingface.tensor_places import TensorPlace


def quantize_export(
    directory: Path, model: ModelConfig, by_name: Mapping[str, TensorPlace], head: str
) -> tuple[dict[str, Any], str]:
    """Quantize the matrices of an export.

    Args:
        head: the module of the model's head.

    Returns:
        the quantization_config of its config.json, and a line about the change of the matrices.
    """
    chosen, squares = matrices_of(model, by_name, PROJECTIONS, lambda shape: True), torch.zeros(2).double()

    def quantized(name: str, matrix: Tensor) -> dict[str, Tensor]:
        tensors, values = in_4_bits(name, exact := matrix.float(), matrix.dtype)
        squares.add_(torch.stack([(values - exact).square().sum(), exact.square().sum()]).double())
        return tensors

    rewrite(directory, chosen, quantized)
    changed = math.sqrt(squares[0] / squares[1]) if chosen else 0.0
    line = f"nf4 has changed the matrices of layers by {changed:.1%} (rms, of their values)"
    return settings_of(by_name, chosen, head), line


def in_4_bits(name: str, matrix: Tensor, dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor]:
    """Quantize a matrix.

    Args:
        name: of the matrix.
        matrix: in fp32.
        dtype: that transformers gives its values.

    Returns:
        the tensors that are stored, by name, and the values in fp32.
    """
    blocks, count = nf4.quantize(matrix.reshape(-1)), matrix.numel()
    packed = nf4.pack(blocks.codes)
    values = nf4.values_of(packed, count) * nf4.of_elements(blocks.scales, count)
    state = {"quant_type": "nf4", "blocksize": nf4.BLOCK}
    state |= {"dtype": str(dtype).removeprefix("torch."), "shape": list(matrix.shape)}
    tensors = {
        name: packed.view(-1, 1),
        f"{name}.absmax": blocks.scales,
        f"{name}.quant_map": nf4.table(matrix.device).clone(),
        f"{name}{STATE}nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    return tensors, values.view_as(matrix)


def settings_of(by_name: Mapping[str, TensorPlace], chosen: Collection[str], head: str) -> dict[str, Any]:
    """Return the quantization_config of a directory in which these matrices are quantized.

    Args:
        head: the module of the model's head, which a file does not have if it is tied.
    """
    linears = {name.removesuffix(WEIGHT) for name in set(linears_of(by_name)).difference(chosen)}
    others = sorted(linears | {head})
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": False,
        "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": others,
    }
