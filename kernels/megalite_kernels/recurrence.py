"""Linear recurrences with decay over a sequence, computed in chunks: the gated delta rule and Mamba-2's scan.

Each head has a state S [dk, dv]. A token with key k, value v, log decay g ≤ 0 and strength β makes of it

    S ← exp(g) S                 g: a number, or one for each of the dk channels (Kimi delta attention)
    S ← S + β k (v − Sᵀk)ᵀ       the delta rule
    S ← S + k vᵀ                 without β: Mamba-2, whose keys are B, queries C and values Δ·x

and its output is o = Sᵀq. The tokens of a chunk are computed at once. With G the cumulative sum of g in the
chunk and S the state before it, the values that the delta rule adds are u = T β (v − exp(G) Sᵀk) with
T = (1 + tril₋₁(β kkᵀ exp(Gᵢ − Gⱼ)))⁻¹, and

    o  = exp(G) Sᵀq + tril(qkᵀ exp(Gᵢ − Gⱼ)) u
    S′ = exp(G_last) S + Σⱼ exp(G_last − Gⱼ) kⱼ uⱼᵀ

Only differences Gᵢ − Gⱼ of a token and an earlier one are exponentiated, so nothing overflows. A token of
another document does not see the state or earlier tokens. All of it is computed in at least fp32.

Yang, Kautz, Hatamizadeh: Gated Delta Networks (2024). Dao, Gu: Transformers are SSMs (2024).
No communication.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite_kernels import state_library
from megalite_kernels.backend import takes_triton

_WIDEST = 256  # channels of a key or a value that the kernels take
CHUNK = 64
CHANNEL_CHUNK = 16  # with a decay for each channel: the differences take chunk · dk numbers for each token


class Tokens(NamedTuple):
    """The inputs of a recurrence over a run of positions.

    Attributes:
        q, k: [seq, batch, key heads, dk].
        v: [seq, batch, heads, dv]; head j reads key head j // (heads / key heads).
        g: log decay, [seq, batch, heads], or [seq, batch, heads, dk] for each channel.
        beta: [seq, batch, heads]; None: the values are added as they are.
        starts: [seq, batch] or [seq, 1], where each token's document starts, counted from the first of these
            positions: below 0, the document of the incoming state. None: all tokens continue that document.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor | None = None
    starts: Tensor | None = None

    @property
    def chunk(self) -> int:
        return CHUNK if self.g.ndim == 3 else CHANNEL_CHUNK


class Gradients(NamedTuple):
    """The gradients of `Tokens`, in the shapes and types of these, and of the incoming state."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor | None
    initial: Tensor


def forward(tokens: Tokens, initial: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the outputs [seq, batch, heads, dv], and the state after the last token.

    Args:
        initial: the state before the first token, [batch, heads, dk, dv] in at least fp32; None: zero.
    """
    if state_library.takes(tokens):
        return state_library.recur(tokens, initial)
    if _takes_triton(tokens):
        from megalite_kernels import recurrence_triton

        return recurrence_triton.recurrence_forward(*tokens, initial)
    chunks = _Chunks(tokens)
    states, final = chunks.states(initial)
    out = chunks.reading @ states + chunks.scores @ chunks.values(states)
    return chunks.joined(out).to(tokens.v.dtype), final


def _state(tokens: Tokens, initial: Tensor | None = None) -> Tensor:
    """Return the state after the last token."""
    if _takes_triton(tokens):
        from megalite_kernels import recurrence_triton

        return recurrence_triton.recurrence_state(*tokens[1:], initial)
    return _Chunks(tokens).states(initial)[1]


class Effect(NamedTuple):
    """What tokens do to a state: S ↦ factor · S + added.

    Attributes:
        factor: [batch, heads, dk, dk], or the diagonal of a diagonal matrix, [batch, heads, 1 or dk, 1].
        added: the state after the tokens if it is zero before them, [batch, heads, dk, dv].
    """

    factor: Tensor
    added: Tensor

    def on(self, state: Tensor) -> Tensor:
        return _times(self.factor, state) + self.added


def _times(factor: Tensor, state: Tensor) -> Tensor:
    return factor * state if factor.shape[-1] == 1 else factor @ state


def gradient_before(factor: Tensor, dfinal: Tensor) -> Tensor:
    """Return the gradient of the state before tokens from that of the state after them.

    Args:
        factor: of their `Effect`.
    """
    return _times(factor.mT if factor.shape[-1] > 1 else factor, dfinal)


