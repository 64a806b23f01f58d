"""The description of the modules of multi-token prediction (`mtp.modules`).

A module looks up tokens as the embedding does, joins them with the output of a norm, and has a layer and
logits. The head keeps that output as well, unless it computes its loss in chunks
(`planner.memory.activations` counts it then).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megalite.model.cost.records import BlockCost, Buffer, Elementwise, FurtherLoss, LocalMatmul, UnitCost
from megalite.model.mtp.losses import module_layers

if TYPE_CHECKING:
    from megalite.model.cost.units import Units


def _joining(units: Units) -> UnitCost:
    """Return the norms of the embedding and of the previous output, and the matmul of their concatenation."""
    model, share, own = units.model, units.share, units.own
    hidden, statistics = model.hidden_size, share.own_tokens * (1 if model.norm == "rms" else 2)
    kept: tuple[Buffer, ...] = (
        Buffer("embedding of further tokens", own),
        Buffer("statistics of both norms", 2 * statistics, "accumulate"),
        Buffer("both, next to each other", 2 * own),
    )
    if model.logit_factor is not None:
        kept += (Buffer("output of the norm before its scale", own),)
    width = 2 * hidden * (2 if model.norm == "layer" and model.norm_bias else 1)
    norms = Elementwise((2 * own, 2 * own, 4 * own), (3 * own, 3 * own, 4 * own), kept, width)
    ranks = share.tokens // share.own_tokens
    matmul = LocalMatmul(
        "mtp.eh_proj", share.own_tokens, hidden, 2 * hidden, 2 * hidden * hidden, "outputs", ranks=ranks
    )
    return UnitCost((BlockCost((matmul,), (Buffer("gradients of both", 4 * own),), before=norms),))


def further_losses(units: Units) -> list[FurtherLoss]:
    """Return the description of each module."""
    return [
        FurtherLoss(units.embedding(), _joining(units), units.layer(index), units.head())
        for index in module_layers(units.model)
    ]
