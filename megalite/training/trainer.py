"""The trainer: one optimizer step reads from top to bottom in `Trainer.step`.

It knows nothing about transformers: the stages compute, the schedule orders, the store holds and reduces, the optimizer updates.
"""

from __future__ import annotations

import gc
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter

import torch

from megalite import checkpoint
from megalite.activity import READING, REDUCING, UPDATING
from megalite.batch import IGNORE_INDEX, Microbatch
from megalite.build import parts as build
from megalite.checkpoint import CheckpointError, DamagedError
from megalite.checkpoint.agreement import all_or_none, on_rank_0
from megalite.checkpoint.saver import Save, Saver
from megalite.config.load import to_dict
from megalite.config.schema import Config
from megalite.data import dataset as datasets
from megalite.data.loader import Loader
from megalite.mesh import Mesh
from megalite.model.parameters import model_specs, with_adapters
from megalite.optimizer.adamw import AdamW
from megalite.optimizer.loss_scale import LossScale
from megalite.optimizer.schedule import learning_rate
from megalite.parallel.collectives import all_reduce
from megalite.parallel.sharding.offload import OffloadError
from megalite.parallel.spec import Rectangle, parameter_count
from megalite.training.closing import Closing, Update
from megalite.training.faults import Injection, restarts
from megalite.training.guard import Guard
from megalite.training.resuming import changed_compression, check_resume, is_same_run, without_adapters

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
        with all_or_none(mesh):
            self.parts = build.build_parts(config, mesh, self.device)
            self.store = self.parts.store
            self.optimizer = AdamW(self.store, config.optimizer)
        self.saver = Saver(mesh, config.checkpoint)
        self.loss_scale = LossScale(config.fp16, active=config.train.precision == "fp16")
        self.guard, self.faults = Guard(config.faults), Injection(config.faults.inject, mesh)
        clip, chained = config.train.grad_clip, build.ends_in_turn(config)
        self.closing = Closing(self.store, self.optimizer, mesh, clip, self.loss_scale, self.guard, chained=chained)
        self.step_done = 0
        self.samples = 0  # global sample index of the next batch
        self.notes: list[str] = []  # what a user should know of how the run was resumed
        self.loader = self._loader(self.train_data)
        self._start_weights()
        self._check_plan()
        self.saver.reserve(self._to_save())

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

    def _start_weights(self) -> None:
        """Resume, warm-start or draw the weights."""
        option = self.config.checkpoint.load
        if restarts() and self._has_saved():
            option = "auto"
        if option not in ("auto", "none"):
            self.resume(Path(option))
        elif option == "auto" and self._resume_newest():
            return
        elif self.config.model.init_from is not None:
            self.load_weights(Path(self.config.model.init_from))
        else:
            self.store.initialise(self.config.run.seed)

    def _has_saved(self) -> bool:
        """Whether the run's newest checkpoint is of these very options, but for the layout: a job that is restarted goes on with its own,
        and not once more with what `checkpoint.load` names for its first start. Collective."""
        found, _ = checkpoint.history(self.run_dir / "checkpoints", self.mesh)

        def look() -> bool:
            for directory in found:
                with suppress(DamagedError):
                    return is_same_run(self.config, checkpoint.manifest_of(directory).state["config"])
            return False

        return on_rank_0(self.mesh, look)

    def _resume_newest(self) -> bool:
        """Continue from the newest checkpoint of the run that is whole; False where it has none at all. Damaged ones go to the notes."""
        checkpoints = self.run_dir / "checkpoints"
        found, strange = checkpoint.history(checkpoints, self.mesh)
        problems = [strange] if strange else []
        for directory in found:
            try:
                self.resume(directory)
            except DamagedError as error:
                problems.append(str(error))
            else:
                self.notes += [*problems, f"continuing from {directory}"] if problems else []
                return True
        if problems:
            listed = "\n  ".join(problems)
            way_out = "Put one of them back, or start afresh with another run.name, or with checkpoint.load = none, which overwrites them."
            raise DamagedError(f"no checkpoint in {checkpoints} can be used:\n  {listed}\n{way_out}")
        return False

    def _checked(self, directory: Path) -> checkpoint.Manifest:
        """What a checkpoint holds, after checking every byte of it where that is asked for. Collective."""
        with all_or_none(self.mesh, CheckpointError):
            manifest = checkpoint.manifest_of(directory)
            if self.config.checkpoint.verify == "full":
                manifest.verify(self.mesh.world.rank, self.mesh.world.size)
        return manifest

    def load_weights(self, directory: Path) -> None:
        """Take the weights alone, of any dtype, from a checkpoint, hf:DIR or an adapter; draw adapters that nothing gives."""
        if str(directory).startswith("hf:") or self.config.lora.init_from is not None:
            from megalite.huggingface.adapters import starting_weights  # other runs do not pay for its import

            read = starting_weights(self.config)
        else:
            read = partial(checkpoint.load, without_adapters(self._checked(directory)), convert=True)
        if drawn := self.config.lora.rank > 0 and self.config.lora.init_from is None:
            self.store.initialise(self.config.run.seed, frozen=False)
        with all_or_none(self.mesh, CheckpointError):
            read(self.store.to_load(trained=not drawn))
        self.store.publish()

    def resume(self, directory: Path) -> None:
        """Continue where a checkpoint stopped, whatever topology saved it. Raises DamagedError on every rank where any finds damage."""
        manifest = self._checked(directory)
        state = manifest.state
        check_resume(self.config, self.train_data.fingerprint, state, directory)
        with all_or_none(self.mesh, CheckpointError):
            checkpoint.load(manifest, self.optimizer.to_load())
            if self.store.reducer.powersgd is not None:
                shapes = {name: tensor.shape for name, tensor in manifest.tensors.items()}
                self.store.reducer.powersgd.restore(shapes, partial(checkpoint.load, manifest))
        self.notes += changed_compression(self.config, state)
        self.store.publish()
        self.step_done, self.samples, self.closing.skipped = state["step"], state["samples"], state["skipped"]
        self.loss_scale.load(state["loss_scale"])
        self.guard.load(state["guard"])
        self.saver.newest = directory

    def save(self) -> Path:
        """Write a checkpoint of the last step, published when this returns. Collective. Raises CheckpointError."""
        save = self.begin_save()
        self.saver.wait()
        if save.error is not None:
            raise save.error
        return save.directory

    def begin_save(self) -> Save:
        """As `save`, but for what `checkpoint.async_save` leaves to the background, and for errors: `saver.take_ended` tells them."""
        self.closing.settle()
        directory = self.run_dir / "checkpoints" / checkpoint.step_name(self.step_done)
        state = {
            "step": self.step_done,
            "samples": self.samples,
            "skipped": self.closing.skipped,
            "loss_scale": self.loss_scale.state(),
            "guard": self.guard.state(),
            "fingerprint": self.train_data.fingerprint,
            "config": to_dict(self.config),
        }
        self.store.gatherer.finish()
        with all_or_none(self.mesh, OffloadError):  # first: what a disk has lost must not replace what a checkpoint has
            self.store.state.sync()
        save = self.saver.begin(directory, self._to_save(), state, sound=self.guard.streak == 0)
        self.store.state.release()
        return save

    def _to_save(self) -> list[Rectangle]:
        return [*self.optimizer.to_save(), *([] if self.store.reducer.powersgd is None else self.store.reducer.powersgd.to_save())]

    def roll_back(self, bad: StepResult) -> None:
        """Return to the newest checkpoint from before the bad steps, where there is one, and go on with the next samples. Collective.

        Raises:
            FaultLimit: on every rank, where the run must end instead, because of the `bad` step and those before it.
        """
        self.saver.wait()
        directory = self.saver.newest
        self.guard.go_back(f"{bad.streak} steps in a row were skipped, the last one step {bad.step}: {bad.fault}", directory is not None)
        assert directory is not None
        self.closing.settle()
        self.store.gatherer.finish()
        samples = self.samples
        self.resume(directory)
        self.samples, self.guard.streak = samples, 0

    def _check_plan(self) -> None:
        """Every rank must have built the same schedule: compare its hash (32 bits: fp64 sums them exactly) before anything is sent."""
        value = torch.tensor([int(self.schedule.hash[:8], 16)], dtype=torch.float64, device=self.device)
        total = all_reduce(value, self.mesh.world).wait()
        if total.item() != value.item() * self.mesh.world.size:
            raise RuntimeError(f"rank {self.mesh.rank} built another pipeline schedule than other ranks: were all given the same options?")

    # ---- one step

    def step(self, stop: bool = False) -> StepResult:
        """One optimizer step, done when this returns. `stop` tells the other ranks that this one wants to stop."""
        return self.advance(stop, wait=True)[-1]

    def advance(self, stop: bool = False, wait: bool = False) -> list[StepResult]:
        """One optimizer step; returns the results that are known now, in order.

        Where the schedule lets ranks run ahead, the result of a step is known during the next one, unless `wait` asks for it now: before a
        validation, a checkpoint and the end.
        """
        step, activity = self.step_done + 1, self.mesh.activity
        update = Update(step, learning_rate(self.config, step), perf_counter(), self.loss_scale.value, self.samples)
        activity.enter(READING)
        microbatches = self.loader.step(self.samples)
        update.tokens = self._valid_tokens(microbatches)
        microbatches = [microbatch.to(self.device) for microbatch in microbatches]

        self.store.reducer.begin_step(len(microbatches), update.loss_scale)
        validate = None if self.closing.pending is None else self.closing.validate
        scale = update.loss_scale / max(update.tokens, 1) * self.faults.loss_factor(step)
        loss, pace = self.parts.runtime.run(self.schedule, microbatches, step=step, loss_scale=scale, validate=validate)
        activity.enter(REDUCING)
        self.store.reducer.finish()
        self.faults.spoil(step, self.closing.norm.chunks)
        activity.enter(UPDATING)

        counted = loss if self.mesh.tp.rank == 0 else torch.zeros_like(loss)  # tp ranks hold the same loss
        self.closing.close(update, (counted, *pace, float(stop)), wait or not build.runs_ahead(self.config))
        self.step_done, self.samples = step, self.samples + self.config.train.global_batch_size
        if step % GARBAGE_INTERVAL == 0:
            gc.collect()
        update.seconds = perf_counter() - update.started
        return [self._result(done) for done in self.closing.take_known()]

    def _result(self, update: Update) -> StepResult:
        loss, busy, wall, stops = update.sums.tolist()
        last = update.samples + self.config.train.global_batch_size - 1
        return StepResult(
            step=update.step,
            loss=loss / update.loss_scale,
            loss_scale=update.loss_scale,
            grad_norm=update.norm.item(),
            lr=update.lr,
            tokens=update.tokens,
            seconds=update.seconds,
            bubble_fraction=max(1 - busy / (self.mesh.pp.size * wall), 0.0) if wall else None,
            fault=None if update.fault is None else f"{update.fault} (samples {update.samples} to {last})",
            streak=update.streak,
            stop=stops > 0,
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
        self.closing.settle()
        plan = self.forward_schedule
        loader = self._loader(self.validation_data, self.validation_data.samples_per_epoch)
        has_loss = self.mesh.pp.rank == plan.placement[-1] and self.mesh.tp.rank == 0
        total = torch.zeros(2, dtype=torch.float64, device=self.device)  # summed loss, tokens
        try:
            for microbatches in loader.epoch(self.config.validation.batches):
                on_device = [microbatch.to(self.device) for microbatch in microbatches]
                loss, _ = self.parts.runtime.run(plan, on_device, step=0, loss_scale=1.0, training=False)
                if has_loss:
                    total[0] += loss
                    total[1] += sum(int((microbatch.targets != IGNORE_INDEX).sum()) for microbatch in microbatches)
        finally:
            loader.close()
        total = all_reduce(total, self.mesh.world).wait()
        return (total[0] / total[1].clamp(min=1)).item()

    def close(self) -> None:
        """Leave nothing under way: a message that nobody awaits would be taken for the next one on its communicator."""
        self.saver.wait()
        self.closing.settle()
        self.store.gatherer.finish()
        self.loader.close()
