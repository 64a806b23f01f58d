"""Initialization of weights, and saving, resuming and rolling back of a run.

The functions take a trainer and are collective: every rank calls them together, and an error on one rank is
raised on all ranks.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from megalite import checkpoint
from megalite.checkpoint import CheckpointError, DamagedError, Manifest, find
from megalite.checkpoint.agreement import on_rank_0, raise_on_all_ranks
from megalite.checkpoint.directories import TIMED, TIMED_KEPT
from megalite.checkpoint.manifest import WEIGHT
from megalite.checkpoint.saver import Save
from megalite.config import run_files
from megalite.config.load import to_dict
from megalite.config.run_length import batches_done
from megalite.config.schema import Config
from megalite.launch.environment import software
from megalite.launch.machine import local_world_size, usable_cores
from megalite.model.adapter_parameters import ADAPTER
from megalite.model.spec_builder import INDEXER, REWARD
from megalite.parallel.quantized.reading import BASE, quantize_base
from megalite.parallel.sharding.offload import OffloadError
from megalite.parallel.spec import Rectangle
from megalite.system.activity import LOADING, SAVING
from megalite.training import reference, stream_positions
from megalite.training.best import resume_state, state_to_save
from megalite.training.start_copy import check_start

if TYPE_CHECKING:
    from megalite.checkpoint.copies import Copies
    from megalite.training.trainer import StepResult, Trainer


LONG_S = 5.0  # saves and loads that take at least this long report their rate


def rate(size: int, seconds: float) -> str:
    """Return the size and throughput of a save or load that took long, or an empty string."""
    return f", {size / 1e6:,.1f} MB at {size / 1e6 / seconds:,.2f} MB/s" if seconds >= LONG_S else ""


def copies_of(trainer: Trainer) -> Copies | None:
    """Return the run's copies in memory, or None if it makes none. Collective."""
    if trainer.config.checkpoint.copy_interval is None:
        return None
    from megalite.training import memory_copies  # only with checkpoint.copy_interval

    return memory_copies.open_copies(trainer)


def reserve(trainer: Trainer) -> None:
    """Allocate what saves and copies need in memory, or raise ConfigError if there is too little."""
    trainer.saver.reserve(to_save(trainer))
    if trainer.copies is not None:
        from megalite.training import memory_copies  # only with checkpoint.copy_interval

        memory_copies.check_room(trainer)


def start_weights(trainer: Trainer, restarted: bool) -> None:
    """Resume, warm-start or initialize the weights according to `checkpoint.load` and `model.init_from`."""
    if trainer.copies is not None:
        from megalite.training import memory_copies  # only with checkpoint.copy_interval

        if memory_copies.resume_from_memory(trainer, restarted):
            return
    option = trainer.config.checkpoint.load
    # a restarted job continues from its own checkpoint, not from the one at which it first started
    if restarted and _has_saved(trainer):
        option = "auto"
    if option not in ("auto", "none"):
        resume(trainer, on_rank_0(trainer.mesh, lambda: find(Path(option))))
    elif option == "auto" and _resume_newest(trainer):
        return
    else:
        _initial_weights(trainer)
        if (copy := reference.start_of(trainer)) is not None:
            copy.keep()
    if trainer.step_done == 0 and trainer.average is not None:
        trainer.average.start()


def _initial_weights(trainer: Trainer) -> None:
    """Set the weights of step 0: those of `model.init_from`, or random ones."""
    if (start := trainer.config.model.initial_weights) is not None:
        load_weights(
            trainer,
            start if start.startswith("hf:") else str(on_rank_0(trainer.mesh, lambda: find(Path(start)))),
        )
    else:
        trainer.store.initialize(trainer.config.run.seed, _threads())
        with raise_on_all_ranks(trainer.mesh, CheckpointError):
            load_base(trainer, None)
        if trainer.config.lora.start != "default":
            trainer.store.publish()  # adapters that have been computed from the base


def _check_reference(trainer: Trainer, state: dict[str, Any], directory: Path) -> None:
    """Read the start of a run that resumes, if it is the reference, and check that it is still the same.

    A second model must have the weights of before, too. Another reference needs consent.
    """
    from megalite.training.resume_checks import check_reference

    with raise_on_all_ranks(trainer.mesh):
        check_reference(trainer.config, reference.identity_of(trainer), state, directory)
    if (other := reference.identity_of(trainer)) is not None:
        with raise_on_all_ranks(trainer.mesh):
            other.check(state, directory)
    copy = reference.start_of(trainer)
    if copy is not None and copy.number is None:
        _initial_weights(trainer)
        copy.keep()
    if trainer.config.preference.reference is None and isinstance(trainer.other, reference.Reference):
        with raise_on_all_ranks(trainer.mesh):
            check_start(trainer.config, None if copy is None else copy.number, state, directory)


