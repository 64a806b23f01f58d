"""The norms' kernels against torch and float64."""

import pytest
import torch
import torch.nn.functional as F
from megalite_kernels import norm, norm_triton
from torch.library import opcheck

from tests.kernels.accuracy import assert_as_accurate
from tests.kernels.test_norm import autograd, llama_norm

EPS = 1e-5
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Short rows by the tile, wider ones that are no power of two, rows of several heads, a single row and none.
SHAPES = [(70, 64), (3, 5, 128), (9, 300), (3, 2, 1500), (1, 37), (0, 16), (5, 4200)]


def rms_in_torch_and_exact(x, weight, dy, offset=0.0):
    """y, dx, dweight of transformers' norm in the inputs' dtype, and in float64."""
    return [
        autograd(lambda x, w: llama_norm(x, w, EPS, offset), pair, dy)
        for pair in ((x, weight), (x.double(), weight.double()))
    ]


def randn(*shape, dtype, device):
    return torch.randn(*shape).to(device, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm_is_as_accurate_as_torch(shape, offset, dtype, device):
    x, weight, dy = (randn(*s, dtype=dtype, device=device) for s in (shape, shape[-1:], shape))
    kept = x.clone(), dy.clone()
    y, rstd = norm.rms_norm(x, weight, EPS, offset)
    dx, dweight = norm.rms_norm_backward(dy, x, weight, rstd, offset)
    torchs, exact = rms_in_torch_and_exact(x, weight, dy, offset)
    for got, torch_result, true in zip((y, dx, dweight.to(dtype)), torchs, exact, strict=True):
        assert_as_accurate(got, true, torch_result)
    assert dweight.dtype == torch.float32 and torch.equal(x, kept[0]) and torch.equal(dy, kept[1])
    # rounded where transformers rounds: the same but for the order of a sum
    if dtype != torch.float32 and offset == 0.0:
        assert (y != torchs[0]).float().mean() < 0.02 or y.numel() == 0


def test_the_product_alone_is_rounded_where_that_is_asked_for(device):
    x, branch, weight = (randn(*shape, dtype=torch.bfloat16, device=device) for shape in ((64, 96), (64, 96), (96,)))
    total, y, rstd = norm.add_rms_norm(x, branch, weight, EPS, 0.0, False)
    once = (total.float() * rstd * weight.float()).bfloat16()
    for own in (y, norm.rms_norm(total, weight, EPS, 0.0, False)[0]):
        assert (own != once).float().mean() < 0.02  # but for the order of a sum
    assert (norm.rms_norm(total, weight, EPS)[0] != once).float().mean() > 0.1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(70, 64), (3, 2, 1500), (0, 16)], ids=str)
def test_rms_norm_without_a_weight(shape, dtype, device):
    x, branch, dtotal, dy = (randn(*shape, dtype=dtype, device=device) for _ in range(4))
    total, y, rstd = norm.add_rms_norm(x, branch, None, EPS)
    dx, dweight = norm.rms_norm_backward(dy, total, None, rstd, 0.0, dtotal)
    assert dweight is None and torch.equal(total, x + branch)
    one = torch.ones(shape[-1], dtype=dtype, device=device)
    with_weight = norm.add_rms_norm(x, branch, one, EPS)
    assert torch.equal(y, with_weight[1]) and torch.equal(rstd, with_weight[2])
    torch.testing.assert_close(dx, norm.rms_norm_backward(dy, total, one, rstd, 0.0, dtotal)[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(40, 96), (1, 8), (0, 8), (3, 3, 2500)], ids=str)
