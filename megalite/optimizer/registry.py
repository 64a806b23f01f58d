"""The optimizers by name (`optimizer.name`).

Each row has the class and the state that it keeps of each parameter; `Optimizer` is their interface. An
elementwise optimizer is an `UpdateRule` in a file of its own, here or of the user (`own_optimizers`).

Offload, planner, memory reports and checkpoints read the kinds of state here. Each kind has the shape of its
segment; `state_tensors` says in which tensors it is kept. The master weight is not one of them: the store
holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import chain
from typing import TYPE_CHECKING, Literal, Protocol

from megalite.config.schema import Config
from megalite.config.sections.lora import EXPERTS, PROJECTIONS
from megalite.optimizer.state_tensors import LARGEST_BLOCK, StateTensor, stored_tensors
from megalite.optimizer.update_rule import UpdateRule
from megalite.parallel.sharding.buckets import BucketLayout
from megalite.parallel.spec import EMA, WEIGHT, Segment

if TYPE_CHECKING:
    from torch import Tensor

    from megalite.optimizer.state import OptimizerState

ADAMW = ("exp_avg", "exp_avg_sq")
STATE = (WEIGHT, *ADAMW)
"""The kinds of tensors in a checkpoint of a run with AdamW."""
MOMENTUM = "momentum_buffer"

Kinds = Callable[[Segment], tuple[StateTensor, ...]]
"""The tensors of state that a run keeps of a segment; empty if the segment is frozen."""


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
        class_path: its class, MODULE:NAME, which is imported when a run uses it; or an `UpdateRule`.
        kinds: the kinds of state of a trainable segment. The segments of one stored tensor have the same
            kinds.
        uniform: whether it keeps the same kinds of state of all trainable segments.
        section: the section of options that its class takes besides `optimizer`.
        exchange_axis: the axis of the mesh over which its ranks exchange parts of matrices, if any.
        wide: kinds that are at least fp32 whatever `optimizer.moments` is.
    """

    class_path: str | type[UpdateRule]
    kinds: Callable[[Segment], tuple[str, ...]]
    uniform: bool = False
    section: str | None = None
    exchange_axis: Literal["stage"] | None = None
    wide: tuple[str, ...] = ()

    def tensors(self, moments: str = "fp32") -> Kinds:
        """Return the tensors that it keeps, by segment."""

        def of(segment: Segment) -> tuple[StateTensor, ...]:
            forms = {kind: "fp32" if kind in self.wide else moments for kind in self.kinds(segment)}
            stored = [stored_tensors(kind, segment, form) for kind, form in forms.items()]
            return tuple(chain.from_iterable(stored)) if segment.trainable else ()

        return of


OPTIMIZERS = {
    "adamw": OptimizerEntry("megalite.optimizer.adamw_rule:adamw", lambda segment: ADAMW, uniform=True),
    "muon": OptimizerEntry(
        "megalite.optimizer.muon.muon:Muon",
        lambda segment: (MOMENTUM,) if is_matrix(segment) else ADAMW,
        section="muon",
        exchange_axis="stage",
        wide=(MOMENTUM,),
    ),
    "lion": OptimizerEntry("megalite.optimizer.lion:Lion", lambda segment: ("exp_avg",), uniform=True),
    "ademamix": OptimizerEntry(
        "megalite.optimizer.ademamix:AdEMAMix",
        lambda segment: ("exp_avg", "exp_avg_slow", "exp_avg_sq"),
        uniform=True,
        section="ademamix",
    ),
}
"""optimizer.name → the optimizer."""


def entry_of(name: str) -> OptimizerEntry:
    """Return an optimizer by its name, or one of the user. Raises ConfigError if there is no such one."""
    if name in OPTIMIZERS:
        return OPTIMIZERS[name]
    from megalite.optimizer.own_optimizers import own_entry

    return own_entry(name)


def create(config: Config, state: OptimizerState) -> Optimizer:
    """Return the optimizer of a run."""
    entry = entry_of(config.optimizer.name)
    factory = entry.class_path
    if isinstance(factory, str):
        module, _, name = factory.partition(":")
        factory = getattr(import_module(module), name)
    sections = [] if entry.section is None else [getattr(config, entry.section)]
    arguments = (state, config.optimizer, *sections)
    if isinstance(factory, type) and issubclass(factory, UpdateRule):
        arguments = (state, factory(config.optimizer, *sections))
        factory = import_module("megalite.optimizer.elementwise").ElementwiseOptimizer
    optimizer: Optimizer = factory(*arguments)
    return optimizer


def kinds_of(config: Config) -> Kinds:
    """Return the tensors of state that a run keeps.

    They are those of its optimizer, and the average of the weights if `train.ema_decay` is set.
    """
    kinds = entry_of(config.optimizer.name).tensors(config.optimizer.moments)
    averages = () if config.train.ema_decay is None else (StateTensor(EMA),)
    return lambda segment: (*kinds(segment), *averages) if segment.trainable else ()


def least_bytes(config: Config) -> float:
    """Return the bytes of state of an element of a large matrix, of those of which least is kept."""
    kinds = entry_of(config.optimizer.name).tensors(config.optimizer.moments)
    shape = (LARGEST_BLOCK, LARGEST_BLOCK)
    large = Segment("layer", shape, role="q"), Segment("embedding", shape, role="embedding")
    return min(sum(kind.bytes(each.numel, 4) for kind in kinds(each)) / each.numel for each in large)


def is_uniform(config: Config) -> bool:
    """Return whether a run keeps the same tensors of state of all trainable segments."""
    return entry_of(config.optimizer.name).uniform and config.optimizer.moments != "8bit"


def alignment(config: Config) -> int:
    """Return the number of elements of which shards and tensors of buckets start at a multiple; 0: any."""
    return LARGEST_BLOCK if config.optimizer.moments == "8bit" else 0


@dataclass(frozen=True)
class StateSpan:
    """Elements [start, stop) of a bucket, with the same kinds of state."""

    start: int
    stop: int
    decays: bool
    lr_factor: float
    kinds: tuple[StateTensor, ...]


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


def state_bytes(layout: BucketLayout, start: int, stop: int, kinds: Kinds, master: int) -> int:
    """Return the bytes of all state of [start, stop) of a bucket, if a master weight has `master`."""
    spans = state_spans(layout, start, stop, kinds)
    return sum(kind.bytes(span.stop - span.start, master) for span in spans for kind in span.kinds)
