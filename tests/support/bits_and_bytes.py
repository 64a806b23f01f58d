"""Matrices and models in few bits as others have them: bitsandbytes, and the definition of MXFP4."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def mxfp4(matrix: Tensor) -> Tensor:
    """The nearest of all values by a search in fp64; `tests/kernels/test_block_formats.py` has the codes of torchao."""
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
    blocks = matrix.double().reshape(-1, 32)
    scales = 2.0 ** torch.ceil(torch.log2(blocks.abs().amax(1, keepdim=True) / 6))
    nearest = ((blocks.abs() / scales).unsqueeze(-1) - magnitudes).abs().argmin(-1)
    return (magnitudes[nearest] * blocks.sign() * scales).view(matrix.shape).float()


def by_others(matrix: Tensor, base: str, double: bool) -> Tensor:
    """Values of a matrix after quantization by bitsandbytes, or of the definition.

    Codes of 4 bits are given flattened: for two dimensions there are faster routes, of which that for AVX-512 is wrong
    where rows are no whole blocks."""
    matrix = matrix.float()
    if base == "mxfp4":
        return mxfp4(matrix)
    from bitsandbytes import functional  # takes seconds

    if base == "int8":
        codes, scales, _ = functional.int8_vectorwise_quant(matrix.half())
        return codes.float().mul_(scales.unsqueeze(1).mul(1.0 / 127.0))
    flat = matrix.reshape(-1)
    packed, state = functional.quantize_4bit(flat, quant_type=base, blocksize=64, compress_statistics=double)
    return functional.dequantize_4bit(packed, state).view(matrix.shape)


def by_bitsandbytes(directory: Path, double: bool, base: str = "nf4") -> Any:
    """The model as transformers loads it in four or eight bits."""
    import transformers

    quantized = transformers.BitsAndBytesConfig(
        load_in_8bit=base == "int8",
        llm_int8_threshold=0.0,
        load_in_4bit=base != "int8",
        bnb_4bit_quant_type="fp4" if base == "fp4" else "nf4",
        bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=torch.float32,
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, quantization_config=quantized, attn_implementation="eager"
    )
    return in_fp32(model)


def in_fp32(model: Any) -> Any:
    """A model in four bits that multiplies in fp32. On CPUs that have it, bitsandbytes would multiply in bf16, whatever
    the compute dtype is."""
    from bitsandbytes.nn import Linear4bit

    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu, module.compute_dtype = False, torch.float32
    return model
