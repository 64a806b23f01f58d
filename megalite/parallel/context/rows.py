"""Whole rows to one context-parallel rank's part of them.

The loader reads rows, shifts targets, marks documents and masks; only then are they cut. So the token after a part's last one is its
target, and what a rank knows of documents is the same as on one process.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from megalite.batch import IGNORE_INDEX, Boundaries, Microbatch
from megalite.parallel.context.parts import Part, Runs


@dataclass(frozen=True)
class Cut:
    """Makes the microbatch of a rank, called as `Microbatch.of`.

    Rows whose length has no equal parts are padded at their ends. Padding has no target, and no token before it sees it.

    Attributes:
        parts: the runs of every cp rank, which together hold each position of a padded row once.
        rank: this rank's index among them.
    """

    parts: list[Runs]
    rank: int

    def __call__(
        self,
        tokens: Tensor,
        targets: Tensor,
        samples: Tensor,
        document_start: Tensor | None = None,
        boundaries: Boundaries | None = None,
    ) -> Microbatch:
        """tokens, targets, document_start: [seq, batch] of whole rows. `boundaries` would be others where rows are padded."""
        length, padded = len(tokens), sum(run.length for runs in self.parts for run in runs)
        missing = (0, 0, 0, padded - length)

        def own(x: Tensor) -> Tensor:
            return torch.cat([x[run.start : run.stop] for run in self.parts[self.rank]])

        if document_start is not None:  # padding continues the last document
            document_start = torch.cat([document_start, document_start[-1:].expand(padded - length, -1)])
        made = Microbatch.of(
            own(pad(tokens, missing)),
            own(pad(targets, missing, value=IGNORE_INDEX)),
            samples,
            None if document_start is None else own(document_start),
            self.parts[self.rank],
            boundaries=boundaries if padded == length else None,
            part=Part(self.parts, self.rank, length, document_start),
        )
        made.positions.clamp_(max=length - 1)  # a table of learned positions may end there
        return made
