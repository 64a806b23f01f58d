"""The trainer: one optimizer step reads from top to bottom in `Trainer.train_step`.

It knows nothing about transformers: the stages compute, the schedule orders, the store holds and reduces, the optimizer updates.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch

from megalite.activity import READING, REDUCING, UPDATING
from megalite.batch import IGNORE_INDEX, Microbatch
from megalite.build import parts as build
from megalite.checkpoint.agreement import raise_on_all_ranks
from megalite.checkpoint.saver import Save, Saver
from megalite.config.schema import Config
from megalite.data import dataset as datasets
from megalite.data.loader import Loader
from megalite.mesh import Mesh
from megalite.model.parameters import model_specs, with_adapters
from megalite.optimizer.adamw import AdamW
from megalite.optimizer.loss_scale import LossScale
from megalite.optimizer.norm import AllReduceNorm, ChainedNorm
from megalite.optimizer.schedule import learning_rate
from megalite.parallel.collectives import all_reduce
from megalite.parallel.spec import parameter_count
from megalite.training import checkpointing
from megalite.training.faults import Injection
from megalite.training.guard import Guard
from megalite.training.step_finalizer import OptimisticStepFinalizer, StepFinalizer, StepStatistics, Update

GARBAGE_INTERVAL = 100  # steps between collections: every rank pauses at the same step instead of at a random one


@dataclass(frozen=True)
class StepResult:
    """One optimizer step: the same numbers on every rank, but for the times, which are this rank's."""

    step: int  # 1-based
    loss: float  # mean over every valid token of the global batch
    grad_norm: float
    lr: float
    tokens: int  # valid tokens
    seconds: float
    bubble_fraction: float | None  # share of the pipeline's time in which its ranks do not compute; None where it is not measured
    loss_scale: float  # 1 but for fp16
    fault: str | None  # why nothing was updated, and with which samples
    streak: int  # steps skipped in a row, up to this one
    stop: bool  # some rank wants to stop

    @property
    def skipped(self) -> bool:
        return self.fault is not None


