"""The optimizers by name (`optimizer.name`): their classes, and the state that they keep of each parameter. Imports no torch.

Offload, planner, memory reports and checkpoints read the kinds of state here. Each kind has the shape of its segment, in at least fp32. The
master weight is not one of them: the store holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Literal

from megalite.config.schema import EXPERTS, PROJECTIONS, Config
from megalite.parallel.sharding.buckets import BucketLayout
from megalite.parallel.spec import Segment

if TYPE_CHECKING:
    from megalite.optimizer.interface import Optimizer
    from megalite.parallel.sharding.store import ParameterStore

ADAMW = ("exp_avg", "exp_avg_sq")
MUON = ("momentum_buffer",)
EMA = "ema"
"""The kind of the average of the weights (`optimizer.averaging`), which may be kept next to any optimizer's state."""


def is_matrix(segment: Segment) -> bool:
    """Whether Muon updates a segment: a trained weight of a layer's projections or experts. All others (embedding, head, norms, biases,
    routers, adapters) stay with AdamW."""
    return segment.trainable and segment.role in (*PROJECTIONS, *EXPERTS) and len(segment.shape) == 2


@dataclass(frozen=True)
class Row:
    """An optimizer.

    Attributes:
        place: its class, module:name, which is imported when a run uses it.
        kinds: names of the state of a trainable segment. The segments of one stored tensor have the same.
        uniform: whether it keeps the same kinds of state of all trainable segments.
        section: the options that its class takes besides those of `optimizer`.
        over: the axis of the mesh over which its ranks exchange parts of matrices, if any.
    """

    place: str
    kinds: Callable[[Segment], tuple[str, ...]]
    uniform: bool = False
    section: str | None = None
    over: Literal["stage"] | None = None


OPTIMIZERS = {
    "adamw": Row("megalite.optimizer.adamw:AdamW", lambda segment: ADAMW, uniform=True),
    "muon": Row("megalite.optimizer.muon:Muon", lambda segment: MUON if is_matrix(segment) else ADAMW, section="muon", over="stage"),
}
"""optimizer.name → the optimizer."""


def create(config: Config, store: ParameterStore) -> Optimizer:
    """The optimizer of a run, with the average of the weights if it keeps one."""
    row = OPTIMIZERS[config.optimizer.name]
    module, _, name = row.place.partition(":")
    sections = [] if row.section is None else [getattr(config, row.section)]
    found: Optimizer = getattr(import_module(module), name)(store, config.optimizer, *sections)
    if config.train.ema_decay is None:
        return found
    averaged: Optimizer = import_module("megalite.optimizer.averaging").Averaged(found, store, config.train.ema_decay)
    return averaged


def state_kinds(segment: Segment, name: str) -> tuple[str, ...]:
    """The kinds of state that an optimizer keeps of a segment; none where it is frozen."""
    return OPTIMIZERS[name].kinds(segment) if segment.trainable else ()


@dataclass(frozen=True)
class StateSpan:
    """Elements [start, stop) of a bucket, of which the optimizer keeps the same kinds of state."""

    start: int
    stop: int
    decays: bool
    kinds: tuple[str, ...]


def state_spans(layout: BucketLayout, start: int, stop: int, name: str) -> Iterator[StateSpan]:
    """[start, stop) of a bucket, split where weight decay or the kinds of state change; padding belongs to the span that precedes it."""
    slots = layout.slots
    ends = [*(slot.start for slot in slots[1:]), layout.size]
    last: StateSpan | None = None
    for slot, low, high in zip(slots, [0, *ends[:-1]], ends, strict=True):
        low, high = max(low, start), min(high, stop)
        if low >= high:
            continue
        span = StateSpan(low, high, slot.spec.decay, state_kinds(slot.spec.segments[0], name))
        if last is not None and (last.decays, last.kinds) == (span.decays, span.kinds):
            span = StateSpan(last.start, high, last.decays, last.kinds)
        elif last is not None:
            yield last
        last = span
    if last is not None:
        yield last


def state_elements(layout: BucketLayout, start: int, stop: int, name: str) -> int:
    """Elements of all kinds of state that an optimizer keeps of [start, stop) of a bucket."""
    return sum(len(span.kinds) * (span.stop - span.start) for span in state_spans(layout, start, stop, name))
