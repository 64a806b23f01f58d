"""Convolutions and recurrences of parts of rows, in which states are passed from segment to segment.

A cp rank has segments of consecutive positions of each row (`parts`). What a segment does to a state is
S ↦ M S + N (`recurrence.Effect`), whatever the state before it is; a document that starts in it makes M zero.

    convolution  forward   all-gather of the last K − 1 inputs of every segment
                 backward  all-gather of the gradients of what was read of them
    recurrence   forward   each segment's (M, N); all-gather of these; the states before the segments, in the
                           order of positions; the outputs of own segments, from the states before them
                 backward  each segment's gradient R of the state before it, by its own outputs; all-gather of
                           these; dS before = R + Mᵀ dS after, in the reverse order; the gradients of own
                           segments

Messages grow with the number of segments, not with tokens. They are in at least fp32: 16 bits would lose
digits with each segment.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from typing import NamedTuple

import torch
from megalite_kernels import causal_conv, recurrence
from megalite_kernels.causal_conv import Halo
from megalite_kernels.recurrence import Effect, Tokens
from torch import Tensor

from megalite.mesh.mesh import MeshAxis
from megalite.parallel.collectives import all_gather
from megalite.parallel.context.parts import PositionSegment, SequencePart
from megalite.parallel.context.whole_rows import (
    ConvInputGradients,
    ConvInputs,
    Kept,
    RowsOfTokens,
    TokenGradients,
)


class SegmentPlace(NamedTuple):
    """A segment and its place in a tensor that all ranks have gathered: ranks, and the segments of each."""

    segment: PositionSegment
    place: int


def places(part: SequencePart) -> tuple[list[SegmentPlace], int]:
    """Return the segments of all ranks in the order of positions, and the places that each rank has."""
    most = max(map(len, part.segments))
    every = [
        SegmentPlace(segment, rank * most + number)
        for rank, segments in enumerate(part.segments)
        for number, segment in enumerate(segments)
    ]
    return sorted(every), most


class Convolutions:
    """Convolutions of parts of rows: `AcrossRows` without recurrences."""

    def __init__(self, cp: MeshAxis):
        self.cp = cp

    def halos(self, x: Tensor, width: int, rows: RowsOfTokens) -> Tensor:
        """Return the K − 1 tokens before each of this rank's segments, [segments, K − 1, batch, channels]."""
        part, taken = part_of(rows), width - 1
        ordered, most = places(part)
        ends = x.new_zeros(most, taken, *x.shape[1:])
        for end, own in zip(ends, _pieces(x, part), strict=False):
            last = own[-taken:] if taken else own[:0]
            end[taken - len(last) :] = last
        gathered = all_gather(ends, self.cp).wait()  # [ranks · most, K − 1, batch, channels]
        halos = x.new_zeros(len(part.segments[part.rank]), taken, *x.shape[1:])
        for number, (_, place) in enumerate(ordered):
            if place // most == part.rank:
                for slot, there, here in _reads(ordered, number, taken):
                    halos[place % most, here] = gathered[slot.place, there]
        return halos

    def convolve(self, inputs: ConvInputs, rows: RowsOfTokens) -> Tensor:
        part = part_of(rows)
        outputs = [
            causal_conv.forward(x, inputs.weight, inputs.bias, starts=starts, halo=halo, silu=inputs.silu)
            for x, starts, halo in self._each_segment(inputs, rows, part)
        ]
        return torch.cat(outputs)

    def convolve_backward(self, dout: Tensor, inputs: ConvInputs, rows: RowsOfTokens) -> ConvInputGradients:
        part, x, taken = part_of(rows), inputs.x, inputs.weight.shape[1] - 1
        ordered, most = places(part)
        gradients = [
            causal_conv.backward(
                grad, piece, inputs.weight, inputs.bias, starts=starts, halo=halo, silu=inputs.silu
            )
            for grad, (piece, starts, halo) in zip(
                _pieces(dout, part), self._each_segment(inputs, rows, part), strict=True
            )
        ]
        dhalos = x.new_zeros(most, taken, *x.shape[1:])
        for dhalo, each in zip(dhalos, gradients, strict=False):
            dhalo.copy_(each.halo)
        gathered = all_gather(dhalos, self.cp).wait()
        dx = torch.cat([each.x for each in gradients])
        # what later segments have read of this rank's: the last positions of its segments
        own = dict(zip(part.segments[part.rank], _pieces(dx, part), strict=True))
        for number, reader in enumerate(ordered):
            for slot, there, here in _reads(ordered, number, taken):
                if slot.segment in own:
                    own[slot.segment][len(own[slot.segment]) - taken + there] += gathered[reader.place, here]
        biases = [each.bias for each in gradients if each.bias is not None]
        dweight = reduce(torch.add, [each.weight for each in gradients])
        return ConvInputGradients(dx, dweight, reduce(torch.add, biases) if biases else None)

    def _each_segment(
        self, inputs: ConvInputs, rows: RowsOfTokens, part: SequencePart
    ) -> Iterator[tuple[Tensor, Tensor | None, Halo]]:
        """Yield the input of each of this rank's segments, where its documents start, and its halo."""
        assert inputs.halos is not None
        halos = self._halos(inputs.halos, part, inputs.weight.shape[1] - 1)
        yield from zip(_pieces(inputs.x, part), _starts(rows, part), halos, strict=True)

    def _halos(self, halos: Tensor, part: SequencePart, taken: int) -> Iterator[Halo]:
        """Yield the halo of each of this rank's segments, with the documents of its tokens."""
        whole = part.document_start
        for halo, segment in zip(halos, part.segments[part.rank], strict=True):
            starts = None
            if whole is not None:
                # before a row there are zeros, in which document is indifferent
                missing = max(taken - segment.start, 0)
                before = whole[segment.start - taken + missing : segment.start]
                starts = torch.cat((whole[:1].expand(missing, -1), before)).to(halo.device)
            yield Halo(halo, starts)