def effect(tokens: Tokens) -> Effect:
    """Return what the tokens do to a state, in at least fp32."""
    dtype = torch.promote_types(tokens.v.dtype, torch.float32)
    if tokens.beta is None:
        total = tokens.g.to(dtype).sum(0).unsqueeze(-1)  # [batch, heads, 1], or with dk before the last
        total = total.unsqueeze(-1) if tokens.g.ndim == 3 else total
        if tokens.starts is not None:  # a document that starts here does not depend on the state
            total = total.masked_fill(tokens.starts[-1].ge(0).view(-1, 1, 1, 1), -torch.inf)
        return Effect(total.exp(), _state(tokens))
    # the values, and none beside them: of the unit matrix as a state, the factor is left
    batch, heads, width = tokens.v.shape[1:]
    keys = tokens.k.shape[-1]
    unit = torch.eye(keys, dtype=dtype, device=tokens.v.device).expand(batch, heads, keys, keys)
    if width + keys > _WIDEST:  # by two scans, which the kernels take
        nothing = tokens.v.new_zeros(()).expand(*tokens.v.shape[:3], keys)
        return Effect(_state(tokens._replace(v=nothing), unit), _state(tokens))
    wider = tokens._replace(v=F.pad(tokens.v, (0, keys)))
    added, factor = _state(wider, F.pad(unit, (width, 0))).split((width, keys), -1)
    return Effect(factor, added)


def initial_gradient(dout: Tensor, tokens: Tokens) -> Tensor:
    """Return the gradient of the state before the tokens from that of their outputs alone."""
    if _takes_triton(tokens):
        return backward(dout, tokens).initial
    chunks = _Chunks(tokens)
    return chunks.state_gradients(chunks.split(dout), None)[2]


def backward(
    dout: Tensor, tokens: Tokens, initial: Tensor | None = None, dfinal: Tensor | None = None
) -> Gradients:
    """Return the gradients from those of the outputs and of the final state (None: zero).

    The states are computed again.
    """
    if state_library.takes(tokens):
        return state_library.recur_backward(dout, tokens, initial, dfinal)
    if _takes_triton(tokens):
        from megalite_kernels import recurrence_triton

        gradients = Gradients(*recurrence_triton.recurrence_backward(dout, *tokens, initial, dfinal))
        return gradients if tokens.beta is not None else gradients._replace(beta=None)
    chunks = _Chunks(tokens)
    states, _ = chunks.states(initial)
    return chunks.backward(chunks.split(dout), states, chunks.values(states), dfinal)


def _takes_triton(tokens: Tokens) -> bool:
    q, k, v = tokens[:3]
    widest = max(k.shape[-1], v.shape[-1])
    return takes_triton(v) and q.dtype == k.dtype == v.dtype and widest <= _WIDEST and len(v) > 0


