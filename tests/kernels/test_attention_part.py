"""Attention of runs of queries to runs of keys: parts merge, and their gradients add up, to the result for whole
rows."""

import pytest
import torch
from megalite_kernels import attention_part as module
from megalite_kernels.attention_part import attention_part, attention_part_backward, delta, merge_

from tests.kernels.test_attention import OPTIONS, autograd, inputs, resolve

LENGTH = 48
CUTS = {
    "contiguous": [[(0, 16)], [(16, 16)], [(32, 16)]],
    "zigzag": [[(0, 8), (40, 8)], [(8, 8), (32, 8)], [(16, 8), (24, 8)]],
    "uneven runs": [[(0, 3), (20, 5), (47, 1)], [(3, 17)], [(25, 1), (26, 21)]],
    "whole rows": [[(0, LENGTH)]],
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 6)


def taken(x, runs):
    return torch.cat([x[start : start + length] for start, length in runs])


def given(whole, part, runs):
    """Add a part's rows to those of whole rows."""
    for (start, length), rows in zip(runs, part.split([length for _, length in runs]), strict=True):
        whole[start : start + length] += rows


def own(options, runs):
    starts = options.get("document_start")
    return options if starts is None else {**options, "document_start": taken(starts, runs)}


def in_parts(q, k, v, dout, cut, **options):
    """out, dq, dk and dv of whole rows, computed part by part as a ring does: by each part of the queries for each part
    of the keys."""
    accumulate = torch.promote_types(q.dtype, torch.float32)
    out, dq, dk, dv = (torch.zeros(x.shape, dtype=accumulate, device=x.device) for x in (dout, q, k, v))
    for runs in cut:
        query, its = taken(q, runs), own(options, runs)
        merged_out = torch.zeros((*query.shape[:3], v.shape[3]), dtype=accumulate, device=q.device)
        lse = torch.full(query.shape[:3], -torch.inf, dtype=accumulate, device=q.device)
        for keys in cut:
            merge_(merged_out, lse, *attention_part(query, taken(k, keys), taken(v, keys), runs, keys, **its))
        grad = taken(dout, runs)
        inner = delta(grad, merged_out)
        for keys in cut:
            key, value = taken(k, keys), taken(v, keys)
            parts = attention_part_backward(grad, query, key, value, lse, inner, runs, keys, **its)
            # rounded to bf16 between parts, gradients would lose their digits
            assert all(part.dtype == accumulate for part in parts)
            for whole, part, its_runs in zip((dq, dk, dv), parts, (runs, keys, keys), strict=True):
                given(whole, part, its_runs)
        given(out, merged_out, runs)
    return out, dq, dk, dv


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", OPTIONS)
def test_parts_are_the_whole_of_the_definition(name, cut):
    q, k, v, dout = inputs(LENGTH, 2, 4, 2, 8, torch.float64)
    options = resolve(sequence=LENGTH, batch=2, **OPTIONS[name]) | {"scale": 0.4}
    torch.testing.assert_close(
        in_parts(q, k, v, dout, CUTS[cut], **options), autograd(q, k, v, dout, **options), rtol=1e-11, atol=1e-11
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_parts_are_as_exact_as_torch(dtype, as_exact_as):
    q, k, v, dout = inputs(LENGTH, 2, 4, 2, 8, dtype)
    options = resolve(sequence=LENGTH, batch=2, **OPTIONS["documents in a window"]) | {"scale": 0.4}
    torchs, exact = autograd(q, k, v, dout, **options), autograd(q.double(), k.double(), v.double(), dout, **options)
    for ours, of_torch, true in zip(in_parts(q, k, v, dout, CUTS["zigzag"], **options), torchs, exact, strict=True):
        as_exact_as(ours.to(dtype), of_torch, true)


def test_what_sees_nothing_is_nothing():
    """Keys after all queries, and a window that ends before them: no NaN from −inf − (−inf), alone or merged."""
    q, k, v, dout = inputs(8, 1, 2, 1, 4, torch.float32)
    for queries, keys, window in (([(0, 8)], [(8, 8)], None), ([(32, 8)], [(0, 8)], 5)):
        out, lse = attention_part(q, k, v, queries, keys, scale=1.0, window=window)
        merge_(out, lse, out.clone(), lse.clone())
        assert out.eq(0).all() and lse.eq(-torch.inf).all()
        gradients = attention_part_backward(
            dout, q, k, v, torch.zeros(8, 1, 2), delta(dout, out), queries, keys, scale=1.0, window=window
        )
        assert all(x.eq(0).all() for x in gradients)


def test_merging_survives_extreme_scores():
    q, k, v, dout = inputs(LENGTH, 1, 2, 2, 8, torch.float32)
    results = in_parts(q * 1e3, k * 1e3, v, dout, CUTS["zigzag"], scale=1.0)
    assert all(torch.isfinite(x).all() for x in results)


def test_values_of_another_width():
    q, k, v, dout = inputs(LENGTH, 2, 4, 2, 8, torch.float64)
    v, dout = v[..., :5], dout[..., :5]
    options = resolve(sequence=LENGTH, batch=2, **OPTIONS["everything"]) | {"scale": 0.4}
    results = in_parts(q, k, v, dout, CUTS["zigzag"], **options)
    for ours, true in zip(results, autograd(q, k, v, dout, **options), strict=True):
        torch.testing.assert_close(ours, true, rtol=1e-11, atol=1e-11)
