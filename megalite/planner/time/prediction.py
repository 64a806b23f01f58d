"""The planner's prediction for a given run: its step time on the device it runs on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megalite.assembly.plan import units_of
from megalite.config.dims import ParallelDims
from megalite.config.errors import ConfigError
from megalite.config.recompute import BUDGET
from megalite.config.schema import Config
from megalite.model.cost.flops import layer_costs
from megalite.planner.hardware.devices import Device, HardwareError, find_device, find_device_by_driver_name
from megalite.planner.time.step import LayoutChoice, PlannedJob, Stepper


def choice_of(config: Config) -> LayoutChoice:
    """Return the layout of a run; its dp must be resolved."""
    parallel, train, dims = config.parallel, config.train, ParallelDims.of(config)
    return LayoutChoice(
        tp=parallel.tp,
        pp=parallel.pp,
        dp=dims.dp,
        schedule=parallel.schedule,
        virtual_stages=dims.virtual_stages,
        zero=parallel.zero,
        micro_batch_size=train.micro_batch_size,
        recompute=train.recompute,
        offload=parallel.offload,
        offload_parameters=parallel.offload_parameters,
        sequence_parallel=parallel.sequence_parallel,
        cp=parallel.cp,
        context=parallel.context,
        context_inner=parallel.context_inner,
        ep=parallel.ep,
        expert_dispatch=parallel.expert_dispatch,
        context_parts=parallel.context_parts,
        dp_shard=parallel.dp_shard,
    )


def unit_flops(config: Config) -> list[float]:
    """Return the matmul FLOPs per token of the embedding, each layer and the head."""
    costs = layer_costs(config.model, config.data.sequence_length)
    return [costs.embedding, *costs.layers, costs.head]


def sum_by_stage(config: Config, costs: Sequence[float]) -> list[float]:
    """Return the cost of each stage, given the costs of the embedding, each layer and the head."""
    units = units_of(config)
    return [float(sum(costs[unit] for unit in units[stage])) for stage in range(len(units))]


def device_of_run(config: Config, driver_name: str) -> Device | None:
    """Return the device of profiling.hardware, or else the one in the table with the driver's name.

    None if there is neither.

    Raises ConfigError if the planner does not know the device that the option names.
    """
    try:
        name = config.profiling.hardware
        device = find_device_by_driver_name(driver_name) if name is None else find_device(name)
    except HardwareError as error:
        raise ConfigError(str(error).replace("--gpu", "profiling.hardware =")) from None
    if device is None or config.train.fp8 == "none":
        return device
    return replace(device, compared=False)  # no run with such matmuls has been


def step_seconds(config: Config, device: Device) -> float | None:
    """Predict the seconds per step; None if the device's peak at the run's precision is unknown."""
    if config.train.precision not in device.peaks:
        return None
    if config.train.recompute == BUDGET:
        from megalite.planner.budget.decision import resolve_budget

        config = resolve_budget(config, "cpu" if device.cpu else "cuda", device.memory)
    return Stepper(PlannedJob.of(config, device)).step(choice_of(config)).total
