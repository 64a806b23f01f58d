"""Log-probabilities of sequences, by a forward pass over microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from megalite.assembly.parts import Parts
from megalite.model.objective.losses import SequenceLosses
from megalite.parallel.microbatch import Microbatch
from megalite.parallel.pipeline.schedule import Schedule
from megalite.parallel.tensor.lora import without_adapters


def score(
    parts: Parts, schedule: Schedule, microbatches: Sequence[Microbatch], adapters: bool = False
) -> None:
    """Set `Sequences.reference` of microbatches on the ranks of the last stage. Collective.

    Dropout is off.

    Args:
        schedule: of forwards only.
        adapters: whether to score with the adapters instead.
    """
    with ExitStack() as stack:
        if not adapters:
            stack.enter_context(without_adapters(parts.store.weights))
        for stage in parts.stages.values():
            if isinstance(stage.sequence_losses, SequenceLosses):
                stack.enter_context(stage.sequence_losses.scoring())
        parts.runtime.run(schedule, microbatches, step=0, loss_scale=0.0, training=False)
