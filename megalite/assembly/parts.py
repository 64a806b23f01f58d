"""Builds the parts of a run: parameters, stages and the runtime of the pipeline.

The trainer, verification and generation build the same parts here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megalite_kernels import backend

from megalite.assembly.fp8_matrices import fp8_matrices
from megalite.assembly.plan import activation_shape, counts_queries, specs_of, units_of
from megalite.assembly.plan import counts_tokens as counts_tokens
from megalite.assembly.plan import optimistic_step as optimistic_step
from megalite.assembly.plan import partition as partition
from megalite.assembly.plan import schedule as schedule
from megalite.assembly.plan import staggered_end as staggered_end
from megalite.config import run_files
from megalite.config.amounts import duration_seconds
from megalite.config.schema import Config
from megalite.config.sections.checkpoint import CheckpointConfig
from megalite.config.token_files import is_chat, prefixes
from megalite.mesh.mesh import Layout, Mesh, MeshAxis
from megalite.model.adapter_parameters import trained_specs
from megalite.model.kinds import block_kinds, replicas, windows
from megalite.model.mtp.losses import further_losses
from megalite.model.mtp.statistics import MtpStatistics
from megalite.model.objective.statistics import ObjectiveStatistics
from megalite.model.parameters import embedding_pair, model_specs
from megalite.model.stage import Stage
from megalite.model.statistics import JoinedStatistics, ModelStatistics
from megalite.objectives.find import objective_of
from megalite.objectives.objective import Objective
from megalite.optimizer.registry import alignment, entry_of, kinds_of
from megalite.parallel.microbatch import Microbatch
from megalite.parallel.pipeline.generator import placement
from megalite.parallel.pipeline.runtime import Runtime
from megalite.parallel.pipeline.send_recv_actions import edges
from megalite.parallel.sharding.offload import check_directory
from megalite.parallel.sharding.state_memory import StateMemory, state_memory
from megalite.parallel.sharding.store import ParameterStore, StoreOptions
from megalite.parallel.spec import Rectangle, parameter_count

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def layout(config: Config) -> Layout:
    return Layout.of(config)


def offload_directory(config: Config) -> Path:
    return Path(config.parallel.offload_dir or config.run.directory / run_files.OFFLOAD)


def check_offload(config: Config, device: torch.device, share: float) -> None:
    """Raise ConfigError if the disk has no room for the optimizer state of this machine's ranks.

    Args:
        share: the fraction of all ranks that are on this machine.
    """
    parallel, dtype = config.parallel, DTYPES[config.train.precision]
    if parallel.offload != "disk":
        return
    accumulate_dtype = torch.promote_types(dtype, torch.float32)
    elsewhere = device.type != "cpu" and not parallel.offload_parameters
    kinds, master, size = kinds_of(config), accumulate_dtype.itemsize, 0
    for spec in trained_specs(model_specs(config.model), config):
        if spec.trainable:
            own_master = elsewhere or (dtype != accumulate_dtype and not spec.at_least_fp32)
            elements = parameter_count([spec])
            size += sum(kind.bytes(elements, master) for kind in kinds(spec.segments[0]))
            size += elements * master * own_master
    required = size * layout(config).replicate * share
    check_directory(offload_directory(config), int(required))


def mesh_options(config: Config) -> dict[str, Any]:
    """Return the arguments of a mesh besides the layout."""
    plan = schedule(config, layout(config).microbatches)
    return {
        "replicas": replicas(config.model, config.parallel.tp),
        "tied": embedding_pair(config.model, plan.placement),
        "channels": edges(plan),
        "staggered_end": staggered_end(config),
        "stage_axis": entry_of(config.optimizer.name).exchange_axis == "stage",
        "counts_tokens": counts_tokens(config),
        "background": background_axes(config.checkpoint),
    }


def background_axes(options: CheckpointConfig) -> tuple[str, ...]:
    """Return the axes over which threads communicate during training."""
    copying = ("copying",) if options.copy_interval is not None else ()
    return ("saving", *copying) if options.async_save else ()


def make_mesh(config: Config) -> Mesh:
    """Create all groups and channels that this configuration needs. Collective over the world."""
    timeout = timedelta(seconds=duration_seconds(config.run.timeout) or 0)
    return Mesh(layout(config), **mesh_options(config), timeout=timeout)


def microbatch_maker(config: Config, cp: MeshAxis) -> Callable[..., Microbatch]:
    """Return the function that makes microbatches.

    With more than one cp rank, a microbatch has this rank's part of each row.
    """
    make: Callable[..., Microbatch] = Microbatch.of
    if cp.size > 1:
        from megalite.parallel.context.rows import Cut

        make = Cut.of(config, cp, windows(config.model))
    if objective_of(config) is not None:
        from megalite.model.objective.counting import WithTokenCounts

        make = WithTokenCounts(make)
    if counts_queries(config):
        from megalite.model.queries import WithQueries

        make = WithQueries(make, padded=any(map(is_chat, prefixes(config.data.train))))
    if further := further_losses(config.model):
        from megalite.model.mtp.targets import WithMtpTargets

        return WithMtpTargets(make, further)
    return make


@dataclass
class Parts:
    """One rank's part of the model, ready to run."""

    store: ParameterStore
    stages: dict[int, Stage]
    runtime: Runtime
    statistics: ModelStatistics | None  # None: nothing is reported but the loss

    def to_load(self) -> list[Rectangle]:
        """Return the tensors of a trained model: its weights, and the states that it computes with."""
        weights = self.store.to_load()
        return weights if self.statistics is None else weights + self.statistics.learned()


