"""The training loop: step, report, validate, save, stop. It reads from top to bottom."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import fields

import torch

from megalite.activity import BETWEEN
from megalite.checkpoint import CheckpointError
from megalite.checkpoint.saver import Saver
from megalite.config.rules.training import duration_seconds
from megalite.monitoring.console import Console
from megalite.monitoring.metrics import MetricsWriter, StepMetrics, peak_memory_bytes
from megalite.monitoring.observer import Observer
from megalite.monitoring.throughput import throughput
from megalite.training.signals import StopRequest
from megalite.training.trainer import StepResult, Trainer
from megalite.training.watchdog import Watchdog


def fit(trainer: Trainer, observers: Sequence[Observer] = ()) -> None:
    """Train until `train.steps`, a signal or the time limit; save at the end and at every `checkpoint.interval`. Called by every rank."""
    config = trainer.config
    lead = trainer.mesh.rank == 0
    limit = duration_seconds(config.train.stop_after) if config.train.stop_after else None
    gc.collect()
    gc.freeze()  # what lives until the end is not walked again
    gc.disable()
    recording = MetricsWriter(trainer.run_dir, trainer.step_done, config) if lead else nullcontext()
    console = Console(config.train.steps, config.logging.interval, start_step=trainer.step_done, enabled=lead)
    activity = trainer.mesh.activity
    with StopRequest(limit) as request, console, recording as writer, Watchdog(config, trainer.mesh, trainer.run_dir):
        if trainer.step_done:
            console.message(f"resumed after step {trainer.step_done}, at sample {trainer.samples}")
        for note in trainer.notes:
            console.message(note)
        while trainer.step_done < config.train.steps:
            step = trainer.step_done + 1
            end = step == config.train.steps
            validating, saving = _is_due(config.validation.interval, step, end), end or _is_due(config.checkpoint.interval, step, end)
            activity.step = step
            activity.enter(BETWEEN)
            for each in observers:
                each.before(step)
            trainer.faults.between_steps(step)
            results = trainer.train_step(stop=request.reason is not None, wait=validating or saving)
            for each in observers:
                each.after(step)
            stop = any(result.stop for result in results)
            if writer is not None:
                for result in results:
                    metrics = measured(trainer, result)
                    numbers = {name: number for each in observers for name, number in each.numbers(metrics).items()}
                    console.step(metrics, result.fault, numbers)
                    writer.step(metrics, numbers)
            if bad := [result for result in results if result.streak >= config.faults.skip_limit]:
                trainer.roll_back(bad[-1])
                console.message(f"back after step {trainer.step_done}, on with sample {trainer.samples}")
                if writer is not None:
                    writer.rewind(trainer.step_done)
                continue
            if validating and not stop:
                validate(trainer, console, writer)
            if saving or stop:
                activity.enter("saving")
                save = trainer.begin_save()
                if config.checkpoint.async_save:
                    console.message(f"saving {save.directory}, held {save.held:.2f} s")
            if validating and stop:  # who sends a signal may not wait for it
                validate(trainer, console, writer)
            activity.enter("awaiting saves")
            report_saves(trainer.saver, console, last=end or stop)
            if stop:
                console.message(f"stopping after step {step}: {request.reason or 'another rank asked for it'}")
                break
        for each in observers:
            for line in each.finish():
                console.message(line)
        if trainer.step_done == config.train.steps:
            console.message(f"done: {trainer.run_dir}")


def validate(trainer: Trainer, console: Console, writer: MetricsWriter | None) -> None:
    loss = trainer.evaluate()
    console.validation(trainer.step_done, loss)
    if writer is not None:
        writer.validation(trainer.step_done, loss)


def report_saves(saver: Saver, console: Console, last: bool) -> None:
    """Tell which saves have ended. A failed one is an error only where it is the last: otherwise the next one makes up for it."""
    if last:
        saver.wait()
    ended = saver.take_ended()
    for save in ended:
        durable = f", on disk after {save.durable:.2f} s" if saver.options.async_save else ""
        if save.durable:
            console.message(f"saved {save.directory}, held {save.held:.2f} s{durable}")
        if save.error is not None:
            if not isinstance(save.error, CheckpointError) or (last and save is ended[-1] and not save.durable):
                raise save.error
            console.message(f"{save.error}\ntraining goes on" + ("" if save.durable else "; the next save tries again"))


def _is_due(interval: int | None, step: int, at_end: bool) -> bool:
    return interval is not None and (step % interval == 0 or at_end)


def measured(trainer: Trainer, result: StepResult) -> StepMetrics:
    """A step's result with its speed: what rank 0 writes."""
    device = trainer.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    same = {field.name: getattr(result, field.name) for field in fields(StepMetrics) if hasattr(result, field.name)}
    speed = throughput(trainer.config, result.seconds, trainer.mesh.world.size, name)
    return StepMetrics(**same, **speed, step_time_s=result.seconds, peak_memory_bytes=peak_memory_bytes(device))
