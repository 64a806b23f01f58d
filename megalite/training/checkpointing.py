"""Starting weights, saving, resuming and rolling back.

Functions of a trainer, all collective: every rank calls them together, and an error on one rank is raised on
all.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from megalite import checkpoint
from megalite.checkpoint import CheckpointError, DamagedError, find
from megalite.checkpoint.agreement import on_rank_0, raise_on_all_ranks
from megalite.checkpoint.directories import TIMED, TIMED_KEPT
from megalite.checkpoint.saver import Save
from megalite.config.load import to_dict
from megalite.config.run_length import batches_done
from megalite.config.schema import Config
from megalite.launch.environment import software
from megalite.launch.machine import local_world_size, usable_cores
from megalite.model.adapter_parameters import ADAPTER
from megalite.parallel.sharding.offload import OffloadError
from megalite.parallel.spec import EMA, Rectangle
from megalite.system.activity import LOADING, SAVING
from megalite.training.best import resume_state, state_to_save

if TYPE_CHECKING:
    from megalite.training.trainer import StepResult, Trainer


LONG_S = 5.0  # a save or a load that takes as long tells its rate


def rate(size: int, seconds: float) -> str:
    """The size and the rate of a save or a load that took long; empty if it did not."""
    return f", {size / 1e6:,.1f} MB at {size / 1e6 / seconds:,.2f} MB/s" if seconds >= LONG_S else ""


def start_weights(trainer: Trainer, restarted: bool) -> None:
    """Resume, warm-start or initialize the weights, as `checkpoint.load` and `model.init_from` say."""
    option = trainer.config.checkpoint.load
    # a restarted job continues from its own checkpoint, not again from the one it first started at
    if restarted and _has_saved(trainer):
        option = "auto"
    if option not in ("auto", "none"):
        resume(trainer, on_rank_0(trainer.mesh, lambda: find(Path(option))))
    elif option == "auto" and _resume_newest(trainer):
        return
    elif (start := trainer.config.model.initial_weights) is not None:
        load_weights(
            trainer,
            start if start.startswith("hf:") else str(on_rank_0(trainer.mesh, lambda: find(Path(start)))),
        )
    else:
        trainer.store.initialize(trainer.config.run.seed, _threads())
    if trainer.step_done == 0 and trainer.average is not None:
        trainer.average.start()


def _threads() -> int:
    """The cores that this rank may use. Launchers set OMP_NUM_THREADS = 1, which would leave most of a GPU
    machine's idle."""
    return max(torch.get_num_threads(), usable_cores() // local_world_size())


def _has_saved(trainer: Trainer) -> bool:
    """Whether the run's newest readable checkpoint was saved with the same options, the layout excepted.
    Collective."""
    from megalite.training import resume_checks  # which a fresh start does not need

    checkpoints, _ = checkpoint.history(trainer.run_dir / "checkpoints", trainer.mesh)

    def look() -> bool:
        for directory in checkpoints:
            with suppress(DamagedError):
                return resume_checks.is_same_run(
                    trainer.config, checkpoint.manifest_of(directory).state["config"]
                )
        return False

    return on_rank_0(trainer.mesh, look)


def _resume_newest(trainer: Trainer) -> bool:
    """Resume the newest undamaged checkpoint of the run; the damaged ones are listed in `trainer.notes`.
    Returns False if it has none.

    Raises:
        DamagedError: there are checkpoints, but none can be used: starting from step 0 would overwrite them.
    """
    checkpoints = trainer.run_dir / "checkpoints"
    directories, warning = checkpoint.history(checkpoints, trainer.mesh)
    problems = [warning] if warning else []
    for directory in directories:
        try:
            resume(trainer, directory)
        except DamagedError as error:
            problems.append(str(error))
        else:
            trainer.notes += [*problems, f"continuing from {directory}"] if problems else []
            return True
    if problems:
        listed = "\n  ".join(problems)
        way_out = (
            "Restore one of them, or start from step 0 with another run.name, or with checkpoint.load = none "
            "and run.overwrite = true."
        )
        raise DamagedError(f"no checkpoint in {checkpoints} can be used:\n  {listed}\n{way_out}")
    return False


def _checked(trainer: Trainer, directory: Path) -> checkpoint.Manifest:
    """Read a checkpoint's manifest; with `checkpoint.verify = full` every byte is checked, divided over the
    ranks. Collective."""
    with raise_on_all_ranks(trainer.mesh, CheckpointError):
        manifest = checkpoint.manifest_of(directory)
        if trainer.config.checkpoint.verify == "full":
            manifest.verify(trainer.mesh.world.rank, trainer.mesh.world.size)
    return manifest


def load_weights(trainer: Trainer, source: str) -> None:
    """Load only the weights, of any dtype, from a checkpoint, hf:DIR or an adapter; adapters without a source
    are initialized.

    What routers add to their scores counts as a weight, where the source has it.
    """
    # which a run without given weights does not need
    from megalite.checkpoint.finite import nonfinite, reject

    trainer.mesh.activity.enter(LOADING)
    routers, known = trainer.parts.routers, None
    if source.startswith("hf:") or trainer.config.lora.init_from is not None:
        from megalite.huggingface.adapter_import import starting_weights  # imported only where it is needed

        read = starting_weights(
            replace(trainer.config, model=replace(trainer.config.model, init_from=source))
        )
    else:
        from megalite.checkpoint.resized_embeddings import of_checkpoint
        from megalite.training.resume_checks import without_adapters

        manifest = without_adapters(_checked(trainer, Path(source)))
        read, known = of_checkpoint(trainer.config.model, trainer.config.run.seed, manifest), manifest.tensors
    states = [] if routers is None else routers.learned()
    biases = [
        state for state in states if state.name.endswith("bias") and (known is None or state.name in known)
    ]
    drawn = [ADAPTER] if trainer.config.lora.rank and trainer.config.lora.init_from is None else []
    if drawn:
        trainer.store.draw(trainer.config.run.seed, _threads(), drawn)
    started = perf_counter()
    with raise_on_all_ranks(trainer.mesh, CheckpointError):
        rectangles = [*trainer.store.to_load(without=drawn), *biases]
        read(rectangles)
        # whose tensors are checked where they are read, under their own names
        if not source.startswith("hf:"):
            reject(source, {part.name: nonfinite(part.tensor) for part in rectangles})
    if (seconds := perf_counter() - started) >= LONG_S:
        trainer.notes.append(f"the weights of {source} were read in {seconds:.1f} s")
    trainer.store.publish()  # the load fills master weights: copy them to the weights and gather


def resume(trainer: Trainer, directory: Path) -> None:
    """Continue from a checkpoint, saved under any topology. Raises DamagedError on every rank if any rank
    finds damage."""
    from megalite.training import resume_checks  # which a fresh start does not need

    started = perf_counter()
    trainer.mesh.activity.enter(LOADING)
    manifest = _checked(trainer, directory)
    state = manifest.state
    with raise_on_all_ranks(trainer.mesh):  # before any weight is overwritten; a node may have other data
        resume_checks.continue_steps(trainer.config, state)
        resume_checks.check_resume(trainer.config, trainer.train_data.fingerprint, state, directory)
    with raise_on_all_ranks(trainer.mesh, CheckpointError):
        routers = [] if trainer.parts.routers is None else trainer.parts.routers.rectangles()
        without = () if manifest.has_averages else (EMA,)
        checkpoint.load(manifest, [*trainer.optimizer.state.to_load(without), *routers])
        if trainer.average is not None and not manifest.has_averages:
            trainer.average.start()
        if trainer.store.reducer.powersgd is not None:
            shapes = {name: tensor.shape for name, tensor in manifest.tensors.items()}
            trainer.store.reducer.powersgd.restore(shapes, partial(checkpoint.load, manifest))
    if (seconds := perf_counter() - started) >= LONG_S:
        trainer.notes.append(
            f"{directory} was read in {seconds:.1f} s{rate(sum(manifest.files.values()), seconds)}"
        )
    trainer.notes += [
        *resume_checks.changes(trainer.config, state, software()),
        *resume_checks.changed_compression(trainer.config, state),
    ]
    trainer.store.publish()
    trainer.step_done, trainer.samples, trainer.weight_updater.skipped = (
        state["step"],
        state["samples"],
        state["skipped"],
    )
    trainer.loss_scale.load(state["loss_scale"])
    trainer.bad_steps.load(state["guard"])
    resume_state(trainer, state.get("loop", {}))
    trainer.saver.newest = directory


def begin_save(trainer: Trainer, best: bool = False, timed: bool = False) -> Save:
    """Like `Trainer.save`, but with `checkpoint.async_save` writing continues in the background; errors come
    from `saver.take_ended`. best: no checkpoint has had a lower validation loss; timed: `checkpoint.minutes`
    is the only reason to save."""
    trainer.drain()  # an unconfirmed step must not be saved
    trainer.mesh.activity.enter(SAVING)
    directory = trainer.run_dir / "checkpoints" / checkpoint.step_name(trainer.step_done)
    state = {
        "step": trainer.step_done,
        "samples": trainer.samples,
        "skipped": trainer.weight_updater.skipped,
        "loss_scale": trainer.loss_scale.state(),
        "guard": trainer.bad_steps.state(),
        "fingerprint": trainer.train_data.fingerprint,
        "tokenizer": trainer.train_data.tokenizer.record(),
        "config": to_dict(trainer.config),
        "software": software(),
        **batches_done(trainer.config),
        **({"loop": state_to_save(trainer)} if trainer.loop_state else {}),
        **({TIMED: True} if timed else {}),
    }
    # first: optimizer state that a disk has lost must not replace a good checkpoint
    with raise_on_all_ranks(trainer.mesh, OffloadError):
        trainer.store.state.sync()
    save = trainer.saver.begin(
        directory, to_save(trainer), state, rollback_safe=trainer.bad_steps.streak == 0, best=best
    )
    trainer.store.state.release()
    return save


def to_save(trainer: Trainer) -> list[Rectangle]:
    """This rank's part of a checkpoint: weights, optimizer state, PowerSGD's state and that of routers, which
    all ranks have alike."""
    powersgd, routers = trainer.store.reducer.powersgd, trainer.parts.routers
    return [
        *trainer.optimizer.state.to_save(),
        *([] if powersgd is None else powersgd.to_save()),
        *([] if routers is None or trainer.mesh.rank > 0 else routers.rectangles()),
    ]


def roll_back(trainer: Trainer, bad: StepResult) -> None:
    """Resume the newest checkpoint from before the bad steps and continue with the next samples. Collective.

    Args:
        bad: the last of the skipped steps.

    Raises:
        FaultLimit: on every rank, if there is no checkpoint or no rollback is allowed: the run must end.
    """
    trainer.saver.wait()  # a save in flight may be the newest checkpoint
    directory = trainer.saver.newest
    trainer.bad_steps.go_back(
        f"{bad.streak} steps in a row were skipped, the last one step {bad.step}: {bad.fault}",
        directory is not None,
    )
    assert directory is not None
    trainer.drain()
    samples = trainer.samples
    # sets samples and streak to the checkpoint's: the bad samples must not be read again
    resume(trainer, directory)
    trainer.samples, trainer.bad_steps.streak = samples, 0


def describe_saves(config: Config) -> str:
    """When the run saves, what it keeps, and how much that is, in a line."""
    from megalite.planner.api import checkpoint_bytes  # which only the command's report needs
    from megalite.system.progress import amount

    options, size = config.checkpoint, checkpoint_bytes(config)
    text = amount(size, "B")
    retention = f"the newest {options.keep} are kept" if options.keep is not None else "all are kept"
    if options.interval is not None:
        when = f"every {options.interval:,} steps"
    elif options.minutes is not None:
        when = f"every {options.minutes:g} minutes (checkpoint.minutes)"
        retention = retention if options.keep is not None else f"the newest {TIMED_KEPT} of these are kept"
    else:
        return "no checkpoint before the end or a signal: checkpoint.interval and checkpoint.minutes are null"
    return f"a checkpoint {when}, about {text} each; {retention}{_little_room(config, size)}"


def _little_room(config: Config, size: float) -> str:
    """A warning, if the disk has less room than the checkpoints that are kept together with the next one."""
    from megalite.system.progress import amount

    options = config.checkpoint
    most = options.keep or (TIMED_KEPT if options.interval is None else 1)
    with suppress(OSError):
        free = shutil.disk_usage(config.run.directory).free
        if free < (most + 1) * size:
            has, need = amount(free, "B"), amount((most + 1) * size, "B")
            return f". {config.run.directory} has {has} free, and {most + 1} of them need {need}"
    return ""
