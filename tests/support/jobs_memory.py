"""Measures a step's memory: what autograd functions keep, as it is kept and let go, and what the allocator gives."""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from megalite.assembly import parts as build
from megalite.config.load import from_dict
from megalite.config.schema import Config
from megalite.model import recomputation
from megalite.model.blocks.attention.operations import AttentionByOperation
from megalite.model.spec_builder import padded_vocabulary
from megalite.objectives.find import objective_of
from megalite.optimizer.adamw import AdamW
from megalite.optimizer.registry import OPTIMIZERS
from megalite.optimizer.state import OptimizerState
from megalite.parallel.microbatch import Microbatch
from megalite.parallel.sequences import Sequences
from megalite.parallel.weight_grad_queue import WeightGradQueue, WeightMatmul
from megalite.training.reference import reference_of, score_reference, set_baseline
from megalite.training.start_copy import StartCopy
from tests.support.jobs import mesh_of


class _Kept:
    """A saved tensor; the ledger hears when nobody holds it any more."""

    def __init__(self, ledger: Ledger, tensor: Tensor):
        self.ledger, self.tensor = ledger, tensor.detach()  # not its node, which would keep itself
        ledger.add(tensor, 1)

    def __del__(self) -> None:
        self.ledger.add(self.tensor, -1)


class Ledger:
    """Bytes of the distinct storages that are kept, logits apart from the rest, and the most of each."""

    def __init__(self, weights: list[Tensor], logits_bytes: int):
        self.weights = {tensor.untyped_storage()._cdata for tensor in weights}
        self.logits_bytes = logits_bytes
        self.users: Counter[int] = Counter()
        self.now: Counter[str] = Counter()
        self.most: Counter[str] = Counter()

    def add(self, tensor: Tensor, change: int) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self.weights:
            return
        kind, before = "logits" if storage.nbytes() == self.logits_bytes else "activations", self.users[storage._cdata]
        self.users[storage._cdata] += change
        if 0 in (before, before + change):
            self.now[kind] += change * storage.nbytes()
            self.most[kind] = max(self.most[kind], self.now[kind])

    def keep(self, tensor: Tensor) -> _Kept:
        return _Kept(self, tensor)

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Count what autograd functions save, and what recomputed operations keep in place of it."""
        pack, unpack, ledger = recomputation.Recorder._pack, recomputation._unpack, self

        class Watched(recomputation.Value):
            """A value whose tensor counts while it is there."""

            __slots__ = ("kept",)

            @property
            def tensor(self) -> Tensor | None:  # type: ignore[override]
                return None if self.kept is None else self.kept.tensor

            @tensor.setter
            def tensor(self, tensor: Tensor | None) -> None:
                self.kept = None if tensor is None else ledger.keep(tensor)

        def watched_pack(recorder: Any, tensor: Tensor) -> Any:
            packed = pack(recorder, tensor)
            return self.keep(packed) if isinstance(packed, Tensor) else packed

        with (
            patch.object(recomputation, "Value", Watched),
            patch.object(recomputation.Recorder, "_pack", watched_pack),
            patch.object(recomputation, "_unpack", lambda x: self.given(x) if isinstance(x, _Kept) else unpack(x)),
            torch.autograd.graph.saved_tensors_hooks(self.keep, self.given),
        ):
            yield

    def given(self, kept: _Kept) -> Tensor:
        """The tensor, which counts as long as a backward has it, also when the graph has let it go."""
        alias = kept.tensor.detach()
        weakref.finalize(alias, lambda kept: None, kept)
        return alias

    def watch(self, queue: WeightGradQueue) -> None:
        """Count the memory that matmuls deferred to a weight pass keep."""
        put, run = queue.put, queue.run
        held: defaultdict[tuple[int, int], list[_Kept]] = defaultdict(list)

        def watched_put(matmul: WeightMatmul) -> None:
            if queue.deferred:
                held[queue.backward] += [self.keep(matmul.grad_output), self.keep(matmul.inputs)]
            put(matmul)

        def watched_run(stage: int, microbatch: int) -> None:
            run(stage, microbatch)
            held.pop((stage, microbatch), None)

        queue.put, queue.run = watched_put, watched_run  # type: ignore[method-assign]


def parts_and_batches(context: Any, config: dict[str, Any]) -> tuple[Config, build.Parts, list[Microbatch]]:
    """A rank with drawn weights, and a step's microbatches of random tokens."""
    parsed = from_dict(config)
    mesh = mesh_of(context, parsed)
    parts = build.build_parts(parsed, mesh, "cpu")
    parts.store.initialize(0)
    length, batch = parsed.data.sequence_length, parsed.train.micro_batch_size
    tokens = torch.randint(parsed.model.vocabulary, (length, batch))
    make = build.microbatch_maker(parsed, mesh.cp)
    preferences = {} if objective_of(parsed) is None else {"sequences": two_sequences(tokens)}
    batches = [
        make(tokens.clone(), tokens.clone(), torch.arange(batch), **preferences)
        for _ in range(build.layout(parsed).microbatches)
    ]
    for each in batches:
        each.mismatched = replace(each) if preferences else None
    for each in batches:
        if each.mtp_targets is not None:
            each.mtp_targets = each.mtp_targets._replace(factors=(1.0,) * parsed.model.mtp_layers)
    return parsed, parts, batches