class _Chunks:
    """The chunks of a run of positions, [batch, heads, chunks, tokens, …].

    Attributes:
        q, k, v, beta: the inputs; beta is [batch, heads, chunks, tokens, 1].
        between: exp(Gᵢ − Gⱼ) of each token i and a token j of its document up to itself, else 0: [.., i, j],
            with a last dimension for the channels if these decay each by itself.
        scores: [.., i, j], how much of the value added by token j token i reads.
        reading: what token i reads the state before the chunk with.
        writing: what token j's value is added to the state after the chunk with.
        decay: the factor of the state before the chunk in the state after it, [.., 1 or dk, 1].
    """

    def __init__(self, tokens: Tokens):
        self.tokens = tokens
        self.length, self.chunk = len(tokens.v), tokens.chunk
        self.dtype = torch.promote_types(tokens.v.dtype, torch.float32)
        self.repeats = tokens.v.shape[2] // tokens.k.shape[2]
        self.q, self.k = (
            self.split(x).repeat_interleave(self.repeats, 1) for x in (tokens.q, tokens.k)
        )  # [batch, heads, chunks, tokens, dk]
        self.v = self.split(tokens.v)
        self.beta = None if tokens.beta is None else self.split(tokens.beta.unsqueeze(-1))
        by_channel = tokens.g.ndim == 4
        decays = self.split(tokens.g if by_channel else tokens.g.unsqueeze(-1))
        # differences of large sums, of which fp32 would keep few digits where decay is strong
        total = decays.cumsum(3) if by_channel else decays.double().cumsum(3)
        same, continues = self._documents()
        differences = total.unsqueeze(4) - total.unsqueeze(3)  # [.., i, j, 1 or dk]
        between = differences.masked_fill_(~same.unsqueeze(-1), -torch.inf).to(self.dtype).exp_()
        self.between = between if by_channel else between.squeeze(-1)
        since_start = total.to(self.dtype).exp() * continues  # [.., i, 1 or dk]
        # of token j to the last: 0 if that is in another document
        to_end = between.select(3, self.chunk - 1)
        self.since_start, self.to_end = since_start, to_end
        self.reading, self.writing = self.q * since_start, self.k * to_end
        self.decay = since_start.select(3, self.chunk - 1).unsqueeze(-1)  # [.., 1 or dk, 1]
        self.scores = self._products(self.q)
        if self.beta is not None:
            # 1 + the part of earlier values that a value replaces; unit lower triangular
            self.replaced = (self.beta * self._products(self.k)).tril(-1)
            self.erasing = self.beta * self.k * since_start

    def split(self, x: Tensor) -> Tensor:
        """Return [seq, batch, heads, width] as [batch, heads, chunks, tokens, width], in at least fp32.

        The last chunk is filled with zeros: such a token changes nothing, with any decay.
        """
        x = x.to(self.dtype).permute(1, 2, 0, 3)
        missing = -self.length % self.chunk
        return F.pad(x, (0, 0, 0, missing)).unflatten(2, (-1, self.chunk))

    def joined(self, x: Tensor) -> Tensor:
        """Return [batch, heads, chunks, tokens, width] as [seq, batch, heads, width]."""
        return x.flatten(2, 3)[:, :, : self.length].permute(2, 0, 1, 3).contiguous()

    def _documents(self) -> tuple[Tensor, Tensor]:
        """Return which tokens j up to i token i sees, and which continue the document before the chunk.

        [batch or 1, 1, chunks or 1, i, j] and [.., i, 1].
        """
        device, starts = self.tokens.v.device, self.tokens.starts
        causal = torch.ones(self.chunk, self.chunk, dtype=torch.bool, device=device).tril()
        if starts is None:
            return causal[None, None, None], torch.ones(
                1, 1, 1, self.chunk, 1, dtype=self.dtype, device=device
            )
        missing = -self.length % self.chunk
        rows = torch.cat((starts, starts[-1:].expand(missing, -1))).t()  # filled in the last document
        rows = rows.unflatten(1, (-1, self.chunk)).unsqueeze(1)  # [batch or 1, 1, chunks, tokens]
        same = (rows.unsqueeze(-1) == rows.unsqueeze(-2)) & causal
        first = torch.arange(rows.shape[2], device=device).unsqueeze(-1) * self.chunk
        return same, (rows < first).unsqueeze(-1).to(self.dtype)

    def _products(self, left: Tensor) -> Tensor:
        """Return leftᵢ · kⱼ with the decay between, [.., i, j]."""
        if self.between.ndim == 5:
            return left @ self.k.mT * self.between
        return torch.einsum("...id,...jd,...ijd->...ij", left, self.k, self.between)

    def _products_backward(self, grad: Tensor, left: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of left and k; the decay's follow from them."""
        if self.between.ndim == 5:
            grad = grad * self.between
            return grad @ self.k, grad.mT @ left
        dleft = torch.einsum("...ij,...jd,...ijd->...id", grad, self.k, self.between)
        return dleft, torch.einsum("...ij,...id,...ijd->...jd", grad, left, self.between)

    def solve(self, right: Tensor, transposed: bool = False) -> Tensor:
        """Return T · right, or Tᵀ · right."""
        unit = self.replaced.mT if transposed else self.replaced
        return torch.linalg.solve_triangular(unit, right, upper=transposed, unitriangular=True)

    def states(self, initial: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the state before each chunk [batch, heads, chunks, dk, dv], and the one after the last."""
        batch, heads, count, _, width = self.v.shape
        state = self.v.new_zeros(batch, heads, self.k.shape[-1], width)
        if initial is not None:
            state = initial.to(self.dtype)
        before = []
        if self.beta is None:
            added = (self.writing.mT @ self.v).unbind(2)
        else:
            new, erased = self.solve(self.beta * self.v).unbind(2), self.solve(self.erasing).unbind(2)
            writing = self.writing.mT.unbind(2)
        decay = self.decay.unbind(2)
        for index in range(count):
            before.append(state)
            if self.beta is None:
                more = added[index]
            else:
                more = writing[index] @ (new[index] - erased[index] @ state)
            state = decay[index] * state + more
        return torch.stack(before, 2), state

    def values(self, states: Tensor) -> Tensor:
        """Return u, what each token adds to the state under its key."""
        if self.beta is None:
            return self.v
        return self.solve(self.beta * self.v - self.erasing @ states)

    def backward(self, dout: Tensor, states: Tensor, values: Tensor, dfinal: Tensor | None) -> Gradients:
        """Return the gradients; `states` are those before the chunks, `values` is u."""
        after, dvalues, initial = self.state_gradients(dout, dfinal)
        # Where a factor exp(Gᵢ) comes with qᵢ or kᵢ, the gradient of G is that of the vector times the
        # vector; where exp(−Gⱼ) comes with kⱼ, it is the same with the opposite sign.
        # A token's own key has no decay: without it these terms are small where decay is strong.
        dscores = dout @ values.mT
        dq, dk_later = self._products_backward(dscores.tril(-1), self.q)
        dq = dq + (dout @ states.mT) * self.since_start
        dk_end = (values @ after.mT) * self.to_end  # through the state after the chunk
        dtotal = self.q * dq - self.k * (dk_later + dk_end)
        itself = dscores.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
        dq, dk = dq + itself * self.k, dk_later + dk_end + itself * self.q
        dbeta = None
        if self.beta is None:
            dv = dvalues
        else:
            dright = self.solve(dvalues, transposed=True)
            dv = dright * self.beta
            dreplaced = -(dright @ values.mT).tril(-1)
            unscaled, dright_k = self._products(self.k).tril(-1), dright @ states.mT * self.since_start
            dbeta = (dright * self.v).sum(-1, keepdim=True) - (dright_k * self.k).sum(-1, keepdim=True)
            dbeta = dbeta + (dreplaced * unscaled).sum(-1, keepdim=True)
            dk_own, dk_other = self._products_backward(dreplaced * self.beta, self.k)
            dk_own = dk_own - self.beta * dright_k
            dtotal = dtotal + self.k * (dk_own - dk_other)
            dk = dk + dk_own + dk_other
        last = (self.k * dk_end).sum(3, keepdim=True) + (after * states * self.decay).sum(-1).unsqueeze(3)
        return self._gradients(dq, dk, dv, dtotal, last, dbeta, initial)

    def state_gradients(self, dout: Tensor, dfinal: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of the state after each chunk, of the values u, and of the first state."""
        batch, heads, count, _, width = self.v.shape
        dstate = self.v.new_zeros(batch, heads, self.k.shape[-1], width)
        if dfinal is not None:
            dstate = dfinal.to(self.dtype)
        within = self.scores.mT @ dout
        after, dvalues = [dstate] * count, [dstate] * count
        for index in reversed(range(count)):
            after[index] = dstate
            dvalues[index] = within[:, :, index] + self.writing[:, :, index] @ dstate
            dstate = self._before(dout, dstate, dvalues[index], index)
        return torch.stack(after, 2), torch.stack(dvalues, 2), dstate

    def _before(self, dout: Tensor, after: Tensor, dvalues: Tensor, index: int) -> Tensor:
        """Return the gradient of the state before a chunk."""
        dstate = self.decay[:, :, index] * after + self.reading[:, :, index].mT @ dout[:, :, index]
        if self.beta is not None:
            unit = self.replaced[:, :, index].mT
            dright = torch.linalg.solve_triangular(unit, dvalues, upper=True, unitriangular=True)
            dstate = dstate - self.erasing[:, :, index].mT @ dright
        return dstate

    def _gradients(
        self,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        dtotal: Tensor,
        last: Tensor,
        dbeta: Tensor | None,
        initial: Tensor,
    ) -> Gradients:
        """Return the gradients in the shapes of the inputs.

        Args:
            dtotal: the gradient of G by channel, besides `last`, that of the last G.
        """
        inputs = self.tokens
        if inputs.g.ndim == 3:
            dtotal, last = dtotal.sum(-1, keepdim=True), last.sum(-1, keepdim=True)
        # G is a cumulative sum: its gradient is summed from the end
        dg = dtotal.flip(3).cumsum(3).flip(3) + last
        dg = self.joined(dg)
        return Gradients(
            self._by_key_head(dq).to(inputs.q.dtype),
            self._by_key_head(dk).to(inputs.k.dtype),
            self.joined(dv).to(inputs.v.dtype),
            (dg.squeeze(-1) if inputs.g.ndim == 3 else dg).to(inputs.g.dtype),
            None
            if dbeta is None or inputs.beta is None
            else self.joined(dbeta).squeeze(-1).to(inputs.beta.dtype),
            initial,
        )

    def _by_key_head(self, grad: Tensor) -> Tensor:
        """Return the gradient of queries or keys: summed over the heads that read them."""
        return self.joined(grad.unflatten(1, (-1, self.repeats)).sum(2))