def _threads() -> int:
    """Return the number of cores that this rank may use.

    Launchers set OMP_NUM_THREADS=1, which would leave most cores of a GPU machine idle.
    """
    return max(torch.get_num_threads(), usable_cores() // local_world_size())


def _has_saved(trainer: Trainer) -> bool:
    """Return whether the newest readable checkpoint has the same options except the layout. Collective."""
    from megalite.training import resume_checks  # not needed for a fresh start

    checkpoints, _ = checkpoint.history(trainer.run_dir / run_files.CHECKPOINTS, trainer.mesh)

    def look() -> bool:
        for directory in checkpoints:
            with suppress(DamagedError):
                return resume_checks.is_same_run(
                    trainer.config, checkpoint.manifest_of(directory).state["config"]
                )
        return False

    return on_rank_0(trainer.mesh, look)


def _resume_newest(trainer: Trainer) -> bool:
    """Resume the newest undamaged checkpoint of the run, and list damaged ones in `trainer.notes`.

    Returns:
        whether the run has a checkpoint.

    Raises:
        DamagedError: all checkpoints are damaged. Starting from step 0 would overwrite them.
    """
    checkpoints = trainer.run_dir / run_files.CHECKPOINTS
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
            "Restore one of them, or start from step 0 by setting another run.name, or by "
            "setting checkpoint.load=none and run.overwrite=true."
        )
        raise DamagedError(f"could not find a usable checkpoint in {checkpoints}:\n  {listed}\n{way_out}")
    return False


def _checked(trainer: Trainer, source: Path | Manifest) -> Manifest:
    """Read the manifest of a checkpoint, unless it has been read. Collective.

    With `checkpoint.verify = full` every byte is checked, and the ranks share the work.
    """
    with raise_on_all_ranks(trainer.mesh, CheckpointError):
        manifest = source if isinstance(source, Manifest) else checkpoint.manifest_of(source)
        if trainer.config.checkpoint.verify == "full":
            manifest.verify(trainer.mesh.world.rank, trainer.mesh.world.size)
    return manifest


def load_weights(trainer: Trainer, source: str) -> None:
    """Load only the weights, of any dtype, from a checkpoint, hf:DIR or an adapter.

    Adapters that are not in the source are initialized, and so are the indexers in their warm-up, if the
    source has none, and the head of a reward model. Biases that the model has learned besides its weights are
    loaded like these, if the source has them.
    """
    # not needed without initial weights
    from megalite.checkpoint.finite import nonfinite, reject

    trainer.mesh.activity.enter(LOADING)
    config = replace(trainer.config, model=replace(trainer.config.model, init_from=source))
    statistics, known = trainer.parts.statistics, None
    if source.startswith("hf:") or trainer.config.lora.init_from is not None:
        from megalite.huggingface.adapter_import import starting_weights  # imported only where it is needed

        read = starting_weights(config)
    else:
        from megalite.checkpoint.resized_embeddings import of_checkpoint
        from megalite.training.resume_checks import check_factors, without_adapters

        manifest = without_adapters(_checked(trainer, Path(source)))
        with raise_on_all_ranks(trainer.mesh):
            check_factors(trainer.config.model, manifest)
        read, known = of_checkpoint(trainer.config.model, trainer.config.run.seed, manifest), manifest.tensors
    states = [] if statistics is None else statistics.learned()
    biases = [
        state for state in states if state.name.endswith("bias") and (known is None or state.name in known)
    ]
    drawn = [ADAPTER] if trainer.config.lora.rank and trainer.config.lora.init_from is None else []
    if trainer.config.train.indexer == "warmup" and not any(f".{INDEXER}." in name for name in known or ()):
        drawn.append(INDEXER)  # a dense model, which is given indexers
    if config.model.output_head == "reward":
        with raise_on_all_ranks(trainer.mesh, CheckpointError):
            drawn += [] if _has_reward_head(config, source, known) else [REWARD]
    if drawn:
        trainer.store.draw(trainer.config.run.seed, _threads(), drawn)
    started = perf_counter()
    with raise_on_all_ranks(trainer.mesh, CheckpointError):
        rectangles = [*trainer.store.to_load(without=drawn), *biases]
        read(rectangles)
        # tensors are checked when they are read, under their own names
        if not source.startswith("hf:"):
            reject(source, {part.name: nonfinite(part.tensor) for part in rectangles})
        load_base(trainer, source)
    if (seconds := perf_counter() - started) >= LONG_S:
        trainer.notes.append(f"read the weights of {source} in {seconds:.1f} s")
    trainer.store.publish()  # the load fills master weights: copy them to the weights and gather


