"""Memory of the model states on each rank, measured and as planned by `megalite.planner.api.model_states`.

It is measured between steps: weights, accumulated gradients, optimizer state (separate master weights, two
moments), and the errors and factors of PowerSGD. The additional memory during a step (activations, gathered
buckets, new errors of PowerSGD) is only planned (`megalite.planner.api.estimate`). State that is offloaded
to disk only uses memory for the windows that a step is working on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from torch import Tensor

from megalite.assembly import parts as build
from megalite.assembly import plan
from megalite.config.schema import Config
from megalite.model.adapter_parameters import trained_specs
from megalite.model.parameters import model_specs
from megalite.optimizer.state import OptimizerState
from megalite.parallel.pipeline.gather_actions import check_gathering
from megalite.parallel.pipeline.schedule import ActionKind
from megalite.parallel.sharding.bucket_buffers import BucketBuffers
from megalite.parallel.sharding.powersgd import CompressedMatrix
from megalite.parallel.sharding.store import ParameterStore
from megalite.parallel.spec import parameter_count
from megalite.planner.api import DeviceType, RankMemory, estimate, model_states
from megalite.training.trainer import Trainer


class ModelStates(NamedTuple):
    """Bytes of the model states on one rank."""

    weights: float
    gradients: float
    optimizer: float
    powersgd: float = 0.0  # errors and factors

    def __str__(self) -> str:
        parts = (
            f"{name} {value / 1e6:,.1f}"
            for name, value in zip(self._fields, self, strict=True)
            if value or name != "powersgd"
        )
        return f"{', '.join(parts)}, total {sum(self) / 1e6:,.1f} MB"


def _storages(state: OptimizerState) -> Iterator[tuple[str, str, int]]:
    """Yield (kind, place, bytes) of live storages.

    Each is counted once, under the first kind to which it belongs.
    """
    store, buckets = state.store, state.store.buckets
    gradients = [bucket.gradients for bucket in buckets if bucket.gradients is not None]
    kinds: dict[str, Iterable[Tensor | None]] = {
        "weights": (
            tensor for bucket in buckets for tensor in (bucket.weights, bucket.shard, *_codes(bucket))
        ),
        "gradients": (
            tensor for own in gradients for tensor in (own.full, own.owned, own.separate_embedding_grad)
        ),
        "optimizer": (*(bucket.master for bucket in buckets), *state.changing()),
        "powersgd": (tensor for matrix in _compressed(store) for tensor in (matrix.error, matrix.factor)),
    }
    seen: set[int] = set()
    for kind, tensors in kinds.items():
        for tensor in tensors:
            # not data_ptr, which is 0 for all tensors on the meta device
            if tensor is not None and tensor.untyped_storage()._cdata not in seen:
                seen.add(tensor.untyped_storage()._cdata)
                yield kind, store.state.place_of(tensor), tensor.untyped_storage().nbytes()


def states_of(state: OptimizerState) -> ModelStates:
    """Return the bytes of the model states that this optimizer state and its store keep between steps."""
    storages = list(_storages(state))
    return ModelStates(
        *(sum(size for kind, _, size in storages if kind == name) for name in ModelStates._fields)
    )


def measured(trainer: Trainer) -> ModelStates:
    """Return the allocated bytes of this rank's model states."""
    return states_of(trainer.optimizer.state)


def places(trainer: Trainer) -> dict[str, int]:
    """Return the allocated bytes by the place where they are stored: cuda, cpu or disk."""
    sizes: dict[str, int] = {}
    for _, place, size in _storages(trainer.optimizer.state):
        sizes[place] = sizes.get(place, 0) + size
    return sizes


def formula(trainer: Trainer) -> ModelStates:
    """Return the bytes of this rank's model states that the planner computes from the configuration."""
    return planned(trainer.config, trainer.mesh.pp.rank, _device(trainer), trainer.mesh.shard.rank)


def _device(trainer: Trainer) -> DeviceType:
    return "cuda" if trainer.device.type == "cuda" else "cpu"


def planned_memory(trainer: Trainer) -> RankMemory:
    """Return the planned memory of this rank."""
    world, rank = trainer.mesh.world.size, trainer.mesh.pp.rank
    return estimate(trainer.config, world, _device(trainer), trainer.schedule, [rank])[0]


def planned(config: Config, pp_rank: int, device: DeviceType, shard: int) -> ModelStates:
    """Return the planned bytes of a pipeline rank between steps, for this index on the shard axis."""
    states = model_states(config, plan.buckets_of(config, pp_rank), pp_rank, device, shard)
    return ModelStates(states.weights, states.gradients, states.master + states.moments, states.powersgd)


