"""The trainer: `Trainer.train_step` runs one optimizer step from top to bottom.

The trainer is independent of the architecture of the model. Stages compute, the schedule orders their
actions, the store holds weights and reduces gradients, and the optimizer updates.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from megalite.assembly import parts as build
from megalite.checkpoint.agreement import raise_on_all_ranks
from megalite.checkpoint.saver import Save, Saver
from megalite.config.extensions import load_extensions
from megalite.config.rampup import batch_size
from megalite.config.schema import Config
from megalite.data import dataset as datasets
from megalite.data.loader import Loader
from megalite.mesh.mesh import Mesh
from megalite.model.adapter_parameters import total_parameters
from megalite.model.statistics import CAUSE
from megalite.objectives.find import objective_of
from megalite.optimizer import registry as optimizers
from megalite.optimizer.averaging import WeightAverage
from megalite.optimizer.loss_scale import LossScale
from megalite.optimizer.norm import AllReduceNorm, ChainedNorm
from megalite.optimizer.schedule import learning_rate
from megalite.optimizer.state import OptimizerState
from megalite.parallel.collectives import all_reduce, meet
from megalite.parallel.microbatch import IGNORE_INDEX, Microbatch
from megalite.parallel.pipeline.schedule import Schedule
from megalite.system.activity import READING, REDUCING, STARTING, UPDATING
from megalite.training import checkpointing, reference
from megalite.training.bad_steps import BadStepPolicy
from megalite.training.fault_injection import FaultInjection
from megalite.training.weight_update import (
    OptimisticWeightUpdater,
    OptimizerStep,
    StepStatistics,
    WeightUpdater,
)

# steps between garbage collections; all ranks pause at the same step, so that none delays the others
GARBAGE_INTERVAL = 100


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step. It is the same on every rank, except for `seconds`."""

    step: int  # 1-based
    loss: float  # mean over every valid token of the global batch
    grad_norm: float
    lr: float
    tokens: int  # valid tokens
    seconds: float
    # idle fraction of the pipeline's time, over all ranks; None if not measured
    bubble_fraction: float | None
    loss_scale: float  # 1 unless fp16
    fault: str | None  # why the update was skipped, and the samples of the step; None if it was applied
    streak: int  # consecutive skipped steps, this one included
    stop: float  # the sum of the ranks' requests to stop or save (`training.stop_requests`)
    of_model: Mapping[str, Any]  # metrics of its blocks and further losses (`model.statistics`)

    @property
    def skipped(self) -> bool:
        return self.fault is not None


