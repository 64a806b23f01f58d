"""The optimizers by name (`optimizer.name`).

Each row has the class and the state that it keeps of each parameter; `Optimizer` is their interface.

Offload, planner, memory reports and checkpoints read the kinds of state here. Each kind has the shape of its
segment, in at least fp32. The master weight is not one of them: the store holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Literal, Protocol

from megalite.config.schema import Config
from megalite.config.sections.lora import EXPERTS, PROJECTIONS
from megalite.parallel.sharding.buckets import BucketLayout
from megalite.parallel.spec import EMA, Segment

if TYPE_CHECKING:
    from torch import Tensor

    from megalite.optimizer.state import OptimizerState

ADAMW = ("exp_avg", "exp_avg_sq")
MOMENTUM = "momentum_buffer"

Kinds = Callable[[Segment], tuple[str, ...]]
"""The kinds of state that a run keeps of a segment, each of the segment's shape; empty if the segment is
frozen."""


class Optimizer(Protocol):
    """Interface of an optimizer: it updates one rank's master weights from their gradients and its state."""

    state: OptimizerState

    def step(self, step: int, lr: float, divisor: Tensor | None) -> None:
        """Update this rank's master weights, and its weights from them.

        All ranks of a stage call it together: some optimizers communicate.

        Gradients are not arguments: an optimizer holds views of `GradientBucket.owned` from its construction.

        Args:
            step: the number of the step, 1-based.
            lr: the learning rate.
            divisor: a scalar by which gradients are divided; NaN: the step is skipped, and nothing changes.
        """


def is_matrix(segment: Segment) -> bool:
    """Return whether Muon updates a segment: a trained weight of a layer's projections or experts.

    AdamW updates all others (embedding, head, norms, biases, routers, adapters).
    """
    return segment.trainable and segment.role in (*PROJECTIONS, *EXPERTS) and len(segment.shape) == 2


@dataclass(frozen=True)
class OptimizerEntry:
    """An optimizer.

    Attributes:
        class_path: its class, MODULE:NAME, which is imported when a run uses it.
        kinds: the kinds of state of a trainable segment. The segments of one stored tensor have the same
            kinds.
        uniform: whether it keeps the same kinds of state of all trainable segments.
        section: the section of options that its class takes besides `optimizer`.
        exchange_axis: the axis of the mesh over which its ranks exchange parts of matrices, if any.
    """

    class_path: str
    kinds: Kinds
    uniform: bool = False
    section: str | None = None
    exchange_axis: Literal["stage"] | None = None


OPTIMIZERS = {
    "adamw": OptimizerEntry("megalite.optimizer.adamw:AdamW", lambda segment: ADAMW, uniform=True),
    "muon": OptimizerEntry(
        "megalite.optimizer.muon.muon:Muon",
        lambda segment: (MOMENTUM,) if is_matrix(segment) else ADAMW,
        section="muon",
        exchange_axis="stage",
    ),
}
"""optimizer.name → the optimizer."""


def create(config: Config, state: OptimizerState) -> Optimizer:
    """Return the optimizer of a run."""
    entry = OPTIMIZERS[config.optimizer.name]
    module, _, name = entry.class_path.partition(":")
    sections = [] if entry.section is None else [getattr(config, entry.section)]
    optimizer: Optimizer = getattr(import_module(module), name)(state, config.optimizer, *sections)
    return optimizer


def kinds_of(config: Config) -> Kinds:
    """Return the kinds of state that a run keeps.

    They are the kinds of its optimizer, and the average of the weights if `train.ema_decay` is set.
    """
    entry, averages = OPTIMIZERS[config.optimizer.name], () if config.train.ema_decay is None else (EMA,)
    return lambda segment: (*entry.kinds(segment), *averages) if segment.trainable else ()


@dataclass(frozen=True)
class StateSpan:
    """Elements [start, stop) of a bucket, with the same kinds of state."""

    start: int
    stop: int
    decays: bool
    lr_factor: float
    kinds: tuple[str, ...]


def lr_factor(segment: Segment) -> float:
    """Return the factor on the learning rate of optimizers that update each element by itself.

    It is 1 / growth of the columns (`model.mup`): the products of a row with the input then change as in the
    base, since changes of the elements are aligned with the input. Weight decay does not depend on it. The
    segments of a stored tensor have one factor.
    """
    return 1.0 / segment.growth[1]


def state_spans(layout: BucketLayout, start: int, stop: int, kinds: Kinds) -> Iterator[StateSpan]:
    """Yield the spans of [start, stop) of a bucket.

    A new span starts where weight decay, the learning rate or the kinds of state change. Padding belongs to
    the span that precedes it.
    """
    slots = layout.slots
    starts = [0, *(slot.start for slot in slots[1:])]
    last: StateSpan | None = None
    for slot, slot_start, slot_stop in zip(slots, starts, [*starts[1:], layout.size], strict=True):
        low, high = max(slot_start, start), min(slot_stop, stop)
        if low >= high:
            continue
        spec = slot.spec
        span = StateSpan(low, high, spec.decay, lr_factor(spec.segments[0]), kinds(spec.segments[0]))
        if last is not None and replace(last, start=low, stop=high) == span:
            span = replace(last, stop=high)
        elif last is not None:
            yield last
        last = span
    if last is not None:
        yield last


def state_elements(layout: BucketLayout, start: int, stop: int, kinds: Kinds) -> int:
    """Return the number of elements of all kinds of state of [start, stop) of a bucket."""
    return sum(len(span.kinds) * (span.stop - span.start) for span in state_spans(layout, start, stop, kinds))