class Trainer:
    """One rank of a run.

    Args:
        config: complete and checked (`megalite.config.load`).
        mesh: from `build.make_mesh(config)`.
    """

    def __init__(self, config: Config, mesh: Mesh, device: torch.device | str = "cpu"):
        self.config, self.mesh, self.device = config, mesh, torch.device(device)
        self.run_dir = Path(config.run.dir) / config.run.name
        self.train_data, self.validation_data = datasets.build(config.data, config.run.seed)
        self.microbatches = build.layout(config).microbatches
        self.schedule = build.schedule(config, self.microbatches)
        self.forward_schedule = build.schedule(config, self.microbatches, forward_only=True)
        with raise_on_all_ranks(mesh):
            self.parts = build.build_parts(config, mesh, self.device)
            self.store = self.parts.store
            self.optimizer = AdamW(self.store, config.optimizer)
        self.saver = Saver(mesh, config.checkpoint)
        self.loss_scale = LossScale(config.fp16, active=config.train.precision == "fp16")
        self.guard, self.faults = Guard(config.faults), Injection(config.faults.inject, mesh)
        self.finalizer = self._make_finalizer()
        self.step_done = 0
        self.samples = 0  # global sample index of the next batch
        self.notes: list[str] = []  # what a user should know of how the run was resumed
        self.loader = self._loader(self.train_data)
        checkpointing.start_weights(self)
        self._check_plan()
        self.saver.reserve(checkpointing.to_save(self))

    def _make_finalizer(self) -> StepFinalizer:
        """How the norm is summed follows from the schedule, and whether a step waits for it from the options."""
        config, store = self.config, self.store
        norm = ChainedNorm(store, self.mesh) if build.staggered_end(config) else AllReduceNorm(store, self.mesh)
        finalizer = OptimisticStepFinalizer if build.optimistic_step(config) else StepFinalizer
        return finalizer(store, self.optimizer, norm, config.train.grad_clip, self.loss_scale, self.guard)

    def _loader(self, data: datasets.Dataset, samples: int | None = None) -> Loader:
        train, options = self.config.train, self.config.data
        return Loader(
            data,
            global_batch_size=train.global_batch_size,
            micro_batch_size=train.micro_batch_size,
            dp_rank=self.mesh.dp.rank,  # not of data: the cp ranks of a replica share its rows
            dp_size=self.mesh.dp.size,
            reset_positions=options.reset_positions,
            eod_mask_loss=options.eod_mask_loss,
            vocab_size=self.config.model.vocab_size,
            samples=samples,
        )

    @property
    def parameters(self) -> int:
        """Parameters of the whole model, adapters included."""
        return parameter_count(with_adapters(model_specs(self.config.model), self.config.lora))

    # ---- state

    def load_weights(self, directory: Path) -> None:
        """Take the weights alone, of any dtype, from a checkpoint, hf:DIR or an adapter; draw adapters that nothing gives."""
        checkpointing.load_weights(self, directory)

    def resume(self, directory: Path) -> None:
        """Continue where a checkpoint stopped, whatever topology saved it. Raises DamagedError on every rank where any finds damage."""
        checkpointing.resume(self, directory)

    def save(self) -> Path:
        """Write a checkpoint of the last step, published when this returns. Collective. Raises CheckpointError."""
        save = self.begin_save()
        self.saver.wait()
        if save.error is not None:
            raise save.error
        return save.directory

    def begin_save(self) -> Save:
        """As `save`, but for what `checkpoint.async_save` leaves to the background, and for errors: `saver.take_ended` tells them."""
        return checkpointing.begin_save(self)

    def roll_back(self, bad: StepResult) -> None:
        """Return to the newest checkpoint from before the bad steps and go on with the next samples. Raises FaultLimit on every rank."""
        checkpointing.roll_back(self, bad)

    def _check_plan(self) -> None:
        """Every rank must have built the same schedule: compare its hash (32 bits: fp64 sums them exactly) before anything is sent."""
        value = torch.tensor([int(self.schedule.hash[:8], 16)], dtype=torch.float64, device=self.device)
        total = all_reduce(value, self.mesh.world).wait()
        if total.item() != value.item() * self.mesh.world.size:
            raise RuntimeError(f"rank {self.mesh.rank} built another pipeline schedule than other ranks: were all given the same options?")

    # ---- one step

    def step(self, stop: bool = False) -> StepResult:
        """One optimizer step, done when this returns. `stop` tells the other ranks that this one wants to stop."""
        return self.train_step(stop, wait=True)[-1]

    def train_step(self, stop: bool = False, wait: bool = False) -> list[StepResult]:
        """One optimizer step; returns the results that are now known, in order, ordinarily one.

        Where the schedule allows optimistic steps, the result of a step is known during the next one, unless `wait` asks for it now: before
        a validation, a checkpoint and the end.
        """
        step, activity, store = self.step_done + 1, self.mesh.activity, self.store
        update = Update(step, learning_rate(self.config, step), perf_counter(), self.loss_scale.value, self.samples)

        activity.enter(READING)
        microbatches = self.loader.step(self.samples)  # of this dp rank
        update.tokens = self._valid_tokens(microbatches)  # of the global batch: fixed before the first backward
        microbatches = [microbatch.to(self.device) for microbatch in microbatches]

        # Forward and backward, in the schedule's order. Losses are scaled by 1 / tokens: gradients then add over microbatches and ranks.
        store.reducer.begin_step(len(microbatches), update.loss_scale)
        scale = update.loss_scale / max(update.tokens, 1) * self.faults.loss_factor(step)
        confirm = None if self.finalizer.pending is None else self.finalizer.confirm
        statistics, pace = self.parts.runtime.run(self.schedule, microbatches, step=step, loss_scale=scale, confirm=confirm)

        # Buckets are reduced during the backward; what remains is waited for, then partial and tied gradients are summed.
        activity.enter(REDUCING)
        store.reducer.finish()
        self.faults.spoil(step, self.finalizer.norm.chunks)

        # The gradient norm and the statistics in one collective; then clipping and AdamW on this rank's shard; then gathering the weights.
        activity.enter(UPDATING)
        loss = statistics["loss"] if self.mesh.tp.rank == 0 else 0.0  # tp ranks hold the same loss
        self.finalizer.finish(update, StepStatistics(loss, *pace, stops=float(stop)), wait)

        self.step_done, self.samples = step, self.samples + self.config.train.global_batch_size
        if step % GARBAGE_INTERVAL == 0:
            gc.collect()
        update.seconds = perf_counter() - update.started
        return [self._result(known) for known in self.finalizer.take_known()]

    def _result(self, update: Update) -> StepResult:
        totals = update.totals
        last = update.samples + self.config.train.global_batch_size - 1
        return StepResult(
            step=update.step,
            loss=update.loss,
            loss_scale=update.loss_scale,
            grad_norm=update.norm.item(),
            lr=update.lr,
            tokens=update.tokens,
            seconds=update.seconds,
            bubble_fraction=max(1 - totals.busy / (self.mesh.pp.size * totals.wall), 0.0) if totals.wall else None,
            fault=None if update.fault is None else f"{update.fault} (samples {update.samples} to {last})",
            streak=update.streak,
            stop=totals.stops > 0,
        )

    def _valid_tokens(self, microbatches: list[Microbatch]) -> int:
        """Tokens of the global batch whose loss counts. Where none can be ignored the number is known without asking."""
        config = self.config
        if not (config.data.eod_mask_loss or self.train_data.chat):
            return config.train.global_batch_size * config.data.sequence_length
        own = sum(int((microbatch.targets != IGNORE_INDEX).sum()) for microbatch in microbatches)
        if self.mesh.data.size == 1:
            return own
        return int(all_reduce(torch.tensor([own], device=self.device), self.mesh.data).wait().item())

    # ---- evaluation

    def evaluate(self) -> float:
        """Mean loss over every valid token of the validation batches: summed over ranks, then divided."""
        assert self.validation_data is not None, "data.validation is not set"
        self.finalizer.drain()
        plan = self.forward_schedule
        loader = self._loader(self.validation_data, self.validation_data.samples_per_epoch)
        has_loss = self.mesh.pp.rank == plan.placement[-1] and self.mesh.tp.rank == 0
        total = torch.zeros(2, dtype=torch.float64, device=self.device)  # summed loss, tokens
        try:
            for microbatches in loader.epoch(self.config.validation.batches):
                on_device = [microbatch.to(self.device) for microbatch in microbatches]
                statistics, _ = self.parts.runtime.run(plan, on_device, step=0, loss_scale=1.0, training=False)
                if has_loss:
                    total[0] += statistics["loss"]
                    total[1] += sum(int((microbatch.targets != IGNORE_INDEX).sum()) for microbatch in microbatches)
        finally:
            loader.close()
        total = all_reduce(total, self.mesh.world).wait()
        return (total[0] / total[1].clamp(min=1)).item()

    def close(self) -> None:
        """Leave nothing under way: a message that nobody awaits would be taken for the next one on its communicator."""
        self.saver.wait()
        self.finalizer.drain()
        self.store.gatherer.finish()
        self.loader.close()