def _codes(bucket: BucketBuffers) -> Sequence[Tensor]:
    """Return the tensors of codes that are kept or gathered instead of a bucket's weights, if any are."""
    return () if bucket.codes is None else bucket.codes.tensors


def _compressed(store: ParameterStore) -> Sequence[CompressedMatrix]:
    return () if store.reducer.powersgd is None else store.reducer.powersgd.matrices


def gathering(trainer: Trainer, reshard: Literal["action", "step"]) -> tuple[float, float]:
    """Return the costs of ZeRO-3 per step for this rank's pipeline position.

    Returns:
        how often all of its weights are gathered (weighted by size), and the largest fraction of its buckets
        that is gathered at once.
    """
    config, rank = trainer.config, trainer.mesh.pp.rank
    config = replace(config, parallel=replace(config.parallel, zero3_reshard=reshard))
    schedule = build.schedule(config, build.layout(config).microbatches)
    sizes = [bucket.full.nbytes for bucket in trainer.store.buckets]
    gathered = sum(
        sizes[action.bucket]
        for action in schedule.actions[rank]
        if action.kind is ActionKind.GATHER and action.bucket is not None
    )
    return gathered / sum(sizes), check_gathering(schedule, rank) / len(sizes)


def _describe_frozen(trainer: Trainer) -> list[str]:
    """Describe the fraction of trainable parameters, and warn if the frozen ones are random."""
    config = trainer.config
    specs = trained_specs(model_specs(config.model), config)
    trained = parameter_count([spec for spec in specs if spec.trainable])
    if trained == trainer.parameters:
        return []
    lines = [
        f"trainable parameters: {trained:,} ({trained / trainer.parameters:.2%} of all); the "
        "others are frozen"
    ]
    if config.model.initial_weights is None and trainer.step_done == 0:
        lines.append(
            "the frozen parameters are randomly initialized: set model.init_from to the weights "
            "that the adapters are trained on, for example hf:DIR"
        )
    return lines


def _describe_copies(trainer: Trainer) -> list[str]:
    """Describe the additional memory of optimistic steps, see `training.weight_update`."""
    if not build.optimistic_step(trainer.config):
        return []
    size = sum(tensor.nbytes for tensor in trainer.optimizer.state.changing()) / 1e6
    return [
        "optimistic steps keep a copy of the optimizer state until they are confirmed: "
        f"{size:,.1f} MB on rank {trainer.mesh.rank}"
    ]


def _describe_loading(trainer: Trainer) -> list[str]:
    """Describe the memory in which a quantized base is read."""
    if trainer.config.lora.base == "none":
        return []
    size = planned_memory(trainer).loading / 1e6
    return [f"rank {trainer.mesh.rank} reads its base in at most {size:,.1f} MB more of CPU memory (planned)"]


def _describe_gathering(trainer: Trainer) -> list[str]:
    """Describe the costs of both values of `parallel.zero3_reshard`."""
    if trainer.store.zero < 3:
        return []
    ways: tuple[Literal["action", "step"], ...] = ("action", "step")
    costs = {way: gathering(trainer, way) for way in ways}
    listed = "; ".join(
        f"{way}: {times:.4g} times a step, at most {whole:.0%} of the buckets gathered"
        for way, (times, whole) in costs.items()
    )
    return [f"gathering of the weights of rank {trainer.mesh.rank} by parallel.zero3_reshard: {listed}"]


def report(trainer: Trainer) -> list[str]:
    """Return one line per group of ranks with equal numbers, and remarks for this rank. Collective.

    The lines about the groups are the same on every rank.
    """
    lies = places(trainer)
    where = ", ".join(f"{size / 1e6:,.1f} MB on {place}" for place, size in lies.items() if size)
    own = (
        measured(trainer),
        formula(trainer),
        planned_memory(trainer).total,
        f"; {where}" if trainer.config.parallel.offload != "none" else "",
    )
    everyone: list[Any] = [own]
    if trainer.mesh.world.size > 1:
        import torch.distributed as dist

        everyone = [None] * trainer.mesh.world.size
        dist.all_gather_object(everyone, own)
    ranks: dict[Any, list[int]] = {}
    for rank, states in enumerate(everyone):
        ranks.setdefault(states, []).append(rank)
    return [
        f"rank{'s' if len(group) > 1 else ''} {', '.join(map(str, group))}: {actual} (planned "
        f"{sum(expected) / 1e6:,.1f} MB; {peak / 1e6:,.1f} MB at a step's peak){where}"
        for (actual, expected, peak, where), group in ranks.items()
    ] + [
        *_describe_frozen(trainer),
        *_describe_loading(trainer),
        *_describe_gathering(trainer),
        *_describe_copies(trainer),
    ]