def load_base(trainer: Trainer, start: str | None) -> None:
    """Read and quantize the frozen matrices of layers, if `lora.base` says so.

    Args:
        start: where they are, hf:DIR or a checkpoint, the same on every rank; None: they are drawn.

    Raises:
        CheckpointError: they cannot be read.
    """
    config, store = trainer.config, trainer.store
    if config.lora.base == "none" or store.base is not None:
        return  # nothing changes them: a run that goes back has them
    from megalite.huggingface import base_weights  # imported only where it is needed

    base = base_weights.BaseWeights(config, start)
    quantize_base(store, base, _threads())
    store.base = base_weights.record(config, start)
    if config.lora.start == "loftq":
        from megalite.huggingface.loftq import LoftqStart

        LoftqStart(config, base).fill(store.to_load())


def resume_base(trainer: Trainer, resumed: Manifest) -> None:
    """Read and quantize the frozen matrices on which a checkpoint was trained, if `lora.base` says so.

    Raises:
        CheckpointError: they cannot be read, or are others than those of the checkpoint.
    """
    config, store = trainer.config, trainer.store
    if config.lora.base == "none":
        return
    from megalite.huggingface import base_weights  # imported only where it is needed

    if store.base is not None and store.base["identity"] == resumed.state[BASE]["identity"]:
        return
    try:
        start, base = base_weights.base_of(config, resumed.state, resumed.directory)
        quantize_base(store, base, _threads())
    except DamagedError as error:  # of the base: an older checkpoint would not help
        raise CheckpointError(f"the base of {resumed.directory}: {error}") from None
    store.base = base_weights.record(config, start)


def _has_reward_head(config: Config, source: str, known: Collection[str] | None) -> bool:
    """Return whether the head of a reward model is among initial weights.

    Args:
        config: whose model starts from `source`.
        known: the tensors of a checkpoint; None: `source` is a Hugging Face directory, or the run starts
            from an adapter, which has the head if it is one of a reward model.
    """
    if known is None and config.lora.init_from is not None:
        from megalite.huggingface.adapter_import import has_reward_head

        if has_reward_head(config):
            return True
        if not source.startswith("hf:"):
            known = checkpoint.manifest_of(Path(source)).tensors
    if known is not None:
        return f"{WEIGHT}score.weight" in known
    from megalite.families.model_config import hf_shape

    return hf_shape(source.removeprefix("hf:")).get("output_head") == "reward"


