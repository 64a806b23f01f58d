"""Convolutions and recurrences of blocks with a state, where a rank has whole rows. No communication.

Under context parallelism the same methods exchange what crosses from one part of a row to another.
"""

from __future__ import annotations

from typing import Protocol

from megalite_kernels import causal_conv, recurrence
from megalite_kernels.causal_conv import ConvGradients
from megalite_kernels.recurrence import Gradients, Tokens
from torch import Tensor

from megalite.parallel.context.parts import SequencePart


class RowsOfTokens(Protocol):
    """What a microbatch says about its rows (`model.forward_state.ForwardState`).

    Attributes:
        document_start: [seq, batch], as in `Microbatch`.
        part: this rank's part of the rows; None: they are whole.
    """

    @property
    def document_start(self) -> Tensor | None: ...
    @property
    def part(self) -> SequencePart | None: ...


Kept = tuple[Tensor | None, ...]


class AcrossRows(Protocol):
    """Convolutions and recurrences along the positions of rows, with their backward."""

    def convolve(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, rows: RowsOfTokens, silu: bool = True
    ) -> Tensor:
        """Return `causal_conv.forward` of whole rows: [seq, batch, channels] -> the same shape."""

    def convolve_backward(
        self,
        dout: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rows: RowsOfTokens,
        silu: bool = True,
    ) -> ConvGradients:
        """Return its gradients, those of the weight and the bias from this rank's tokens."""

    def recur(self, tokens: Tokens, rows: RowsOfTokens) -> tuple[Tensor, Kept]:
        """Return the outputs of `recurrence.forward` of whole rows, and what the backward needs besides."""

    def recur_backward(self, dout: Tensor, tokens: Tokens, rows: RowsOfTokens, kept: Kept) -> Gradients:
        """Return the gradients of this rank's tokens."""


class WholeRows:
    """`AcrossRows` where this rank has whole rows."""

    def convolve(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, rows: RowsOfTokens, silu: bool = True
    ) -> Tensor:
        return causal_conv.forward(x, weight, bias, starts=rows.document_start, silu=silu)

    def convolve_backward(
        self,
        dout: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rows: RowsOfTokens,
        silu: bool = True,
    ) -> ConvGradients:
        return causal_conv.backward(dout, x, weight, bias, starts=rows.document_start, silu=silu)

    def recur(self, tokens: Tokens, rows: RowsOfTokens) -> tuple[Tensor, Kept]:
        out, _ = recurrence.forward(tokens._replace(starts=rows.document_start))
        return out, ()

    def recur_backward(self, dout: Tensor, tokens: Tokens, rows: RowsOfTokens, kept: Kept) -> Gradients:
        return recurrence.backward(dout, tokens._replace(starts=rows.document_start))
