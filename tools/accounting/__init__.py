"""What the model's states take on each rank, measured beside the formula (Rajbhandari et al. 2020).

Between steps: weights, accumulated gradients, the optimizer's (master weights where they are apart, two moments), and what PowerSGD keeps
of the matrices that it compresses. While a step runs, add activations, with ZeRO-2 and 3 the buckets that are whole for the moment, and
with PowerSGD, until the step is known to be applied, its new errors. On disk lies
what is offloaded there, in memory but for the windows that a step walks through.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from torch import Tensor

from megalite.parallel.pipeline.gathering import check_gathering
from megalite.parallel.pipeline.schedule import Kind
from megalite.parallel.sharding.powersgd import Matrix
from megalite.training import build
from megalite.training.trainer import Trainer


class ModelStates(NamedTuple):
    """Bytes on one rank."""

    weights: float
    gradients: float
    optimizer: float
    powersgd: float = 0.0  # errors and factors

    def __str__(self) -> str:
        parts = (f"{name} {value / 1e6:,.1f}" for name, value in zip(self._fields, self, strict=True) if value or name != "powersgd")
        return f"{', '.join(parts)}, together {sum(self) / 1e6:,.1f} MB"


def _storages(trainer: Trainer) -> Iterator[tuple[str, str, int]]:
    """(kind, place, bytes) of the memory of live tensors, each counted once, under the first kind that it has."""
    buckets = trainer.store.buckets
    gradients = [memory.gradients for memory in buckets if memory.gradients is not None]
    kinds: dict[str, Iterable[Tensor | None]] = {
        "weights": (tensor for memory in buckets for tensor in (memory.weights, memory.shard)),
        "gradients": (tensor for each in gradients for tensor in (each.full, each.owned, each.apart)),
        "optimizer": (rectangle.tensor for rectangle in trainer.optimizer.to_load()),
        "powersgd": (tensor for matrix in _compressed(trainer) for tensor in (matrix.error, matrix.factor)),
    }
    seen: set[int] = set()
    for kind, tensors in kinds.items():
        for tensor in tensors:
            if tensor is not None and tensor.untyped_storage().data_ptr() not in seen:
                seen.add(tensor.untyped_storage().data_ptr())
                yield kind, trainer.store.state.place_of(tensor), tensor.untyped_storage().nbytes()


def measured(trainer: Trainer) -> ModelStates:
    storages = list(_storages(trainer))
    return ModelStates(*(sum(size for kind, _, size in storages if kind == name) for name in ModelStates._fields))


def places(trainer: Trainer) -> dict[str, int]:
    """The same bytes by where they lie: cuda, cpu, disk."""
    found: dict[str, int] = {}
    for _, place, size in _storages(trainer):
        found[place] = found.get(place, 0) + size
    return found


def formula(trainer: Trainer) -> ModelStates:
    """Bytes per parameter of this rank's part of the model, padding left out: whole, or divided by the ranks that share them."""
    store, shards = trainer.store, trainer.mesh.shard.size
    parameters = sum(slot.stop - slot.start for memory in store.buckets for slot in memory.layout.slots)
    memory = store.buckets[0]
    width, wide = memory.weights.itemsize, memory.master.itemsize
    grad_width = memory.owned_grads.itemsize if memory.gradients is not None else 0
    masters = 3 if memory.has_own_master else 2  # in full precision the weights are their own masters, unless state is offloaded
    return ModelStates(
        parameters * width / (shards if store.zero >= 3 else 1),
        parameters * grad_width / (shards if store.zero >= 2 else 1),
        parameters * wide * masters / (shards if store.zero >= 1 else 1),
        sum((matrix.part.numel + matrix.factor.numel()) * grad_width for matrix in _compressed(trainer)),
    )


def _compressed(trainer: Trainer) -> Sequence[Matrix]:
    return () if trainer.store.powersgd is None else trainer.store.powersgd.matrices


def gathering(trainer: Trainer, reshard: Literal["action", "step"]) -> tuple[float, float]:
    """What ZeRO-3 costs this rank's pipeline position in a step: how often it gathers its weights, and the most of its buckets that are
    whole at once, both in units of all of them."""
    config, rank = trainer.config, trainer.mesh.pp.rank
    config = replace(config, parallel=replace(config.parallel, zero3_reshard=reshard))
    plan = build.schedule(config, build.microbatch_count(config))
    sizes = [memory.layout.size for memory in trainer.store.buckets]
    gathered = sum(sizes[action.bucket] for action in plan.actions[rank] if action.kind is Kind.GATHER and action.bucket is not None)
    return gathered / sum(sizes), check_gathering(plan, rank) / len(sizes)


def _describe_copies(trainer: Trainer) -> list[str]:
    """What running ahead takes on top, see `training.closing`."""
    if trainer.closing.chain is None or not build.runs_ahead(trainer.config):
        return []
    size = trainer.optimizer.copy_size / 1e6
    return [f"steps that run ahead hold a copy of the optimizer state for a while: {size:,.1f} MB on rank {trainer.mesh.rank}"]


def _describe_gathering(trainer: Trainer) -> list[str]:
    """Both ways of freeing gathered weights, beside each other."""
    if trainer.store.residency is None:
        return []
    ways: tuple[Literal["action", "step"], ...] = ("action", "step")
    costs = {way: gathering(trainer, way) for way in ways}
    each = "; ".join(f"{way}: {times:.4g} times a step, at most {whole:.0%} of the buckets whole" for way, (times, whole) in costs.items())
    return [f"weights of rank {trainer.mesh.rank} are gathered, by parallel.zero3_reshard: {each}"]


def report(trainer: Trainer) -> list[str]:
    """A line for each group of ranks with equal numbers, the same on every rank, and what else this rank needs. Collective."""
    lies = places(trainer)
    where = ", ".join(f"{size / 1e6:,.1f} MB on {place}" for place, size in lies.items() if size)
    own = (measured(trainer), formula(trainer), f"; {where}" if trainer.config.parallel.offload != "none" else "")
    everyone: list[Any] = [own]
    if trainer.mesh.world.size > 1:
        import torch.distributed as dist

        everyone = [None] * trainer.mesh.world.size
        dist.all_gather_object(everyone, own)
    ranks: dict[Any, list[int]] = {}
    for rank, states in enumerate(everyone):
        ranks.setdefault(states, []).append(rank)
    return [
        f"rank{'s' if len(group) > 1 else ''} {', '.join(map(str, group))}: {found} (formula {sum(expected) / 1e6:,.1f} MB){where}"
        for (found, expected, where), group in ranks.items()
    ] + [*_describe_gathering(trainer), *_describe_copies(trainer)]
