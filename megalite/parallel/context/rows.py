"""Cutting of whole rows to the part of one context-parallel rank.

The loader reads rows, shifts targets, and marks documents and masks before they are cut. The token after the
last one of a part is therefore its target, and a rank has the same information about documents as a single
process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from megalite.config.dims import attention_method, part_length
from megalite.config.schema import Config
from megalite.mesh.mesh import MeshAxis
from megalite.parallel.context.balanced import EVERY_KEY, Windows, balanced, between_ranks
from megalite.parallel.context.parts import PARTS, PositionSegments, SequencePart, split
from megalite.parallel.microbatch import IGNORE_INDEX, Boundaries, Microbatch, MtpTargets, Queries
from megalite.parallel.sequences import Sequences
from megalite.parallel.top_words import TopWords


@dataclass(frozen=True)
class Cut:
    """Callable that creates the microbatch of a rank, with the signature of `Microbatch.of`.

    Rows that cannot be divided into equal parts are padded at their ends. Padding has no target, and no token
    before it sees it.

    Attributes:
        parts: the segments of every group of `inner` cp ranks, which together cover each position of a padded
            row once.
        rank: this rank's index among the cp ranks.
        uneven: parallel.context, if documents cause unequal work on its ranks, so that their tiles are
            counted; otherwise None.
        by_documents: whether rows with documents have their own parts (`balanced`).
        windows: sliding windows of the model's layers.
        inner: number of ranks that share a part in consecutive pieces.
    """

    parts: Sequence[PositionSegments]
    rank: int
    uneven: str | None = None
    by_documents: bool = False
    windows: Windows = EVERY_KEY
    inner: int = 1

    @classmethod
    def of(cls, config: Config, cp: MeshAxis, windows: Iterable[int | None]) -> Cut:
        """Return the cut of a configuration; `windows` has one of each layer."""
        context, inner = attention_method(config.parallel.context), config.parallel.context_inner
        parts = PARTS[context](part_length(config) * cp.size, cp.size // inner)
        uneven = None if context == "ulysses" else context
        by_documents, counted = config.parallel.context_parts == "balanced", tuple(Counter(windows).items())
        return cls(parts, cp.rank, uneven, by_documents, counted, inner)

    def __call__(
        self,
        tokens: Tensor,
        targets: Tensor,
        samples: Tensor,
        document_start: Tensor | None = None,
        boundaries: Boundaries | None = None,
        mtp_targets: MtpTargets | None = None,
        queries: Queries | None = None,
        weights: Tensor | None = None,
        **others: Any,
    ) -> Microbatch:
        """Return this rank's part of the rows.

        If rows are padded, `boundaries` is not used, because it would change.

        Args:
            tokens, targets, document_start, weights: [seq, batch] of whole rows.
            others: sequences and top, of whole rows, if microbatches have them.
        """
        sequences: Sequences | None = others.get("sequences")
        top: TopWords | None = others.get("top")
        length, padded = len(tokens), sum(segment.length for segments in self.parts for segment in segments)
        missing = (0, 0, 0, padded - length)
        if document_start is not None:  # padding continues the last document
            document_start = torch.cat([document_start, document_start[-1:].expand(padded - length, -1)])
        part = self._part(length, document_start)
        segments = part.segments[self.rank]

        def own(x: Tensor) -> Tensor:
            return torch.cat([x[segment.start : segment.stop] for segment in segments])

        microbatch = Microbatch.of(
            own(pad(tokens, missing)),
            own(pad(targets, missing, value=IGNORE_INDEX)),
            samples,
            None if document_start is None else own(document_start),
            segments,
            boundaries=boundaries if padded == length else None,
            part=part,
            mtp_targets=mtp_targets
            and mtp_targets._replace(
                tokens=_each(mtp_targets.tokens, missing, 0, own),
                targets=_each(mtp_targets.targets, missing, IGNORE_INDEX, own),
                weights=None if mtp_targets.weights is None else _each(mtp_targets.weights, missing, 0, own),
            ),
            queries=queries and queries._replace(counted=own(pad(queries.counted, missing))),
            weights=None if weights is None else own(pad(weights, missing)),
            sequences=sequences
            and sequences._replace(
                index=own(pad(sequences.index, missing, value=-1)),
                completion=own(pad(sequences.completion, missing)),
            ),
            top=top
            and TopWords(*(own(pad(each, (0, 0, *missing) if each.dim() == 3 else missing)) for each in top)),
        )
        microbatch.positions.clamp_(max=length - 1)  # a table of learned positions may end at this length
        return microbatch

    def _part(self, length: int, document_start: Tensor | None) -> SequencePart:
        """Return the parts of all cp ranks, given document_start [padded row, batch]."""
        if document_start is None or self.uneven is None:
            return SequencePart(split(self.parts, self.inner), self.rank, length, document_start)
        starts = document_start.numpy()
        parts = (
            balanced(starts, len(self.parts), self.windows, self.uneven) if self.by_documents else self.parts
        )
        return SequencePart(
            split(parts, self.inner),
            self.rank,
            length,
            document_start,
            between_ranks(parts, starts, self.windows),
        )


def _each(values: Tensor, missing: tuple[int, ...], padding: int, own: Callable[[Tensor], Tensor]) -> Tensor:
    """Return this rank's part of values [modules, seq, batch]."""
    return torch.stack([own(pad(each, missing, value=padding)) for each in values])
