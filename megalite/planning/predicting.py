"""What the planner expects of a given run: its step, on the device that it runs on."""

from __future__ import annotations

from collections.abc import Sequence

from megalite.build.plan import units_of
from megalite.config.dims import ParallelDims
from megalite.config.schema import Config, ConfigError
from megalite.model.cost import layer_costs
from megalite.planning.hardware import Device, HardwareError, find, found_as
from megalite.planning.step import Choice, Job, Stepper


def choice_of(config: Config) -> Choice:
    """The layout of a run whose dp is resolved."""
    parallel, train, dims = config.parallel, config.train, ParallelDims.of(config)
    return Choice(
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
    )


def estimated_costs(config: Config) -> list[float]:
    """FLOPs of the matrix products of the embedding, each layer and the head, for a token."""
    costs = layer_costs(config.model, config.data.sequence_length)
    return [costs.embedding, *costs.layers, costs.head]


def stage_sums(config: Config, costs: Sequence[float]) -> list[float]:
    """What each stage takes, given what the embedding, each layer and the head take."""
    units = units_of(config)
    return [float(sum(costs[unit] for unit in units[stage])) for stage in range(len(units))]


def device_of(config: Config, driver_name: str) -> Device | None:
    """What profiling.hardware names, else the table's device of what the driver calls it; None where there is neither.

    Raises ConfigError where the option names nothing that the planner knows.
    """
    if config.profiling.hardware is None:
        return found_as(driver_name)
    try:
        return find(config.profiling.hardware)
    except HardwareError as error:
        raise ConfigError(str(error).replace("--gpu", "profiling.hardware =")) from None


def step_seconds(config: Config, device: Device) -> float | None:
    """Seconds of a step; None for what is not modelled: adapters, and a precision of which the device's peak is not known."""
    if config.lora.rank or config.train.precision not in device.peaks:
        return None
    gradient_bytes = 2 if "bf16" in (config.parallel.reduce_dtype, config.train.grad_dtype) else 4
    sizes = (config.data.sequence_length, config.train.global_batch_size)
    job = Job(config.model, device, *sizes, config.train.precision, gradient_bytes=gradient_bytes)
    return Stepper(job).step(choice_of(config)).total
