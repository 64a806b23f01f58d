"""What the modules of multi-token prediction read and predict: the k-th one the tokens and targets that are k
positions further on.

It is made of whole rows, before context parallelism cuts them. A module combines what is known at a position
with the tokens up to k positions after it, so its target counts only if these are in the row and of the same
document. The rest of the rule is that of the target itself, which may be ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.mesh.mesh import MeshAxis
from megalite.parallel.collectives import all_reduce
from megalite.parallel.microbatch import IGNORE_INDEX, Microbatch, MtpTargets


@dataclass(frozen=True)
class WithMtpTargets:
    """Makes microbatches of whole rows that have what the modules need. make: makes those without; it is
    called with all arguments."""

    make: Callable[..., Microbatch]
    modules: int

    def __call__(self, tokens: Tensor, targets: Tensor, *others: object, **named: object) -> Microbatch:
        mtp_targets = shifted(tokens, targets, named.get("document_start"), self.modules)  # type: ignore[arg-type]
        return self.make(tokens, targets, *others, **named, mtp_targets=mtp_targets)


def shifted(tokens: Tensor, targets: Tensor, document_start: Tensor | None, modules: int) -> MtpTargets:
    """Tokens and targets of every module, of whole rows [seq, batch].

    The token after the end of a row is 0: no position whose target counts sees it.
    """
    length = len(tokens)
    further, wanted = (
        tokens.new_zeros(modules, *tokens.shape),
        targets.new_full((modules, *targets.shape), IGNORE_INDEX),
    )
    for index in range(modules):
        shift = index + 1
        further[index, : length - shift], wanted[index, : length - shift] = tokens[shift:], targets[shift:]
        if document_start is not None:
            other = document_start[shift:] != document_start[: length - shift]
            wanted[index, : length - shift].masked_fill_(other, IGNORE_INDEX)
    return MtpTargets(further, wanted)


def count_valid(microbatches: Sequence[Microbatch], axis: MeshAxis) -> int:
    """Tokens of the global batch whose loss counts; sets `factors` from this number and the numbers of each
    module. Collective."""
    rows = []
    for microbatch in microbatches:
        assert microbatch.mtp_targets is not None
        further = (microbatch.mtp_targets.targets != IGNORE_INDEX).sum((1, 2))  # [modules]
        rows.append(torch.cat([(microbatch.targets != IGNORE_INDEX).sum().view(1), further]))
    valid, *ahead = all_reduce(torch.stack(rows).sum(0), axis).wait().tolist()
    # never 0: the losses in metrics are divided by them
    factors = tuple(max(valid, 1) / max(count, 1) for count in ahead)
    for microbatch in microbatches:
        assert microbatch.mtp_targets is not None
        microbatch.mtp_targets = microbatch.mtp_targets._replace(factors=factors)
    return int(valid)
