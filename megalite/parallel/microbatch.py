"""Microbatch: the input of a forward pass on one data-parallel rank, and the output of a stage for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from megalite.parallel.context.parts import PositionSegment

if TYPE_CHECKING:
    from megalite.parallel.context.parts import SequencePart
    from megalite.parallel.sequences import Sequences
    from megalite.parallel.top_words import TopWords

IGNORE_INDEX = -100  # target without loss (convention of torch and Hugging Face)


def positions_of(segments: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    """Return the positions of segments (start, length): [seq, 1] int64."""
    return torch.cat(
        [torch.arange(start, start + length, device=device) for start, length in segments]
    ).unsqueeze(1)


class Boundaries(NamedTuple):
    """Boundaries of the documents of a microbatch, in the format of varlen attention kernels.

    Attributes:
        offsets: [documents + 1] int32 ("cu_seqlens"): the start of each document in the tokens of all rows,
            row after row, followed by the number of tokens.
        longest: length of the longest document ("max_seqlen"), on the host, which launches the kernels with
            it.
    """

    offsets: Tensor
    longest: int


class MtpTargets(NamedTuple):
    """Inputs and targets of the multi-token prediction (MTP) modules (`model.mtp.targets`).

    The k-th module reads index k − 1.

    Attributes:
        tokens: [modules, seq, batch] int64, the token k positions after each token.
        targets: [modules, seq, batch] int64, the target k positions after each target; IGNORE_INDEX where the
            loss is not counted.
        weights: [modules, seq, batch] float32, the weights of these targets; None: all are 1.
        factors: for each module, the number of tokens of the global batch whose loss counts, divided by the
            number of those that count for the module; empty until known.
    """

    tokens: Tensor
    targets: Tensor
    weights: Tensor | None = None
    factors: tuple[float, ...] = ()


class Queries(NamedTuple):
    """The tokens over which a loss is a mean that has no targets (`model.queries`).

    Attributes:
        counted: [seq, batch] bool: not the padding of rows.
        factor: the number of tokens of the global batch whose loss counts, divided by the number of these.
    """

    counted: Tensor
    factor: float = 1.0


@dataclass
class Microbatch:
    """The rows of one forward pass.

    Attributes:
        tokens: [seq, batch] int64.
        targets: [seq, batch] int64, IGNORE_INDEX where the loss is not counted.
        positions: [seq, 1] int64, index of each token in its row; [seq, batch] if rows differ.
        samples: [batch] int64, global sample index of each row: the key of dropout.
        document_start: [seq, batch] int64, index in the row of the first token of each token's document; None
            if a row is one document.
        segments: the segments of consecutive positions in `positions`; empty if rows differ. They give the
            host the positions without reading the device: rotary tables are cached by them.
        boundaries: the same as `document_start`, of whole rows only; may be None where that is not.
        part: the rank's part of the rows under context parallelism; None: these are whole rows.
        mtp_targets: inputs and targets of the MTP modules, if the model has any.
        queries: the tokens that are no padding, if a loss needs them.
        weights: [seq, batch] float32, the weight of the loss of each target, 0 where it is IGNORE_INDEX;
            None: the weight of every target is 1.
        sequences: the documents of preferences. Their targets have prompts and completions both.
        mismatched: the same prompts with the completions of other examples, if an objective needs them.
        top: the most probable words of a teacher at each position, [seq, batch, …], if they are stored.
        teacher: the normed output of a teacher's last layer, [seq (/tp), batch, hidden of the teacher], on
            ranks with the head, once it is computed; None without a teacher.
    """

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    samples: Tensor
    document_start: Tensor | None = None
    segments: tuple[PositionSegment, ...] = ()
    boundaries: Boundaries | None = None
    part: SequencePart | None = None
    mtp_targets: MtpTargets | None = None
    queries: Queries | None = None
    weights: Tensor | None = None
    sequences: Sequences | None = None
    mismatched: Microbatch | None = None
    top: TopWords | None = None
    teacher: Tensor | None = None

    @staticmethod
    def of(
        tokens: Tensor,
        targets: Tensor,
        samples: Tensor,
        document_start: Tensor | None = None,
        segments: Sequence[PositionSegment] = (),
        **others: Any,
    ) -> Microbatch:
        """Create a microbatch whose rows have the positions of `segments`; default: 0 to the end of the row.

        Args:
            others: values of the other fields.
        """
        segments = tuple(segments) or (PositionSegment(0, len(tokens)),)
        return Microbatch(
            tokens,
            targets,
            positions_of(segments, tokens.device),
            samples,
            document_start,
            segments,
            **others,
        )

    def to(self, device: torch.device) -> Microbatch:
        """Copy the microbatch to a device, asynchronously from pinned memory: the host does not wait."""
        if device == self.tokens.device:
            return self

        def moved(x: Any) -> Any:
            if isinstance(x, Microbatch):
                return x.to(device)
            if isinstance(x, Tensor):
                return x.pin_memory().to(device, non_blocking=True)
            # boundaries and part, which have tensors in them
            return type(x)(*map(moved, x)) if hasattr(x, "_fields") else x

        return Microbatch(**{name: moved(value) for name, value in vars(self).items()})


class StageOutput(NamedTuple):
    """Output of a stage for one microbatch.

    Attributes:
        value: activations for the next stage, [seq (/tp), batch, hidden], or the loss of the last stage, a
            scalar.
        statistics: scalars by name, which are summed over microbatches, stages and ranks.
    """

    value: Tensor
    statistics: Mapping[str, Tensor] = {}