class Trainer:
    """Trainer of one rank of a run.

    Args:
        config: resolved and validated configuration (`megalite.config.load`).
        mesh: from `build.make_mesh(config)`.
        device: where weights, gradients and activations are stored.
        restarted: whether the job was started again. It then continues from its own checkpoint, regardless of
            checkpoint.load.
    """

    def __init__(
        self, config: Config, mesh: Mesh, device: torch.device | str = "cpu", restarted: bool = False
    ):
        load_extensions(config.run.extensions)
        if config.train.recompute == "budget":
            from megalite.training.recompute_budget import agreed

            config = agreed(config, mesh, torch.device(device))
        self.config, self.mesh, self.device = config, mesh, torch.device(device)
        self.run_dir = config.run.directory
        with raise_on_all_ranks(mesh):  # nodes may have different files
            self.train_data, self.validation_data = datasets.build(config.data, config.run.seed)
            reference.attach_stored(config, self.train_data, self.validation_data)
        self.microbatches = build.layout(config).microbatches
        self._plans = dict[tuple[int, bool], Schedule]()
        self.schedule = self.plan(self.microbatches)
        self.forward_schedule = self.plan(self.microbatches, forward_only=True)
        with raise_on_all_ranks(mesh):
            self.parts = build.build_parts(config, mesh, self.device)
            self.store = self.parts.store
            state = OptimizerState(self.store, optimizers.kinds_of(config), config.run.seed)
            self.optimizer = optimizers.create(config, state)
        decay = config.train.ema_decay
        self.objective = objective_of(config)  # None: the cross-entropy of the next token
        self.other = reference.other_of(self)  # None: the objective needs no other model
        self.average = None if decay is None else WeightAverage(state, decay)
        self.saver = Saver(mesh, config.checkpoint)
        self.loss_scale = LossScale(config.fp16, active=config.train.precision == "fp16")
        self.bad_steps, self.faults = BadStepPolicy(config.faults), FaultInjection(config.faults.inject, mesh)
        self.weight_updater = self._make_weight_updater()
        self.step_done = 0  # 1-based number of the last step
        self.samples = 0  # global index of the first sample of the next batch
        self.loop_state: dict[str, Any] = {}  # of the training loop, which checkpoints keep (`training.best`)
        self.notes: list[str] = []  # messages for the user about how the run was resumed
        self.loader = self.loader_of(self.train_data)
        if config.train.rampup_batch_size is not None:
            self.loader.size = partial(batch_size, config.train)
        self.copies = checkpointing.copies_of(self)  # in memory; None: there are none
        checkpointing.start_weights(self, restarted)  # may resume: sets step_done and samples
        checkpointing.reserve(self)
        self._check_plan()  # before the first pipeline message: a mismatch would hang

    def _make_weight_updater(self) -> WeightUpdater:
        """Choose how the norm is summed, and whether a step waits for it.

        The schedule determines the former, the options the latter.
        """
        config, store = self.config, self.store
        reduction = ChainedNorm if build.staggered_end(config) else AllReduceNorm
        norm = reduction(store, self.mesh)
        updater = OptimisticWeightUpdater if build.optimistic_step(config) else WeightUpdater
        return updater(
            store, self.optimizer, self.average, norm, config.train.grad_clip, self.loss_scale, self.bad_steps
        )

    def loader_of(self, data: datasets.Dataset, samples: int | None = None) -> Loader:
        train, options = self.config.train, self.config.data
        loader = Loader(
            data,
            global_batch_size=train.global_batch_size,
            micro_batch_size=train.micro_batch_size,
            dp=self.mesh.coordinates["dp"],
            reset_positions=options.reset_positions,
            eod_mask_loss=options.eod_mask_loss,
            vocab_size=self.config.model.vocab_size,
            make=build.microbatch_maker(self.config, self.mesh.cp),
            samples=samples,
        )
        loader.mismatches = self.objective is not None and self.objective.needs_baseline
        return loader

    @property
    def parameters(self) -> int:
        """Number of parameters of the whole model, including adapters."""
        return total_parameters(self.config.model, self.config.lora)

    # ---- state

    def resume(self, directory: Path) -> None:
        """Resume from a checkpoint saved under any topology.

        Raises:
            DamagedError: on every rank, if any rank finds damage.
        """
        checkpointing.resume(self, directory)

    def save(self) -> Path:
        """Write a checkpoint of the last step, and return once it is published. Collective.

        Raises:
            CheckpointError: the checkpoint could not be saved.
        """
        save = self.begin_save()
        self.saver.wait()
        if save.error is not None:
            raise save.error
        return save.directory

    def begin_save(self, best: bool = False, timed: bool = False) -> Save:
        """Start a save, which continues in the background with `checkpoint.async_save`.

        Errors are returned by `saver.take_ended`.

        Args:
            best: whether this checkpoint has the lowest validation loss so far.
            timed: whether `checkpoint.minutes` is the only reason to save.
        """
        return checkpointing.begin_save(self, best, timed)

    def roll_back(self, bad: StepResult) -> None:
        """Resume the newest checkpoint from before the bad steps, and continue with the next samples.

        Raises:
            FaultLimit: on every rank, if the run cannot roll back.
        """
        checkpointing.roll_back(self, bad)

    def _check_plan(self) -> None:
        """Check that all ranks have built the same schedule. Collective.

        The ranks compare 32 bits of its hash, which fp64 sums exactly.
        """
        meet(self.mesh)  # reading and preparing may have taken some ranks longer
        self.mesh.activity.enter(REDUCING)
        value = torch.tensor([int(self.schedule.hash[:8], 16)], dtype=torch.float64, device=self.device)
        total = all_reduce(value, self.mesh.world).wait()
        if total.item() != value.item() * self.mesh.world.size:
            raise RuntimeError(
                f"The pipeline schedule of rank {self.mesh.rank} does not match those of the "
                "other ranks. Check that all ranks are started with the same options."
            )
        self.mesh.activity.enter(STARTING)

    def plan(self, microbatches: int, forward_only: bool = False) -> Schedule:
        """Return the schedule of a step. During a ramp-up, steps have fewer microbatches."""
        key = microbatches, forward_only
        if key not in self._plans:
            self._plans[key] = build.schedule(self.config, *key)
        return self._plans[key]

    # ---- one step

    def step(self, stop: float = 0.0) -> StepResult:
        """Run one optimizer step and wait for its result.

        Args:
            stop: this rank's request. The result contains the sum over all ranks.
        """
        return self.train_step(stop, wait=True)[-1]

    def train_step(self, stop: float = 0.0, wait: bool = False) -> list[StepResult]:
        """Run one optimizer step. Return the results that are available, in order; usually one.

        With optimistic steps (`OptimisticWeightUpdater`) the result of a step becomes available during the
        next step, unless `wait` is set, as before a validation, a checkpoint or the end of the run.
        """
        number, activity, store = self.step_done + 1, self.mesh.activity, self.store
        lr, started = learning_rate(self.config, number), perf_counter()
        step = OptimizerStep(number, lr, started, self.loss_scale.value, self.samples)

        activity.enter(READING)
        microbatches = self.loader.step(self.samples)  # of this dp rank: tokens and targets [seq, batch]
        # of the global batch: known before the first backward, which divides by it
        step.tokens = self._valid_tokens(microbatches)
        microbatches = [microbatch.to(self.device) for microbatch in microbatches]
        if self.other is not None:
            self.other.run(microbatches)

        # Forward and backward, in the schedule's order. Losses are scaled by 1 / tokens, so that gradients
        # are plain sums over microbatches and ranks. The weights may still be those of an unconfirmed step:
        # `confirm` is called after the first forwards.
        store.reducer.begin_step(len(microbatches), step.loss_scale)  # the first contributions then overwrite
        scale = step.loss_scale / max(step.tokens, 1) * self.faults.loss_factor(number)
        confirm = None if self.weight_updater.pending is None else self.weight_updater.confirm
        statistics, pace = self.parts.runtime.run(
            self.plan(len(microbatches)), microbatches, step=number, loss_scale=scale, confirm=confirm
        )

        # Reductions start during the backward, bucket by bucket. Wait for the rest, then sum over replicas,
        # tp-partial and tied copies: the norm needs complete gradients. Norm and optimizer hold views of them
        # (`bucket.owned_grads`): none is passed on below.
        activity.enter(REDUCING)
        store.reducer.finish()
        self.faults.spoil(number, self.weight_updater.norm.chunks)

        # Sum the gradient norm and the statistics together, clip, update this rank's shard, and start the
        # all-gather of the weights.
        activity.enter(UPDATING)
        # tp ranks hold the same loss: the sum over the world counts it once
        loss = statistics["loss"] if self.mesh.tp.rank == 0 else 0.0
        of_model = None if self.parts.statistics is None else self.parts.statistics.own(statistics)
        own = StepStatistics(loss, *pace, stops=stop, model=of_model)
        self.weight_updater.finish(step, own, wait)

        self.step_done, self.samples = number, self.samples + self.loader.size(self.samples)
        if number % GARBAGE_INTERVAL == 0:
            gc.collect()
        step.seconds = perf_counter() - step.started
        return [self._result(known) for known in self.weight_updater.take_known()]

    def _result(self, step: OptimizerStep) -> StepResult:
        totals, fault = step.totals, step.fault
        bubble = 1 - totals.busy / (self.mesh.pp.size * totals.wall) if totals.wall else None
        statistics, metrics = self.parts.statistics, dict[str, Any]()
        if statistics is not None:
            assert totals.model is not None, "the totals of a step are known before anything learns from it"
            metrics = statistics.learn(totals.model, step.tokens, fault is None)
        if fault is not None:
            last, cause = step.samples + self.loader.size(step.samples) - 1, metrics.pop(CAUSE, None)
            origin = "" if cause is None else f", beginning with {cause}"
            fault = f"{fault}{origin} (samples {step.samples} to {last})"
        return StepResult(
            step=step.number,
            loss=step.loss,
            loss_scale=step.loss_scale,
            grad_norm=step.norm.item(),
            lr=step.lr,
            tokens=step.tokens,
            seconds=step.seconds,
            bubble_fraction=None if bubble is None else max(bubble, 0.0),
            fault=fault,
            streak=step.streak,
            stop=totals.stops,
            of_model=metrics,
        )

    def _valid_tokens(self, microbatches: list[Microbatch]) -> int:
        """Return the number of tokens in the global batch that have a target.

        What the loss of an objective over sequences is divided by is counted as well; and where tokens are
        counted and a loss needs them, those that are no padding.
        """
        tokens = self._count_targets(microbatches)
        if self.objective is not None:
            from megalite.model.objective.counting import count_sequences

            count_sequences(microbatches, self.objective, tokens, self.mesh)
        if microbatches[0].queries is not None and build.counts_tokens(self.config):
            from megalite.model.queries import count_queries

            count_queries(microbatches, tokens, self.mesh.counting)
        return tokens

    def _count_targets(self, microbatches: list[Microbatch]) -> int:
        """Return the number of tokens in the global batch that have a target.

        If no target can be ignored, this is a constant and requires no all-reduce. Microbatches are still in
        CPU memory here, and the sum is computed there as well, so that the host does not wait for the device.
        """
        config = self.config
        if microbatches[0].mtp_targets is not None:
            from megalite.model.mtp.targets import count_valid

            return count_valid(microbatches, self.mesh.counting)
        if not (config.data.eod_mask_loss or self.train_data.chat):  # as `assembly.plan.counts_tokens`
            return self.loader.size(self.samples) * config.data.sequence_length
        own = torch.tensor(
            [sum(int((microbatch.targets != IGNORE_INDEX).sum()) for microbatch in microbatches)]
        )
        return int(all_reduce(own, self.mesh.counting).wait())

    # ---- evaluation

    def evaluate(self) -> float:
        """Return the mean loss over all valid tokens of all validation sets. Collective."""
        from megalite.training.validation import losses  # not needed without validation

        return losses(self).mean

    def drain(self) -> None:
        """Wait for the pending step, the gathers in flight and the device. Collective.

        Afterwards only the host is working.
        """
        self.mesh.activity.enter(UPDATING)
        self.weight_updater.drain()
        self.store.gatherer.finish()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Wait for all operations in flight.

        A message that is not awaited would be matched with the next one on its communicator.
        """
        self.saver.wait()
        self.weight_updater.drain()
        self.store.gatherer.finish()
        self.loader.close()
