"""Limits the rows that a sequence sends to an expert: C = ⌈factor · S · k / E⌉ of them are kept, the others are dropped.

Rows are kept in the order of (slot, position): the first choices of all tokens, from the first position on, then their second choices, and
so on. Tokens whose loss does not count come after all others, so that padding takes no place from them. What is dropped is a function of
the sequence alone: it depends neither on the other sequences of the microbatch nor on the ranks that share the sequence.

Communication: counts of rows are gathered over the ranks that share a sequence, in forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megalite_kernels.permutation import choice_groups, count, inverse_order, places_among_equals, sums_before
from torch import Tensor

from megalite.config.dims import rows_per_expert
from megalite.mesh.mesh import MeshAxis
from megalite.parallel.collectives import all_gather
from megalite.parallel.context.parts import Part, Run
from megalite.parallel.expert.choice import Choice


def pieces_of(runs: Sequence[Sequence[tuple[int, int]]], tp: int) -> list[list[Run]]:
    """The positions of each rank that shares a sequence, as runs of consecutive ones: tp equal parts of each cp rank's."""
    found = []
    for own in runs:
        each = sum(length for _, length in own) // tp
        for rank in range(tp):
            low, high, pieces = rank * each, (rank + 1) * each, []
            for start, length in own:  # which are elements [0, length) of what is left of this cp rank's
                first, last = max(low, 0), min(high, length)
                if first < last:
                    pieces.append(Run(start + first, last - first))
                low, high = low - length, high - length
            found.append(pieces)
    return found


@dataclass(frozen=True)
class Capacity:
    """The limit of one layer.

    Attributes:
        factor: that of the option `model.expert_capacity_factor`.
        sequence: the axis of the ranks that share a sequence: cp ranks, and in each its tp ranks.
        tp: number of the latter.
    """

    factor: float
    sequence: MeshAxis
    tp: int

    def limit(self, choice: Choice, valid: Tensor, part: Part | None) -> Choice:
        """The choice without the rows that are dropped.

        Args:
            valid: [seq, batch], the tokens of this rank whose loss counts.
            part: what the cp ranks have of the sequences; None: all of them.
        """
        (length, batch), experts = valid.shape, len(choice.counts)
        whole = length * self.tp if part is None else part.length
        pieces = pieces_of([[(0, whole)]] if part is None else part.runs, self.tp)
        own, most = pieces[self.sequence.rank], max(map(len, pieces))
        groups = 2 * choice.k * batch * experts  # of one piece; all rows of a group have equal (valid, slot, sequence, expert)
        flat = self._groups(choice, valid, own, whole, groups, most).flatten()
        places, counts = places_among_equals(flat, most * groups + 1)  # of each row among those of its group on this rank
        gathered = all_gather(counts[:-1].view(1, most, 2 * choice.k, -1), self.sequence).wait()  # [ranks, most, 2 k, batch · experts]
        limit = rows_per_expert(self.factor, whole, choice.k, experts)
        before = torch.cat([*self._before(gathered, pieces), counts.new_full((1,), limit)])  # padding is dropped
        kept = places + before[flat] < limit
        order = choice.order[kept[choice.order]]
        return Choice(choice.experts, order, inverse_order(order, len(flat)), count(choice.experts.flatten()[order], experts))

    def _groups(self, choice: Choice, valid: Tensor, own: Sequence[Run], whole: int, groups: int, most: int) -> Tensor:
        """The group of each row, [seq, batch, k], numbered piece by piece; one more for padding past the end of a sequence."""
        piece = torch.tensor([number for number, run in enumerate(own) for _ in range(run.length)], device=valid.device)
        inside = torch.tensor([position < whole for run in own for position in range(run.start, run.stop)], device=valid.device)
        found = choice_groups(choice.experts.view(*valid.shape, -1), valid, len(choice.counts)) + piece.view(-1, 1, 1) * groups
        return found.masked_fill(~inside.view(-1, 1, 1), most * groups)

    def _before(self, gathered: Tensor, pieces: Sequence[Sequence[Run]]) -> list[Tensor]:
        """Number of rows of the sequence that come before those of each of this rank's groups, piece by piece, flat."""
        of_slots = gathered.sum((0, 1))  # [2 k, batch · experts]
        earlier_slots = sums_before(of_slots)
        found = [earlier_slots] * gathered.shape[1]
        for number, own in enumerate(pieces[self.sequence.rank]):
            at = [(rank, index) for rank, runs in enumerate(pieces) for index, run in enumerate(runs) if run.start < own.start]
            ranks, indices = ([each[dim] for each in at] for dim in range(2))
            found[number] = earlier_slots + gathered[ranks, indices].sum(0) if at else earlier_slots
        return [each.flatten() for each in found]