def test_residual_addition_with_rms_norm(shape, offset, dtype, device):
    x, branch, weight, dtotal, dy = (
        randn(*s, dtype=dtype, device=device) for s in (shape, shape, shape[-1:], shape, shape)
    )
    total, y, rstd = norm.add_rms_norm(x, branch, weight, EPS, offset)
    dx, dweight = norm.rms_norm_backward(dy, total, weight, rstd, offset, dtotal)
    assert torch.equal(total, x + branch)
    y_alone, rstd_alone = norm.rms_norm(total, weight, EPS, offset)
    if x.is_cuda and shape[-1] * x.element_size() % 16:
        torch.testing.assert_close((y, rstd), (y_alone, rstd_alone))
    else:
        assert torch.equal(y, y_alone) and torch.equal(rstd, rstd_alone)

    def both(total, weight):
        return torch.stack((total, llama_norm(total, weight, EPS, offset)))

    gradients = torch.stack((dtotal, dy))
    torchs, exact = (autograd(both, wide, gradients) for wide in ((total, weight), (total.double(), weight.double())))
    for got, torch_result, true in zip((dx, dweight.to(dtype)), torchs[1:], exact[1:], strict=True):
        assert_as_accurate(got, true, torch_result)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layer_norm_is_as_accurate_as_torch(shape, dtype, device):
    x, weight, bias, dy = (randn(*s, dtype=dtype, device=device) for s in (shape, shape[-1:], shape[-1:], shape))
    x, offset = x + 3, float(shape[-1] % 2)
    y, mean, rstd = norm.layer_norm(x, weight, bias, EPS, offset)
    dx, dweight, dbias = norm.layer_norm_backward(dy, x, weight, mean, rstd, offset)
    zero = torch.zeros_like(bias)
    torch.testing.assert_close(
        norm.layer_norm(x, weight, None, EPS, offset)[0], norm.layer_norm(x, weight, zero, EPS, offset)[0]
    )

    def reference(x, weight, bias):
        return F.layer_norm(x, shape[-1:], weight + offset, bias, EPS)

    torchs, exact = (
        autograd(reference, wide, dy) for wide in ((x, weight, bias), (x.double(), weight.double(), bias.double()))
    )
    for got, torch_result, true in zip((y, dx, dweight.to(dtype), dbias.to(dtype)), torchs, exact, strict=True):
        assert_as_accurate(got, true, torch_result)


@pytest.mark.parametrize("hidden", [8192, 16384])
def test_widest_rows(hidden, device):
    x, branch, dtotal, dy = randn(4, 3, hidden, dtype=torch.bfloat16, device=device)
    weight = randn(hidden, dtype=torch.bfloat16, device=device)
    total, y, rstd = norm.add_rms_norm(x, branch, weight, EPS)
    dx, dweight = norm.rms_norm_backward(dy, total, weight, rstd, dtotal=dtotal)
    torchs, exact = rms_in_torch_and_exact(total, weight, dy)
    for got, torch_result, true in zip((y, dx, dweight.to(x.dtype)), torchs, exact, strict=True):
        past = dtotal if got is dx else 0
        assert_as_accurate(got, true + past, torch_result + past)


def test_weight_gradients_of_many_rows_are_summed_in_fp32(device):
    """bf16 would stop counting at 256, and one program sums hundreds of rows."""
    x = torch.ones(2000, 64, device=device, dtype=torch.bfloat16)
    weight = torch.ones(64, device=device, dtype=torch.bfloat16)
    rstd, mean = torch.ones(2000, 1, device=device), torch.zeros(2000, 1, device=device)
    assert torch.equal(norm.rms_norm_backward(x, x, weight, rstd)[1], torch.full((64,), 2000.0, device=device))
    for gradient in norm.layer_norm_backward(x, x, weight, mean, rstd)[1:]:
        assert torch.equal(gradient, torch.full((64,), 2000.0, device=device))


def test_heads_of_a_packed_projection_are_read_in_place(device, monkeypatch):
    packed = torch.randn(7, 2, 9, 32, device=device)
    weight, dy = torch.randn(32, device=device), torch.randn(7, 2, 3, 32, device=device)
    heads, dense = packed[:, :, 5:8], packed[:, :, 5:8].contiguous()
    y, rstd = norm.rms_norm(heads, weight, EPS)
    expected = norm.rms_norm(dense, weight, EPS)
    assert torch.equal(y, expected[0]) and torch.equal(rstd, expected[1]) and y.is_contiguous()
    for got, wanted in zip(
        norm.rms_norm_backward(dy, heads, weight, rstd), norm.rms_norm_backward(dy, dense, weight, rstd), strict=True
    ):
        assert torch.equal(got, wanted)
    assert norm_triton._rows_of(heads)[0] is heads


