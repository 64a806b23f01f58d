"""Flash attention's kernels against torch and float64."""

import dataclasses
import math

import pytest
import torch
import triton.language as tl
from megalite_kernels import attention_triton
from megalite_kernels.attention import attention, attention_backward
from megalite_kernels.attention_triton import Tile
from torch.library import opcheck

from tests.kernels.accuracy import assert_as_accurate
from tests.kernels.test_attention import OPTIONS, autograd, inputs, resolve

NONE = {
    "window": None,
    "document_start": None,
    "softcap": None,
    "samples": None,
    "key": 0,
    "p": 0.0,
    "first_head": 0,
    "first_position": 0,
}
SMALL = {"forward": Tile(32, 16, 4, 1), "dq": Tile(32, 16, 4, 1), "dk dv": Tile(16, 32, 4, 1)}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch, device):
    """Short sequences are several tiles in the interpreter, and their documents are looked at in several portions."""
    if device == "cpu":
        monkeypatch.setattr(attention_triton, "_tile", lambda target, kernel, width, heavy: SMALL[kernel])
        monkeypatch.setattr(attention_triton, "_PROBES", tl.constexpr(2))
        attention_triton._variant.cache_clear()
    yield
    attention_triton._variant.cache_clear()


def on(device, options):
    moved = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    if "dropout" in moved:
        moved["dropout"] = dataclasses.replace(moved["dropout"], samples=moved["dropout"].samples.to(device))
    return moved


def run(q, k, v, dout, device, **options):
    """out, dq, dk and dv, by the kernels."""
    q, k, v, dout = (x.to(device) for x in (q, k, v, dout))
    options = {"scale": q.shape[-1] ** -0.5} | on(device, options)
    out, saved = attention(q, k, v, **options)
    return [x.cpu() for x in (out, *attention_backward(dout, q, k, v, out, saved, **options))]


def assert_accurate(q, k, v, dout, device, **options):
    results, options = run(q, k, v, dout, device, **options), {"scale": q.shape[-1] ** -0.5} | options
    torchs, exact = autograd(q, k, v, dout, **options), autograd(q.double(), k.double(), v.double(), dout, **options)
    # A query that sees one key: the gradients of q and k are differences of two equal terms.
    cancels = options.get("window") == 1 and options["scale"] * (dout.norm(dim=-1).max() * v.norm(dim=-1).max()).item()
    terms = [0, cancels * k.abs().max().item(), cancels * q.abs().max().item(), 0] if cancels else [0] * 4
    for got, true, of_torch, size in zip(results, exact, torchs, terms, strict=True):
        assert got.is_contiguous()
        assert_as_accurate(got, true, of_torch, terms=size)


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SINGLE = [name for name in OPTIONS if name not in ("window of one", "plain", "everything")]
CASES = [(name, DTYPES[number % 2]) for number, name in enumerate(SINGLE)]
CASES += [(name, dtype) for name in ("plain", "everything") for dtype in DTYPES]


@pytest.mark.parametrize("name, dtype", CASES, ids=str)
def test_as_accurate_as_torch(name, dtype, device):
    """On a GPU, fp32 takes the reference."""
    options = resolve(sequence=60, batch=2, **OPTIONS[name])
    assert_accurate(*inputs(60, 2, 2, 1, 12, dtype), device, **options)


@pytest.mark.parametrize(
    "sizes", [(1, 2, 3, 3, 16), (64, 1, 3, 1, 1), (33, 1, 2, 2, 160), (0, 2, 2, 1, 8), (5, 0, 2, 1, 8)], ids=str
)
def test_odd_sizes(sizes, device):
    q, k, v, dout = inputs(*sizes, torch.bfloat16)
    if sizes[0] == 1:  # one key: torch's gradients are exact zeros, as are those of p and dp
        out, dq, dk, dv = run(q, k, v, dout, device)
        assert torch.equal(out, v) and torch.equal(dv, dout)
        return torch.testing.assert_close((dq, dk), (torch.zeros_like(q), torch.zeros_like(k)), rtol=0, atol=1e-5)
    assert_accurate(q, k, v, dout, device)


def cut(tensors, dim, value_dim):
    q, k, v, dout = tensors
    return q[..., :dim], k[..., :dim], v[..., :value_dim], dout[..., :value_dim]


@pytest.mark.parametrize(
    "dims, name", [((12, 8), "everything"), ((8, 20), "plain"), ((144, 24), "everything")], ids=str
)
def test_values_of_another_width(dims, name, device):
    """Narrower and wider ones, and keys in two parts: 128 channels, and others."""
    tensors = cut(inputs(35, 1, 2, 1, max(dims), torch.bfloat16), *dims)
    assert_accurate(*tensors, device, **resolve(sequence=35, batch=1, **OPTIONS[name]))


def test_the_log_sum_exp_is_saved(device):
    q, k, v, _ = inputs(50, 2, 4, 2, 16, torch.bfloat16)
    window = 20
    lse = attention(q.to(device), k.to(device), v.to(device), scale=0.3, window=window)[1][0].cpu()
    scores = 0.3 * torch.einsum("ibhd,jbhd->bhij", q.double(), k.double().repeat_interleave(2, 2))
    distance = torch.arange(50).unsqueeze(1) - torch.arange(50)
    exact = scores.masked_fill((distance < 0) | (distance >= window), -torch.inf).logsumexp(-1) / math.log(2)
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse.double(), exact, rtol=1e-5, atol=1e-5)


