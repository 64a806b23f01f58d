"""One microbatch: what a forward pass of one data-parallel rank consumes, and what a stage returns for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

IGNORE_INDEX = -100  # a target that costs nothing (torch's and Hugging Face's convention)


@dataclass
class Microbatch:
    """Attributes:

    tokens: [seq, batch] int64.
    targets: [seq, batch] int64, IGNORE_INDEX where the loss is not counted.
    positions: [seq, 1] int64, index of each token in its row; [seq, batch] where rows differ.
    samples: [batch] int64, global sample index of each row: the key of dropout.
    document_start: [seq, batch] int64, index in the row of the first token of each token's document; None where a row is one document.
    starts: where the runs of consecutive positions begin that `positions` consists of, all of one length; empty where rows differ. The
        host knows the positions by it: tables are cached under it, without reading the device.
    """

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    samples: Tensor
    document_start: Tensor | None = None
    starts: tuple[int, ...] = ()

    @staticmethod
    def of(
        tokens: Tensor, targets: Tensor, samples: Tensor, document_start: Tensor | None = None, starts: Sequence[int] = (0,)
    ) -> Microbatch:
        """A microbatch whose rows all consist of the runs of positions that begin at `starts`; by default whole rows."""
        length = len(tokens) // len(starts)
        runs = [torch.arange(start, start + length, device=tokens.device) for start in starts]
        return Microbatch(tokens, targets, torch.cat(runs).unsqueeze(1), samples, document_start, tuple(starts))

    def to(self, device: torch.device) -> Microbatch:
        """The same on a device; the copy does not wait for the device's work."""
        if device.type == "cpu":
            return self

        def moved(x: Tensor) -> Tensor:
            return x.pin_memory().to(device, non_blocking=True)

        start = None if self.document_start is None else moved(self.document_start)
        return Microbatch(moved(self.tokens), moved(self.targets), moved(self.positions), moved(self.samples), start, self.starts)


class StageOutput(NamedTuple):
    """What a stage returns for one microbatch.

    value: activations for the next stage, [seq (/tp), batch, hidden]; of the last stage the loss, a scalar.
    statistics: what the stage has measured, by name: scalars that are summed over microbatches, stages and ranks.
    """

    value: Tensor
    statistics: Mapping[str, Tensor] = {}
