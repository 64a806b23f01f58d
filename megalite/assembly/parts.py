"""From a configuration and a mesh to the parts of a run: partition, schedule, parameters, stages, runtime,
optimizer.

The trainer, verification and generation build the same parts here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from megalite_kernels import backend

from megalite.assembly.plan import activation_shape, counts_tokens, specs_of, units_of
from megalite.assembly.plan import optimistic_step as optimistic_step
from megalite.assembly.plan import partition as partition
from megalite.assembly.plan import schedule as schedule
from megalite.assembly.plan import staggered_end as staggered_end
from megalite.config.amounts import duration_seconds
from megalite.config.schema import Config
from megalite.mesh.mesh import Layout, Mesh, MeshAxis
from megalite.model.adapters import with_adapters
from megalite.model.parameters import kv_replicas, model_specs
from megalite.model.stage import Stage
from megalite.optimizer.table import OPTIMIZERS, kinds_of
from megalite.parallel.microbatch import Microbatch
from megalite.parallel.pipeline.generator import placement
from megalite.parallel.pipeline.runtime import Runtime
from megalite.parallel.pipeline.send_recv_actions import edges
from megalite.parallel.sharding.offload import StateMemory, check_directory, state_memory
from megalite.parallel.sharding.store import ParameterStore, StoreOptions
from megalite.parallel.spec import Rectangle, parameter_count

if TYPE_CHECKING:
    from megalite.model.mtp import MultiTokenStatistics
    from megalite.model.routers import Routers

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def layout(config: Config) -> Layout:
    return Layout.of(config)


def offload_directory(config: Config) -> Path:
    return Path(config.parallel.offload_dir or Path(config.run.dir) / config.run.name / "offload")


def check_offload(config: Config, device: torch.device, share: float) -> None:
    """Raise ConfigError if the disk has no room for the optimizer state of this machine's ranks, which are a
    `share` of all."""
    parallel, dtype = config.parallel, DTYPES[config.train.precision]
    if parallel.offload != "disk":
        return
    accumulate_dtype = torch.promote_types(dtype, torch.float32)
    own_master = dtype != accumulate_dtype or (device.type != "cpu" and not parallel.offload_parameters)
    trained = [spec for spec in with_adapters(model_specs(config.model), config.lora) if spec.trainable]
    kinds = kinds_of(config)
    elements = sum(parameter_count([spec]) * (len(kinds(spec.segments[0])) + own_master) for spec in trained)
    wanted = elements * accumulate_dtype.itemsize * layout(config).replicate * share
    check_directory(offload_directory(config), int(wanted))


def mesh_options(config: Config) -> dict[str, Any]:
    """Arguments of a mesh, from the configuration, besides the layout."""
    plan = schedule(config, layout(config).microbatches)
    return {
        "kv_replicas": kv_replicas(config.model, config.parallel.tp),
        "tied": (plan.placement[0], plan.placement[-1])
        if config.model.tie_word_embeddings or config.model.mtp_layers
        else None,
        "channels": edges(plan),
        "staggered_end": staggered_end(config),
        "stage_axis": OPTIMIZERS[config.optimizer.name].over == "stage",
        "counts_tokens": counts_tokens(config),
        "background_saves": config.checkpoint.async_save,
    }


def make_mesh(config: Config) -> Mesh:
    """Create all groups and channels that this configuration needs. Collective over the world."""
    return Mesh(
        layout(config),
        **mesh_options(config),
        timeout=timedelta(seconds=duration_seconds(config.run.timeout) or 0),
    )


def microbatch_maker(config: Config, cp: MeshAxis) -> Callable[..., Microbatch]:
    """What makes microbatches of whole rows: with more than one cp rank, of this rank's part of them."""
    make: Callable[..., Microbatch] = Microbatch.of
    if cp.size > 1:
        from megalite.parallel.context.rows import Cut

        make = Cut.of(config, cp)
    if config.model.mtp_layers:
        from megalite.data.mtp_targets import WithMtpTargets

        return WithMtpTargets(make, config.model.mtp_layers)
    return make


@dataclass
class Parts:
    """One rank's part of the model, ready to run."""

    store: ParameterStore
    stages: dict[int, Stage]
    runtime: Runtime
    # None: no mixtures of experts, and no modules of multi-token prediction
    routers: Routers | MultiTokenStatistics | None

    def to_load(self) -> list[Rectangle]:
        """What a trained model computes with: its weights, and what a choice of experts adds to the
        probabilities."""
        return [*self.store.to_load(), *(self.routers.learned() if self.routers is not None else ())]


def build_parts(
    config: Config,
    mesh: Mesh,
    device: torch.device | str,
    training: bool = True,
    state: StateMemory | None = None,
) -> Parts:
    """Allocate this rank's parameters (zero until initialized or loaded; gradients only if it trains) and
    build the stages that use them.

    `state`: the memory of the optimizer state; default: as `parallel.offload` says.
    """
    parallel, train = config.parallel, config.train
    backend.select(train.kernels)
    dtype = DTYPES[train.precision]
    options = StoreOptions(
        zero=parallel.zero,
        dtype=dtype,
        grad_dtype=None if train.grad_dtype == "wide" else DTYPES[train.grad_dtype],
        reduce_dtype=None if parallel.reduce_dtype == "wide" else DTYPES[parallel.reduce_dtype],
        bucket_bytes=parallel.bucket_mb * 1e6,
        separate_embedding_grad=config.run.deterministic,
        offload_parameters=parallel.offload_parameters,
        training=training,
    )
    powersgd = None
    if parallel.powersgd_rank and mesh.data.size > 1:
        from megalite.parallel.sharding.powersgd import PowerSGD

        powersgd = PowerSGD(mesh, parallel.powersgd_rank, config.run.seed)
    state = state or state_memory(
        parallel.offload if training else "none", torch.device(device), offload_directory(config)
    )
    store = ParameterStore(
        specs_of(config, mesh.pp.rank), mesh, options, powersgd=powersgd, device=device, state=state
    )
    if config.lora.rank:
        from megalite.parallel.tensor.lora import attach_adapters

        attach_adapters(store.weights, config.lora, mesh.tp)
    own = placement(parallel.schedule, parallel.pp, parallel.virtual_stages)
    units = units_of(config)
    stages = {
        stage: Stage(config, units[stage], store.weights, store.gatherer, mesh, dtype)
        for stage, rank in enumerate(own)
        if rank == mesh.pp.rank
    }
    found = None
    if config.model.num_experts:
        from megalite.model.routers import Routers

        # Biases are frozen with the weights: PEFT's files of adapters have no place for them.
        rate = 0.0 if config.lora.rank else config.model.router_bias_rate
        found = Routers(replace(config.model, router_bias_rate=rate), stages.values(), store.device)
    routers: Routers | MultiTokenStatistics | None = found
    if config.model.mtp_layers:
        from megalite.model.mtp import MultiTokenStatistics

        routers = MultiTokenStatistics(config.model.mtp_layers, found, mesh, store.device)
    runtime = Runtime(
        stages, mesh, activation_shape(config), dtype, device, store.weight_grads, store.gatherer
    )
    return Parts(store, stages, runtime, routers)
