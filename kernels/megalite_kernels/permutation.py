"""Orders and counts of rows that are sorted by expert: whole numbers, so that the order of additions changes nothing."""

import torch
from torch import Tensor


def inverse_order(order: Tensor, length: int) -> Tensor:
    """Where each of `length` indices is in `order`: [length] int64; len(order) for an index that is not in it."""
    inverse = torch.full((length,), len(order), dtype=order.dtype, device=order.device)
    inverse[order] = torch.arange(len(order), device=order.device)
    return inverse


def count(values: Tensor, number: int) -> Tensor:
    """How often each of 0 … number - 1 occurs in the flat `values`: [number] int64."""
    return torch.zeros(number, dtype=torch.int64, device=values.device).scatter_add_(0, values, torch.ones_like(values))


def count_by_column(choices: Tensor, valid: Tensor, number: int) -> Tensor:
    """How many of the valid rows of each column chose each of `number`: [columns, number] fp64.

    choices: [rows · columns, k] int64, column by column within a row; valid: [rows, columns] bool.
    """
    columns = valid.shape[1]
    of = torch.arange(columns, device=valid.device).repeat(valid.shape[0]).unsqueeze(1)  # the column of each choice
    counts = torch.zeros(columns * number, dtype=torch.float64, device=valid.device)
    ones = valid.flatten().double().unsqueeze(1).expand_as(choices)
    return counts.scatter_add_(0, (of * number + choices).flatten(), ones.flatten()).view(columns, number)


def places_among_equals(values: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """For each of the flat `values`, 0 … number - 1, how many equal ones come before it; and how often each number occurs."""
    counts, order = count(values, number), values.argsort(stable=True)
    places = torch.empty_like(values)
    places[order] = torch.arange(len(values), device=values.device) - sums_before(counts)[values[order]]
    return places, counts


def sums_before(counts: Tensor) -> Tensor:
    """The sum of the rows before each row."""
    return counts.cumsum(0) - counts


def choice_groups(choices: Tensor, valid: Tensor, number: int) -> Tensor:
    """Numbers of the groups (valid first, then slot, column and what is chosen of `number`) of choices [rows, columns, k].

    valid: [rows, columns] bool. There are 2 · k · columns · number groups.
    """
    columns, k = choices.shape[1:]
    slots = torch.arange(k, device=choices.device) + k * (~valid).unsqueeze(-1)
    return (slots * columns + torch.arange(columns, device=choices.device).view(1, -1, 1)) * number + choices


def order_by_column(sizes: Tensor, total: int) -> Tensor:
    """The order that sorts blocks of rows by column, then by row of `sizes` [rows, columns], if they come by row, then by column."""
    columns = torch.arange(sizes.shape[1], device=sizes.device).repeat(sizes.shape[0])
    return columns.repeat_interleave(sizes.flatten(), output_size=total).argsort(stable=True)
