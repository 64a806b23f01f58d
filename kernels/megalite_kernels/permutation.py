"""Rows in the order of their experts, and back: orders, counts, and the copies and sums of rows.

    gather_rows             out[i] = rows[index[i]]
    combine_rows            out[t] = Σ_j weights[t, j] · rows[index[t, j]]
    combine_rows_backward   drows[r] = weights[s] · grad[t]        dweights[s] = Σ grad[t] · rows[r]
                            with s = order[r] and t = s // k

The sum over j is in the order of j, without atomic additions. An index that is not less than the number of
rows means that there is no row: it counts as zero. Orders and counts are whole numbers, so that the order of
additions changes nothing.
"""

import torch
from torch import Tensor

from megalite_kernels.backend import takes_triton


def inverse_order(order: Tensor, length: int) -> Tensor:
    """Return the place of each of `length` indices in `order`: [length] int64.

    An index that is not in `order` has place len(order).
    """
    inverse = torch.full((length,), len(order), dtype=order.dtype, device=order.device)
    inverse[order] = torch.arange(len(order), device=order.device)
    return inverse


def count(values: Tensor, number: int) -> Tensor:
    """Return how often each of 0 … number - 1 occurs in the flat `values`: [number] int64."""
    counts = torch.zeros(number, dtype=torch.int64, device=values.device)
    return counts.scatter_add_(0, values, torch.ones_like(values))


def count_by_column(choices: Tensor, valid: Tensor, number: int) -> Tensor:
    """Return how many of the valid rows of each column chose each of `number`: [columns, number] fp64.

    Args:
        choices: [rows · columns, k] int64, column by column within a row.
        valid: [rows, columns] bool.
    """
    columns = valid.shape[1]
    column = torch.arange(columns, device=valid.device).repeat(valid.shape[0]).unsqueeze(1)  # of each choice
    counts = torch.zeros(columns * number, dtype=torch.float64, device=valid.device)
    ones = valid.flatten().double().unsqueeze(1).expand_as(choices)
    counts.scatter_add_(0, (column * number + choices).flatten(), ones.flatten())
    return counts.view(columns, number)


def places_among_equals(values: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Return how many equal values precede each of the flat `values`, and how often each number occurs.

    The values are 0 … number - 1.
    """
    counts, order = count(values, number), values.argsort(stable=True)
    places = torch.empty_like(values)
    places[order] = torch.arange(len(values), device=values.device) - sums_before(counts)[values[order]]
    return places, counts


def sums_before(counts: Tensor) -> Tensor:
    """Return the sum of the rows before each row."""
    return counts.cumsum(0) - counts


def choice_groups(choices: Tensor, valid: Tensor, number: int) -> Tensor:
    """Return the group of each of the choices [rows, columns, k].

    Groups are ordered by validity (valid first), slot, column and choice of `number`. There are 2 · k ·
    columns · number groups.

    Args:
        valid: [rows, columns] bool.
    """
    columns, k = choices.shape[1:]
    slots = torch.arange(k, device=choices.device) + k * (~valid).unsqueeze(-1)
    return (slots * columns + torch.arange(columns, device=choices.device).view(1, -1, 1)) * number + choices


def order_by_column(sizes: Tensor, total: int) -> Tensor:
    """Return the order that sorts blocks of rows by column, then by row of `sizes` [rows, columns].

    The blocks are given sorted by row, then by column.
    """
    columns = torch.arange(sizes.shape[1], device=sizes.device).repeat(sizes.shape[0])
    return columns.repeat_interleave(sizes.flatten(), output_size=total).argsort(stable=True)


def gather_rows(rows: Tensor, index: Tensor) -> Tensor:
    """Return rows[index]: [n, width], [m] int64 -> [m, width]. All rows exist."""
    if takes_triton(rows):
        from megalite_kernels import permutation_triton

        return permutation_triton.gather_rows(rows, index)
    return rows.index_select(0, index)


def by_slot(values: Tensor, index: Tensor, partial: bool = False) -> Tensor:
    """Return values[index], zero where there is no value: [n, …], [m] int64 -> [m, …].

    Args:
        partial: values may be missing although there are no fewer values than indices.
    """
    if partial or len(values) < len(index):
        index = index.clamp(max=len(values))
        values = torch.cat((values, values.new_zeros(1, *values.shape[1:])))
    return values.index_select(0, index)


def combine_rows(rows: Tensor, index: Tensor, weights: Tensor | None = None, partial: bool = False) -> Tensor:
    """Return the weighted sum of each token's rows: [n, width], [tokens, k] -> [tokens, width].

    Sums are in at least fp32 and rounded to the rows' dtype.

    Args:
        weights: [tokens, k], at least fp32; None: all are 1.
        partial: as for `by_slot`.
    """
    if takes_triton(rows):
        from megalite_kernels import permutation_triton

        return permutation_triton.combine_rows(rows, index, weights)
    values = by_slot(rows, index.flatten(), partial).view(*index.shape, -1)  # [tokens, k, width]
    if weights is not None:
        return (values * weights.unsqueeze(-1)).sum(1).to(rows.dtype)
    return values.sum(1, dtype=torch.promote_types(rows.dtype, torch.float32)).to(rows.dtype)


def combine_rows_backward(
    grad: Tensor, rows: Tensor, order: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `combine_rows` with respect to the rows and to their weights.

    They are [n, width], and [n] in the weights' dtype.

    Args:
        grad: [tokens, width].
        order: [n] int64, the index of each row's weight in the flattened weights [tokens, k].
    """
    if takes_triton(grad):
        from megalite_kernels import permutation_triton

        return permutation_triton.combine_rows_backward(grad, rows, order, weights)
    sent = grad.index_select(0, order // weights.shape[1])  # [n, width]
    by_row = weights.flatten().index_select(0, order).unsqueeze(-1)
    return (sent * by_row).to(rows.dtype), (sent.to(weights.dtype) * rows).sum(-1)
