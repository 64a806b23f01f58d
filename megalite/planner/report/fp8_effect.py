"""What fp8 matmuls (`train.fp8`) change in the predicted time of a step, as lines for users."""

from __future__ import annotations

from dataclasses import replace

from megalite.config.recompute import BUDGET
from megalite.config.schema import Config
from megalite.parallel.fp8_choice import NO_FP8
from megalite.planner.budget.decision import resolve_budget
from megalite.planner.time.prediction import choice_of, device_of_run
from megalite.planner.time.step import LayoutChoice, PlannedJob, Stepper


def fp8_effect(job: PlannedJob, choice: LayoutChoice) -> list[str]:
    """Return a line with the step times with and without fp8; nothing without fp8."""
    times = Stepper(job).operations.fp8_times
    if job.fp8.recipe == "none" or times is None:
        return []
    plain = Stepper(replace(job, fp8=NO_FP8)).step(choice).total
    seconds = Stepper(job).step(choice).total
    faster = f"{plain / seconds:.2f} times as fast" if seconds <= plain else "slower"
    line = f"fp8 ({job.fp8.recipe}): {seconds:.4g} s per step, {plain:.4g} s in {job.precision}: {faster}."
    if times.emulated:
        rounded = f"operands are rounded to fp8 and multiplied in {times.wider}"
        if job.device.cpu:
            return [f"{line} On a CPU, {rounded}."]
        return [
            f"{line} {job.device.name} has no such matmuls, so that a run is rejected unless train.kernels "
            f"is torch: then {rounded}."
        ]
    return [f"{line} The rate of fp8 matmuls is an estimate from published times of large matmuls."]


def fp8_effect_of_run(config: Config) -> list[str]:
    """Return the line for a run on the device that profiling.hardware names; nothing if it names none."""
    device = device_of_run(config, "")
    if config.train.fp8 == "none" or device is None or config.train.precision not in device.peaks:
        return []
    if config.train.recompute == BUDGET:
        config = resolve_budget(config, "cpu" if device.cpu else "cuda", device.memory)
    return fp8_effect(PlannedJob.of(config, device), choice_of(config))