def resume(trainer: Trainer, source: Path | Manifest) -> None:
    """Resume from a checkpoint saved under any topology.

    Args:
        source: its directory, or its manifest if that has been read already.

    Raises:
        DamagedError: on every rank, if any rank finds damage.
    """
    from megalite.training import resume_checks  # not needed for a fresh start
    from megalite.training.resumed_state import load_state

    started = perf_counter()
    trainer.mesh.activity.enter(LOADING)
    manifest = _checked(trainer, source)
    state, directory = manifest.state, manifest.directory
    # before any weight is overwritten, because nodes may have different data
    with raise_on_all_ranks(trainer.mesh):
        resume_checks.continue_steps(trainer.config, state)
        resume_checks.check_resume(trainer.config, trainer.train_data.fingerprint, state, directory)
    _check_reference(trainer, state, directory)
    with raise_on_all_ranks(trainer.mesh, CheckpointError):
        resume_base(trainer, manifest)
        learned = [] if trainer.parts.statistics is None else trainer.parts.statistics.rectangles()
        done = state["step"] - state["skipped"]
        notes = load_state(trainer.optimizer.state, manifest, learned, trainer.config.optimizer, done)
        stream_positions.restore(trainer, manifest)
        if trainer.average is not None and not manifest.has_averages:
            trainer.average.start()
        if trainer.store.reducer.powersgd is not None:
            shapes = {name: tensor.shape for name, tensor in manifest.tensors.items()}
            trainer.store.reducer.powersgd.restore(shapes, partial(checkpoint.load, manifest))
    if (seconds := perf_counter() - started) >= LONG_S:
        trainer.notes.append(
            f"read {directory} in {seconds:.1f} s{rate(sum(manifest.files.values()), seconds)}"
        )
    trainer.notes += [
        *notes,
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
    """Start a save, which continues in the background with `checkpoint.async_save`.

    Errors are returned by `saver.take_ended`.

    Args:
        best: whether this checkpoint has the lowest validation loss so far.
        timed: whether `checkpoint.minutes` is the only reason to save.
    """
    trainer.drain()  # an unconfirmed step must not be saved
    trainer.mesh.activity.enter(SAVING)
    directory = trainer.run_dir / run_files.CHECKPOINTS / checkpoint.step_name(trainer.step_done)
    state = state_of(trainer) | ({TIMED: True} if timed else {})
    # first, because optimizer state lost by a disk must not replace a good checkpoint
    with raise_on_all_ranks(trainer.mesh, OffloadError):
        trainer.store.state.sync()
    save = trainer.saver.begin(
        directory, to_save(trainer), state, rollback_safe=trainer.bad_steps.streak == 0, best=best
    )
    trainer.store.state.release()
    return save


def state_of(trainer: Trainer) -> dict[str, Any]:
    """Return what a checkpoint has besides tensors, as JSON data."""
    return {
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
        **reference.to_save(trainer),
        **({} if trainer.store.base is None else {BASE: trainer.store.base}),
        **({"started": trainer.optimizer.state.started} if trainer.optimizer.state.started else {}),
    }


def to_save(trainer: Trainer) -> list[Rectangle]:
    """Return this rank's part of a checkpoint.

    It contains weights and optimizer state, positions in streams, and the states of PowerSGD and of the
    model's blocks, which are the same on all ranks.
    """
    powersgd, statistics = trainer.store.reducer.powersgd, trainer.parts.statistics
    return [
        *trainer.optimizer.state.to_save(),
        *([] if powersgd is None else powersgd.to_save()),
        *stream_positions.to_save(trainer),
        *([] if statistics is None or trainer.mesh.rank > 0 else statistics.rectangles()),
    ]


def roll_back(trainer: Trainer, bad: StepResult) -> None:
    """Resume the newest checkpoint from before the bad steps and continue with the next samples. Collective.

    Args:
        bad: the last of the skipped steps.

    Raises:
        FaultLimit: on every rank, if there is no checkpoint or no further rollback is allowed.
    """
    trainer.saver.wait()  # a save in flight may be the newest checkpoint
    directory = trainer.saver.newest
    trainer.bad_steps.go_back(
        f"{bad.streak} consecutive steps were skipped, most recently step {bad.step}: {bad.fault}",
        directory is not None,
    )
    assert directory is not None
    trainer.drain()
    samples = trainer.samples
    # sets samples and streak to the checkpoint's: the bad samples must not be read again
    resume(trainer, directory)
    trainer.samples, trainer.bad_steps.streak = samples, 0
    if trainer.copies is not None:
        trainer.copies.remove()  # of steps that are not part of the run any more


def describe_saves(config: Config) -> str:
    """Describe in one line when the run saves, what it keeps, and the size of a checkpoint."""
    from megalite.planner.api import checkpoint_bytes  # only needed for the report of the command
    from megalite.system.progress import amount

    options, size = config.checkpoint, checkpoint_bytes(config)
    text = amount(size, "B")
    retention = f"keeping the newest {options.keep}" if options.keep is not None else "keeping all"
    if options.interval is not None:
        when = f"every {options.interval:,} steps"
    elif options.minutes is not None:
        when = f"every {options.minutes:g} minutes (checkpoint.minutes)"
        retention = retention if options.keep is not None else f"keeping the newest {TIMED_KEPT} of these"
    else:
        return (
            "no checkpoint before the end of the run or a signal, because checkpoint.interval and "
            f"checkpoint.minutes are null{_copies(config)}"
        )
    return f"a checkpoint {when}, about {text} each; {retention}{_little_room(config, size)}{_copies(config)}"


def _copies(config: Config) -> str:
    """Describe copies in memory, or return an empty string."""
    from megalite.planner.api import copying_bytes  # only needed for the report of the command
    from megalite.system.progress import amount

    if (interval := config.checkpoint.copy_interval) is None:
        return ""
    most = amount(copying_bytes(config), "B")
    return f"\na copy in memory every {interval:,} steps; copies take at most {most} of host memory per rank"


def _little_room(config: Config, size: float) -> str:
    """Return a warning if the disk cannot hold the kept checkpoints together with the next one."""
    from megalite.system.progress import amount

    options = config.checkpoint
    most = options.keep or (TIMED_KEPT if options.interval is None else 1)
    with suppress(OSError):
        free = shutil.disk_usage(config.run.directory).free
        if free < (most + 1) * size:
            has, need = amount(free, "B"), amount((most + 1) * size, "B")
            return (
                f". Low disk space: {config.run.directory} has {has} free, but {most + 1} checkpoints "
                f"need {need}"
            )
    return ""
