"""Convolutions and recurrences along rows, where a rank has whole rows. No communication.

`passed_states` and `exchanged_heads` are the same where it has a part of each row.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from megalite_kernels import causal_conv, recurrence
from megalite_kernels.recurrence import Tokens
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


class ConvInputs(NamedTuple):
    """The arguments of `causal_conv.forward`, of this rank's positions.

    Attributes:
        x: [seq, batch, channels].
        halos: what `AcrossRows.halos` returns for x.
    """

    x: Tensor
    halos: Tensor | None
    weight: Tensor
    bias: Tensor | None = None
    silu: bool = True


class ConvInputGradients(NamedTuple):
    """The gradients of `ConvInputs`: x, and the weight and the bias in at least fp32."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None


class TokenGradients(NamedTuple):
    """The gradients of `Tokens`, in their shapes and types."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor | None


Kept = tuple[Tensor | None, ...]


class AcrossRows(Protocol):
    """Convolutions and recurrences along the positions of rows, with their backward.

    Tensors are [seq/cp, batch, …], this rank's positions. All cp ranks call the methods in the same order.
    """

    def halos(self, x: Tensor, width: int, rows: RowsOfTokens) -> Tensor | None:
        """Return the tokens before this rank's positions that a convolution reads; None: there are none.

        Args:
            x: the input of the convolution, [seq, batch, channels].
            width: the number of weights of a channel.
        """

    def convolve(self, inputs: ConvInputs, rows: RowsOfTokens) -> Tensor:
        """Return the outputs of `causal_conv.forward` of whole rows."""

    def convolve_backward(self, dout: Tensor, inputs: ConvInputs, rows: RowsOfTokens) -> ConvInputGradients:
        """Return its gradients: of x by all outputs, of the weight and the bias by this rank's outputs."""

    def recur(self, tokens: Tokens, rows: RowsOfTokens) -> tuple[Tensor, Kept]:
        """Return the outputs of `recurrence.forward` of whole rows, and what the backward needs besides."""

    def recur_backward(self, dout: Tensor, tokens: Tokens, rows: RowsOfTokens, kept: Kept) -> TokenGradients:
        """Return the gradients of this rank's tokens."""


class WholeRows:
    """`AcrossRows` where this rank has whole rows."""

    def halos(self, x: Tensor, width: int, rows: RowsOfTokens) -> None:
        return None

    def convolve(self, inputs: ConvInputs, rows: RowsOfTokens) -> Tensor:
        x, _, weight, bias, silu = inputs
        return causal_conv.forward(x, weight, bias, starts=rows.document_start, silu=silu)

    def convolve_backward(self, dout: Tensor, inputs: ConvInputs, rows: RowsOfTokens) -> ConvInputGradients:
        x, _, weight, bias, silu = inputs
        gradients = causal_conv.backward(dout, x, weight, bias, starts=rows.document_start, silu=silu)
        return ConvInputGradients(gradients.x, gradients.weight, gradients.bias)

    def recur(self, tokens: Tokens, rows: RowsOfTokens) -> tuple[Tensor, Kept]:
        return self.recur_to_end(tokens, rows)[:2]

    def recur_to_end(
        self, tokens: Tokens, rows: RowsOfTokens, initial: Tensor | None = None
    ) -> tuple[Tensor, Kept, Tensor]:
        """Return also the states after the last positions, [batch, heads, dk, dv].

        Args:
            initial: those before the first ones; None: zero.
        """
        out, final = recurrence.forward(tokens._replace(starts=rows.document_start), initial)
        return out, (), final

    def recur_backward(self, dout: Tensor, tokens: Tokens, rows: RowsOfTokens, kept: Kept) -> TokenGradients:
        gradients = recurrence.backward(dout, tokens._replace(starts=rows.document_start))
        return TokenGradients(*gradients[:5])
