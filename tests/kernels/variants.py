"""What the compile tests compile: of every module's static tables all entries, at the sizes of real models."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from megalite_kernels.launch import Variant

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


def of_activation(module: Any, architecture: str) -> list[Variant]:
    """Limited by memory alone, and the same on every architecture; so are most of the others."""
    return [
        module._variant(backward, dtype, act, width=14336)
        for backward in (False, True)
        for act in ("silu", "gelu_new")
        for dtype in (BF16, FP16, FP32)
    ]


def of_adamw(module: Any, architecture: str) -> list[Variant]:
    """Training in fp32, bf16 and fp16."""
    dtypes = (FP32, None), (FP32, BF16), (BF16, BF16), (FP32, FP16)
    return [module._variant(*each, scaled) for each in dtypes for scaled in (False, True)]


def of_attention(module: Any, architecture: str) -> list[Variant]:
    """Every tile: with all options, and, for the heads of Llama 1B and 8B, with documents alone."""
    everything = {"softcap": 30.0, "window": 1024, "documents": True, "p": 0.1}
    documents = {"softcap": 0.0, "window": 0, "documents": True, "p": 0.0}
    return [
        module._variant(kernel, architecture, BF16, dim=dim, group=4, scale=dim**-0.5, **options)
        for kernel in ("forward", "dq", "dk dv")
        for dim, options in ((80, everything), (256, everything), (64, documents), (128, documents))
    ]


def of_cross_entropy(module: Any, architecture: str) -> list[Variant]:
    """Padded vocabularies."""
    return [
        module._variant(architecture, backward, dtype, with_sum, module.ALIGN)
        for backward, with_sum in ((False, False), (False, True), (True, False))
        for dtype in (BF16, FP16, FP32)
    ]


def of_grad_norm(module: Any, architecture: str) -> list[Variant]:
    return [module._variant(dtype) for dtype in (FP32, BF16, FP16)]


def of_norm(module: Any, architecture: str) -> list[Variant]:
    """The widths of real models, the widest that `norm` gives to kernels, and short and odd ones."""
    widths = {"rms": [2048, 8192, 16384], "add": [2048, 4096, 5120, 8192, 16384], "layer": [768, 8192]}
    cases = [(kind, BF16, (width, 1, width), 0.0) for kind, of_kind in widths.items() for width in of_kind]
    cases += [("add", FP16, (4096, 1, 4096), 0.0), ("add", FP32, (8192, 1, 8192), 0.0), ("layer", FP32, (8192, 1, 8192), 0.0)]
    cases += [("rms", BF16, (64, 8, 1536), 0.0), ("rms", BF16, (128, 32, 6144), 0.0), ("add", BF16, (3072, 1, 3072), 1.0)]
    return [
        module._variant(backward, architecture, dtype, rows_of_x, kind == "add", kind == "layer", offset, 1e-5)
        for backward in (False, True)
        for kind, dtype, rows_of_x, offset in cases
    ]


def of_rotary(module: Any, architecture: str) -> list[Variant]:
    return [module._variant(dtype, dtype, dim) for dtype in (BF16, FP16, FP32) for dim in (64, 96, 128)]


LISTS = {
    "activation_triton": of_activation,
    "adamw_triton": of_adamw,
    "attention_triton": of_attention,
    "cross_entropy_triton": of_cross_entropy,
    "grad_norm_triton": of_grad_norm,
    "norm_triton": of_norm,
    "rotary_triton": of_rotary,
}


def variants(module: str, architecture: str) -> list[Variant]:
    return LISTS[module](importlib.import_module(f"megalite_kernels.{module}"), architecture)
