"""Training runs on the pool's ranks: saved, resumed, evaluated, with a broken gradient, with their traffic counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.autograd.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megalite.config.errors import ConfigError
from megalite.optimizer.registry import STATE
from megalite.system import rng
from megalite.training.memory_report import ModelStates, formula, measured
from megalite.training.trainer import Trainer
from megalite.training.verify import global_tensors
from tests.support.jobs import make_trainer, numbers


def settle(trainer: Trainer) -> None:
    """Wait for the weights and the totals that the last step has sent."""
    trainer.weight_updater.drain()
    for memory in trainer.store.buckets:
        for unit in memory.layout.units:
            trainer.store.gatherer.wait_for(unit)


def train_with_initial_weights(context: Any, config: dict[str, Any], steps: int) -> dict[str, Any]:
    """Train some steps: losses and gradient norms, and on rank 0 the global weights before and after."""
    trainer = make_trainer(context, config)
    try:
        before = global_tensors(trainer)
        results = [trainer.step() for _ in range(steps)]
        return {**numbers(results), "before": before, "tensors": global_tensors(trainer)}
    finally:
        trainer.close()


class LargestLogits(TorchDispatchMode):
    """Records the largest number of rows among tensors whose rows have `width` elements."""

    def __init__(self, width: int):
        super().__init__()
        self.width, self.rows = width, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            is_matrix = isinstance(leaf, Tensor) and leaf.dim() > 1
            if is_matrix and leaf.is_contiguous() and leaf.shape[-1] == self.width:  # a transposed weight is not
                self.rows = max(self.rows, leaf.numel() // self.width)
        return out


def train_recording_logits(context: Any, config: dict[str, Any], steps: int) -> dict[str, Any]:
    """Losses, gradient norms and weights; validation loss; and the most rows of logits that existed at once."""
    trainer = make_trainer(context, config)
    try:
        head = next((stage.head for stage in trainer.parts.stages.values() if stage.head is not None), None)
        logits = LargestLogits(head.project.weight.tensor.shape[0] if head is not None else -1)
        with logits:
            results = [trainer.step()]
        results += [trainer.step() for _ in range(1, steps)]
        validation = trainer.evaluate()
        scalars = [validation, *(value for result in results for value in (result.loss, result.grad_norm))]
        return {"scalars": scalars, "tensors": global_tensors(trainer), "rows": logits.rows}
    finally:
        trainer.close()


def model_states(context: Any, config: dict[str, Any]) -> tuple[ModelStates, ModelStates]:
    """The measured sizes of a rank's model states after a step, and those of the formula."""
    trainer = make_trainer(context, config)
    try:
        trainer.step()
        trainer.store.gatherer.finish()
        trainer.store.gatherer.gather_updated()
        return measured(trainer), formula(trainer)
    finally:
        trainer.close()


def train_and_save(
    context: Any, config: dict[str, Any], before: int, after: int, kinds: Sequence[str] = STATE
) -> dict[str, Any]:
    """Train, save, and train on: the checkpoint, the numbers of both halves, on rank 0 weights and moments."""
    trainer = make_trainer(context, config)
    try:
        results = [trainer.step() for _ in range(before)]
        directory = trainer.save()
        results += [trainer.step() for _ in range(after)]
        return {"directory": str(directory), **numbers(results), "tensors": global_tensors(trainer, kinds)}
    finally:
        trainer.close()


def train_and_save_each(context: Any, config: dict[str, Any], steps: Sequence[int]) -> list[str]:
    """Train and save after each of some steps; returns where."""
    trainer = make_trainer(context, config)
    directories = []
    try:
        for step in range(1, max(steps) + 1):
            trainer.step()
            if step in steps:
                directories.append(str(trainer.save()))
        return directories
    finally:
        trainer.close()


def resume(context: Any, config: dict[str, Any], steps: int, kinds: Sequence[str] = STATE) -> dict[str, Any]:
    """Train with a new trainer that starts from `checkpoint.load`."""
    trainer = make_trainer(context, config)
    try:
        place = {"step": trainer.step_done, "samples": trainer.samples, "skipped": trainer.weight_updater.skipped}
        started = global_tensors(trainer, kinds)
        results = [trainer.step() for _ in range(steps)]
        return {"place": place, "started": started, **numbers(results), "tensors": global_tensors(trainer, kinds)}
    finally:
        trainer.close()


def refusal(context: Any, config: dict[str, Any]) -> str:
    """The message of the ConfigError with which a trainer rejects its configuration."""
    try:
        make_trainer(context, config).close()
    except ConfigError as error:
        return str(error)
    return "started"


