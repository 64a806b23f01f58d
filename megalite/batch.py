"""One microbatch: the input of a forward pass on one data-parallel rank, and the output of a stage for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

IGNORE_INDEX = -100  # a target without loss (torch's and Hugging Face's convention)


class Boundaries(NamedTuple):
    """The documents of a microbatch, as attention kernels for documents of any length read them.

    Attributes:
        offsets: [documents + 1] int32 ("cu_seqlens"): where each document starts in the tokens of all rows, row after row; last, how many
            tokens there are.
        longest: the length of the longest document: known to the host, which starts the kernels by it.
    """

    offsets: Tensor
    longest: int


@dataclass
class Microbatch:
    """The rows of one forward pass.

    Attributes:
        tokens: [seq, batch] int64.
        targets: [seq, batch] int64, IGNORE_INDEX where the loss is not counted.
        positions: [seq, 1] int64, index of each token in its row; [seq, batch] if rows differ.
        samples: [batch] int64, global sample index of each row: the key of dropout.
        document_start: [seq, batch] int64, index in the row of the first token of each token's document; None if a row is one document.
        starts: first positions of the runs of consecutive positions, all of one length, that `positions` consists of; empty if rows
            differ. It gives the host the positions without reading the device: rotary tables are cached by it.
        boundaries: the same as `document_start`, of whole rows only; may be None where that is not.
    """

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    samples: Tensor
    document_start: Tensor | None = None
    starts: tuple[int, ...] = ()
    boundaries: Boundaries | None = None

    @staticmethod
    def of(
        tokens: Tensor,
        targets: Tensor,
        samples: Tensor,
        document_start: Tensor | None = None,
        starts: Sequence[int] = (0,),
        boundaries: Boundaries | None = None,
    ) -> Microbatch:
        """A microbatch in which every row consists of the runs of positions that begin at `starts`; by default of one run."""
        length = len(tokens) // len(starts)
        runs = [torch.arange(start, start + length, device=tokens.device) for start in starts]
        return Microbatch(tokens, targets, torch.cat(runs).unsqueeze(1), samples, document_start, tuple(starts), boundaries)

    def to(self, device: torch.device) -> Microbatch:
        """The microbatch on a device. The copy is asynchronous, from pinned memory: it does not wait for the device's work."""
        if device.type == "cpu":
            return self

        def moved(x: Tensor) -> Tensor:
            return x.pin_memory().to(device, non_blocking=True)

        start = None if self.document_start is None else moved(self.document_start)
        ends = None if self.boundaries is None else Boundaries(moved(self.boundaries.offsets), self.boundaries.longest)
        return Microbatch(moved(self.tokens), moved(self.targets), moved(self.positions), moved(self.samples), start, self.starts, ends)


class StageOutput(NamedTuple):
    """The output of a stage for one microbatch.

    Attributes:
        value: activations for the next stage, [seq (/tp), batch, hidden]; from the last stage the loss, a scalar.
        statistics: scalars by name, which are summed over microbatches, stages and ranks.
    """

    value: Tensor
    statistics: Mapping[str, Tensor] = {}
