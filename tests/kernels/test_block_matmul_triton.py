"""Matmuls with matrices in codes of few bits, interpreted, against the same values in memory."""

from __future__ import annotations

import pytest
import torch
from megalite_kernels import backend, block_formats
from megalite_kernels.block_matmul_triton import block_matmul, block_transposed_matmul
from torch.library import opcheck

from megalite.assembly.parts import build_parts, make_mesh
from megalite.config.load import from_dict
from megalite.huggingface.base_weights import BaseWeights
from megalite.parallel.quantized.reading import quantize_base

FORMS = {"nf4": 64, "fp4": 64, "int8": 0, "mxfp4": 32}  # elements of a row that share a scale; 0: all


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("rows", "outputs", "inner"), [(37, 80, 256), (130, 200, 128), (0, 8, 128)])
def test_products_are_those_of_the_values(rows, outputs, inner, form, dtype, device):
    matrix, block = torch.randn(outputs, inner, device=device) * 0.05, FORMS[form]
    matrix[3] = 0
    kind = block_formats.FORMATS[form]
    codes, scales = block_formats.quantize(matrix, form, block or inner)
    packed, in_fp32 = kind.pack(codes), kind.scales(scales).view(outputs, -1)
    values = block_formats.rounded(matrix, form, block or inner).to(dtype)
    x, dy = (torch.randn(rows, width, device=device).to(dtype) for width in (inner, outputs))
    arguments = packed, in_fp32, block_formats.code_values(form, x.device), form, block
    out, dx = block_matmul(x, *arguments), block_transposed_matmul(dy, *arguments)
    assert out.dtype == dx.dtype == dtype
    for got, exact in (
        (out, x.double() @ values.double().t()),
        (dx, dy.double() @ values.double()),
    ):
        limit = {torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
        assert (got.double() - exact).abs().max() <= limit * exact.abs().max() if rows else got.numel() == 0


def test_both_are_operations(device):
    codes, scales = torch.zeros(8, 64, dtype=torch.uint8, device=device), torch.ones(8, 2, device=device)
    arguments = codes, scales, block_formats.code_values("nf4", scales.device), "nf4", 64
    for name, width in (("block_matmul", 128), ("block_transposed_matmul", 8)):
        opcheck(getattr(torch.ops.megalite, name).default, (torch.randn(3, width, device=device), *arguments))


@pytest.mark.parametrize("base", FORMS)
def test_a_stored_matrix_is_multiplied_by_them(base, monkeypatch, device):
    """Of three segments, one after the other, with scales that are quantized."""
    model = {"num_hidden_layers": 1, "hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4}
    lora = {"rank": 2, "base": base, "double_quant": base in ("nf4", "fp4")}
    config = from_dict({"model": model | {"vocab_size": 16}, "lora": lora, "train": {"precision": "bf16"}})
    parts = build_parts(config, make_mesh(config), device)
    backend.select("triton")  # which `train.kernels` has changed
    quantize_base(parts.store, BaseWeights(config, None))
    matmuls = parts.store.weights["layers.0.attention.qkv.weight"].matmuls
    x, dy = (torch.randn(3, 2, width, device=device, dtype=torch.bfloat16) for width in (128, 384))
    launched = [matmuls.forward(x), matmuls.input_gradient(dy)]
    monkeypatch.setattr(backend, "_on_cpu", False)
    monkeypatch.setattr(backend, "_on_cuda", False)
    for got, expected in zip(launched, (matmuls.forward(x), matmuls.input_gradient(dy)), strict=True):
        assert (got - expected).abs().max() <= 2**-7 * expected.abs().max()
