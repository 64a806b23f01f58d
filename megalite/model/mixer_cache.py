"""What blocks with a state keep in generation: the end of what their convolution reads, and the state.

Both have a constant size. Of a prompt they are those at each row's own end: padding after it neither enters
the state nor the convolution of the next token. A part of a prompt starts from those at the end of the part
before it. A state is that of all tokens read so far, so a row goes on only after its last one
(`RowCache.begin_tokens`).

Each tp rank has the states of its heads, each cp rank those of whole rows. Communicates as the mixer does,
and over cp the ends of rows.
"""

from __future__ import annotations

from copy import copy
from typing import Any, NamedTuple, cast

import torch
from megalite_kernels import causal_conv, recurrence_step
from megalite_kernels.causal_conv import Halo
from megalite_kernels.recurrence import Tokens
from torch import Tensor

from megalite.model.forward_state import ForwardState
from megalite.model.mixer_block import MixerBlock
from megalite.model.row_cache import CachedBlock, CachedState
from megalite.parallel.context.passed_states import PassedStates
from megalite.parallel.context.whole_rows import ConvInputs, Kept, WholeRows


class MixerStore(NamedTuple):
    """What one block keeps of a batch of rows.

    Attributes:
        tail: [K − 1, rows, channels/tp], the last inputs of the convolution; zero before a row's start.
        state: [rows, heads/tp, dk, dv] in at least fp32; None: the block only convolves.
    """

    tail: Tensor
    state: Tensor | None

    @property
    def nbytes(self) -> int:
        return self.tail.nbytes + (0 if self.state is None else self.state.nbytes)


class CachedRows:
    """The forward of `AcrossRows` for a `CachedState`: reads prompts as training does and keeps their ends,
    and goes on from there by the next part of each row, or by one token of it."""

    def __init__(self, block: CachedMixer, across: WholeRows | PassedStates):
        self.block, self.across = block, across

    def halos(self, x: Tensor, width: int, rows: CachedState) -> Tensor | None:
        cache, tail = rows.cache, rows.cache.stores[self.block].tail
        before = tail.clone() if cache.continues else torch.zeros_like(tail)
        tail.copy_(cache.last_of(x, before, rows.part))
        if rows.part is None:
            return before if cache.continues else None
        halos = self.across.halos(x, width, rows)
        assert halos is not None
        for halo, segment in zip(halos, rows.part.segments[rows.part.rank], strict=True):
            earlier = before[segment.start :]  # what the segment reads of it comes first
            halo[: len(earlier)] = earlier
        return halos

    def convolve(self, inputs: ConvInputs, rows: CachedState) -> Tensor:
        x, halos, weight, bias, silu = inputs
        if halos is None or rows.part is not None:
            return self.across.convolve(inputs, rows)
        return causal_conv.forward(x, weight, bias, halo=Halo(halos), silu=silu)

    def recur(self, tokens: Tokens, rows: CachedState) -> tuple[Tensor, Kept]:
        cache, state = rows.cache, rows.cache.stores[self.block].state
        if not cache.reads_prompts:
            return recurrence_step.advance(state, tokens), ()
        without = _without_padding(tokens, cache.padding(rows.part))
        initial = state if cache.continues else None
        out, kept, final = self.across.recur_to_end(without, rows, initial)
        state.copy_(final)
        return out, kept


def _without_padding(tokens: Tokens, padding: Tensor) -> Tokens:
    """Return tokens of which the padding, [seq, batch], does not change the state."""
    by_head = padding.unsqueeze(-1)
    k = tokens.k.masked_fill(by_head.unsqueeze(-1), 0)
    g = tokens.g.masked_fill(by_head if tokens.g.ndim == 3 else by_head.unsqueeze(-1), 0)
    return tokens._replace(k=k, g=g)


class CachedMixer(CachedBlock):
    """A block with a state in generation.

    Args:
        convolution: channels on this tp rank, and K.
        state: heads on this tp rank, dk and dv; None: the block only convolves.
    """

    def __init__(
        self, block: MixerBlock, convolution: tuple[int, int], state: tuple[int, int, int] | None = None
    ):
        super().__init__()
        self.block, self.convolution, self.state = block, convolution, state
        across = block.mixer.across
        assert isinstance(across, WholeRows | PassedStates)
        self.mixer = cast(Any, copy(block.mixer))  # which has no backward
        self.mixer.across = CachedRows(self, across)

    def new_store(self, rows: int, capacity: int, dtype: torch.dtype, device: torch.device) -> MixerStore:
        channels, taps = self.convolution
        tail = torch.zeros(taps - 1, rows, channels, dtype=dtype, device=device)
        if self.state is None:
            return MixerStore(tail, None)
        at_least_fp32 = torch.promote_types(dtype, torch.float32)
        return MixerStore(tail, torch.zeros(rows, *self.state, dtype=at_least_fp32, device=device))

    def forward(self, x: Tensor, state: ForwardState) -> Tensor:
        if not isinstance(state, CachedState):
            return self.block(x, state)
        y = self.mixer.compute(self.block.into(x), [], state)
        out: Tensor = self.block.out(y)
        return out
