"""The kernels for runs of queries and keys, against torch and float64."""

import dataclasses

import pytest
import torch
import triton.language as tl
from megalite_kernels import attention_part_triton, attention_triton
from megalite_kernels.attention_part import attention_part, attention_part_backward, delta

from tests.kernels.accuracy import assert_as_accurate
from tests.kernels.test_attention import OPTIONS, autograd, inputs, resolve
from tests.kernels.test_attention_part import in_parts
from tests.kernels.test_attention_triton import SMALL


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch, device):
    """Short runs are several tiles in the interpreter, and their documents are looked at in several portions."""
    if device == "cpu":
        for module in (attention_triton, attention_part_triton):
            monkeypatch.setattr(module, "_tile", lambda target, kernel, width, heavy: SMALL[kernel])
        monkeypatch.setattr(attention_part_triton, "_PROBES", tl.constexpr(2))
    for module in (attention_triton, attention_part_triton):
        module._variant.cache_clear()
    yield
    for module in (attention_triton, attention_part_triton):
        module._variant.cache_clear()


HALVES = {
    "zigzag": [[(0, 7), (21, 7)], [(7, 14)]],
    "uneven runs": [[(0, 3), (10, 5), (27, 1)], [(3, 7), (15, 12)]],
    "whole": [[(0, 28)]],
}
CASES = [
    ("plain", "zigzag", torch.float32),
    ("documents in a window", "zigzag", torch.bfloat16),
    ("softcap", "whole", torch.float32),
    ("everything", "uneven runs", torch.bfloat16),
]


@pytest.mark.parametrize("name, cut, dtype", CASES, ids=str)
def test_parts_are_the_whole_of_the_definition(name, cut, dtype, device):
    """fp32 within 1e-5; bf16, in which products round their operands, as accurately as torch. Once with values of
    another width."""
    q, k, v, dout = inputs(28, 2, 2, 1, 12, dtype)
    if cut == "whole":
        v, dout = v[..., :8], dout[..., :8]
    options = resolve(sequence=28, batch=2, **OPTIONS[name]) | {"scale": 0.4}
    moved = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    if "dropout" in moved:
        moved["dropout"] = dataclasses.replace(moved["dropout"], samples=moved["dropout"].samples.to(device))
    results = in_parts(*(x.to(device) for x in (q, k, v, dout)), HALVES[cut], **moved)
    torchs, exact = autograd(q, k, v, dout, **options), autograd(q.double(), k.double(), v.double(), dout, **options)
    for got, true, of_torch in zip(results, exact, torchs, strict=True):
        if dtype == torch.float32:
            torch.testing.assert_close(got.cpu().double(), true, rtol=1e-5, atol=1e-5)
        else:
            assert_as_accurate(got.cpu().to(dtype), true, of_torch)


def test_keys_in_two_parts(device):
    """128 channels and 16 others, with values of 24."""
    q, k, v, dout = inputs(28, 1, 2, 1, 144, torch.bfloat16)
    v, dout, options = v[..., :24], dout[..., :24], {"scale": 0.1, "window": 20}
    results = in_parts(*(x.to(device) for x in (q, k, v, dout)), HALVES["zigzag"], **options)
    torchs, exact = autograd(q, k, v, dout, **options), autograd(q.double(), k.double(), v.double(), dout, **options)
    for got, true, of_torch in zip(results, exact, torchs, strict=True):
        assert_as_accurate(got.cpu().to(torch.bfloat16), true, of_torch)


def test_long_runs_have_tiles_without_a_mask(device):
    """Against the reference, which is another implementation: keys far before the queries, and a window across two
    runs."""
    q, k, v, dout = (x.to(device) for x in inputs(96, 1, 2, 1, 16, torch.bfloat16))
    for queries, keys, window in (
        ([(60, 40), (200, 56)], [(0, 50), (150, 46)], None),
        ([(40, 96)], [(0, 50), (50, 46)], 75),
    ):
        options = {"scale": 0.3, "window": window}
        out, lse = attention_part(q, k, v, queries, keys, **options)
        true, true_lse = attention_part(*(x.cpu().double() for x in (q, k, v)), queries, keys, **options)
        torch.testing.assert_close(lse.cpu().double(), true_lse, rtol=1e-3, atol=1e-2)
        torch.testing.assert_close(out.cpu().double(), true, rtol=2e-2, atol=2e-2)
        inner = delta(dout, out)
        results = attention_part_backward(dout, q, k, v, lse, inner, queries, keys, **options)
        exact = attention_part_backward(
            *(x.cpu().double() for x in (dout, q, k, v, lse, inner)), queries, keys, **options
        )
        for got, expected in zip(results, exact, strict=True):
            torch.testing.assert_close(got.cpu().double(), expected, rtol=2e-2, atol=4e-2)


def test_queries_that_see_nothing(device):
    q, k, v, _ = (x.to(device) for x in inputs(40, 1, 2, 1, 16, torch.bfloat16))
    out, lse = attention_part(q, k, v, [(0, 20), (60, 20)], [(40, 40)], scale=1.0)
    assert lse[:20].eq(-torch.inf).all() and out[:20].eq(0).all()
    assert torch.isfinite(lse[20:]).all() and torch.isfinite(out).all()
