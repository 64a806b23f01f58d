"""Counts what autograd functions keep, as it is kept and let go: the independent measure of the planner's activations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megalite.batch import Microbatch
from megalite.config.load import from_dict
from megalite.parallel.weight import WeightGradients
from megalite.training import build
from tests.distributed.jobs import mesh_of


class _Kept:
    """A saved tensor; the ledger hears when nobody holds it any more."""

    def __init__(self, ledger: Ledger, tensor: Tensor):
        self.ledger, self.tensor = ledger, tensor
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

    def hooks(self) -> Any:
        return torch.autograd.graph.saved_tensors_hooks(self.keep, lambda kept: kept.tensor)

    def watch(self, queue: WeightGradients) -> None:
        """Count what the products keep that are put off for a weight pass."""
        put = queue.put

        def watched(work: Callable[[], None]) -> None:
            held = [self.keep(cell.cell_contents) for cell in work.__closure__ or () if isinstance(cell.cell_contents, Tensor)]

            def then() -> None:
                work()
                held.clear()

            put(then)

        queue.put = lambda work: watched(work) if queue.deferred else put(work)  # type: ignore[method-assign]


def most_kept(context: Any, config: dict[str, Any]) -> dict[str, int]:
    """The most bytes of activations and of logits that this rank keeps during one step."""
    made = from_dict(config)
    mesh = mesh_of(context, made)
    parts = build.build_parts(made, mesh, "cpu")
    parts.store.initialise(0)
    model, length, batch = made.model, made.data.sequence_length, made.train.micro_batch_size
    head = parts.store.weights.get("head.weight")
    vocabulary = head.tensor.shape[0] if head is not None else -1
    ledger = Ledger([memory.weights for memory in parts.store.buckets], length * batch * vocabulary * parts.runtime.dtype.itemsize)
    ledger.watch(parts.store.gradients)
    tokens = torch.randint(model.vocabulary, (length, batch))
    batches = [Microbatch(tokens.clone(), tokens.clone(), torch.arange(batch), None) for _ in range(build.microbatch_count(made))]
    parts.store.begin_step(len(batches))
    with ledger.hooks():
        parts.runtime.run(build.schedule(made, len(batches)), batches, step=1, loss_scale=1.0)
    parts.store.finish_gradients()
    return dict(ledger.most)
