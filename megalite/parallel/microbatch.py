"""One microbatch: the input of a forward pass on one data-parallel rank, and the output of a stage for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megalite.parallel.context.parts import SequencePart

Runs = Sequence[tuple[int, int]]
IGNORE_INDEX = -100  # a target without loss (torch's and Hugging Face's convention)


def positions_of(runs: Runs, device: torch.device) -> Tensor:
    """The positions of runs, [seq, 1] int64."""
    return torch.cat(
        [torch.arange(start, start + length, device=device) for start, length in runs]
    ).unsqueeze(1)


class Boundaries(NamedTuple):
    """The documents of a microbatch, as attention kernels for documents of any length read them.

    Attributes:
        offsets: [documents + 1] int32 ("cu_seqlens"): where each document starts in the tokens of all rows,
        row after row; last, how many
            tokens there are.
        longest: the length of the longest document: known to the host, which starts the kernels by it.
    """

    offsets: Tensor
    longest: int


class MtpTargets(NamedTuple):
    """What the modules of multi-token prediction read (`data.mtp_targets`), the k-th module what is at index k − 1.

    Attributes:
        tokens: [modules, seq, batch] int64, the token k positions after each token. targets: the same of the
        targets, IGNORE_INDEX where the loss is not counted. factors: tokens of the global batch whose loss
        counts, divided by those whose loss of the k-th module does; empty until known.
    """

    tokens: Tensor
    targets: Tensor
    factors: tuple[float, ...] = ()


@dataclass
class Microbatch:
    """The rows of one forward pass.

    Attributes:
        tokens: [seq, batch] int64.
        targets: [seq, batch] int64, IGNORE_INDEX where the loss is not counted. positions: [seq, 1] int64,
        index of each token in its row; [seq, batch] if rows differ. samples: [batch] int64, global sample
        index of each row: the key of dropout. document_start: [seq, batch] int64, index in the row of the
        first token of each token's document; None if a row is one document. runs: (first position, length) of
        the runs of consecutive positions that `positions` consists of; empty if rows differ. It gives
            the host the positions without reading the device: rotary tables are cached by it.
        boundaries: the same as `document_start`, of whole rows only; may be None where that is not.
        part: the rank's part of the rows under context parallelism; None: these are whole rows.
        mtp_targets: further tokens and targets, if the model has modules that predict them.
    """

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    samples: Tensor
    document_start: Tensor | None = None
    runs: Runs = ()
    boundaries: Boundaries | None = None
    part: SequencePart | None = None
    mtp_targets: MtpTargets | None = None

    @staticmethod
    def of(
        tokens: Tensor,
        targets: Tensor,
        samples: Tensor,
        document_start: Tensor | None = None,
        runs: Runs = (),
        **others: Any,
    ) -> Microbatch:
        """A microbatch in which every row consists of these runs of positions; by default of one, from
        position 0 on. others: fields."""
        runs = tuple(runs or [(0, len(tokens))])
        return Microbatch(
            tokens, targets, positions_of(runs, tokens.device), samples, document_start, runs, **others
        )

    def to(self, device: torch.device) -> Microbatch:
        """The microbatch on a device. The copy is asynchronous, from pinned memory: it does not wait for the
        device's work."""
        if device == self.tokens.device:
            return self

        def moved(x: Any) -> Any:
            if isinstance(x, Tensor):
                return x.pin_memory().to(device, non_blocking=True)
            # boundaries and part, which have tensors in them
            return type(x)(*map(moved, x)) if hasattr(x, "_fields") else x

        return Microbatch(**{name: moved(value) for name, value in vars(self).items()})


class StageOutput(NamedTuple):
    """The output of a stage for one microbatch.

    Attributes:
        value: activations for the next stage, [seq (/tp), batch, hidden]; from the last stage the loss, a
        scalar. statistics: scalars by name, which are summed over microbatches, stages and ranks.
    """

    value: Tensor
    statistics: Mapping[str, Tensor] = {}
