"""Checks whether a run may continue from a checkpoint.

Model, data and horizon must match; all other changes are listed.
"""

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
from megalite.config.schema import OPTIONS, Config
from megalite.config.sections.model import ModelConfig
from megalite.model.kinds import dispatch_of
from megalite.model.parameters import embedding_uses, model_specs
from megalite.objectives.find import objective_class
from megalite.objectives.objective import Objective
from megalite.training.other_identity import STATE as OTHER
from megalite.training.other_identity import OtherIdentity

FREE = ("preset", "from_hf", "init_from", "resize_embeddings", "dropout")
"""Options of model and lora that do not affect the content of a checkpoint."""

DATA = ("data.train", "data.validation")
SAMPLES = ("run.seed", "data.sequence_length", "data.shuffle", "data.packing", *DATA)
"""Options that determine the samples and their order."""
SETS = ("targets", "modules_to_save")  # lists of lora whose order and repetitions have no effect
UNLISTED = (
    *("run.dir", "run.overwrite", "checkpoint.load", "checkpoint.allow", "data.allow_tokenizer_change"),
    *("run.spool", *(option for option in OPTIONS if option.startswith("store."))),
    *("train.stop_after", "faults.inject", "network.variables"),  # network.variables may contain secrets
)
"""Options that belong to a single start of a run and do not affect its results."""
LENGTH = ("train.steps", "train.epochs", "train.tokens")


def check_resume(config: Config, fingerprint: str, state: dict[str, Any], directory: Path) -> None:
    """Raise ConfigError if the run does not match the model, optimizer, data or horizon of a checkpoint.

    Changes listed in `checkpoint.allow` are accepted.
    """
    # not needed for a fresh start
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
            f"The model does not match checkpoint.load={directory}: {'; '.join(changed)}. To "
            "train this model, set another run.name."
        )
    names = (saved.optimizer.name, config.optimizer.name)
    if names[0] != names[1] and ("muon" in names or "optimizer" not in allow):
        consent = (
            ""
            if "muon" in names
            else (
                ", or keep what both have under one name (exp_avg) and start the rest at zero with "
                "checkpoint.allow=[optimizer]"
            )
        )
        raise ConfigError(
            f"optimizer.name={names[1]} does not match checkpoint.load={directory}, "
            f"which contains the state of {names[0]}. Set optimizer.name={names[0]}, or start another run "
            f"from the weights with model.init_from={directory}{consent}."
        )
    if (phase := saved.train.indexer) != config.train.indexer:
        raise ConfigError(
            f"train.indexer={config.train.indexer} does not match checkpoint.load={directory} "
            f"(train.indexer={phase}), because the two train different parameters. Start another run from "
            f"the weights with model.init_from={directory}."
        )
    if (before := saved.train.objective) != config.train.objective:
        needs = objective_class(config.train.objective).needs_reference
        unnamed = needs and config.preference.reference is None
        if unnamed and not _objective_before(config, saved, directory).needs_reference:
            raise ConfigError(
                f"train.objective={config.train.objective} does not match checkpoint.load={directory} "
                f"(train.objective={before}): its reference is the model from which training starts, and "
                "that run has already trained it. Export it with megalite convert export, and start another "
                "run from hf:DIR with model.init_from, or name the reference with preference.reference."
            )
        if "objective" not in allow:
            raise ConfigError(
                f"train.objective={config.train.objective} does not match checkpoint.load={directory} "
                f"(train.objective={before}). {_CONSENT}"
            )
    check_resumed_tokenizer(config, fingerprint, state, directory)
    if state["fingerprint"] != fingerprint and "data" not in allow:
        what = other_samples(config, saved)
        raise ConfigError(
            f"checkpoint.load={directory} does not match the data of this run, because it was "
            f"trained with other {what}. To resume anyway, set checkpoint.allow=[data]."
        )
    # A length in samples is unchanged if it corresponds to the same number of steps of the checkpoint.
    planned = config.train.steps if samples is None else steps_for(saved.train, samples)
    if saved.train.steps != planned and "horizon" not in allow and config.optimizer.decay != "constant":
        raise ConfigError(
            f"train.steps={config.train.steps} does not match {directory} "
            f"(train.steps={saved.train.steps}). Resuming would change the learning rates; to do "
            "so anyway, set checkpoint.allow=[horizon]."
        )
    if (ramp := saved.train.rampup_batch_size) != config.train.rampup_batch_size and "horizon" not in allow:
        raise ConfigError(
            f"train.rampup_batch_size={show(config.train.rampup_batch_size)} does not match "
            f"{directory} ({show(ramp)}). Resuming would change the batch sizes and learning "
            "rates; to do so anyway, set checkpoint.allow=[horizon]."
        )


