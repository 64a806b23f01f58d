import pytest
import torch
from megalite_kernels import attention as module
from megalite_kernels.attention import attention, attention_backward
from megalite_kernels.dropout import AttentionDropout

OPTIONS = {
    "plain": {},
    "window": {"window": 5},
    "window of one": {"window": 1},
    "documents": {"documents": True},
    "documents in a window": {"documents": True, "window": 9},
    "softcap": {"softcap": 1.5, "window": 20},
    "dropout": {"dropout": 0.3},
    "everything": {"documents": True, "window": 11, "softcap": 2.0, "dropout": 0.2},
}


def document_starts(sequence, batch):
    first = (torch.rand(sequence, batch) < 0.08) * torch.arange(sequence).unsqueeze(1)
    return first.cummax(0).values


def resolve(documents=False, dropout=0.0, *, sequence, batch, **options):
    if documents:
        options["document_start"] = document_starts(sequence, batch)
    if dropout:
        options["dropout"] = AttentionDropout(77, torch.arange(5, 5 + batch), dropout, head_offset=2)
    return options


def reference(q, k, v, *, scale, window=None, document_start=None, softcap=None, dropout=None, sinks=None):
    """The definition, whole matrices, in the inputs' dtype. sinks [heads]: a column of scores more, whose probabilities
    are dropped."""
    sequence, batch, heads, _ = q.shape
    q, k, v = (
        x.permute(1, 2, 0, 3)
        for x in (q, k.repeat_interleave(heads // k.shape[2], 2), v.repeat_interleave(heads // v.shape[2], 2))
    )
    scores = scale * q @ k.transpose(-1, -2)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    i, j = torch.arange(sequence).unsqueeze(1), torch.arange(sequence)
    visible = (j <= i).expand(batch, 1, -1, -1)
    if window:
        visible = visible & (i - j < window)
    if document_start is not None:
        visible = visible & (j >= document_start.T[:, None, :, None])
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.view(1, heads, 1, 1).expand(batch, -1, sequence, -1)), -1)
    probabilities = scores.softmax(-1)[..., :sequence]
    if dropout:
        probabilities = probabilities * dropout.scale(heads, range(sequence), range(sequence), probabilities.dtype)
    return (probabilities @ v).permute(2, 0, 1, 3)


def autograd(q, k, v, dout, **options):
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = reference(*leaves, **options)
    return out.detach(), *torch.autograd.grad(out, leaves, dout.to(out.dtype))


def inputs(sequence, batch, heads, kv_heads, dim, dtype):
    """q and k as halves of one packed tensor, v as another view, as a packed projection gives them."""
    packed = torch.randn(sequence, batch, heads + 2 * kv_heads, dim, dtype=torch.float64).to(dtype)
    q, k, v = packed.split([heads, kv_heads, kv_heads], 2)
    return q, k, v, torch.randn(sequence, batch, heads, dim, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_every_option_against_the_definition(name, recompute, dtype, as_exact_as, monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 16)  # several blocks, the last one short
    q, k, v, dout = inputs(45, 3, 4, 2, 8, dtype)
    options = resolve(sequence=45, batch=3, **OPTIONS[name]) | {"scale": 0.4}
    out, saved = attention(q, k, v, recompute=recompute, **options)
    gradients = attention_backward(dout, q, k, v, out, saved, recompute=recompute, **options)
    torchs, exact = autograd(q, k, v, dout, **options), autograd(q.double(), k.double(), v.double(), dout, **options)
    assert out.is_contiguous() and out.dtype == dtype
    assert not (recompute and saved)
    for ours, torch_result, true in zip((out, *gradients), torchs, exact, strict=True):
        as_exact_as(ours, torch_result, true)
        if dtype == torch.float64:
            torch.testing.assert_close(ours, true, rtol=1e-11, atol=1e-11)


SIZES = [(1, 2, 3, 3, 5), (64, 1, 2, 1, 4), (65, 2, 6, 2, 3), (130, 1, 1, 1, 1), (0, 2, 2, 1, 4)]


@pytest.mark.parametrize("sequence, batch, heads, kv_heads, dim", SIZES)
def test_odd_sizes(sequence, batch, heads, kv_heads, dim):
    q, k, v, dout = inputs(sequence, batch, heads, kv_heads, dim, torch.float64)
    out, saved = attention(q, k, v, scale=0.7)
    gradients = attention_backward(dout, q, k, v, out, saved, scale=0.7)
    torch.testing.assert_close((out, *gradients), autograd(q, k, v, dout, scale=0.7), rtol=1e-11, atol=1e-11)


def test_a_document_is_computed_as_if_it_were_alone():
    q, k, v, dout = inputs(150, 2, 2, 1, 8, torch.float64)
    starts = torch.tensor([0, 90]).repeat_interleave(torch.tensor([90, 60])).unsqueeze(1).expand(-1, 2)
    out, saved = attention(q, k, v, scale=0.3, document_start=starts)
    gradients = attention_backward(dout, q, k, v, out, saved, scale=0.3, document_start=starts)
    for part in (slice(0, 90), slice(90, 150)):
        alone, kept = attention(q[part], k[part], v[part], scale=0.3)
        torch.testing.assert_close(out[part], alone)
        alone_gradients = attention_backward(dout[part], q[part], k[part], v[part], alone, kept, scale=0.3)
        torch.testing.assert_close(tuple(g[part] for g in gradients), alone_gradients)


def test_extreme_scores_stay_finite():
    q, k, v, dout = inputs(70, 1, 2, 2, 8, torch.float32)
    for softcap in (None, 30.0):
        out, saved = attention(q * 1e3, k * 1e3, v, scale=1.0, softcap=softcap)
        gradients = attention_backward(dout, q * 1e3, k * 1e3, v, out, saved, scale=1.0, softcap=softcap)
        assert all(torch.isfinite(x).all() for x in (out, *gradients))


def test_inputs_are_not_written():
    tensors = inputs(20, 2, 2, 1, 4, torch.float32)
    kept = [x.clone() for x in tensors]
    q, k, v, dout = tensors
    out, saved = attention(q, k, v, scale=1.0)
    before = [p.clone() for p in (out, *saved)]
    attention_backward(dout, q, k, v, out, saved, scale=1.0)
    assert all(torch.equal(a, b) for a, b in zip((*tensors, out, *saved), (*kept, *before), strict=True))


@pytest.mark.parametrize("kept", [5, 8])
@pytest.mark.parametrize("name", ["plain", "everything"])
def test_values_of_another_width(name, kept):
    """Narrower and wider ones than queries and keys, which are cut to 6."""
    q, k, v, dout = inputs(45, 3, 4, 2, 8, torch.float64)
    q, k, v, dout = q[..., :6], k[..., :6], v[..., :kept], dout[..., :kept]
    options = resolve(sequence=45, batch=3, **OPTIONS[name]) | {"scale": 0.4}
    out, saved = attention(q, k, v, **options)
    assert out.shape == (45, 3, 4, kept) and out.is_contiguous()
    results = out, *attention_backward(dout, q, k, v, out, saved, **options)
    for ours, true in zip(results, autograd(q, k, v, dout, **options), strict=True):
        torch.testing.assert_close(ours, true, rtol=1e-11, atol=1e-11)
