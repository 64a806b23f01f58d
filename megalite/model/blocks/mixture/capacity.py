"""Limit on the rows that a sequence sends to an expert.

C = ⌈factor · S · k / E⌉ rows are kept, and the others are dropped. Rows are kept in the order of (slot,
position): the first choices of all tokens, from the first position on, then their second choices, and so on.
Tokens without loss come after all others, so that padding does not take capacity from them. Which rows are
dropped depends only on the sequence, not on the other sequences of the microbatch or on the ranks that share
the sequence.

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
from megalite.parallel.context.parts import PositionSegment, SequencePart
from megalite.parallel.expert.choice import ExpertChoice
from megalite.parallel.microbatch import positions_of


def pieces_of(segments: Sequence[Sequence[tuple[int, int]]], tp: int) -> list[list[PositionSegment]]:
    """Return the segments of each rank that shares a sequence: tp equal parts of each cp rank's segments."""
    ranks = []
    for own in segments:
        each = sum(length for _, length in own) // tp
        for rank in range(tp):
            low, high, pieces = rank * each, (rank + 1) * each, []
            for start, length in own:  # which are elements [0, length) of what is left of this cp rank's
                first, last = max(low, 0), min(high, length)
                if first < last:
                    pieces.append(PositionSegment(start + first, last - first))
                low, high = low - length, high - length
            ranks.append(pieces)
    return ranks


@dataclass(frozen=True)
class Capacity:
    """Limit of one layer.

    Attributes:
        factor: the option `model.expert_capacity_factor`.
        sequence: the axis of the ranks that share a sequence: cp ranks, each with its tp ranks.
        tp: number of tp ranks.
    """

    factor: float
    sequence: MeshAxis
    tp: int

    def limit(self, choice: ExpertChoice, valid: Tensor, part: SequencePart | None) -> ExpertChoice:
        """Return the choice without the rows that are dropped.

        Args:
            valid: [seq, batch], this rank's tokens with a loss.
            part: the parts of the cp ranks; None if the sequences are not split.
        """
        (length, batch), experts, rows = valid.shape, len(choice.counts), len(choice.inverse)
        whole = length * self.tp if part is None else part.length
        pieces = pieces_of([[(0, whole)]] if part is None else part.segments, self.tp)
        own, most = pieces[self.sequence.rank], max(map(len, pieces))
        # of one piece; all rows of a group have equal (valid, slot, sequence, expert)
        groups = 2 * choice.k * batch * experts
        flat = self._groups(choice, valid, own, whole, groups, most).flatten()
        # of each row among those of its group on this rank
        places, counts = places_among_equals(flat, most * groups + 1)
        # [ranks, most, 2 k, batch · experts]
        gathered = all_gather(counts[:-1].view(1, most, 2 * choice.k, -1), self.sequence).wait()
        limit = rows_per_expert(self.factor, whole, choice.k, experts)
        # padding is dropped
        before = torch.cat([*self._before(gathered, pieces), counts.new_full((1,), limit)])
        kept = places + before[flat] < limit

        # The device alone knows how many rows are kept, so the host takes as many as there can be. Those that
        # are dropped come last.
        sent = choice.experts.flatten().masked_fill(~kept, experts)
        most_rows = min(rows, batch * experts * limit)
        order = sent.argsort(stable=True)[:most_rows]
        counts = count(sent, experts + 1)[:-1]
        inverse = inverse_order(order, rows)
        return ExpertChoice(
            choice.experts,
            order,
            inverse.masked_fill(inverse >= counts.sum(), most_rows),
            counts,
            partial=True,
        )

    def _groups(
        self,
        choice: ExpertChoice,
        valid: Tensor,
        own: Sequence[PositionSegment],
        whole: int,
        groups: int,
        most: int,
    ) -> Tensor:
        """Return the group of each row, [seq, batch, k], numbered piece by piece.

        The last group is for padding past the end of a sequence.
        """
        groups_of_rows = choice_groups(choice.experts.view(*valid.shape, -1), valid, len(choice.counts))
        for number, part in enumerate(groups_of_rows.split([segment.length for segment in own])):
            part += number * groups
        if any(segment.stop > whole for segment in own):
            positions = positions_of(
                [(segment.start, segment.length) for segment in own], valid.device
            )  # [seq, 1]
            groups_of_rows.masked_fill_((positions >= whole).unsqueeze(-1), most * groups)
        return groups_of_rows

    def _before(self, gathered: Tensor, pieces: Sequence[Sequence[PositionSegment]]) -> list[Tensor]:
        """Count the rows of the sequence that precede those of each group of this rank.

        The result is flat, piece by piece.
        """
        places = sorted(
            (segment.start, rank, index)
            for rank, segments in enumerate(pieces)
            for index, segment in enumerate(segments)
        )
        earlier_slots = sums_before(gathered.sum((0, 1)))  # [2 k, batch · experts]
        earlier_pieces = sums_before(torch.stack([gathered[rank, index] for _, rank, index in places]))
        before = [earlier_slots] * gathered.shape[1]
        for (_, rank, index), earlier in zip(places, earlier_pieces, strict=True):
            if rank == self.sequence.rank:
                before[index] = earlier_slots + earlier
        return [each.flatten() for each in before]