def initial_weights(context: Any, config: dict[str, Any]) -> tuple[dict[str, Tensor], int, int]:
    """The initial weights, the random numbers that this rank has drawn for them, and those of the blocks it keeps."""
    sizes: list[int] = []

    def normal(numbers: Tensor, *parts: int | str) -> Tensor:
        sizes.append(numbers.numel())
        return draw(numbers, *parts)

    draw = rng.normal_
    with patch.object(rng, "normal_", normal):
        trainer = make_trainer(context, config)
    trainer.close()
    blocks = {}
    for part in trainer.store.to_load():
        rows, *width = part.global_shape
        first = part.offsets[0] // rng.BLOCK_ROWS
        for block in range(first, -(-(part.offsets[0] + part.tensor.shape[0]) // rng.BLOCK_ROWS) if width else first):
            blocks[part.name, block] = min(rng.BLOCK_ROWS, rows - block * rng.BLOCK_ROWS) * prod(width)
    return global_tensors(trainer), sum(sizes), sum(blocks.values())


def evaluate(context: Any, config: dict[str, Any], steps: int) -> tuple[float, float]:
    """Validation loss before and after some steps."""
    trainer = make_trainer(context, config)
    try:
        before = trainer.evaluate()
        for _ in range(steps):
            trainer.step()
        return before, trainer.evaluate()
    finally:
        trainer.close()


def train_with_infinite_gradient(
    context: Any, config: dict[str, Any], broken_step: int, broken_rank: int, steps: int
) -> dict[str, Any]:
    """Train with one infinite gradient element on one rank in one step; returns the weights around that step too."""
    trainer = make_trainer(context, config)
    finish = trainer.store.reducer.finish
    kept: list[dict[str, Tensor]] = []

    def finish_and_break() -> None:
        finish()
        if trainer.step_done + 1 == broken_step and context.rank == broken_rank:
            memory = next(memory for memory in trainer.store.buckets if memory.gradients is not None)
            memory.owned_grads[0] = torch.inf

    trainer.store.reducer.finish = finish_and_break  # type: ignore[method-assign]
    try:
        results = []
        for step in range(1, steps + 1):
            if step == broken_step:
                kept.append(global_tensors(trainer, STATE))
            results.append(trainer.step())
            if step == broken_step:
                kept.append(global_tensors(trainer, STATE))
    finally:
        trainer.close()
    under_way = sum(memory.gathering is not None for memory in trainer.store.buckets)
    skipped, scales = [result.skipped for result in results], [result.loss_scale for result in results]
    return {
        **numbers(results),
        "skipped": skipped,
        "loss_scales": scales,
        "count": trainer.weight_updater.skipped,
        "kept": kept,
        "under_way": under_way,
    }


def communication_of_a_step(context: Any, config: dict[str, Any]) -> dict[str, Any]:
    """The communication of one step (not the first), counted by the mesh and independently by torch's dispatcher.

    `observed` counts every c10d operation that this process issued, whoever asked for it; `expected` is what the mesh's
    count amounts to on gloo, where a collective of n ranks is n - 1 sends and receives, and over tp one message in
    shared memory.
    """
    trainer = make_trainer(context, config)
    mesh, store = trainer.mesh, trainer.store
    axes = (mesh.tp, mesh.cp, mesh.dp, mesh.data, mesh.stage, mesh.world, mesh.pp, mesh.tied_pair)
    axes = (*axes, *mesh.replicas.values())
    sizes = {axis.name: axis.size for axis in axes if axis}
    try:
        trainer.step()
        settle(trainer)
        mesh.traffic.clear()
        shared, before = mesh.tp.shared, mesh.tp.shared.published if mesh.tp.shared else 0
        with profile() as recorded:
            trainer.step()
            settle(trainer)  # torch crashes where a message outlives the profiler that saw it start
        traffic = dict(mesh.traffic)
    finally:
        trainer.close()
    assert recorded.kineto_results is not None
    # `function_events` makes a tree of them, which takes long
    names = [event.name() for event in recorded.kineto_results.events()]
    observed = Counter(name for name in names if name.startswith("c10d::"))
    if shared is not None:
        observed["published"] = shared.published - before
    expected: Counter[str] = Counter()
    for (operation, axis), count in traffic.items():
        if operation in ("isend", "irecv"):
            expected["c10d::send" if operation == "isend" else "c10d::recv_"] += count
        elif operation == "hop":
            expected += Counter({"c10d::send": count, "c10d::recv_": count})
        elif axis == "tp":
            expected["published"] += count
        else:
            expected["c10d::send"] += count * (sizes[axis] - 1)
            expected["c10d::recv_"] += count * (sizes[axis] - 1)
    owned = [
        rectangle.segment
        for memory in store.buckets
        for rectangle, _ in store.rectangles_in(memory, memory.start, memory.stop)
    ]
    holds = {
        "partial": any(segment.grad_partial_axis is not None for segment in owned),
        "replicated": any(segment.replicas > 1 for segment in owned),
    }
    place = {"pp": mesh.pp.rank, "buckets": len(store.buckets)}
    return {"traffic": traffic, "observed": dict(observed), "expected": dict(expected), **holds, **place}
