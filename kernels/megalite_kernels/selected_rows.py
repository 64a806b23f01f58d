"""Rows that each query selects, gathered and added to, in plain torch. No communication.

A selection [seq, batch, top] contains for each query indices of rows, int32, ascending; −1 fills up its end
where fewer rows are selected. What a query does not select may be anything: it is not read.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

_ELEMENTS = 1 << 22  # of the largest temporary


def parts(queries: int, elements: int) -> Iterator[slice]:
    """Yield blocks of queries of which each has a temporary of so many elements."""
    size = max(1, _ELEMENTS // max(1, elements))
    return (slice(first, min(first + size, queries)) for first in range(0, queries, size))


def gather(table: Tensor, selection: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the selected rows of a table [rows, batch, …] as [seq, batch, top, …], zero where there is none.
    """
    rows = torch.arange(table.shape[1], device=table.device)[:, None]
    gathered = table[selection.clamp_min(0).long(), rows].to(dtype)
    missing = selection < 0
    return gathered.masked_fill_(missing.view(*missing.shape, *[1] * (table.ndim - 2)), 0)


def spread(x: Tensor, selection: Tensor, rows: int) -> Tensor:
    """Return [seq, batch, heads, top] as [seq, batch, heads, rows], zero where a row is not selected.

    Sums over queries are then one matmul, whose order does not depend on the selection.
    """
    place = selection.long().masked_fill(selection < 0, rows).unsqueeze(2).expand_as(x)
    return x.new_zeros(*x.shape[:-1], rows + 1).scatter_(-1, place, x)[..., :rows]
