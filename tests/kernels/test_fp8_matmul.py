"""Which implementation multiplies quantized matrices, and the layouts in which torch's reads scales."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from megalite_kernels import backend, device_routes, fp8, fp8_library, fp8_matmul
from megalite_kernels.fp8 import Quantized
from megalite_kernels.groups import Groups
from torch import Tensor

RECIPES = get_args(fp8.Recipe)
SIZES = [(4, 128, 128), (132, 256, 256), (128, 640, 384), (260, 128, 640)]
"""Rows, outputs, inner: K / 128 of 1, 2, 3 and 5."""


def numbers_of(matrix: Quantized) -> Tensor:
    """Codes times scales in float64, by definition."""
    codes, scales = matrix.codes.double(), matrix.scales.double()
    for dim in (-2, -1):
        scales = scales.repeat_interleave(codes.shape[dim] // scales.shape[dim], dim)
    return codes * scales


def quantized(recipe: fp8.Recipe, rows: int, outputs: int, inner: int) -> tuple[Quantized, Quantized]:
    x, w = torch.randn(rows, inner), torch.randn(outputs, inner) * torch.exp2(torch.randn(outputs, 1))
    if recipe == "mxfp8":
        return fp8.quantize_mx(x), fp8.quantize_mx(w)
    return fp8.quantize(x, (1, 128)), fp8.quantize(w, (128, 128))


def scale_in_tiles(flat: Tensor, row: int, block: int, blocks: int) -> Tensor:
    """A scale where cuBLAS reads it: in the tile of its 128 rows and 4 blocks, at 16 bytes for each of 32 rows."""
    tile = row // 128 * -(-blocks // 4) + block // 4
    return flat[512 * tile + row % 32 * 16 + row % 128 // 32 * 4 + block % 4]


def as_cublas(
    a: Tensor, b: Tensor, a_scales: Tensor, kind: Any, b_scales: Tensor, b_kind: Any, **options: Any
) -> Tensor:
    """`scaled_mm` by its documentation: scales are read where cuBLAS reads them."""
    (rows, inner), outputs = a.shape, b.shape[1]
    if kind == F.ScalingType.BlockWise1x32:
        assert options["swizzle_a"] == options["swizzle_b"] == F.SwizzleType.SWIZZLE_32_4_4
        left, right = (
            torch.stack(
                [scale_in_tiles(flat, row, block, inner // 32) for row in range(count) for block in range(inner // 32)]
            )
            .view(count, -1)
            .double()
            .repeat_interleave(32, 1)
            for flat, count in ((a_scales, rows), (b_scales, outputs))
        )
    else:
        # addresses: a column of rows; a column of K / 128 blocks, padded to a multiple of 4
        flat, weights = (torch.as_strided(x, (x.numel(),), (1,)) for x in (a_scales, b_scales))
        blocks, whole = inner // 128, -(-inner // 512) * 4
        left = torch.stack([flat[block * rows : (block + 1) * rows] for block in range(blocks)], 1)
        right = torch.stack([weights[column * whole :][:blocks] for column in range(outputs // 128)])
        left, right = left.repeat_interleave(128, 1), right.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return ((a.double() * left) @ (b.t().double() * right).t()).to(options["output_dtype"])


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_scales_lie_where_cublas_reads_them(recipe, sizes, monkeypatch):
    """Torch's own checks of shapes and strides, on tensors without data, and the numbers."""
    a, b = quantized(recipe, *sizes)
    on_meta = (Quantized(codes.to("meta"), scales.to("meta")) for codes, scales in (a, b))
    assert fp8_library.multiply(*on_meta, torch.bfloat16).shape == sizes[:2]
    monkeypatch.setattr(fp8_library.F, "scaled_mm", as_cublas)
    torch.testing.assert_close(fp8_library.multiply(a, b, torch.float64), numbers_of(a) @ numbers_of(b).t())
    if recipe == "block":
        rows, inner, outputs = sizes[0], sizes[2], sizes[1]
        dy = fp8.quantize(torch.randn(rows, outputs), (1, 128))
        got = fp8_library.multiply(dy, b.t, torch.float64)
        assert got.shape == (rows, inner)
        torch.testing.assert_close(got, numbers_of(dy) @ numbers_of(b))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """CPU tensors are of a GPU with this architecture and CUDA, whose file names these routes."""

    def pretend(architecture: str, cuda: str | None = "13.0", **routes: str) -> None:
        for module in (fp8_library, fp8_matmul):
            monkeypatch.setattr(module, "fp8_architecture", lambda device: architecture)
        monkeypatch.setattr(fp8_matmul, "measured", lambda device: device_routes.DeviceRoutes("a", **routes))
        monkeypatch.setattr(torch.version, "cuda", cuda)

    return pretend


