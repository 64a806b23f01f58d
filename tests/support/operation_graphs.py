"""Graphs of operations on tensors in CPU memory, which repeat what a CUDA graph repeats, and nothing else.

Recorded are the operations that reach the dispatcher, in forward and backward, with the tensors and numbers that they
were given. A replay calls them again on the same memory: no Python of the model runs, no gradient is counted, a number
of the host stays what it was, and a tensor that was replaced is not found. Memory is kept, not reused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megalite.optimizer.registry import STATE
from megalite.parallel.pipeline import graphed_runtime
from megalite.training.trainer import Trainer
from megalite.training.verify import global_tensors
from tests.support.jobs import make_trainer, numbers


class OperationGraphs:
    """Records operations in place of `CudaGraphs`.

    Attributes:
        replays: number of replays by pool.
        owned: the addresses of the memory that operations have allocated, which the next replay overwrites.
        before: called with the pool before each replay.
    """

    def __init__(self, device: torch.device | str):
        self.replays: dict[Any, int] = {}
        self.owned: set[int] = set()
        self.before: Callable[[Any], None] = lambda pool: None

    def begin(self) -> None:
        self.replays.clear()

    def record(self, compute: Callable[[], None], pool: Any) -> Callable[[], None]:
        with _Recording() as recording:
            compute()
        self.owned |= recording.owned
        self.replays.setdefault(pool, 0)

        def replay() -> None:
            self.before(pool)
            self.replays[pool] += 1
            with torch.no_grad():
                for repeat in recording.operations:
                    repeat()

        return replay


class _Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Callable[[], None]] = []
        self.owned: set[int] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or else torch imports the compiler, which takes seconds

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        schema = function._schema
        if schema.name == "aten::_local_scalar_dense":
            raise RuntimeError("the host reads a number")
        result = function(*args, **options)
        # a view is of memory that the replay writes anyway
        if schema.is_mutable or not any(each.alias_info for each in schema.returns):
            if not schema.is_mutable:
                self.owned |= {
                    each.untyped_storage().data_ptr() for each in tree_leaves(result) if isinstance(each, Tensor)
                }
            self.operations.append(lambda: _repeat(function, args, options, result, schema.is_mutable))
        return result


def _repeat(function: Any, args: Any, options: dict[str, Any], into: Any, in_place: bool) -> None:
    results = function(*args, **options)
    if not in_place:
        for own, new in zip(tree_leaves(into), tree_leaves(results), strict=True):
            if isinstance(own, Tensor):
                own.copy_(new)


def check_weights(trainer: Trainer, pool: tuple[int, int]) -> None:
    """Check that the gathers of a stage's weights have been awaited: a replay does not wait for them."""
    stage, _ = pool
    for unit in trainer.parts.stages[stage].units:
        assert all(bucket.gathering is None for bucket in trainer.store.gatherer.by_unit.get(unit, ()))


def train(context: Any, config: dict[str, Any], steps: int) -> dict[str, Any]:
    """A job: train some steps, with a validation after the third one, without a GPU.

    Returns losses, norms and validation loss, on rank 0 whole weights and moments, and the number of replays by pool.
    """
    with patch.object(graphed_runtime, "CudaGraphs", OperationGraphs):
        trainer = make_trainer(context, config)
    graphs = getattr(trainer.parts.runtime, "graphs", None)
    isend = dist.isend

    @wraps(isend)
    def checked(tensor: Tensor, *args: Any, **options: Any) -> Any:
        assert graphs is None or tensor.untyped_storage().data_ptr() not in graphs.owned, "a replay may overwrite it"
        return isend(tensor, *args, **options)

    if graphs is not None:
        graphs.before = partial(check_weights, trainer)
    try:
        results, validation = [], 0.0
        for step in range(1, steps + 1):
            with patch.object(dist, "isend", checked):
                results += trainer.train_step(wait=True)
            if step == 3:
                validation = trainer.evaluate()
        tensors = global_tensors(trainer, ("weight", *STATE))
    finally:
        trainer.close()
    return {
        **numbers(results),
        "validation": validation,
        "tensors": tensors if context.rank == 0 else None,
        "replays": None if graphs is None else graphs.replays,
    }
