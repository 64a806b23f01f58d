"""fp8 kernels against the references: codes and scales bit for bit, matmuls as accurate as fp32."""

import math
from typing import Any, get_args

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from megalite_kernels import backend, fp8, fp8_matmul, fp8_matmul_triton, fp8_mx_matmul_triton, fp8_triton
from megalite_kernels.groups import Groups
from megalite_kernels.launch import fp8_architecture
from torch.library import opcheck

from tests.kernels.test_fp8 import adversarial
from tests.kernels.test_fp8_matmul import numbers_of


def same(one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]) -> bool:
    """Whether codes and scales have the same bits, or are both NaN."""
    pairs = [(a.float(), b.float()) for a, b in zip(one, other, strict=True)]
    return all(((a.view(torch.int32) == b.view(torch.int32)) | (a.isnan() & b.isnan())).all() for a, b in pairs)


def numbers() -> dict[str, torch.Tensor]:
    """Matrices of 128 × 384 with all that rounds, with blocks of zeros and tiny numbers, and with infinity and NaN."""
    rounding = adversarial(128 * 384)[-128 * 384 :].view(128, 384).clone()
    small = torch.randn(128, 384) * torch.exp2(torch.arange(-140.0, -12.0)).unsqueeze(1)
    small[5] = 0
    wrong = torch.randn(128, 384)
    wrong[3, 5], wrong[100, 200], wrong[101, 201] = math.inf, math.nan, -math.nan
    return {"rounding": rounding, "small": small, "not finite": wrong, "bf16": rounding.bfloat16()}


@pytest.mark.parametrize("name", ["rounding", "small", "not finite", "bf16"])
def test_the_bits_of_the_reference(name: str, monkeypatch, device):
    x = numbers()[name].to(device)
    recipes = [(fp8_triton.quantize(x, rows, exact), (rows, exact)) for rows in (1, 128) for exact in (False, True)]
    mx = fp8_triton.quantize_mx(x)
    monkeypatch.setattr(backend, "_on_cpu", False)
    monkeypatch.setattr(backend, "_on_cuda", False)
    for own, (rows, exact) in recipes:
        assert same(own, fp8.quantize(x, (rows, 128), exact))
    assert same(mx, fp8.quantize_mx(x))


def test_views_of_experts_are_quantized_as_a_copy_of_each(monkeypatch, device):
    stack = torch.randn(2, 128, 128).to(device).transpose(1, 2)
    ways = [lambda x, rows=rows: fp8.quantize(x, (rows, 128)) for rows in (1, 128)] + [fp8.quantize_mx]
    together = [quantize(stack) for quantize in ways]
    monkeypatch.setattr(backend, "_on_cpu", False)
    monkeypatch.setattr(backend, "_on_cuda", False)
    for quantize, (codes, scales) in zip(ways, together, strict=True):
        assert codes.is_contiguous() and scales.is_contiguous()
        for number, matrix in enumerate(stack):
            assert same((codes[number], scales[number]), quantize(matrix.contiguous()))


def multiplies(recipe: fp8.Recipe, device: str, monkeypatch: pytest.MonkeyPatch, architecture: str = "sm_100") -> bool:
    """Whether a kernel multiplies a recipe on a device: on a CPU that of any architecture is interpreted."""
    if device == "cpu":
        for module in (fp8_matmul, fp8_matmul_triton, fp8_mx_matmul_triton):
            monkeypatch.setattr(module, "fp8_architecture", lambda device: architecture)
    return fp8_matmul.missing(torch.device(device), recipe) is None


def shapes() -> st.SearchStrategy[dict[str, Any]]:
    """Of products: rows beside tiles of 64 and 128, few blocks of the contracted dimension, experts without rows."""
    given = {
        "rows": st.sampled_from((1, 63, 127, 129)),
        "outputs": st.integers(1, 3),
        "inner": st.sampled_from((1, 2, 3, 5)),
        "groups": st.sampled_from((None, (0,), (0, 1), (1, 0, 128), (70, 0, 0, 75), (129, 127))),
        "transposed": st.booleans(),
        "zeros": st.booleans(),
        "copied": st.booleans(),
    }
    return st.fixed_dictionaries(given)


