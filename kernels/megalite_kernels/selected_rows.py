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
    """Return the selected rows of a table [rows, batch, …], [seq, batch, top, …]; zero where none is."""
    rows = torch.arange(table.shape[1], device=table.device)[:, None]
    gathered = table[selection.clamp_min(0).long(), rows].to(dtype)
    missing = selection < 0
    return gathered.masked_fill_(missing.view(*missing.shape, *[1] * (table.ndim - 2)), 0)


def add(total: Tensor, factors: Tensor, x: Tensor, selection: Tensor) -> None:
    """Add Σ factors · x, over the queries that select a row and the heads that read it, to each row.

    The sum is one matmul with zeros where a row is not selected: its order does not depend on the selection.

    Args:
        total: [rows, batch, groups, width]; consecutive heads read a group, equally many each.
        factors: [seq, batch, heads, top].
        x: [seq, batch, heads, width].
    """
    rows, groups = total.shape[0], total.shape[2]
    place = selection.long().masked_fill(selection < 0, rows).unsqueeze(2).expand_as(factors)
    by_row = factors.new_zeros(*factors.shape[:3], rows + 1).scatter_(-1, place, factors)[..., :rows]
    # [batch, groups, rows, queries and heads of the group] and [batch, groups, those, width]
    left = by_row.unflatten(2, (groups, -1)).permute(1, 2, 4, 0, 3).flatten(3)
    right = x.to(factors.dtype).unflatten(2, (groups, -1)).permute(1, 2, 0, 3, 4).flatten(2, 3)
    total += (left @ right).permute(2, 0, 1, 3)