_CONSENT = (
    "Resuming would go on with the optimizer state of the loss of before; to do so anyway, set "
    "checkpoint.allow=[objective], and to train from the start, set another run.name."
)


def check_reference(
    config: Config, other: OtherIdentity | None, state: dict[str, Any], directory: Path
) -> None:
    """Raise ConfigError if the run has another reference than a checkpoint, and does not say so.

    The same weights under another name are the same reference.

    Args:
        other: the identity of the reference or the teacher of the run.
        state: of the checkpoint.
    """
    saved, known = from_dict(state["config"]), state.get(OTHER)
    was, now = saved.preference.reference, config.preference.reference
    if was == now or "objective" in config.checkpoint.allow:
        return
    if known and other and known["content"] == other.content:
        return
    start = f" (the start of the run, model.init_from={config.model.init_from})"
    raise ConfigError(
        f"preference.reference={show(now)}{start if now is None else ''} does not match "
        f"checkpoint.load={directory} (preference.reference={show(was)}{start if was is None else ''}). "
        f"{_CONSENT}"
    )


def _objective_before(config: Config, saved: Config, directory: Path) -> type[Objective]:
    """Return the class of the objective of a checkpoint.

    Raises:
        ConfigError: it is of an extension that the run does not name any more.
    """
    try:
        return objective_class(saved.train.objective)
    except ConfigError:
        if not saved.run.extensions:
            raise
        raise ConfigError(
            f"train.objective={config.train.objective} has the model from which training starts as its "
            f"reference, and checkpoint.load={directory} was trained with {saved.train.objective}, of an "
            f"extension that is not there to say whether that run kept it. Name the file again "
            f"(run.extensions was {show(saved.run.extensions)}), or name the reference with "
            "preference.reference."
        ) from None


def continue_steps(config: Config, state: dict[str, Any]) -> None:
    """Recompute the number of steps of a run that continues a checkpoint (`amounts.resume_steps`)."""
    resume_steps(config, with_batches(from_dict(state["config"]), state), state["step"])


def other_samples(config: Config, saved: Config) -> str:
    """Describe what changes the samples: the options that select and order them, or the data itself."""
    before, now = options_of(saved), options_of(config)
    changed = {
        name: f"{name} was {show(before[name])}, is {show(now[name])}"
        for name in SAMPLES
        if before[name] != now[name]
    }
    what = "samples" if changed.keys() - DATA else "data"
    return f"{what}: {'; '.join(changed.values()) or 'the content of the token files has changed'}"


def options_of(config: Config) -> dict[str, Any]:
    """Return section.key → value, as stored. Lists whose order has no effect are sorted."""
    tree = json.loads(json.dumps(_tree(config)))
    return {f"{section}.{name}": value for section, values in tree.items() for name, value in values.items()}


def _tree(config: Config) -> dict[str, dict[str, Any]]:
    """Return `to_dict` for comparison. Lists whose order has no effect are sorted."""
    tree = to_dict(config)
    return tree | {
        "lora": {
            name: sorted(set(value)) if name in SETS and value else value
            for name, value in tree["lora"].items()
        }
    }


def changes(config: Config, state: dict[str, Any], software: dict[str, str]) -> list[str]:
    """Return a table of all options and software versions that differ from a checkpoint, or no lines.

    Args:
        software: current version of each package, by name.
    """
    return _table(_changed(config, state, software))


