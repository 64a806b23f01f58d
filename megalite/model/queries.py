"""The tokens over which losses without targets are means: all of the global batch but the padding of rows.

Padding is what follows the last conversation of a row of chats, and what context parallelism adds to a row so
that it has equal parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.mesh.mesh import MeshAxis
from megalite.parallel.collectives import all_reduce
from megalite.parallel.microbatch import IGNORE_INDEX, Microbatch, Queries


@dataclass(frozen=True)
class WithQueries:
    """Builds microbatches with their queries.

    Attributes:
        make: makes a microbatch; it is called with all arguments and `queries`.
        padded: whether rows end with padding.
    """

    make: Callable[..., Microbatch]
    padded: bool

    def __call__(self, tokens: Tensor, targets: Tensor, *others: object, **named: object) -> Microbatch:
        counted = torch.ones_like(tokens, dtype=torch.bool)
        if self.padded:
            counted = ~_padding(tokens, targets, named["document_start"])  # type: ignore[arg-type]
        return self.make(tokens, targets, *others, **named, queries=Queries(counted))


def _padding(tokens: Tensor, targets: Tensor, document_start: Tensor) -> Tensor:
    """Return whether tokens of whole rows are padding: a last document of 0s without targets."""
    last = document_start == document_start[-1]
    empty = ((tokens == 0) & (targets == IGNORE_INDEX) | ~last).all(0)  # [batch]
    return last & empty


def count_queries(microbatches: Sequence[Microbatch], valid: int, axis: MeshAxis) -> None:
    """Count the queries of the global batch, and set their `factor` in the microbatches. Collective.

    Args:
        valid: number of tokens of the global batch whose loss counts.
    """
    own = torch.tensor([sum(int(_queries(each).counted.sum()) for each in microbatches)])
    factor = max(valid, 1) / max(int(all_reduce(own, axis).wait()), 1)
    for microbatch in microbatches:
        microbatch.queries = _queries(microbatch)._replace(factor=factor)


def _queries(microbatch: Microbatch) -> Queries:
    assert microbatch.queries is not None
    return microbatch.queries