def test_inputs_may_have_any_strides(device):
    q, k, v, dout = (x.contiguous() for x in inputs(20, 2, 4, 2, 16, torch.bfloat16))
    starts = torch.arange(20).sub(9).clamp(min=0).unsqueeze(1).expand(20, 2)
    expected = run(q, k, v, dout, device, document_start=starts.contiguous())
    q, dout = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, dout))
    k, v = k.transpose(0, 3).contiguous().transpose(0, 3), torch.stack([v, v], 1)[:, 1]
    results = run(q, k, v, dout, device, document_start=starts)
    assert all(torch.equal(got, value) for got, value in zip(results, expected, strict=True))


@pytest.mark.parametrize("name", ["documents", "window"])
def test_what_no_query_of_a_tile_sees_is_not_touched(name, device):
    """Anything times not-a-number would show."""
    part = 32 if device == "cpu" else 256
    starts = torch.tensor([0, 2 * part]).repeat_interleave(2 * part).unsqueeze(1)
    options = {"document_start": starts} if name == "documents" else {"window": part}
    q, k, v, dout = inputs(4 * part, 1, 2, 1, 16, torch.bfloat16)
    expected = run(q, k, v, dout, device, **options)
    first, last, nan = slice(0, part), slice(3 * part, 4 * part), torch.tensor(torch.nan)
    results = run(
        q, k.index_fill(0, torch.arange(part), nan), v.index_fill(0, torch.arange(part), nan), dout, device, **options
    )
    for got, value in zip(results[:2], expected[:2], strict=True):
        assert torch.equal(got[last], value[last]) and got[first].isnan().all()
    end = torch.arange(3 * part, 4 * part)
    results = run(q.index_fill(0, end, nan), k, v, dout.index_fill(0, end, nan), device, **options)
    for got, value in zip(results[2:], expected[2:], strict=True):
        assert torch.equal(got[first], value[first]) and got[last].isnan().any()


def test_extreme_scores_stay_finite(device):
    q, k, v, dout = inputs(40, 1, 2, 2, 16, torch.float16)
    for softcap in (None, 30.0):
        assert all(torch.isfinite(x).all() for x in run(q * 100, k * 100, v, dout, device, softcap=softcap))


def test_inputs_are_not_written(device):
    tensors = [x.to(device) for x in inputs(20, 2, 2, 1, 16, torch.bfloat16)]
    kept = [x.clone() for x in tensors]
    q, k, v, dout = tensors
    out, saved = attention(q, k, v, scale=1.0)
    before = [x.clone() for x in (out, *saved)]
    attention_backward(dout, q, k, v, out, saved, scale=1.0)
    assert all(torch.equal(a, b) for a, b in zip((*tensors, out, *saved), (*kept, *before), strict=True))


def arguments(device, **options):
    q, k, v, dout = (x.to(device) for x in inputs(5, 1, 2, 1, 16, torch.bfloat16))
    return q, k, v, dout, {"scale": 0.25} | NONE | on(device, options)


def test_operations_are_registered_soundly(device):
    q, k, v, dout, options = arguments(device, samples=torch.arange(1), p=0.2, window=4)
    opcheck(torch.ops.megalite.flash_attention.default, (q, k, v), options)
    out, lse = torch.ops.megalite.flash_attention(q, k, v, **options)
    opcheck(torch.ops.megalite.flash_attention_backward.default, (dout, q, k, v, out, lse), options)


def test_the_compiler_sees_one_operation(device):
    q, k, v, dout, _ = arguments(device)
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    def step(q, k, v, dout):  # with a window, as on a GPU torch's kernels would take it without
        out, saved = attention(2 * q, k, v, scale=0.25, window=4)
        return out, *attention_backward(dout, 2 * q, k, v, out, saved, scale=0.25, window=4)

    compiled = torch.compile(step, fullgraph=True, backend=backend)(q, k, v, dout)
    assert all(torch.equal(got, expected) for got, expected in zip(compiled, step(q, k, v, dout), strict=True))
    targets = [str(node.target) for node in graphs[0].graph.nodes]
    assert "megalite.flash_attention.default" in targets and "megalite.flash_attention_backward.default" in targets


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
def test_real_tiles_are_as_accurate_as_torch(name, dim, device):
    options = resolve(sequence=700, batch=2, **OPTIONS[name])
    assert_accurate(*inputs(700, 2, 4, 2, dim, torch.bfloat16), device, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIONS)
def test_real_tiles_of_two_widths_are_as_accurate_as_torch(name, device):
    options = resolve(sequence=700, batch=2, **OPTIONS[name])
    assert_accurate(*cut(inputs(700, 2, 4, 2, 192, torch.bfloat16), 192, 128), device, **options)


@pytest.mark.gpu
def test_results_are_the_same_bits_each_time_and_nothing_waits_for_the_host(device, assert_same_bits_and_no_wait):
    q, k, v, dout = (x.to(device) for x in inputs(2048, 2, 8, 2, 128, torch.bfloat16))
    options = on(device, resolve(sequence=2048, batch=2, **OPTIONS["everything"]))

    def step():
        out, saved = attention(q, k, v, scale=0.1, **options)
        return out, *attention_backward(dout, q, k, v, out, saved, scale=0.1, **options)

    assert_same_bits_and_no_wait(step)