def test_inputs_may_have_any_strides(device):
    x, branch = (
        torch.randn(6, 40, 5, device=device).transpose(1, 2),
        torch.randn(5, 6, 40, device=device).transpose(0, 1),
    )
    dy, weight, bias = (
        torch.randn(5, 6, 80, device=device)[..., ::2].transpose(0, 1),
        *torch.randn(2, 41, device=device)[:, 1:],
    )
    dense = [t.contiguous() for t in (x, branch, dy, weight, bias)]

    def results(x, branch, dy, weight, bias):
        total, y, rstd = norm.add_rms_norm(x, branch, weight, EPS)
        normed, mean, scale = norm.layer_norm(x, weight, bias, EPS)
        gradients = (
            *norm.rms_norm_backward(dy, x, weight, rstd, 0.0, branch),
            *norm.layer_norm_backward(dy, x, weight, mean, scale),
        )
        return total, y, rstd, normed, mean, scale, *gradients

    for got, expected in zip(results(x, branch, dy, weight, bias), results(*dense), strict=True):
        # a compiler may share out a row in another way where the weight is not aligned
        torch.testing.assert_close(got, expected)


def test_small_and_large_values_stay_finite(device):
    weight = torch.ones(64, device=device)
    for scale in (0.0, 1e-15, 1e15):
        x = torch.randn(3, 64, device=device) * scale
        y, rstd = norm.rms_norm(x, weight, 1e-6)
        torch.testing.assert_close(y, llama_norm(x, weight, 1e-6, 0.0))
        assert torch.isfinite(norm.rms_norm_backward(torch.randn_like(x), x, weight, rstd)[0]).all()


def test_rows_too_wide_for_registers_and_fp64_take_the_reference(device, monkeypatch):
    monkeypatch.setattr(norm_triton, "norm_forward", None)

    def rms(dtype, hidden):
        return norm.rms_norm(
            torch.ones(1, hidden, dtype=dtype, device=device), torch.ones(hidden, dtype=dtype, device=device), EPS
        )

    def layer(dtype, hidden):
        ones = torch.ones(hidden, dtype=dtype, device=device)
        return norm.layer_norm(torch.ones(1, hidden, dtype=dtype, device=device), ones, ones, EPS)

    for function, dtype, hidden in ((rms, torch.float64, 8), (rms, torch.float32, 8193), (rms, torch.bfloat16, 16385)):
        function(dtype, hidden)
    layer(torch.bfloat16, 8193)
    for function, dtype, hidden in (
        (rms, torch.float32, 8192),
        (rms, torch.bfloat16, 16384),
        (layer, torch.bfloat16, 8192),
    ):
        with pytest.raises(TypeError):  # the kernel is what would have been called
            function(dtype, hidden)


def test_operations_are_registered_soundly(device):
    x, other, dy = torch.randn(3, 5, 16, device=device)
    weight, bias = torch.randn(2, 16, device=device)
    rstd = torch.rand(5, 1, device=device)
    for branch, shift in ((None, None), (other, None), (None, bias)):
        opcheck(torch.ops.megalite.norm_forward.default, (x, branch, weight, shift, EPS, 0.0, True))
    for dtotal, mean in ((None, None), (other, None), (None, rstd - 0.5)):
        opcheck(torch.ops.megalite.norm_backward.default, (dy, dtotal, x, weight, mean, rstd, 0.0))


def test_the_compiler_sees_one_operation(device):
    x, branch, dy = torch.randn(3, 5, 16, device=device)
    weight = torch.randn(16, device=device)
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    def step(x, branch, dy):
        total, y, rstd = norm.add_rms_norm(2 * x, branch, weight, EPS)
        return total, y, *norm.rms_norm_backward(dy, total, weight, rstd, dtotal=branch)

    compiled = torch.compile(step, fullgraph=True, backend=backend)(x, branch, dy)
    for got, expected in zip(compiled, step(x, branch, dy), strict=True):
        assert torch.equal(got, expected)
    targets = [str(node.target) for node in graphs[0].graph.nodes]
    assert "megalite.norm_forward.default" in targets and "megalite.norm_backward.default" in targets


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [128, 4096])
def test_results_are_the_same_bits_each_time_and_nothing_waits_for_the_host(
    hidden, device, assert_same_bits_and_no_wait
):
    x, branch, dtotal, dy = randn(4, 2**23 // hidden, hidden, dtype=torch.bfloat16, device=device)
    weight, bias = randn(2, hidden, dtype=torch.bfloat16, device=device)

    def run():
        total, y, rstd = norm.add_rms_norm(x, branch, weight, EPS)
        normed, mean, scale = norm.layer_norm(x, weight, bias, EPS)
        gradients = (
            *norm.rms_norm_backward(dy, total, weight, rstd, 0.0, dtotal),
            *norm.layer_norm_backward(dy, x, weight, mean, scale),
        )
        return total, y, normed, *gradients

    assert_same_bits_and_no_wait(run)
