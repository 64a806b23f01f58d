"""Checks which checkpoint a run may continue from, one of the same model, data and horizon, and lists every
other change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megalite.checkpoint import CheckpointError, Manifest
from megalite.config.dims import ParallelDims
from megalite.config.errors import ConfigError
from megalite.config.load import from_dict, to_dict
from megalite.config.rampup import steps_for
from megalite.config.rule import show
from megalite.config.run_length import resume_steps, with_batches
from megalite.config.schema import Config

FREE = ("preset", "from_hf", "init_from", "resize_embeddings", "dropout")
"""Options of model and lora that do not affect what a checkpoint holds."""

DATA = ("data.train", "data.validation")
SAMPLES = ("run.seed", "data.sequence_length", "data.shuffle", "data.packing", *DATA)
"""Options that determine the samples and their order."""
SETS = ("targets", "modules_to_save")  # lists of lora whose order and repetitions have no effect
UNLISTED = (
    *("run.dir", "run.overwrite", "checkpoint.load", "checkpoint.allow", "data.allow_tokenizer_change"),
    *("train.stop_after", "faults.inject", "network.variables"),  # values of the last may be secret
)
"""Options of one start of a run, which have no effect on what it computes."""
LENGTH = ("train.steps", "train.epochs", "train.tokens")


def check_resume(config: Config, fingerprint: str, state: dict[str, Any], directory: Path) -> None:
    """Raise ConfigError if model, optimizer, data or horizon differ from a checkpoint's, unless
    `checkpoint.allow` lists the change."""
    # which a fresh start does not need
    from megalite.training.tokenizer_checks import check_resumed_tokenizer

    saved = with_batches(from_dict(state["config"]), state)
    allow, samples = config.checkpoint.allow, config.train.horizon.samples
    shape, saved_shape = (
        {
            f"{section}.{name}": value
            for section in ("model", "lora")
            for name, value in _tree(each)[section].items()
            if name not in FREE
        }
        for each in (config, saved)
    )
    changed = [
        f"{name} was {saved_shape.get(name)}, is {shape[name]}"
        for name in shape
        if saved_shape.get(name) != shape[name]
    ]
    if changed:
        raise ConfigError(
            f"checkpoint.load = {directory} was made by another model: {'; '.join(changed)}. Give the run "
            "another run.name."
        )
    if saved.optimizer.name != config.optimizer.name:
        raise ConfigError(
            f"optimizer.name = {config.optimizer.name}, but checkpoint.load = {directory} has the state of "
            f"{saved.optimizer.name}. "
            f"Set it to {saved.optimizer.name}, or start another run from the weights alone: model.init_from "
            f"= {directory}."
        )
    check_resumed_tokenizer(config, fingerprint, state, directory)
    if state["fingerprint"] != fingerprint and "data" not in allow:
        what = other_samples(config, saved)
        raise ConfigError(
            f"checkpoint.load = {directory} was made with other {what}. Accept it with checkpoint.allow = "
            "[data]."
        )
    # A length in samples is the same one if it makes as many steps of the checkpoint's batches.
    planned = config.train.steps if samples is None else steps_for(saved.train, samples)
    if saved.train.steps != planned and "horizon" not in allow and config.optimizer.decay != "constant":
        raise ConfigError(
            f"train.steps = {config.train.steps}, but {directory} was made for {saved.train.steps}: the "
            "learning rate would change. "
            "Accept it with checkpoint.allow = [horizon]."
        )
    if (ramp := saved.train.rampup_batch_size) != config.train.rampup_batch_size and "horizon" not in allow:
        raise ConfigError(
            f"train.rampup_batch_size = {show(config.train.rampup_batch_size)}, but {directory} was made "
            f"with {show(ramp)}: batches and "
            "learning rates would change. Accept it with checkpoint.allow = [horizon]."
        )


def continue_steps(config: Config, state: dict[str, Any]) -> None:
    """Count the steps of a run again that a checkpoint's state continues (`amounts.resume_steps`)."""
    resume_steps(config, with_batches(from_dict(state["config"]), state), state["step"])


def other_samples(config: Config, saved: Config) -> str:
    """What changes the samples: the options that cut and order them by name, else the data."""
    before, now = options_of(saved), options_of(config)
    changed = {
        name: f"{name} was {show(before[name])}, is {show(now[name])}"
        for name in SAMPLES
        if before[name] != now[name]
    }
    what = "samples" if changed.keys() - DATA else "data"
    return f"{what}: {'; '.join(changed.values()) or 'the content of the token files has changed'}"


