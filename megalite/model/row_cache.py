"""The cache of generation: what blocks keep of the tokens that a model has read, so that the next token of a
row costs one position.

Rows may have different lengths. A pass reads either the same positions of all rows, which are padded after
their ends, where no token looks (prompts, whole or in parts one after another), or one token of each row. A
block keeps its own data in a store; this module knows which rows and positions a pass has. Each tp rank keeps
what it computes, each stage that of its layers. Each cp rank keeps whole rows: of a prompt it computes its
part, and gathers what it keeps over cp. Nothing else here communicates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megalite.mesh.mesh import MeshAxis
from megalite.model.block_module import BlockModule
from megalite.model.forward_state import ForwardState
from megalite.parallel.collectives import all_reduce
from megalite.parallel.context.gathered import own_part, whole
from megalite.parallel.context.parts import SequencePart

ROUND_UP = 64


def padded(length: int) -> int:
    """Round a length up to a multiple of ROUND_UP.

    Rotary tables and matrix-product kernels are reused if there are few shapes.
    """
    return -(-length // ROUND_UP) * ROUND_UP


class BlockStore(Protocol):
    """What one block keeps of a batch of rows."""

    @property
    def nbytes(self) -> int: ...


class CachedBlock(BlockModule):
    """A block in generation: reads and extends its store of the `RowCache` in a `CachedState`."""

    def new_store(self, rows: int, capacity: int, dtype: torch.dtype, device: torch.device) -> BlockStore:
        """Allocate a store for a number of rows.

        Args:
            capacity: maximum number of positions of a row.
        """
        raise NotImplementedError


class CacheSlots(NamedTuple):
    """The slots of a store that keep the tokens of one pass, and the slots that they look at.

    Position p of a row is in slot p mod slots: a store with as many slots as a window overwrites the position
    that has just left it. The next token of a row looks at the first min(length, slots) slots.
    """

    rows: Tensor  # [batch, 1]
    slot: Tensor  # [batch, seq]; the slot after the last one for padding and what the window has left
    # [batch, 1, 1, used slots]: slots not written yet; None for prompts, see `with_past`
    empty: Tensor | None


def with_past(stored: Tensor, own: Tensor, start: int) -> Tensor:
    """Return what a store has of the positions before a part of prompts, followed by the part's own.

    Call it before the own ones are stored, which may overwrite what the first of them still see.

    Args:
        stored: [rows, heads, slots + 1, dim], position p in slot p mod slots.
        own: [seq, rows, heads, dim], from position `start` on.

    Returns:
        [min(start, slots) + seq, rows, heads, dim], in the order of positions.
    """
    if start == 0:
        return own
    slots = stored.shape[2] - 1
    oldest = start % slots if start > slots else 0
    before = stored[:, :, oldest : min(start, slots)], stored[:, :, :oldest]
    return torch.cat([*(x.permute(2, 0, 1, 3) for x in before), own])


class RowCache:
    """The stores of one stage's blocks for a batch of rows; their memory is allocated once.

    Args:
        rows: number of rows.
        capacity: maximum number of positions of a row.

    Attributes:
        stores: that of each block.
        ends: [rows, 1] number of tokens of each row, with those of the current pass.
        added: [rows, 1] how many of these the current pass reads.
        start: the first position of a pass over prompts.
        reads_prompts: whether the current pass reads prompts or a part of them, not one token of each row.
    """

    def __init__(
        self,
        blocks: Sequence[CachedBlock],
        rows: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        cp: MeshAxis,
    ):
        self.device, self.cp = device, cp
        self.stores: dict[CachedBlock, Any] = {
            block: block.new_store(rows, capacity, dtype, device) for block in blocks
        }
        self._column_of_rows = self._column(range(rows))
        self._slots: dict[int, CacheSlots] = {}  # by number of slots, for the current pass
        self._lengths = [0] * rows  # what `ends` has

    @property
    def nbytes(self) -> int:
        return sum(store.nbytes for store in self.stores.values())

    def begin_prompts(self, lengths: list[int], padded: int, start: int = 0) -> None:
        """Prepare a pass that reads a position and the following ones of all rows, `padded` in number.

        At start 0 the pass clears the cache. Later parts of prompts continue where the pass before has ended.

        Args:
            lengths: the number of tokens of each row up to the end of the pass; below `start` for a row that
                has ended before.
        """
        self.reads_prompts, self.start, self._padded = True, start, padded
        self.ends = self._column(lengths)
        self.added = (self.ends - start).clamp(min=0)
        self._padding = torch.arange(padded, device=self.device).unsqueeze(1) >= self.added.t()
        self._slots, self._lengths = {}, list(lengths)

    @property
    def continues(self) -> bool:
        """Whether the current pass continues rows, of which blocks have kept something."""
        return not self.reads_prompts or self.start > 0

    def begin_tokens(self, positions: list[int]) -> None:
        """Prepare a pass that reads one token of each row at these positions: the next ones.

        Raises:
            ValueError: a position is not the one after what the cache has of its row. What blocks keep may
                not be cut: a state is that of all tokens, and a window has overwritten earlier ones.
        """
        if positions != self._lengths:
            raise ValueError(
                f"Expected the next position of each row, {self._lengths}, but got {positions}. Read the "
                "rows from their start."
            )
        self.reads_prompts, self._longest = False, padded(max(positions) + 1)
        self._lengths = [position + 1 for position in positions]
        self.ends, self._slots = self._column(self._lengths), {}
        self.added = torch.ones_like(self.ends)

    def slots(self, count: int) -> CacheSlots:
        """Return the slots of the current pass in stores with `count` slots."""
        if count not in self._slots:
            if self.reads_prompts:
                position = self.start + torch.arange(self._padded, device=self.device)
                last = (position < self.ends) & (position >= self.ends - count)  # [rows, padded]
                slot, empty = torch.where(last, position % count, count), None
            else:
                used = torch.arange(min(self._longest, count), device=self.device)
                slot, empty = (self.ends - 1) % count, (used >= self.ends)[:, None, None]
            self._slots[count] = CacheSlots(self._column_of_rows, slot, empty)
        return self._slots[count]

    def padding(self, part: SequencePart | None) -> Tensor:
        """Return which tokens of prompts are after their row's end, [padded, rows] or this cp rank's part."""
        return self._padding if part is None else own_part(self._padding, part)

    def last_of(self, x: Tensor, before: Tensor, part: SequencePart | None) -> Tensor:
        """Return the last tokens of each row up to the end of the current pass, [count, rows, channels].

        Args:
            x: those of the pass, [seq, rows, channels], or this cp rank's part of prompts.
            before: the last ones before it, [count, rows, channels]; zero before a row's start.
        """
        index = self.added.t() + torch.arange(len(before), device=self.device).unsqueeze(1)
        if part is None:
            return self._at(torch.cat((before, x)), index)
        own, index = part.segments[part.rank], index - len(before)  # below 0: before the pass
        pieces = zip(own, x.split([segment.length for segment in own]), strict=True)
        # one rank has each token
        last = sum((self._at(piece, index - segment.start) for segment, piece in pieces), x.new_zeros(()))
        return all_reduce(last, self.cp).wait() + self._at(before, index + len(before))

    def _at(self, x: Tensor, index: Tensor) -> Tensor:
        """Return x at [count, rows] positions; zero where there is none."""
        there = (index >= 0) & (index < len(x))
        return x[index.clamp(0, len(x) - 1), self._column_of_rows.t()].masked_fill(~there.unsqueeze(-1), 0)

    def whole(self, x: Tensor, part: SequencePart | None) -> Tensor:
        """All-gather whole rows [seq, …] from this cp rank's part. Without parts x is whole."""
        return x if part is None else whole(x, self.cp, part)

    def _column(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(list(numbers), device=self.device).unsqueeze(1)


@dataclass(kw_only=True)
class CachedState(ForwardState):
    """The state of a forward pass that reads and extends a cache."""

    cache: RowCache