class PassedStates(Convolutions):
    """`AcrossRows` of parts of rows, by passing states."""

    def recur(self, tokens: Tokens, rows: RowsOfTokens) -> tuple[Tensor, Kept]:
        return self.recur_to_end(tokens, rows)[:2]

    def recur_to_end(
        self, tokens: Tokens, rows: RowsOfTokens, initial: Tensor | None = None
    ) -> tuple[Tensor, Kept, Tensor]:
        """Return also the states after the last positions of whole rows, [batch, heads, dk, dv].

        Args:
            initial: those before the first positions; None: zero.
        """
        part = part_of(rows)
        own = list(_segments(tokens, rows, part))
        ordered, most = places(part)
        effects = [recurrence.effect(each) for each in own]
        factors, added = (self._gathered(x, most) for x in zip(*effects, strict=True))
        before: dict[int, Tensor] = {}
        state = torch.zeros_like(added[0]) if initial is None else initial
        for slot in ordered:
            before[slot.place] = state
            state = Effect(factors[slot.place], added[slot.place]).on(state)
        states = torch.stack([before[part.rank * most + number] for number in range(len(own))])
        outputs = [recurrence.forward(each, state)[0] for each, state in zip(own, states, strict=True)]
        return torch.cat(outputs), (states, factors), state

    def recur_backward(self, dout: Tensor, tokens: Tokens, rows: RowsOfTokens, kept: Kept) -> TokenGradients:
        states, factors = kept
        assert states is not None and factors is not None
        part = part_of(rows)
        own, grads = list(_segments(tokens, rows, part)), list(_pieces(dout, part))
        ordered, most = places(part)
        local = [recurrence.initial_gradient(grad, each) for grad, each in zip(grads, own, strict=True)]
        gathered = self._gathered(local, most)
        after: dict[int, Tensor] = {}
        dstate = torch.zeros_like(gathered[0])
        for slot in reversed(ordered):
            after[slot.place] = dstate
            dstate = gathered[slot.place] + recurrence.gradient_before(factors[slot.place], dstate)
        gradients = [
            recurrence.backward(grad, each, states[number], after[part.rank * most + number])
            for number, (grad, each) in enumerate(zip(grads, own, strict=True))
        ]
        betas = [each.beta for each in gradients if each.beta is not None]
        q, k, v, g = ([getattr(each, name) for each in gradients] for name in "qkvg")
        beta = torch.cat(betas) if betas else None
        return TokenGradients(torch.cat(q), torch.cat(k), torch.cat(v), torch.cat(g), beta)

    def _gathered(self, own: Sequence[Tensor], most: int) -> Tensor:
        """Return what each segment of each rank has, [ranks · most, …]; zero where a rank has fewer."""
        stacked = torch.stack(list(own))
        if len(own) < most:
            stacked = torch.cat((stacked, stacked.new_zeros(most - len(own), *stacked.shape[1:])))
        return all_gather(stacked, self.cp).wait()


def part_of(rows: RowsOfTokens) -> SequencePart:
    assert rows.part is not None, "rows are split over cp"
    return rows.part


def _pieces(x: Tensor, part: SequencePart) -> Sequence[Tensor]:
    """Return this rank's segments of [seq/cp, …]: views."""
    return x.split([segment.length for segment in part.segments[part.rank]])


def _starts(rows: RowsOfTokens, part: SequencePart) -> Sequence[Tensor | None]:
    """Return where the documents of each segment's tokens start, from the start of the row."""
    if rows.document_start is None:
        return [None] * len(part.segments[part.rank])
    return _pieces(rows.document_start, part)


def _segments(tokens: Tokens, rows: RowsOfTokens, part: SequencePart) -> Iterator[Tokens]:
    """Yield the tokens of each of this rank's segments."""
    inputs = [[None] * len(part.segments[part.rank]) if x is None else _pieces(x, part) for x in tokens[:5]]
    places = zip(part.segments[part.rank], _starts(rows, part), strict=True)
    for (segment, starts), (q, k, v, g, beta) in zip(places, zip(*inputs, strict=True), strict=True):
        assert q is not None and k is not None and v is not None and g is not None
        yield Tokens(q, k, v, g, beta, None if starts is None else starts - segment.start)


def _reads(
    ordered: Sequence[SegmentPlace], number: int, taken: int
) -> Iterator[tuple[SegmentPlace, int, int]]:
    """Yield where the `taken` tokens before segment `number` are: a segment, the place among its last
    `taken`, and the place among those before."""
    start = ordered[number].segment.start
    while number and ordered[number].segment.start > start - taken:
        number -= 1
        slot = ordered[number]
        for position in range(max(slot.segment.start, start - taken), slot.segment.stop):
            yield slot, position - slot.segment.stop + taken, position - start + taken
