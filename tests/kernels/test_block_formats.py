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


@pytest.mark.parametrize("form", ["nf4", "fp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", SIZES)
def test_4_bits_are_those_of_bitsandbytes(count, dtype, form):
    from bitsandbytes import functional

    x = numbers(count, dtype)
    packed, state = functional.quantize_4bit(x, quant_type=form, blocksize=64)
    codes, scales = nf4.quantize(x, form)
    assert torch.equal(nf4.unpack(packed.view(-1), count), codes) and torch.equal(scales, state.absmax)
    values = nf4.values_of(nf4.pack(codes), count, form) * nf4.of_elements(scales, count)
    assert torch.equal(values.to(dtype), functional.dequantize_4bit(packed, state).view(-1))


@pytest.mark.parametrize("form", ["nf4", "fp4"])
def test_ties_and_very_small_numbers_have_the_bits_of_bitsandbytes(form):
    """Elements at midpoints, where x / absmax in a short block and x · (1 / absmax) may be on two sides, and blocks
    of zeros or of the smallest numbers."""
    from bitsandbytes import functional

    middles = torch.tensor(nf4._midpoints(form))
    whole, short = (torch.rand(count, 1) * middles for count in (2000, 100))
    whole = torch.cat([whole, whole.new_ones(2000, 49) * whole[:, :1] / middles[0]], 1).view(-1)
    for x in (whole, torch.zeros(130), torch.full((64,), 1e-39)):
        packed, state = functional.quantize_4bit(x, quant_type=form, blocksize=64)
        codes, scales = nf4.quantize(x, form)
        assert torch.equal(nf4.unpack(packed.view(-1), len(x)), codes)
    for row in short:
        x = torch.cat([row, row[:1] / middles[0]])
        packed, _ = functional.quantize_4bit(x, quant_type=form, blocksize=64)
        assert torch.equal(nf4.unpack(packed.view(-1), len(x)), nf4.quantize(x, form).codes)


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
    for name, block in (("nf4", 64), ("fp4", 64), ("int8", 128), ("mxfp4", 32)):
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
    for name, block in (("nf4", 64), ("fp4", 64), ("mxfp4", 32)):
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
    assert torch.equal(block_formats.rounded(values, "nf4", 64, scales=scales, known=True), values)


def test_rows_of_very_small_numbers_keep_their_codes_of_8_bits():
    """Which fp16 cannot tell apart."""
    codes, scales = torch.randint(-127, 128, (8, 64), dtype=torch.int8), torch.logspace(-7.2, 2, 8)
    values = codes * (scales * (1 / 127)).unsqueeze(1)
    again = block_formats.FORMATS["int8"].quantize(values.view(-1), 64, scales)
    assert torch.equal(again.codes.view(torch.int8).view_as(codes), codes) and torch.equal(again.scales, scales)