@pytest.mark.parametrize(
    "recipe, architecture, cuda, rows, dtype, reason",
    [
        ("block", "sm_90", "12.9", 128, torch.bfloat16, None),
        ("block", "sm_90", "12.8", 128, torch.bfloat16, "CUDA 12.8"),
        ("block", "sm_100", "13.0", 128, torch.bfloat16, "block on sm_100"),
        ("block", "sm_90", "13.0", 127, torch.bfloat16, "127 rows are no multiple of 4"),
        ("block", "sm_90", "13.0", 128, torch.float32, "results in torch.float32"),
        ("mxfp8", "sm_100", "12.8", 127, torch.bfloat16, None),
        ("mxfp8", "sm_90", "13.0", 128, torch.bfloat16, "mxfp8 on sm_90"),
        ("mxfp8", "", None, 128, torch.bfloat16, "mxfp8 on cpu"),
        ("mxfp8", "sm_100", "13.0", 0, torch.bfloat16, "no rows"),
    ],
)
def test_torchs_matmul_runs_where_it_is_named_and_supported(
    recipe, architecture, cuda, rows, dtype, reason, gpu, monkeypatch
):
    a, b = quantized(recipe, max(rows, 1), 128, 128)
    a, called = Quantized(a.codes[:rows], a.scales[:rows]), []
    monkeypatch.setattr(fp8_library, "multiply", lambda *given: called.append(given))
    gpu(architecture, cuda, **{f"fp8_{recipe}": "scaled_mm"})
    assert fp8_library.refuses(a, b, dtype) == reason
    fp8_matmul.multiply(a, b, dtype)
    assert bool(called) == (reason is None)
    gpu(architecture, cuda)
    fp8_matmul.multiply(a, b, dtype)
    assert len(called) == (reason is None), "it must be named"


@pytest.mark.parametrize(
    "architecture, hip, block, mxfp8",
    [
        (
            "",
            None,
            "requires the tensor cores of Ada, Hopper and Blackwell, which X does",
            "requires the tensor cores of",
        ),
        ("sm_89", None, None, "requires the tensor cores of Blackwell, which X does not have"),
        ("sm_90", None, None, "requires the tensor cores of Blackwell, which X does not have"),
        ("sm_100", None, None, None),
        ("", "6.4", "has no kernel for X: the 8-bit format of MI300 (e4m3fnuz)", "has no kernel for X"),
    ],
)
def test_what_a_gpu_lacks_is_named(architecture, hip, block, mxfp8, gpu, monkeypatch):
    gpu(architecture)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "X")
    monkeypatch.setattr(fp8_matmul.importlib.util, "find_spec", lambda name: SimpleNamespace())
    for recipe, words in (("block", block), ("mxfp8", mxfp8)):
        reason = fp8_matmul.missing(torch.device("cuda"), recipe)
        assert (reason is None) if words is None else words in (reason or "")
    monkeypatch.setattr(fp8_matmul.importlib.util, "find_spec", lambda name: None)
    assert "package triton" in (fp8_matmul.missing(torch.device("cuda"), "block") or "")
    assert fp8_matmul.missing(torch.device("cpu"), "mxfp8") is None


def test_other_blocks_than_those_of_kernels_take_the_reference(gpu, monkeypatch):
    """1 × 128 on both sides: kernels would read other scales."""
    x, w = torch.randn(8, 256), torch.randn(128, 256)
    a, b = fp8.quantize(x, (1, 128)), fp8.quantize(w, (1, 128))
    gpu("sm_90", fp8_block="scaled_mm")
    monkeypatch.setattr(backend, "runs_triton", lambda x: True)
    got = fp8_matmul.multiply(a, b, torch.float32)
    torch.testing.assert_close(got.double(), numbers_of(a) @ numbers_of(b).t(), rtol=1e-5, atol=1e-5)
    assert fp8_library.refuses(a, b, torch.bfloat16) == "a weight with scales of 1 x 128"


def test_the_report_names_the_implementation_and_the_reason(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "X")
    monkeypatch.setattr(backend, "selected", "triton")  # another test may have selected torch
    device = torch.device("cuda")
    gpu("sm_90", fp8_block="scaled_mm")
    assert fp8_matmul.describe(device, "block") == (
        "fp8 matmuls: scaled_mm, measured to be the fastest on a; experts and what it does not support: triton"
    )
    assert "reference" in fp8_matmul.describe(device, "mxfp8")
    gpu("sm_100")
    assert fp8_matmul.describe(device, "mxfp8") == "fp8 matmuls: triton; no routes were measured on this device"
    monkeypatch.setattr(backend, "selected", "torch")
    assert "reference" in fp8_matmul.describe(device, "mxfp8")


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_rows_have_an_empty_product(recipe):
    """As the experts of a rank that no token has chosen."""
    (a, b), (none, _) = quantized(recipe, 4, 128, 256), quantized(recipe, 0, 128, 256)
    assert fp8_matmul.multiply(none, b, torch.float32).shape == (0, 128)
    experts = Quantized(b.codes.expand(3, -1, -1), b.scales.expand(3, -1, -1))
    groups = Groups(torch.zeros(3, dtype=torch.int64))
    assert fp8_matmul.multiply_experts(none, experts, groups, torch.bfloat16).shape == (0, 128)
    assert fp8_matmul.multiply_experts(a, experts, groups, torch.bfloat16).shape == (4, 128)


def test_codes_of_mxfp8_are_exact_in_bf16():
    """So a GPU without its tensor cores multiplies them in bf16."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(8, 32)
    for exponent in (4, 127, 245):
        scales = torch.full((8, 1), exponent, dtype=torch.uint8).view(torch.float8_e8m0fnu)
        matrix = Quantized(codes, scales)
        rounded = fp8.dequantize(matrix, torch.bfloat16).double()
        assert torch.equal(rounded.nan_to_num(7.0), numbers_of(matrix).nan_to_num(7.0))


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_cublas_computes_the_same(recipe, sizes):
    a, b = (Quantized(codes.cuda(), scales.cuda()) for codes, scales in quantized(recipe, *sizes))
    if (reason := fp8_library.refuses(a, b, torch.bfloat16)) is not None:
        pytest.skip(reason)
    got, exact = fp8_library.multiply(a, b, torch.bfloat16).double(), numbers_of(a) @ numbers_of(b).t()
    assert (got - exact).norm() <= 2.0**-8 * exact.norm()
