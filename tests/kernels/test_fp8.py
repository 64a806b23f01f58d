"""fp8 codes and scales, against definitions in float64 and torchao's reference quantizers."""

import math
from itertools import pairwise

import pytest
import torch
from megalite_kernels import fp8, fp8_ranges
from torch import Tensor


def e4m3_values() -> Tensor:
    """The 127 numbers ≥ 0 of e4m3 in the order of their codes: 4 bits of exponent, 3 of mantissa, no infinity."""
    return torch.tensor(
        [
            math.ldexp(mantissa, -9) if exponent == 0 else math.ldexp(8 + mantissa, exponent - 10)
            for exponent in range(16)
            for mantissa in range(8)
        ][:127],
        dtype=torch.float64,
    )


def nearest_code(x: Tensor) -> Tensor:
    """The code of each fp64 number: that of the nearest number of e4m3, the even one of two, at most 448."""
    values = e4m3_values()
    magnitude = x.abs().clamp(max=448.0)
    above = torch.searchsorted(values, magnitude).clamp(max=126)
    below = (above - 1).clamp(min=0)
    up, down = values[above] - magnitude, magnitude - values[below]
    code = torch.where(up < down, above, torch.where(down < up, below, torch.where(above % 2 == 0, above, below)))
    return code + 128 * torch.signbit(x)


def adversarial(count: int) -> Tensor:
    """fp32 numbers: Gaussian of all magnitudes, all numbers of e4m3, the midpoints between them and the
    fp32 neighbours of both."""
    torch.manual_seed(0)
    values = e4m3_values()
    points = torch.cat((values, (values[1:] + values[:-1]) / 2)).float()
    near = torch.cat((points, points.nextafter(torch.tensor(math.inf)), points.nextafter(torch.tensor(-math.inf))))
    random = torch.randn(count) * torch.exp2(torch.randint(-14, 10, (count,)).float())
    return torch.cat((near, -near, random))