def _tables(parts: build.Parts, batch: Microbatch) -> Iterator[Tensor]:
    """The tables of positions that a rank holds all the time, also where recomputation saves none."""
    for stage in parts.runtime.stages.values():
        state = stage.forward_state(batch, step=1, training=True)
        layers = [module for module in stage.modules() if isinstance(module, AttentionByOperation)]
        for each in layers:
            yield from each.rotary_tables(state) or ()
        if layers and state.query_factors is not None:
            yield state.query_factors


def two_sequences(tokens: Tensor) -> Sequences:
    """A pair in each row, [seq, batch]: its halves, all of them completions."""
    length, batch = tokens.shape
    halves = torch.arange(length) * 2 // length  # [seq]
    index = 2 * torch.arange(batch) + halves.unsqueeze(1)
    count = 2 * batch
    labels = 1 - torch.arange(count) % 2
    return Sequences(index, torch.ones_like(tokens, dtype=torch.bool), torch.arange(count), labels, count)


def most_kept(context: Any, config: dict[str, Any]) -> tuple[int, int]:
    """The most bytes of activations and of logits that this rank keeps during one step."""
    parsed, parts, batches = parts_and_batches(context, config)
    vocabulary = padded_vocabulary(parsed.model.vocabulary, parsed.parallel.tp) // parsed.parallel.tp
    ledger = Ledger(
        [memory.weights for memory in parts.store.buckets],
        batches[0].tokens.numel() * vocabulary * parts.runtime.dtype.itemsize,
    )
    ledger.watch(parts.store.weight_grads)
    tables = [ledger.keep(each) for each in _tables(parts, batches[0])]
    parts.store.reducer.begin_step(len(batches))
    with ledger.hooks():
        parts.runtime.run(build.schedule(parsed, len(batches)), batches, step=1, loss_scale=1.0)
    parts.store.reducer.finish()
    del tables
    return ledger.most["activations"], ledger.most["logits"]


class Stepping:
    """A rank that takes whole steps: forward, backward, reduction, update, gathering."""

    def __init__(self, context: Any, config: dict[str, Any]):
        self.config, self.parts, self.batches = parts_and_batches(context, config)
        parsed = self.config
        self.schedule = build.schedule(parsed, len(self.batches))
        self.objective, self.reference = objective_of(parsed), None
        if self.objective is not None and self.objective.needs_reference:
            self.reference = reference_of(parsed, self.parts, self.parts.runtime.mesh, self.objective)
            if isinstance(self.reference, StartCopy):
                self.reference.keep()
        self.optimizer = AdamW(OptimizerState(self.parts.store, OPTIMIZERS["adamw"].tensors()), parsed.optimizer)

    def step(self, number: int) -> None:
        store = self.parts.store
        if self.objective is not None and self.objective.needs_reference:
            plan = build.schedule(self.config, len(self.batches), forward_only=True)
            score_reference(self.reference, self.parts, plan, self.batches)
            if self.objective.needs_baseline:
                set_baseline(self.reference, self.parts, plan, self.batches, self.parts.runtime.mesh)
        store.reducer.begin_step(len(self.batches))
        self.parts.runtime.run(self.schedule, self.batches, step=number, loss_scale=1.0)
        store.reducer.finish()
        self.optimizer.step(number, 1e-3, None)
        store.gatherer.gather_updated()
        store.gatherer.finish()


def most_allocated(context: Any, config: dict[str, Any]) -> int:
    """`allocated_by` a rank."""
    return allocated_by(Stepping(context, config))


def allocated_by(rank: Stepping) -> int:
    """The most bytes that the allocator has given to a step beyond what was there before it, the second step of two."""
    from torch.profiler import ProfilerActivity, profile

    rank.step(1)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        rank.step(2)
    events = (event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]")
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))