def changed_experiment(config: Config, state: dict[str, Any]) -> list[str]:
    """Return the table of `changes` without the layout and the length of the run.

    These may change between the starts of a run.
    """
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
    """Return whether a stored configuration has the same options, except for the layout.

    A missing option has its default. A configuration with unknown options belongs to another run.
    """
    try:
        before = from_dict({**saved, "parallel": {}})
    except ConfigError:
        return False
    # as it would have been stored
    now = from_dict({**json.loads(json.dumps(to_dict(config))), "parallel": {}})
    return _tree(before) == _tree(now)


def check_factors(model: ModelConfig, manifest: Manifest) -> None:
    """Raise ConfigError if initial weights were trained with other factors of `model.mup`."""
    saved = from_dict(manifest.state["config"]).model if "config" in manifest.state else model
    if not (model.mup or saved.mup):
        return
    was, now = ((each.logit_factor or 1.0, each.residual_factor) for each in (saved, model))
    if was != now:
        raise ConfigError(
            f"model.mup = {show(model.mup)} does not match model.init_from={manifest.directory}, which was "
            f"trained with model.mup = {show(saved.mup)}: logits, or what blocks add, would have other "
            "factors. Set model.mup to that value, or export the model with megalite convert export, which "
            "gives a plain one, and start from hf:DIR."
        )


def without_adapters(manifest: Manifest) -> Manifest:
    """Return the manifest of a checkpoint to start from.

    Raises:
        CheckpointError: the checkpoint contains adapters, which would not be loaded.
    """
    if from_dict(manifest.state.get("config", {})).lora.rank:
        way_out = (
            "Merge them with megalite convert export and start from hf:DIR, or export only the "
            "adapters and set lora.init_from"
        )
        raise CheckpointError(
            f"model.init_from={manifest.directory} contains adapters in addition to its weights, "
            f"which would be ignored. {way_out}."
        )
    return manifest


def changed_compression(config: Config, state: dict[str, Any]) -> list[str]:
    """Return a note if the state of PowerSGD is not restored exactly.

    This is the case if PowerSGD is enabled or disabled, or continues on other ranks. The run then differs
    from an uninterrupted one.
    """
    saved = from_dict(state["config"])
    before, now = saved.parallel, config.parallel
    dims = [ParallelDims.of(options) for options in (saved, config)]
    on_before, on_now = (
        options.powersgd_rank is not None and sizes.data > 1
        for options, sizes in zip((before, now), dims, strict=True)
    )
    if not (on_before or on_now):
        return []
    tied, experts = embedding_uses(config.model) > 0, dispatch_of(config.model) is not None
    # whether the gradient of a matrix is summed over tp only with a split sequence
    partial = any(
        segment.grad_partial_axis is not None and len(segment.shape) == 2
        for spec in model_specs(config.model, tp=now.tp, sequence_parallel=True)
        for segment in spec.segments
    )
    others = {"ep": experts, "pp": tied, "schedule": tied, "sequence_parallel": partial}
    names = ("powersgd_rank", "dp", "cp", "tp", *(name for name, matters in others.items() if matters))
    changed = [name for name in names if getattr(before, name) != getattr(now, name)]
    if not changed:
        return []
    if not (on_before and on_now):
        fate = "is initialized to zero" if on_now else "is discarded"
    elif {"dp", "cp", "ep"} & set(changed):
        fate = "is divided equally among the current ranks"
    else:
        fate = "is kept for matrices that are still compressed, with new factors"
    if on_before and on_now and dims[0].expert_data > 1 == dims[1].expert_data and experts:
        fate += ", except for experts, where it is discarded because each expert is now on one rank"
    what = ", ".join(
        f"parallel.{name} changed from {show(getattr(before, name))} to {show(getattr(now, name))}"
        for name in changed
    )
    return [f"{what}: PowerSGD's error feedback {fate}; the resumed run will not be bitwise identical"]