def options_of(config: Config) -> dict[str, Any]:
    """section.key → value, as stored, in one order where none counts."""
    tree = json.loads(json.dumps(_tree(config)))
    return {f"{section}.{name}": value for section, values in tree.items() for name, value in values.items()}


def _tree(config: Config) -> dict[str, dict[str, Any]]:
    """The options as they are compared: `to_dict`, in one order where none counts."""
    tree = to_dict(config)
    return tree | {
        "lora": {
            name: sorted(set(value)) if name in SETS and value else value
            for name, value in tree["lora"].items()
        }
    }


def changes(config: Config, state: dict[str, Any], software: dict[str, str]) -> list[str]:
    """A table of every option, and of software, that differs from those of a checkpoint; no lines if none
    does.

    Args:
        software: name → version of what runs now.
    """
    return _table(_changed(config, state, software))


def changed_experiment(config: Config, state: dict[str, Any]) -> list[str]:
    """The table of `changes` without the layout and the length of the run, which may change from one start of
    a run to the next."""
    rows = _changed(config, state, {})
    return _table([row for row in rows if row[0] not in LENGTH and not row[0].startswith("parallel.")])


def _changed(config: Config, state: dict[str, Any], software: dict[str, str]) -> list[tuple[str, str, str]]:
    before, now = (
        options_of(from_dict(state["config"])) | state.get("software", {}),
        options_of(config) | software,
    )
    changed = [
        (name, show(before[name]), show(now[name]))
        for name in now
        if name in before and before[name] != now[name]
    ]
    return [row for row in changed if row[0] not in UNLISTED]


def _table(changed: list[tuple[str, str, str]]) -> list[str]:
    rows = [("changed since the checkpoint", "was", "is"), *changed]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return [f"  {name:{widths[0]}}  {was:{widths[1]}}  {now}" for name, was, now in rows] if changed else []


def is_same_run(config: Config, saved: dict[str, Any]) -> bool:
    """Whether a stored configuration has the same options, the layout excepted. An option that is missing in
    it has its default; with one that is unknown it is another run's."""
    try:
        before = from_dict({**saved, "parallel": {}})
    except ConfigError:
        return False
    # as it would have been stored
    now = from_dict({**json.loads(json.dumps(to_dict(config))), "parallel": {}})
    return _tree(before) == _tree(now)


def without_adapters(manifest: Manifest) -> Manifest:
    """Return the manifest of a checkpoint to start from. Raises CheckpointError if it holds adapters, which
    would not be loaded."""
    if from_dict(manifest.state.get("config", {})).lora.rank:
        way_out = (
            "Merge them with megalite convert export and start from hf:DIR, or export them alone, for "
            "lora.init_from"
        )
        raise CheckpointError(
            f"model.init_from = {manifest.directory} holds adapters next to its weights. {way_out}."
        )
    return manifest


def changed_compression(config: Config, state: dict[str, Any]) -> list[str]:
    """A note for the user if PowerSGD starts, ends or continues on other ranks: the run then differs from an
    uninterrupted one."""
    saved = from_dict(state["config"])
    before, now = saved.parallel, config.parallel
    dims = [ParallelDims.of(options) for options in (saved, config)]
    on_before, on_now = (
        options.powersgd_rank is not None and sizes.data > 1
        for options, sizes in zip((before, now), dims, strict=True)
    )
    tied, experts = (
        config.model.tie_word_embeddings or config.model.mtp_layers > 0,
        config.model.num_experts is not None,
    )
    # whether something is summed over tp only with a split sequence
    partial = experts or config.model.position == "learned"
    others = {"ep": experts, "pp": tied, "schedule": tied, "sequence_parallel": partial}
    names = ("powersgd_rank", "dp", "cp", "tp", *(name for name, matters in others.items() if matters))
    changed = [name for name in names if getattr(before, name) != getattr(now, name)]
    if not changed or not (on_before or on_now):
        return []
    if not (on_before and on_now):
        fate = "starts at zero" if on_now else "is dropped"
    elif {"dp", "cp", "ep"} & set(changed):
        fate = "is divided equally among the present ranks"
    else:
        fate = "is kept where the same matrices are compressed, with new factors"
    if on_before and on_now and dims[0].expert_data > 1 == dims[1].expert_data and experts:
        fate += ", that of experts, which one rank holds now, is dropped"
    what = ", ".join(
        f"parallel.{name} was {show(getattr(before, name))}, is {show(getattr(now, name))}"
        for name in changed
    )
    return [f"{what}: PowerSGD's error feedback {fate}; this resume is not bitwise"]
