"""The training loop: step, report, validate, save, stop. The file reads from top to bottom."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import fields
from time import monotonic
from typing import NamedTuple

import torch

from megalite.checkpoint import CheckpointError
from megalite.checkpoint.saver import Saver
from megalite.config.amounts import duration_seconds
from megalite.config.rampup import samples_after
from megalite.config.schema import Config
from megalite.launch.exit_status import ExitStatus
from megalite.monitoring.console import Console
from megalite.monitoring.metrics import MetricsWriter, StepMetrics, peak_memory_bytes, throughput
from megalite.monitoring.observers import Observer, numbers_of
from megalite.system.activity import AWAITING_SAVES, BETWEEN, REPORTING
from megalite.training.checkpointing import rate
from megalite.training.stop_requests import SaveTimer, StopRequest, requested_end, resize_requested
from megalite.training.trainer import StepResult, Trainer


def fit(
    trainer: Trainer, observers: Sequence[Observer] = (), clock: Callable[[], float] = monotonic
) -> ExitStatus:
    """Train until `train.steps`, a signal, the time limit or early stopping.

    Saves at the end and at every `checkpoint.interval`, or every `checkpoint.minutes`, and copies the state
    to memory at every `checkpoint.copy_interval`. Every rank calls it, inside a `Watchdog` if there are
    several.

    Args:
        clock: time in seconds, for `checkpoint.minutes`.

    Returns:
        DONE, STOPPED (SIGTERM, SIGUSR1, SIGUSR2, SIGHUP or the time limit) or INTERRUPTED (SIGINT), the same
        on every rank.
    """
    config, lead = trainer.config, trainer.mesh.rank == 0
    limit = duration_seconds(config.train.stop_after) if config.train.stop_after else None
    gc.collect()
    gc.freeze()  # long-lived objects are not traversed again
    gc.disable()
    recording = MetricsWriter(trainer.run_dir, trainer.step_done, config) if lead else nullcontext()
    console = Console(config.train.steps, config.logging.interval, start_step=trainer.step_done, enabled=lead)
    with StopRequest(limit, trainer.mesh.activity) as request, console, recording as writer:
        announce(trainer, console)
        mark_best(trainer)
        timer = SaveTimer(config.checkpoint, lead, clock)
        ended, resized = None, False
        while trainer.step_done < config.train.steps:
            due = Due.after(trainer.step_done + 1, config)
            results = run_step(trainer, observers, request, timer, wait=due.known)
            report_results(trainer, results, observers, console, writer)
            if bad := [result for result in results if result.streak >= config.faults.skip_limit]:
                go_back(trainer, bad[-1], timer, console, writer)
                continue
            requests = max((result.stop for result in results), default=0.0)
            ended, resized = requested_end(requests), resize_requested(requests)
            due = due._replace(timed=timer.due(results))
            validate_save_and_copy(trainer, due, ended is not None, resized, timer, console, writer)
            if ended is not None:
                console.message(
                    f"stopping after step {trainer.step_done}: "
                    f"{request.reason or 'requested by another rank'}"
                )
                break
            if due.validation and (early := stopped_early(trainer)) is not None:
                console.message(f"stopping early after step {trainer.step_done}: {early}")
                break
        for observer in observers:
            for line in observer.finish():
                console.message(line)
        status = ended or ExitStatus.DONE
        if trainer.step_done == config.train.steps:
            status = ExitStatus.DONE
        end(trainer, status, console, resized)
    return status


def end(trainer: Trainer, status: ExitStatus, console: Console, resized: bool) -> None:
    """Print how the run ends, and remove copies in memory that are not needed any more.

    Args:
        resized: whether it has stopped to continue on another number of ranks.
    """
    if status is ExitStatus.DONE:
        console.message(f"done: {trainer.run_dir}")
    elif resized:
        console.message("the state is kept, to continue on another number of ranks")
    else:
        load = "" if trainer.config.checkpoint.load == "auto" else " with --checkpoint.load auto"
        console.message(f"everything is saved: repeat the command{load} to resume")
    if trainer.copies is not None:
        trainer.copies.close()
        if status is ExitStatus.DONE or not resized:
            trainer.copies.remove()  # the disk has all of it


class Due(NamedTuple):
    """Actions that are due after a step."""

    validation: bool
    save: bool
    end: bool
    timed: bool = False  # a save, by checkpoint.minutes: known only after the step
    copy: bool = False

    @property
    def known(self) -> bool:
        """Whether the result of the step must be known first."""
        return self.validation or self.save or self.copy

    @staticmethod
    def after(step: int, config: Config) -> Due:
        end = step == config.train.steps
        return Due(
            _is_due(config.validation.interval, step, end),
            end or _is_due(config.checkpoint.interval, step, end),
            end,
            copy=_is_due(config.checkpoint.copy_interval, step, False),
        )


def announce(trainer: Trainer, console: Console) -> None:
    """Print how the run was resumed."""
    if trainer.step_done:
        console.message(f"resumed after step {trainer.step_done}, at sample {trainer.samples}")
    for note in trainer.notes:
        console.message(note)


def run_step(
    trainer: Trainer, observers: Sequence[Observer], request: StopRequest, timer: SaveTimer, wait: bool
) -> list[StepResult]:
    """Run one step with its observers. Return the results that have become available."""
    step, activity = trainer.step_done + 1, trainer.mesh.activity
    activity.step = step
    activity.enter(BETWEEN)
    for observer in observers:
        observer.before(step)
    trainer.faults.between_steps(step)
    # Read as late as possible: a signal that arrived during the hooks above must not cost another step.
    results = trainer.train_step(stop=request.value + timer.value, wait=wait)
    activity.enter(REPORTING)
    for observer in observers:
        observer.after(step)
    return results


def report_results(
    trainer: Trainer,
    results: Sequence[StepResult],
    observers: Sequence[Observer],
    console: Console,
    writer: MetricsWriter | None,
) -> None:
    """Print and record each result. Only rank 0 has a writer."""
    for result in results if writer is not None else ():
        metrics = measured(trainer, result)
        numbers = numbers_of(observers, metrics, result.of_model)
        console.step(metrics, result.fault, numbers)
        assert writer is not None
        writer.step(metrics, numbers)
        for line in (line for observer in observers for line in observer.lines(metrics)):
            console.message(line)


def go_back(
    trainer: Trainer, bad: StepResult, timer: SaveTimer, console: Console, writer: MetricsWriter | None
) -> None:
    """Return to the newest checkpoint from before the bad steps.

    Raises:
        FaultLimit: on every rank, if the run must end instead.
    """
    trainer.roll_back(bad)
    timer.rolled_back(trainer.step_done)
    mark_best(trainer)
    console.message(f"rolled back to step {trainer.step_done}, continuing with sample {trainer.samples}")
    if writer is not None:
        writer.rewind(trainer.step_done)


def validate_save_and_copy(
    trainer: Trainer,
    due: Due,
    stop: bool,
    resized: bool,
    timer: SaveTimer,
    console: Console,
    writer: MetricsWriter | None,
) -> None:
    """Validate, save and copy the state to memory as due after a step.

    Args:
        stop: whether the run has to stop.
        resized: whether it stops only to continue on another number of ranks, for which a copy is enough.
    """
    only_copy = resized and trainer.copies is not None
    validate_and_save(trainer, due, stop and not only_copy, timer, console, writer)
    if (due.copy or only_copy) and not due.end:
        copy(trainer, timer, console, last=only_copy)


def validate_and_save(
    trainer: Trainer, due: Due, stop: bool, timer: SaveTimer, console: Console, writer: MetricsWriter | None
) -> None:
    """Validate and save as due after a step.

    A run that has to stop saves first, because the sender of a signal may not wait for a validation. The best
    loss that a validation finds is saved with the next checkpoint, or immediately if the run ends.
    """
    lowest = due.validation and not stop and validate(trainer, console, writer)
    early = due.validation and stopped_early(trainer) is not None
    if (needed := due.save or stop or early or (lowest and trainer.config.checkpoint.keep_best)) or due.timed:
        save(trainer, timer, console, lowest, timed=not needed)
    if due.validation and stop:
        lowest = validate(trainer, console, writer)
        if follows_loss(trainer.config):
            save(trainer, timer, console, lowest)
    trainer.mesh.activity.enter(AWAITING_SAVES)
    report_saves(trainer.saver, console, last=due.end or stop or early)


def save(trainer: Trainer, timer: SaveTimer, console: Console, lowest: bool, timed: bool = False) -> None:
    """Start a save.

    Args:
        lowest: whether the validation loss is the lowest so far.
        timed: whether the save is only due by time.
    """
    begun = trainer.begin_save(lowest and trainer.config.checkpoint.keep_best, timed)
    timer.saved(trainer.step_done, begun.held)
    if trainer.config.checkpoint.async_save:
        console.message(f"saving {begun.directory} (training paused for {begun.held:.2f} s)")


def copy(trainer: Trainer, timer: SaveTimer, console: Console, last: bool) -> None:
    """Copy the state to memory, and report copies that have failed.

    Args:
        last: whether the run ends with the copy: it is saved on the disk instead if the copy fails.
    """
    from megalite.training import memory_copies  # only with checkpoint.copy_interval

    assert trainer.copies is not None
    begun = memory_copies.copy(trainer, wait=last)
    for line in memory_copies.report(trainer.copies):
        console.message(line)
    if last:
        if begun is None or begun.error is not None:
            save(trainer, timer, console, lowest=False)
        trainer.mesh.activity.enter(AWAITING_SAVES)
        report_saves(trainer.saver, console, last=True)


def validate(trainer: Trainer, console: Console, writer: MetricsWriter | None) -> bool:
    """Validate and report. Return whether the loss is the lowest so far, if the run tracks it."""
    from megalite.training import best  # not needed without validation
    from megalite.training.validation import losses

    results = losses(trainer)
    console.validation(trainer.step_done, results.mean, results.by_set, results.metrics)
    if writer is not None:
        writer.validation(trainer.step_done, results.mean, results.by_set, results.metrics)
    return follows_loss(trainer.config) and best.note(trainer, results)


def follows_loss(config: Config) -> bool:
    """Return whether the run keeps its best checkpoint or may stop early."""
    return config.checkpoint.keep_best or config.train.early_stopping_patience is not None


def stopped_early(trainer: Trainer) -> str | None:
    """Return the reason to end the run early, or None if it continues."""
    if not follows_loss(trainer.config):
        return None
    from megalite.training import best

    return best.stopped_early(trainer.config, trainer.loop_state)


def mark_best(trainer: Trainer) -> None:
    """Update the link `checkpoints/best` after a start or a rollback."""
    if trainer.config.checkpoint.keep_best and trainer.mesh.rank == 0:
        from megalite.training import best

        best.mark_again(trainer)


def report_saves(saver: Saver, console: Console, last: bool) -> None:
    """Report completed saves.

    A failed save only raises its error if it is the last one; otherwise the next save replaces it.
    """
    if last:
        saver.wait()
    ended = saver.take_ended()
    for save in ended:
        durable = f", on disk after {save.durable:.2f} s" if saver.options.async_save else ""
        if save.durable:
            console.message(
                f"saved {save.directory} (training paused for {save.held:.2f} s{durable})"
                f"{rate(save.bytes, save.durable)}"
            )
        if save.error is not None:
            if not isinstance(save.error, CheckpointError) or (
                last and save is ended[-1] and not save.durable
            ):
                raise save.error
            console.message(
                f"{save.error}\ncontinuing training"
                + ("" if save.durable else "; the next save will try again")
            )


def _is_due(interval: int | None, step: int, at_end: bool) -> bool:
    return interval is not None and (step % interval == 0 or at_end)


def measured(trainer: Trainer, result: StepResult) -> StepMetrics:
    """Return the result of a step with its speed, as rank 0 records it."""
    device = trainer.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    same = {
        field.name: getattr(result, field.name)
        for field in fields(StepMetrics)
        if hasattr(result, field.name)
    }
    batch = samples_after(trainer.config.train, result.step) - samples_after(
        trainer.config.train, result.step - 1
    )
    speed = throughput(trainer.config, result.seconds, trainer.mesh.world.size, name, batch)
    return StepMetrics(
        **same, **speed, step_time_s=result.seconds, peak_memory_bytes=peak_memory_bytes(device)
    )
