"""The chunked recurrences against the recursion token by token, in fp64."""

import pytest
import torch
from megalite_kernels import recurrence, recurrence_step
from megalite_kernels.recurrence import Tokens
from torch import Tensor

BATCH, DK, DV = 2, 5, 3


def step_by_step(tokens: Tokens, initial: Tensor | None) -> tuple[Tensor, Tensor]:
    """The definition: one token after the other."""
    batch, heads = tokens.v.shape[1:3]
    repeats = heads // tokens.k.shape[2]
    state = torch.zeros(batch, heads, DK, DV, dtype=torch.float64) if initial is None else initial
    outputs = []
    for position in range(len(tokens.v)):
        if tokens.starts is not None:
            begins = (tokens.starts[position] == position).view(-1, 1, 1, 1)
            state = state.masked_fill(begins, 0.0)
        decay = tokens.g[position].exp()
        state = state * (decay[..., None, None] if decay.ndim == 2 else decay[..., None])
        key = tokens.k[position].repeat_interleave(repeats, 1)
        query, value = tokens.q[position].repeat_interleave(repeats, 1), tokens.v[position]
        if tokens.beta is not None:
            value = tokens.beta[position].unsqueeze(-1) * (value - torch.einsum("bhkv,bhk->bhv", state, key))
        state = state + key.unsqueeze(-1) * value.unsqueeze(-2)
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, query))
    return torch.stack(outputs), state


def starts_of_documents(length: int, begins_before: bool) -> Tensor:
    """Documents of a few tokens, the first of which may have begun before the first token."""
    starts = torch.full((length, BATCH), -3 if begins_before else 0)
    for row in range(BATCH):
        for position in (torch.rand(length) < 0.1).nonzero().flatten().tolist():
            if position:
                starts[position:, row] = position
    return starts


def tokens_of(kind: str, length: int, documents: bool, begins_before: bool) -> Tokens:
    heads, key_heads = (2, 2) if kind == "channel" else (4, 2)
    q, k = (torch.randn(length, BATCH, key_heads, DK, dtype=torch.float64) for _ in range(2))
    v = torch.randn(length, BATCH, heads, DV, dtype=torch.float64)
    decay = (length, BATCH, heads, DK) if kind == "channel" else (length, BATCH, heads)
    beta = None if kind == "mamba" else torch.rand(length, BATCH, heads, dtype=torch.float64) * 2
    starts = starts_of_documents(length, begins_before) if documents else None
    return Tokens(q, k / k.norm(dim=-1, keepdim=True), v, -torch.rand(decay, dtype=torch.float64), beta, starts)


@pytest.mark.parametrize("continued", [False, True], ids=["from zero", "continued"])
@pytest.mark.parametrize("documents", [False, True], ids=["one document", "documents"])
@pytest.mark.parametrize("length", [1, 64, 150])
@pytest.mark.parametrize("kind", ["head", "channel", "mamba"])
def test_chunks_are_the_recursion(kind, length, documents, continued):
    tokens = tokens_of(kind, length, documents, continued)
    initial = torch.randn(BATCH, tokens.v.shape[2], DK, DV, dtype=torch.float64) if continued else None
    inputs = [x.requires_grad_() for x in (*tokens[:5], initial) if x is not None]
    expected, final = step_by_step(tokens, initial)
    dout, dfinal = torch.randn_like(expected), torch.randn_like(final)
    gradients = torch.autograd.grad((expected * dout).sum() + (final * dfinal).sum(), inputs)
    with torch.no_grad():
        out, state = recurrence.forward(tokens, initial)
        ours = [x for x in recurrence.backward(dout, tokens, initial, dfinal) if x is not None]
        effect = recurrence.effect(tokens)
        local = recurrence.initial_gradient(dout, tokens)
    torch.testing.assert_close((out, state), (expected, final), rtol=1e-12, atol=1e-12)
    for own, reference in zip(ours, gradients, strict=False):  # without an incoming state there is one more
        largest = reference.abs().max().item()
        torch.testing.assert_close(own, reference, rtol=0, atol=1e-12 * max(largest, 1.0))
    if initial is not None:
        torch.testing.assert_close(effect.on(initial), final)
        torch.testing.assert_close(local + recurrence.gradient_before(effect.factor, dfinal), gradients[-1])


@pytest.mark.parametrize("kind", ["head", "channel", "mamba"])
def test_a_document_does_not_see_those_before_it(kind):
    """Bit for bit, whatever they hold."""
    tokens = tokens_of(kind, 100, False, False)
    starts = torch.where(torch.arange(100) < 41, 0, 41).unsqueeze(1)
    outputs = []
    for value in (1.0, 1e30):
        v = tokens.v.clone()
        v[:41] *= value
        outputs.append(recurrence.forward(tokens._replace(v=v, starts=starts))[0][41:])
    assert torch.equal(*outputs)


@pytest.mark.parametrize("kind", ["head", "channel", "mamba"])
def test_strong_decay_stays_finite(kind):
    tokens = Tokens(*(None if x is None else x.float() for x in tokens_of(kind, 100, False, False)))
    tokens = tokens._replace(g=tokens.g * 1e4)
    out, state = recurrence.forward(tokens)
    for x in (out, state, *recurrence.backward(torch.ones_like(out), tokens, None, torch.ones_like(state))):
        assert x is None or torch.isfinite(x).all()


@pytest.mark.parametrize("kind", ["head", "channel", "mamba"])
def test_the_next_token_is_that_of_the_recursion(kind):
    tokens, state = tokens_of(kind, 3, False, True), torch.randn(BATCH, 4, DK, DV, dtype=torch.float64)
    state = state[:, : tokens.v.shape[2]].contiguous()
    expected, final = step_by_step(tokens, state)
    state = state.clone()
    out = [
        recurrence_step.advance(state, Tokens(*(None if x is None else x[[position]] for x in tokens)))
        for position in range(3)
    ]
    torch.testing.assert_close((torch.cat(out), state), (expected, final), rtol=1e-12, atol=1e-12)
