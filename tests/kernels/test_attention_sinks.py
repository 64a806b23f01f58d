"""Attention with a sink in each head, against the definition: a column of scores more, whose probabilities are
dropped."""

import pytest
import torch
from megalite_kernels import attention_part as module
from megalite_kernels.attention_part import attention_part, attention_part_backward, delta, merge_
from megalite_kernels.attention_sinks import attention_with_sinks, attention_with_sinks_backward, join, sinks_gradient

from tests.kernels.test_attention import OPTIONS, inputs, reference, resolve

LENGTH = 40


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 6)


def expected(q, k, v, dout, sinks, **options):
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v, sinks)]
    out = reference(*leaves[:3], sinks=leaves[3], **options)
    return out.detach(), *torch.autograd.grad(out, leaves, dout)


@pytest.mark.parametrize("name", OPTIONS)
def test_is_the_definition(name):
    q, k, v, dout = inputs(LENGTH, 2, 4, 2, 8, torch.float64)
    sinks, options = (
        torch.randn(4, dtype=torch.float64),
        resolve(sequence=LENGTH, batch=2, **OPTIONS[name]) | {"scale": 0.4},
    )
    out, lse = attention_with_sinks(q, k, v, sinks, **options)
    results = out, *attention_with_sinks_backward(dout, q, k, v, out, lse, sinks, **options)
    torch.testing.assert_close(results, expected(q, k, v, dout, sinks, **options), rtol=1e-11, atol=1e-11)


def test_a_sink_joins_merged_parts_once():
    """Queries of a later part: their keys come in two parts, and the sink after both."""
    q, k, v, dout = inputs(LENGTH, 2, 4, 2, 8, torch.float64)
    sinks, half = torch.randn(4, dtype=torch.float64), LENGTH // 2
    first, second = [(0, half)], [(half, half)]
    query, grad = q[half:], dout[half:]
    out, lse = attention_part(query, k[half:], v[half:], second, second, scale=0.4)
    merge_(out, lse, *attention_part(query, k[:half], v[:half], second, first, scale=0.4))
    out, lse = join(out, lse, sinks)
    inner = delta(grad, out)
    dq = sum(
        attention_part_backward(grad, query, k[part], v[part], lse, inner, second, runs, scale=0.4)[0]
        for part, runs in ((slice(half), first), (slice(half, None), second))
    )
    only_second = torch.cat((torch.zeros_like(dout[:half]), grad))
    true_out, true_dq, _, _, true_dsinks = expected(q, k, v, only_second, sinks, scale=0.4)
    torch.testing.assert_close(
        (out, dq, sinks_gradient(sinks, lse, inner)), (true_out[half:], true_dq[half:], true_dsinks)
    )


def test_extreme_sinks_stay_finite():
    """A sink far below all scores changes nothing; one far above takes everything. bf16 inputs, fp32 gradient of the
    sinks."""
    q, k, v, dout = inputs(20, 1, 2, 2, 8, torch.bfloat16)
    sinks = torch.tensor([-1e4, 1e4], dtype=torch.bfloat16)
    out, lse = attention_with_sinks(q, k, v, sinks, scale=1.0)
    plain, _ = attention_part(q, k, v, [(0, 20)], [(0, 20)], scale=1.0)
    assert torch.equal(out[:, :, 0], plain[:, :, 0].bfloat16()) and not out[:, :, 1].any()
    *_, dsinks = attention_with_sinks_backward(dout, q, k, v, out, lse, sinks, scale=1.0)
    assert dsinks.dtype == torch.float32 and torch.isfinite(dsinks).all()