def build_parts(
    config: Config,
    mesh: Mesh,
    device: torch.device | str,
    training: bool = True,
    state: StateMemory | None = None,
    objective: Objective | None = None,
) -> Parts:
    """Allocate this rank's parameters (zero until initialized or loaded) and build the stages that use them.

    Args:
        training: whether to allocate gradients.
        state: the memory of the optimizer state; default: as `parallel.offload` says.
        objective: over sequences, of forwards without training, which then have scores.
    """
    parallel, train = config.parallel, config.train
    backend.select(train.kernels)
    dtype = DTYPES[train.precision]
    options = StoreOptions(
        zero=parallel.zero,
        dtype=dtype,
        grad_dtype=None if train.grad_dtype == "fp32" else DTYPES[train.grad_dtype],
        reduce_dtype=None if parallel.reduce_dtype == "fp32" else DTYPES[parallel.reduce_dtype],
        bucket_bytes=parallel.bucket_mb * 1e6,
        pad=alignment(config),
        separate_embedding_grad=config.run.deterministic,
        offload_parameters=parallel.offload_parameters,
        training=training,
    )
    powersgd = None
    if parallel.powersgd_rank and mesh.data.size > 1:
        from megalite.parallel.sharding.powersgd import PowerSGD

        powersgd = PowerSGD(mesh, parallel.powersgd_rank, config.run.seed)
    if state is None:
        offload = parallel.offload if training else "none"
        state = state_memory(offload, torch.device(device), offload_directory(config))
    specs = specs_of(config, mesh.pp.rank)
    store = ParameterStore(specs, mesh, options, powersgd=powersgd, device=device, state=state)
    if config.lora.rank:
        from megalite.parallel.tensor.lora import attach_adapters

        attach_adapters(store.weights, config.lora, mesh.tp)
    if train.fp8 != "none":
        from megalite.parallel.fp8 import attach_fp8

        attach_fp8(store, train, config.model.num_hidden_layers)
    units, objective = units_of(config), objective_of(config) if training else objective
    stages = {
        stage: Stage(config, units[stage], store.weights, store.gatherer, mesh, dtype, objective)
        for stage, rank in enumerate(placement(parallel.schedule, parallel.pp, parallel.virtual_stages))
        if rank == mesh.pp.rank
    }
    shape = activation_shape(config)
    make_runtime: Callable[..., Runtime] = Runtime
    if train.graphs and training:
        from megalite.parallel.pipeline.graphed_runtime import GraphedRuntime

        make_runtime = partial(GraphedRuntime, weights=store.weights.values())
    runtime = make_runtime(stages, mesh, shape, dtype, device, store.weight_grads, store.gatherer)
    return Parts(store, stages, runtime, _statistics(config, stages, mesh, store, objective))


def _statistics(
    config: Config, stages: dict[int, Stage], mesh: Mesh, store: ParameterStore, objective: Objective | None
) -> ModelStatistics | None:
    """Return the statistics of blocks, further losses, an objective and fp8 operands (`Parts.statistics`)."""
    parts, device = list[ModelStatistics](), store.device
    for kind in block_kinds(config.model):
        blocks = [block for stage in stages.values() for block in stage.blocks(kind.name)]
        if (own := kind.statistics(config, blocks, device)) is not None:
            parts.append(own)
    if further := further_losses(config.model):
        parts.append(MtpStatistics(further, mesh, device))
    if objective is not None:
        parts.append(ObjectiveStatistics(objective, mesh, device))
    if config.train.fp8 != "none":
        from megalite.model.fp8_finite import FiniteOperands

        names = [spec.name for spec in fp8_matrices(config)]
        parts.append(FiniteOperands(names, store.weights, device))
    if len(parts) <= 1:
        return parts[0] if parts else None
    return JoinedStatistics(parts)
