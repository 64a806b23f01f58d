"""The optimizers by name (`optimizer.name`): their classes, and the state that they keep of each parameter.

Offload, planner, memory reports and checkpoints read the kinds of state here. Each kind has the shape of its
segment, in at least fp32. The master weight is not one of them: the store holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Literal

from megalite.config.schema import Config
from megalite.config.sections.lora import EXPERTS, PROJECTIONS
from megalite.parallel.sharding.buckets import BucketLayout
from megalite.parallel.spec import Segment

if TYPE_CHECKING:
    from megalite.optimizer.interface import Optimizer
    from megalite.optimizer.state import OptimizerState

ADAMW = ("exp_avg", "exp_avg_sq")
MOMENTUM = "momentum_buffer"
EMA = "ema"
"""The kind of the average of the weights (`optimizer.averaging`), which may be kept next to any optimizer's
state."""

Kinds = Callable[[Segment], tuple[str, ...]]
"""The names of the state that a run keeps of a segment, each of the segment's shape; none where the segment
is frozen."""


def is_matrix(segment: Segment) -> bool:
    """Whether Muon updates a segment: a trained weight of a layer's projections or experts. All others
    (embedding, head, norms, biases, routers, adapters) stay with AdamW."""
    return segment.trainable and segment.role in (*PROJECTIONS, *EXPERTS) and len(segment.shape) == 2


@dataclass(frozen=True)
class OptimizerEntry:
    """An optimizer.

    Attributes:
        place: its class, module:name, which is imported when a run uses it.
        kinds: names of the state of a trainable segment. The segments of one stored tensor have the same.
        uniform: whether it keeps the same kinds of state of all trainable segments.
        section: the options that its class takes besides those of `optimizer`.
        over: the axis of the mesh over which its ranks exchange parts of matrices, if any.
    """

    place: str
    kinds: Kinds
    uniform: bool = False
    section: str | None = None
    over: Literal["stage"] | None = None


OPTIMIZERS = {
    "adamw": OptimizerEntry("megalite.optimizer.adamw:AdamW", lambda segment: ADAMW, uniform=True),
    "muon": OptimizerEntry(
        "megalite.optimizer.muon:Muon",
        lambda segment: (MOMENTUM,) if is_matrix(segment) else ADAMW,
        section="muon",
        over="stage",
    ),
}
"""optimizer.name → the optimizer."""


def create(config: Config, state: OptimizerState) -> Optimizer:
    """The optimizer of a run."""
    row = OPTIMIZERS[config.optimizer.name]
    module, _, name = row.place.partition(":")
    sections = [] if row.section is None else [getattr(config, row.section)]
    optimizer: Optimizer = getattr(import_module(module), name)(state, config.optimizer, *sections)
    return optimizer


def kinds_of(config: Config) -> Kinds:
    """The state that a run keeps: that of its optimizer, and the average of the weights if `train.ema_decay`
    is set."""
    row, averages = OPTIMIZERS[config.optimizer.name], () if config.train.ema_decay is None else (EMA,)
    return lambda segment: (*row.kinds(segment), *averages) if segment.trainable else ()


@dataclass(frozen=True)
class StateSpan:
    """Elements [start, stop) of a bucket, with the same kinds of state."""

    start: int
    stop: int
    decays: bool
    kinds: tuple[str, ...]


def state_spans(layout: BucketLayout, start: int, stop: int, kinds: Kinds) -> Iterator[StateSpan]:
    """[start, stop) of a bucket, split where weight decay or the kinds of state change; padding belongs to
    the span that precedes it."""
    slots = layout.slots
    ends = [*(slot.start for slot in slots[1:]), layout.size]
    last: StateSpan | None = None
    for slot, low, high in zip(slots, [0, *ends[:-1]], ends, strict=True):
        low, high = max(low, start), min(high, stop)
        if low >= high:
            continue
        span = StateSpan(low, high, slot.spec.decay, kinds(slot.spec.segments[0]))
        if last is not None and (last.decays, last.kinds) == (span.decays, span.kinds):
            span = StateSpan(last.start, high, last.decays, last.kinds)
        elif last is not None:
            yield last
        last = span
    if last is not None:
        yield last


def state_elements(layout: BucketLayout, start: int, stop: int, kinds: Kinds) -> int:
    """Elements of all kinds of state of [start, stop) of a bucket."""
    return sum(len(span.kinds) * (span.stop - span.start) for span in state_spans(layout, start, stop, kinds))