def operands(
    recipe: fp8.Recipe, shape: dict[str, Any], device: str
) -> tuple[fp8.Quantized, fp8.Quantized, Groups | None]:
    """The rows, which may be more than those of the groups, and the weight."""
    block = 128 if recipe == "block" else 32
    outputs, inner, groups = block * shape["outputs"], block * shape["inner"], shape["groups"]
    rows = torch.randn(shape["rows"] if groups is None else sum(groups) + 3, inner).to(device)
    weight = torch.randn(*(() if groups is None else (len(groups),)), outputs, inner).to(device)
    if shape["zeros"]:
        rows[-1, :block] = weight[..., :block, :block] = 0
    own = None if groups is None else Groups(torch.tensor(groups, device=device))
    if recipe == "mxfp8":
        return fp8.quantize_mx(rows), fp8.quantize_mx(weight), own
    if shape["transposed"]:
        return fp8.quantize(rows, (1, 128)), fp8.quantize(weight.transpose(-1, -2), (128, 128)).t, own
    return fp8.quantize(rows, (1, 128)), fp8.quantize(weight, (128, 128)), own


def products(rows: fp8.Quantized, weight: fp8.Quantized, groups: Groups | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The matmul in fp32, and in float64 by definition."""
    left, right = numbers_of(rows), numbers_of(weight)
    if groups is None:
        return fp8_matmul.multiply(rows, weight, torch.float32), left @ right.mT
    got = fp8_matmul.multiply_experts(rows, weight, groups, torch.float32)
    exact = [own @ matrix.t() for own, matrix in zip(groups.split(left), right, strict=True)]
    return got[: sum(groups.sizes)], torch.cat(exact)


@pytest.mark.parametrize("recipe", get_args(fp8.Recipe))
@given(shape=shapes())
@settings(max_examples=6, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(
    shape={"rows": 1100, "outputs": 2, "inner": 1, "groups": None, "transposed": True, "zeros": False, "copied": False}
)
def test_sums_are_as_exact_as_in_fp32(recipe, shape, monkeypatch, device):
    copied = shape["copied"] and recipe == "block"
    if not multiplies(recipe, device, monkeypatch, "sm_90" if copied else "sm_100"):
        pytest.skip("no tensor cores")
    got, exact = products(*operands(recipe, shape, device))
    # Hopper adds the 128 products of a block with 14 bits
    share = 2.0**-10 if device == "cuda" and fp8_architecture(got.device) == "sm_90" else 2e-7
    assert (got - exact).norm() <= share * exact.norm()


@pytest.mark.parametrize("recipe", get_args(fp8.Recipe))
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_nothing_that_is_not_finite_is_lost(recipe, bad, monkeypatch, device):
    if not multiplies(recipe, device, monkeypatch):
        pytest.skip("no tensor cores")
    rows, weight = torch.randn(130, 256).to(device), torch.randn(256, 256).to(device)
    rows[128, 130], weight[200, 7] = bad, -bad
    if recipe == "block":
        got = fp8_matmul.multiply(fp8.quantize(rows, (1, 128)), fp8.quantize(weight, (128, 128)), torch.float32)
        lost = slice(128, 256)  # the block's outputs
    else:
        got = fp8_matmul.multiply(fp8.quantize_mx(rows), fp8.quantize_mx(weight), torch.float32)
        lost = slice(200, 201)
    expected = torch.ones(130, 256, dtype=torch.bool, device=device)
    expected[128], expected[:, lost] = False, False
    assert torch.equal(got.isfinite(), expected)


def test_as_operations(monkeypatch, device):
    x = torch.randn(32, 256).to(device)
    rows, mx = fp8_triton.quantize(x, 1, False), fp8_triton.quantize_mx(x)
    opcheck(torch.ops.megalite.quantize, (x, 1, False), test_utils="test_faketensor")
    opcheck(torch.ops.megalite.quantize_mx, (x,), test_utils="test_faketensor")
    weight = torch.randn(128, 256).to(device)
    cases = {
        "block": (torch.ops.megalite.fp8_matmul, rows, fp8.quantize(weight, (128, 128))),
        "mxfp8": (torch.ops.megalite.fp8_mx_matmul, mx, fp8.quantize_mx(weight)),
    }
    for recipe, (operation, left, right) in cases.items():
        if multiplies(recipe, device, monkeypatch):
            opcheck(operation, (*left, *right, torch.bfloat16, None), test_utils="test_faketensor")