def test_a_code_is_the_nearest_number():
    x = adversarial(1_000_000)
    rows = x[: len(x) // 128 * 128].view(-1, 128).clone()
    # 448 in each block: the factor is 1
    rows[:, 0] = 448.0
    rows.clamp_(-448.0, 448.0)
    codes, scales = fp8.quantize(rows, (1, 128))
    assert torch.equal(scales, torch.ones(len(rows), 1))
    assert torch.equal(codes.view(torch.uint8).long(), nearest_code(rows.double()))


@pytest.mark.parametrize("block", [(1, 128), (128, 128)])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_scales_and_codes_are_those_of_the_definition(block, power_of_two):
    x = adversarial(128 * 512)[-128 * 512 :].view(128, 512)
    x[:, 128:256] = 0
    codes, scales = fp8.quantize(x, block, power_of_two)
    blocks = x.double().view(128 // block[0], block[0], 4, 128)
    for row in range(blocks.shape[0]):
        for column in range(4):
            own = blocks[row, :, column]
            factor = torch.tensor(448.0 / max(own.abs().max().item(), 1e-12)).float()
            if power_of_two:
                factor = torch.tensor(math.ldexp(1.0, math.frexp(factor.item())[1] - 1))
            assert scales[row, column] == factor.reciprocal()
            # the product is rounded to fp32, as kernels do
            expected = nearest_code((own.float() * factor).double())
            assert torch.equal(codes.view(torch.uint8).long().view(blocks.shape)[row, :, column], expected)


def test_a_part_has_the_codes_of_the_whole():
    w = torch.randn(384, 512, dtype=torch.bfloat16)
    whole = fp8.quantize(w, (128, 128))
    for rows, columns in ((slice(128, 384), slice(None)), (slice(None), slice(256, 512))):
        part = fp8.quantize(w[rows, columns].contiguous(), (128, 128))
        assert torch.equal(part.codes.view(torch.uint8), whole.codes[rows, columns].view(torch.uint8))
        tiles = slice((rows.start or 0) // 128, (rows.stop or 384) // 128)
        assert torch.equal(part.scales, whole.scales[tiles, (columns.start or 0) // 128 : (columns.stop or 512) // 128])
    transposed = fp8.quantize(w.t().contiguous(), (128, 128))
    assert torch.equal(transposed.codes.view(torch.uint8), whole.t.codes.contiguous().view(torch.uint8))
    assert torch.equal(transposed.scales, whole.t.scales)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("parts", [2, 3, 7])
def test_ranges_have_the_codes_of_the_whole(parts, dtype):
    """Cut inside rows and blocks, with blocks that are not finite and blocks of zeros."""
    w = adversarial(384 * 256)[-384 * 256 :].view(384, 256).to(dtype)
    w[130, 5], w[300, 200], w[:128, 128:] = math.nan, -math.inf, 0
    whole, flat, columns = fp8.quantize(w, (128, 128)), w.view(-1), w.shape[1]
    cuts = [len(flat) * part // parts // 32 * 32 for part in range(parts + 1)]
    rows = [fp8_ranges.block_rows(start, stop, columns) for start, stop in pairwise(cuts)]
    maxima = torch.zeros(3, 2, dtype=torch.int32)
    for own, (start, stop) in zip(rows, pairwise(cuts), strict=True):
        maxima[own] = maxima[own].maximum(fp8_ranges.block_maxima(flat[start:stop], start, columns))
    factors = fp8.scale_factors(maxima.view(torch.float32), power_of_two=False)
    codes = [
        fp8_ranges.quantize_range(flat[start:stop], start, columns, factors[own]).view(torch.uint8)
        for own, (start, stop) in zip(rows, pairwise(cuts), strict=True)
    ]
    assert torch.equal(torch.cat(codes), whole.codes.view(torch.uint8).flatten())
    assert torch.equal(factors.reciprocal().nan_to_num(-1), whole.scales.nan_to_num(-1))


def test_mx_scales_are_the_smallest_powers_that_hold_the_block():
    exponents = torch.arange(-140, 128)
    powers = torch.ldexp(torch.full(exponents.shape, 448.0), exponents).clamp(max=torch.finfo(torch.float32).max)
    largest = torch.cat((powers, powers.nextafter(torch.tensor(math.inf)), powers.nextafter(torch.tensor(0.0))))
    largest = largest[largest.isfinite()]
    rows = torch.zeros(len(largest), 32)
    rows[:, 5] = -largest
    rows[:, 7] = largest / 3
    codes, scales = fp8.quantize_mx(rows)
    for amax, scale, row, code in zip(largest, scales[:, 0].view(torch.uint8), rows, codes, strict=True):
        quotient = (amax / 448.0).item()  # in fp32
        expected = -127
        while math.ldexp(1.0, expected) < quotient:
            expected += 1
        assert int(scale) - 127 == expected
        exact = torch.tensor([math.ldexp(value, -expected) for value in row.tolist()], dtype=torch.float64)
        assert torch.equal(code.view(torch.uint8).long(), nearest_code(exact.float().double()))


def test_nothing_that_is_not_finite_is_lost():
    for bad in (math.inf, -math.inf, math.nan):
        x = torch.ones(128, 256)
        x[3, 200] = bad
        rows = fp8.dequantize(fp8.quantize(x, (1, 128)), torch.float32)
        assert rows[3, 128:].isnan().all() and rows[:, :128].isfinite().all() and rows[4:].isfinite().all()
        tiles = fp8.dequantize(fp8.quantize(x, (128, 128)), torch.float32)
        assert tiles[:, 128:].isnan().all() and tiles[:, :128].isfinite().all()
        mx = fp8.dequantize(fp8.quantize_mx(x), torch.float32)
        assert mx[3, 192:224].isnan().all() and mx.isnan().sum() == 32


def test_zeros_stay_zeros():
    for quantized in (fp8.quantize(torch.zeros(128, 128), (1, 128)), fp8.quantize_mx(torch.zeros(4, 32))):
        assert not fp8.dequantize(quantized, torch.float32).any()


def test_blocks_have_no_remainder():
    with pytest.raises(ValueError, match="192 x 128 cannot be divided into 128 x 128"):
        fp8.quantize(torch.zeros(192, 128), (128, 128))


def test_torchao_computes_the_same():
    kernels = pytest.importorskip("torchao.prototype.blockwise_fp8_training.kernels")
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    torch.manual_seed(1)
    x = torch.randn(256, 384) * torch.exp2(torch.randint(-8, 8, (256, 1)).float())
    for dtype in (torch.float32, torch.bfloat16):
        own = fp8.quantize(x.to(dtype), (1, 128))
        codes, scales = kernels.torch_blockwise_scale_act_quant_lhs(x.to(dtype).float())
        assert torch.equal(own.codes.view(torch.uint8), codes.view(torch.uint8)) and torch.equal(own.scales, scales)
        own = fp8.quantize(x.to(dtype), (128, 128))
        codes, scales = kernels.torch_blockwise_scale_weight_quant(x.to(dtype).float())
        assert torch.equal(own.codes.view(torch.uint8), codes.view(torch.uint8)) and torch.equal(own.scales, scales)
        own = fp8.quantize_mx(x.to(dtype))
        scales, codes = mx.to_mx(x.to(dtype), torch.float8_e4m3fn, 32, mx.ScaleCalculationMode.RCEIL)
        assert torch.equal(own.codes.view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(own.scales.view(torch.uint8), scales.view(torch.uint8).view(256, 12))
