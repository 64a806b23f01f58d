"""The recurrences' kernels against torch and float64."""

import pytest
import torch
from megalite_kernels import backend, recurrence, recurrence_triton
from megalite_kernels.recurrence import Tokens
from torch.library import opcheck

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


def tokens_of(kind, size, heads, widths, dtype, documents, device):
    """Two heads read each key head; the first document began before the first token."""
    batch, (dk, dv) = (2 if documents else 1), widths
    key_heads = heads if kind == "channel" else max(heads // 2, 1)
    q, k = (torch.nn.functional.normalize(torch.randn(size, batch, key_heads, dk), dim=-1) for _ in range(2))
    packed = torch.randn(size, batch, heads, 2 * dv)
    g = -torch.rand((size, batch, heads, dk) if kind == "channel" else (size, batch, heads)) / 2
    beta = None if kind == "mamba" else 2 * torch.rand(size, batch, heads, device=device)
    starts = None
    if documents:
        starts = torch.full((size, batch), -3, device=device)
        for position in range(21, size, 25):  # anywhere in a chunk
            starts[position:, 0] = position
        starts[-1:, 1] = size - 1
    return Tokens(
        q.to(device, dtype), k.to(device, dtype), packed.to(device, dtype)[..., dv:], g.to(device), beta, starts
    )


def results(dout, tokens, initial, dfinal):
    out, final = recurrence.forward(tokens, initial)
    gradients = recurrence.backward(dout, tokens, initial, dfinal)
    return {"out": out, "final": final, **gradients._asdict(), "alone": recurrence.effect(tokens).on(initial)}


def cast(tokens, dtype):
    return Tokens(*(x if x is None else x.to(dtype) for x in tokens[:5]), tokens.starts)


def one_by_one(dout, tokens, initial, dfinal):
    """The recursion token by token in the dtype of its inputs, and autograd's gradients."""
    inputs = [None if x is None else x.detach().requires_grad_() for x in (*tokens[:5], initial)]
    q, k, v, g, beta, state = inputs
    repeats = v.shape[2] // k.shape[2]
    outputs = []
    for position in range(len(v)):
        if tokens.starts is not None:
            begins = (tokens.starts[position] == position).view(-1, 1, 1, 1)
            state = state.masked_fill(begins, 0.0)
        decay = g[position].exp()
        state = state * (decay[..., None, None] if decay.ndim == 2 else decay[..., None])
        key, query = (x[position].repeat_interleave(repeats, 1) for x in (k, q))
        value = v[position]
        if beta is not None:
            value = beta[position].unsqueeze(-1) * (value - (state * key.unsqueeze(-1)).sum(-2))
        state = state + key.unsqueeze(-1) * value.unsqueeze(-2)
        outputs.append((state * query.unsqueeze(-1)).sum(-2))
    out = torch.stack(outputs)
    used = [x for x in inputs if x is not None]
    gradients = iter(torch.autograd.grad((out * dout).sum() + (state * dfinal).sum(), used))
    names = ("q", "k", "v", "g", "beta", "initial")
    named = {name: None if x is None else next(gradients) for name, x in zip(names, inputs, strict=True)}
    return {"out": out.detach(), "final": state.detach(), **named, "alone": state.detach()}


@pytest.mark.parametrize(
    ("kind", "size", "heads", "widths", "dtype", "documents"),
    [
        ("head", 1, 2, (16, 16), BF16, False),
        ("head", 2, 1, (24, 40), FP32, True),
        ("head", 130, 2, (24, 20), FP32, True),
        ("head", 70, 1, (96, 80), BF16, True),
        ("head", 64, 1, (160, 16), FP16, False),
        ("channel", 130, 1, (24, 16), FP32, True),
        ("channel", 70, 1, (40, 16), BF16, False),
        ("mamba", 130, 2, (16, 40), FP32, True),
        ("mamba", 70, 4, (80, 16), BF16, True),
    ],
)
def test_as_accurate_as_torch(kind, size, heads, widths, dtype, documents, device, monkeypatch, as_exact_as):
    tokens = tokens_of(kind, size, heads, widths, dtype, documents, device)
    state = tokens.v.shape[1], heads, *widths
    initial, dfinal = torch.randn(2, *state, device=device)
    dout = torch.randn(tokens.v.shape, device=device).to(dtype)
    kept = torch.Tensor.new_empty

    def poisoned(*args, **options):
        new = kept(*args, **options)
        return new.fill_(torch.nan) if new.is_floating_point() else new

    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "new_empty", poisoned)
        ours = results(dout, tokens, initial, dfinal)
    backend.select("torch")
    double = torch.float64
    exact = results(dout.double(), cast(tokens, double), initial.double(), dfinal.double())
    if dtype == FP32:
        monkeypatch.setattr(recurrence, "CHANNEL_CHUNK", 64)  # G is as large as in the kernels
        torchs = results(dout, tokens, initial, dfinal)
    else:
        torchs = one_by_one(dout, cast(tokens, dtype), initial.to(dtype), dfinal.to(dtype))
    for name, got in ours.items():
        assert (got is None) == (exact[name] is None)
        if got is not None:
            of_result = dtype if name in ("out", "q", "k", "v") else FP32
            assert got.dtype == of_result, name
            # the reference adds decays in fp64
            as_exact_as(got, torchs[name], exact[name], factor=3.0 if dtype == FP32 else 1.5)


