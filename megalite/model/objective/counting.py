"""Numbers of tokens of the sequences of a microbatch, and what the terms of an objective are divided by.

Both are known before the first forward. Communication: one all-reduce of a number for each term.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.mesh.mesh import Mesh
from megalite.objectives.objective import Objective, Scores
from megalite.parallel.collectives import all_reduce
from megalite.parallel.microbatch import IGNORE_INDEX, Microbatch
from megalite.parallel.sequences import Sequences


@dataclass(frozen=True)
class WithTokenCounts:
    """Builds microbatches whose sequences have their numbers of tokens.

    They are counted in whole rows, before context parallelism cuts them.

    Attributes:
        make: makes a microbatch; it is called with all arguments.
    """

    make: Callable[..., Microbatch]

    def __call__(
        self, tokens: Tensor, targets: Tensor, *others: object, sequences: Sequences, **named: object
    ) -> Microbatch:
        counts = sums_of_sequences((targets != IGNORE_INDEX).double(), sequences)
        return self.make(tokens, targets, *others, **named, sequences=sequences._replace(tokens=counts))


def sums_of_sequences(values: Tensor, sequences: Sequences) -> Tensor:
    """Sum values of tokens, [seq, batch], over prompts and over completions: [2, sequences] fp64."""
    end = sequences.count  # where padding is summed
    place = torch.where(sequences.index < 0, end, sequences.index) + (end + 1) * sequences.completion
    sums = torch.zeros(2 * (end + 1), dtype=torch.float64, device=values.device)
    return sums.index_add(0, place.flatten(), values.double().flatten()).view(2, -1)[:, :end]


def scores_of(sequences: Sequences, totals: Tensor) -> Scores:
    """Return the scores of sequences.

    Args:
        totals: the log-probabilities of their prompts and completions, [2, sequences] fp64.
    """
    assert sequences.tokens is not None, "microbatches are made with WithTokenCounts"
    prompt_tokens, completion_tokens = sequences.tokens
    prompt, completion = totals
    of_batch = sequences.labels, sequences.reference, sequences.baseline
    return Scores(completion, prompt, completion_tokens, prompt_tokens, *of_batch)


def counts_of(objective: Objective, microbatches: Sequence[Microbatch]) -> Tensor:
    """Return what the terms of an objective are divided by, summed over microbatches, [terms] fp64."""
    counts = []
    for microbatch in microbatches:
        sequences = sequences_of(microbatch)
        none = torch.zeros(2, sequences.count, dtype=torch.float64, device=microbatch.tokens.device)
        counts.append(torch.stack([each.double() for each in objective.counts(scores_of(sequences, none))]))
    return torch.stack(counts).sum(0)


def count_sequences(microbatches: Sequence[Microbatch], objective: Objective, valid: int, mesh: Mesh) -> None:
    """Count what the terms of an objective are divided by, and set `factors` of the microbatches. Collective.

    Args:
        valid: number of tokens of the global batch with a target.
    """
    # cp ranks have the same sequences
    own = counts_of(objective, microbatches) * (mesh.cp.rank == 0)
    counts = all_reduce(own, mesh.counting).wait().tolist()
    factors = tuple(max(valid, 1) / max(count, 1) for count in counts)
    for microbatch in microbatches:
        microbatch.sequences = sequences_of(microbatch)._replace(factors=factors)


def sequences_of(microbatch: Microbatch) -> Sequences:
    assert microbatch.sequences is not None, "preferences have sequences"
    return microbatch.sequences
