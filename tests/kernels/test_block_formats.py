"""Codes and scales of few bits against bitsandbytes, and against what torchao has computed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from megalite_kernels import block_formats, nf4
from torch import Tensor

RECORDED = Path(__file__).with_name("mxfp4_of_torchao.json")
SIZES = (64 * 1000, 64 * 37 + 13, 5, 33 * 96, 256 * 64 * 3 + 1)


def numbers(count: int, dtype: torch.dtype) -> Tensor:
    return (torch.randn(count) * 0.02).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", SIZES)
def test_nf4_has_the_bits_of_bitsandbytes(count, dtype):
    from bitsandbytes import functional

    x = numbers(count, dtype)
    packed, state = functional.quantize_4bit(x, quant_type="nf4", blocksize=64)
    codes, scales = nf4.quantize(x)
    assert torch.equal(nf4.unpack(packed.view(-1), count), codes) and torch.equal(scales, state.absmax)
    values = nf4.values_of(nf4.pack(codes), count) * nf4.of_elements(scales, count)
    assert torch.equal(values.to(dtype), functional.dequantize_4bit(packed, state).view(-1))


@pytest.mark.parametrize("count", SIZES)
def test_scales_that_are_quantized_have_the_bits_of_bitsandbytes(count):
    from bitsandbytes import functional

    x = numbers(count, torch.float32)
    packed, state = functional.quantize_4bit(x, quant_type="nf4", blocksize=64, compress_statistics=True)
    nested = nf4.quantize_scales(nf4.quantize(x).scales)
    assert torch.equal(nested.offset, state.offset) and torch.equal(nested.scales, state.state2.absmax)
    different = nested.codes != state.absmax
    assert not different[nested.scales.repeat_interleave(256)[: len(different)] > 0].any(), "of zeros any code is right"
    exact = functional.dequantize_4bit(packed, state).view(-1)
    assert torch.equal(block_formats.rounded(x.view(1, -1), "nf4", 64, double=True).view(-1), exact)


def test_zeros_stay_zeros():
    for name, block in (("nf4", 64), ("int8", 128), ("mxfp4", 32)):
        assert not block_formats.rounded(torch.zeros(2, 128), name, block).any(), name
    assert not block_formats.rounded(torch.zeros(2, 128), "nf4", 64, double=True).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_int8_has_the_bits_of_bitsandbytes(dtype):
    from bitsandbytes import functional

    x = numbers(64 * 96, dtype).view(64, 96)
    codes, scales, _ = functional.int8_vectorwise_quant(x.half())
    ours = block_formats.quantize(x, "int8", 96)
    assert torch.equal(ours.codes.view(torch.int8).view(64, 96), codes) and torch.equal(ours.scales, scales)


def test_mxfp4_has_the_bits_of_torchao():
    """Zeros, very small and very large numbers, and ties among them."""
    recorded = json.loads(RECORDED.read_text())
    codes, scales = block_formats.quantize(torch.tensor(recorded["input"]), "mxfp4", 32)
    assert scales.tolist() == recorded["scales"]
    assert block_formats.FORMATS["mxfp4"].pack(codes).tolist() == recorded["codes"]


def test_a_value_is_quantized_to_itself():
    """A base that is read from its own values has the same values."""
    x = numbers(64 * 64, torch.float32).view(64, 64)
    for name, block in (("nf4", 64), ("mxfp4", 32)):
        values = block_formats.rounded(x, name, block)
        assert torch.equal(block_formats.rounded(values, name, block), values), name


def test_a_negative_scale_has_the_codes_of_other_signs():
    """Of a small block beside large ones, whose scales have been quantized together."""
    x = numbers(64 * 256, torch.float32).view(256, 64)
    x[::2] *= 1e-4
    nested = nf4.quantize_scales(nf4.quantize(x.view(-1)).scales)
    assert (nested.values() < 0).any()
    values = block_formats.rounded(x, "nf4", 64, double=True)
    scales = nested.values()
    unsigned = nf4.without_signs(values.view(-1), scales).view_as(values)
    assert torch.equal(block_formats.rounded(unsigned, "nf4", 64, known=scales), values)