@pytest.mark.parametrize("kind", ["head", "channel", "mamba"])
def test_runs_of_positions_join(kind, device):
    """Of forward and backward, through the states between them; `effect` is how the second depends on the first."""
    tokens = tokens_of(kind, 90, 1, (16, 16), FP32, False, device)
    runs = [Tokens(*(x if x is None else x[part] for x in tokens)) for part in (slice(0, 37), slice(37, 90))]
    dout, dfinal = torch.randn_like(tokens.v), torch.randn(1, 1, 16, 16, device=device)
    out, final = recurrence.forward(tokens)
    first, between = recurrence.forward(runs[0])
    second, last = recurrence.forward(runs[1], between)
    torch.testing.assert_close((torch.cat((first, second)), last), (out, final))
    torch.testing.assert_close(recurrence.effect(runs[1]).on(between), final)
    whole = recurrence.backward(dout, tokens, None, dfinal)
    later = recurrence.backward(dout[37:], runs[1], between, dfinal)
    sooner = recurrence.backward(dout[:37], runs[0], None, later.initial)
    for name in ("q", "k", "v", "g"):
        joined = torch.cat((getattr(sooner, name), getattr(later, name)))
        torch.testing.assert_close(joined, getattr(whole, name), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["head", "channel", "mamba"])
def test_documents_do_not_meet_and_strong_decay_stays_finite(kind, device):
    tokens = tokens_of(kind, 66, 1, (16, 16), FP32, False, device)
    starts = torch.where(torch.arange(66, device=device) < 41, 0, 41).unsqueeze(1)
    outputs = []
    for value in (1.0, 1e30):
        v = tokens.v.clone()
        v[:41] *= value
        outputs.append(recurrence.forward(tokens._replace(v=v, starts=starts))[0][41:])
    assert torch.equal(*outputs)
    tokens = tokens._replace(g=tokens.g * 1e4)
    out, state = recurrence.forward(tokens)
    gradients = recurrence.backward(torch.ones_like(out), tokens, None, torch.ones_like(state))
    assert all(x is None or torch.isfinite(x).all() for x in (out, state, *gradients))


def test_fp64_mixed_types_and_wide_heads_take_the_reference(device, monkeypatch):
    monkeypatch.setattr(recurrence_triton, "recurrence_forward", None)
    tokens = tokens_of("mamba", 2, 1, (16, 16), FP32, False, device)
    wide = tokens_of("mamba", 2, 1, (257, 16), FP32, False, device)
    for other in (cast(tokens, torch.float64), tokens._replace(q=tokens.q.bfloat16()), wide):
        recurrence.forward(other)
    with pytest.raises(TypeError):  # the kernel is what would have been called
        recurrence.forward(tokens)


def test_operations_are_registered_soundly(device):
    for kind in ("head", "mamba"):
        tokens = tokens_of(kind, 3, 1, (16, 16), FP32, False, device)
        state = torch.randn(1, 1, 16, 16, device=device)
        opcheck(torch.ops.megalite.recurrence_forward.default, (*tokens, None))
        opcheck(torch.ops.megalite.recurrence_state.default, (*tokens[1:], state))
        opcheck(torch.ops.megalite.recurrence_backward.default, (tokens.v.contiguous(), *tokens, state, None))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["head", "channel", "mamba"])
def test_results_are_the_same_bits_each_time_and_nothing_waits_for_the_host(kind, device, assert_same_bits_and_no_wait):
    tokens = tokens_of(kind, 2000, 4, (128, 128), BF16, True, device)
    initial, dfinal = torch.randn(2, tokens.v.shape[1], 4, 128, 128, device=device)
    dout = torch.randn_like(tokens.v)
    assert_same_bits_and_no_wait(lambda: [x for x in results(dout, tokens, initial, dfinal).values() if x is not None])
