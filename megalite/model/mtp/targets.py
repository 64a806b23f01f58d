"""Inputs and targets of multi-token prediction (MTP): module k has the tokens and targets k positions later.

They are computed from whole rows, before context parallelism cuts them. Module k combines the hidden state of
a position with the next k tokens, so its target counts only if these are in the same row and document, and if
the target is not IGNORE_INDEX itself.
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
    """Builds microbatches with the inputs and targets of MTP modules.

    Attributes:
        make: makes a microbatch; it is called with all arguments and `ahead`.
        modules: number of MTP modules.
    """

    make: Callable[..., Microbatch]
    modules: int

    def __call__(self, tokens: Tensor, targets: Tensor, *others: object, **named: object) -> Microbatch:
        starts, weights = named.get("document_start"), named.get("weights")
        mtp_targets = shifted(tokens, targets, starts, self.modules, weights)  # type: ignore[arg-type]
        return self.make(tokens, targets, *others, **named, mtp_targets=mtp_targets)


def shifted(
    tokens: Tensor,
    targets: Tensor,
    document_start: Tensor | None,
    modules: int,
    weights: Tensor | None = None,
) -> MtpTargets:
    """Return the tokens and targets of all MTP modules from whole rows: [seq, batch] → [modules, seq, batch].

    The weight of a target is the same for every module.

    Tokens after the end of a row are 0: no position whose target counts reads them.
    """
    length = len(tokens)
    mtp_tokens = tokens.new_zeros(modules, *tokens.shape)
    mtp_targets = targets.new_full((modules, *targets.shape), IGNORE_INDEX)
    mtp_weights = None if weights is None else weights.new_zeros(modules, *weights.shape)
    for index in range(modules):
        shift = index + 1
        inside = length - shift
        mtp_tokens[index, :inside] = tokens[shift:]
        mtp_targets[index, :inside] = targets[shift:]
        if weights is not None and mtp_weights is not None:
            mtp_weights[index, :inside] = weights[shift:]
        if document_start is not None:
            other_document = document_start[shift:] != document_start[:inside]
            mtp_targets[index, :inside].masked_fill_(other_document, IGNORE_INDEX)
    return MtpTargets(mtp_tokens, mtp_targets, mtp_weights)


def count_valid(microbatches: Sequence[Microbatch], axis: MeshAxis) -> int:
    """Count the tokens of the global batch whose loss counts, and set `factors` of the microbatches.

    A module's factor is this number divided by its own number of targets. Collective.
    """
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
