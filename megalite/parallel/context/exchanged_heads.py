"""Recurrences of whole rows of some heads, for which ranks exchange their parts of all heads (Ulysses).

    forward    all-to-all of queries, keys, values, decays and strengths [seq/cp, batch, heads] ->
               [seq, batch, heads/cp]; of the output, back
    backward   all-to-all of the output's gradient; of the gradients of the inputs, back

Key heads of which there are fewer than ranks are sent to several ranks, and their gradients are summed on the
way back. The inputs are exchanged again in backward, so that they are not kept. Convolutions exchange halos,
as `passed_states`.
"""

from __future__ import annotations

from megalite_kernels import recurrence
from megalite_kernels.recurrence import Tokens
from torch import Tensor

from megalite.parallel.context.gathered import by_rank, in_order
from megalite.parallel.context.passed_states import Convolutions, part_of
from megalite.parallel.context.ulysses import summed, to_heads, to_positions
from megalite.parallel.context.whole_rows import Kept, RowsOfTokens, TokenGradients


class ExchangedHeads(Convolutions):
    """`AcrossRows` of parts of rows, by exchanging heads."""

    def recur(self, tokens: Tokens, rows: RowsOfTokens) -> tuple[Tensor, Kept]:
        out, _ = recurrence.forward(self._own_heads(tokens, rows))
        return self._to_positions(out, rows), ()

    def recur_backward(self, dout: Tensor, tokens: Tokens, rows: RowsOfTokens, kept: Kept) -> TokenGradients:
        own = self._own_heads(tokens, rows)
        (dout,) = to_heads([dout], self.cp)
        gradients = recurrence.backward(in_order(dout, part_of(rows).segments), own)
        q, k, v = (self._to_positions(x, rows) for x in (gradients.q, gradients.k, gradients.v))
        heads = tokens.k.shape[2]
        g = self._to_positions(gradients.g if own.g.ndim == 4 else gradients.g.unsqueeze(-1), rows)
        beta = None
        if gradients.beta is not None:
            beta = self._to_positions(gradients.beta.unsqueeze(-1), rows).squeeze(-1)
        dg = g if own.g.ndim == 4 else g.squeeze(-1)
        return TokenGradients(summed(q, heads), summed(k, heads), v, dg, beta)

    def _own_heads(self, tokens: Tokens, rows: RowsOfTokens) -> Tokens:
        """Return whole rows of this rank's heads."""
        part = part_of(rows)
        repeats = max(self.cp.size // tokens.k.shape[2], 1)
        q, k = (x.repeat_interleave(repeats, 2) for x in (tokens.q, tokens.k))
        q, k, v = (in_order(x, part.segments) for x in to_heads((q, k, tokens.v), self.cp))
        by_channel = tokens.g.ndim == 4
        decays = [tokens.g if by_channel else tokens.g.unsqueeze(-1)]
        decays += [] if tokens.beta is None else [tokens.beta.unsqueeze(-1)]
        starts = None if part.document_start is None else part.document_start.to(v.device)
        g, *beta = (in_order(x, part.segments) for x in to_heads(decays, self.cp))
        return Tokens(
            *(q, k, v, g if by_channel else g.squeeze(-1)),
            beta[0].squeeze(-1) if beta else None,
            starts,
        )

    def _to_positions(self, x: Tensor, rows: RowsOfTokens) -> Tensor:
        (own,) = to_positions([by_rank(x, part_of(rows).segments)], self.cp)
        return own
