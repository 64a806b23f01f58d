"""Scores of the reference model of an objective, by a forward pass over the microbatches of a step before the
step itself, or what a model was asked once.

The former are of the model from which training started, or of a second model. The start is the model without
adapters, where these start at 0 and nothing else is trained, and otherwise a copy of what is trained
(`training.start_copy`). The latter are in a directory (`data.sequence_scores`), from which the rows have
them. Communication: that of the forward pass, and of two numbers over data in `set_baseline`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megalite.assembly.parts import Parts
from megalite.assembly.scoring import score
from megalite.assembly.teacher import keeps_start, second_model
from megalite.checkpoint.errors import CheckpointError
from megalite.config.errors import ConfigError
from megalite.config.schema import Config
from megalite.config.sections.distillation import distils, stored_teacher
from megalite.config.sections.preference import scores_directory
from megalite.data.dataset import Dataset
from megalite.data.sequence_scores import SequenceScores, attach_scores
from megalite.data.teacher_words import TeacherWords
from megalite.mesh.mesh import Mesh
from megalite.objectives.find import objective_class
from megalite.objectives.objective import Objective
from megalite.parallel.collectives import all_reduce
from megalite.parallel.microbatch import Microbatch
from megalite.parallel.pipeline.schedule import Schedule
from megalite.training import other_identity, start_copy
from megalite.training.other_identity import OtherIdentity, Stored
from megalite.training.start_copy import StartCopy

SCORED_IN = ("fp32", "bf16")
"""Precisions of `megalite score`."""

if TYPE_CHECKING:
    from megalite.training.teacher import ReferenceModel, Teacher
    from megalite.training.trainer import Trainer


def other_of(trainer: Trainer) -> Teacher | Reference | Stored | None:
    """Return what runs before the steps of a run: the teacher or the reference of its objective, or nothing.

    Collective: it loads the weights of a second model.
    """
    config, objective = trainer.config, trainer.objective
    if distils(config):
        from megalite.training.teacher import Teacher, use_stored_words  # not needed by other objectives

        if stored_teacher(config.distillation) is not None:
            return use_stored_words(trainer.parts, config)
        return Teacher(config, trainer.parts, trainer.mesh, trainer.device)
    if objective is None or not objective.needs_reference:
        return None
    if (directory := scores_directory(config.preference)) is not None:
        scores, name = SequenceScores.of(Path(directory)), str(config.preference.reference)
        model = f"scores of {scores.model}"
        return Stored(OtherIdentity("preference.reference", name, model, scores.weights))
    return Reference(trainer, reference_of(config, trainer.parts, trainer.mesh, objective))


def start_of(trainer: Trainer) -> StartCopy | None:
    """Return the copy of the start of a run, if that is its reference."""
    model = trainer.other.model if isinstance(trainer.other, Reference) else None
    return model if isinstance(model, StartCopy) else None


def identity_of(trainer: Trainer) -> OtherIdentity | None:
    """Return the identity of the teacher or the reference of a run; None: it has none, or is its start."""
    model = trainer.other.model if isinstance(trainer.other, Reference) else trainer.other
    return None if model is None or isinstance(model, StartCopy) else model.identity


def to_save(trainer: Trainer) -> dict[str, Any]:
    """Return what checkpoints keep of the model besides the one that is trained."""
    start, other = start_of(trainer), identity_of(trainer)
    return {
        **({} if start is None else {start_copy.STATE: start.number}),
        **({} if other is None else {other_identity.STATE: other.state()}),
    }


def stored_scores(config: Config) -> SequenceScores | None:
    """Return the scores of the reference of a run; None: it has none.

    Raises:
        ConfigError: they are of another model than the one from which training starts.
    """
    directory = scores_directory(config.preference)
    if directory is None:
        return None
    option, start = f"preference.reference = {config.preference.reference}", config.model.initial_weights
    scores = SequenceScores.of(Path(directory), option)
    if config.preference.allow_reference_change:
        return scores
    accept = "or set preference.allow_reference_change to true"
    if start is None or config.lora.init_from is not None:
        raise ConfigError(
            f"{option} has scores of {scores.model}, but training starts from "
            f"{'random weights' if start is None else 'an adapter'}. Start from that model "
            f"(model.init_from), {accept}."
        )
    from megalite.huggingface.weights_identity import (
        architecture,
        changes,
        other_weights,
        weights_identity,
    )

    try:
        weights = weights_identity(start)
    except CheckpointError as error:
        reason = str(error).removesuffix(".")
        raise ConfigError(
            f"{option} has scores of {scores.model}, which cannot be compared with those of "
            f"model.init_from = {start}: {reason}. Start from that model, {accept}."
        ) from None
    if weights != scores.weights:
        raise ConfigError(
            f"{option} has scores of {other_weights(scores.model, start, f'model.init_from = {start}')}. "
            f"Score the data with the model from which training starts, into another directory, {accept}."
        )
    if changed := changes(scores.architecture, architecture(config.model)):
        raise ConfigError(
            f"{option}, whose weights this run starts from, but {changed}. Set it as it was, score the data "
            f"with a checkpoint of a model that has it as it is, {accept}."
        )
    return scores


def attach_stored(config: Config, *data: Dataset | None) -> None:
    """Let the rows of datasets have the stored scores of the reference, or the words of a teacher, if the run
    has them.

    Raises:
        ConfigError: they are of another model or of other data, end early, or are damaged.
    """
    if distils(config) and stored_teacher(config.distillation) is not None:
        from megalite.training.teacher import attach_stored_words

        attach_stored_words(config, data)
    scores = stored_scores(config)
    if scores is None:
        return
    option = f"preference.reference = {config.preference.reference}"
    for dataset in data:
        if dataset is not None:
            attach_scores(dataset, lambda file: scores.of_file(file, option))


def describe(config: Config) -> list[str]:
    """Return lines for the user about the reference or the teacher of a run.

    Raises:
        ConfigError: a record of stored scores or words cannot be read.
    """
    teaches, objective = distils(config), config.train.objective
    role = "teacher" if teaches else f"reference of {objective}"
    if (named := second_model(config)) is not None:
        return [f"{role}: {named[1]}, a second model that is not trained"]
    directory = stored_teacher(config.distillation) if teaches else scores_directory(config.preference)
    if directory is not None:
        kind: type[SequenceScores] | type[TeacherWords] = TeacherWords if teaches else SequenceScores
        stored = kind.of(Path(directory))
        line = f"{role}: what {stored.model} has said once, in {directory}"
        return [line + _other_precision(stored.precision, config.train.precision)]
    if keeps_start(config):
        return [f"{role}: the start of the run, a copy of what is trained"]
    if objective_class(objective).needs_reference:
        return [f"{role}: the start of the run, the model with its adapters off"]
    return []


def _other_precision(stored: str | None, own: str) -> str:
    """Return what to add about stored results if a run computes in another precision."""
    if stored is None or stored == own:
        return ""
    way_out = f"; megalite score --precision {own} computes in that of the run" if own in SCORED_IN else ""
    return f", in {stored}: train.precision = {own}, so the first losses differ by rounding{way_out}"


def reference_of(
    config: Config, parts: Parts, mesh: Mesh, objective: Objective
) -> StartCopy | ReferenceModel | None:
    """Return the reference model of an objective; None: the model without its adapters. Collective."""
    if second_model(config) is not None:
        from megalite.training.teacher import ReferenceModel  # imported only where it is needed

        return ReferenceModel(config, mesh, parts.store.device, objective)
    return StartCopy(parts, mesh) if keeps_start(config) else None


class Reference:
    """Scores the sequences of each step in the reference model.

    Args:
        model: see `reference_of`.
    """

    def __init__(self, trainer: Trainer, model: StartCopy | ReferenceModel | None):
        self.trainer, self.model = trainer, model

    def run(self, microbatches: Sequence[Microbatch]) -> None:
        """Set what the objective needs of its reference. Collective."""
        trainer, objective = self.trainer, self.trainer.objective
        plan = trainer.plan(len(microbatches), forward_only=True)
        score_reference(self.model, trainer.parts, plan, microbatches)
        if objective is not None and objective.needs_baseline:
            trainer.weight_updater.drain()  # these scores are of the weights of the last step
            set_baseline(self.model, trainer.parts, plan, microbatches, trainer.mesh)


def score_reference(
    model: StartCopy | ReferenceModel | None,
    parts: Parts,
    schedule: Schedule,
    microbatches: Sequence[Microbatch],
) -> None:
    """Set `Sequences.reference` of microbatches on the ranks of the last stage. Collective.

    Args:
        model: see `reference_of`.
        parts, schedule: of the model that is trained.
    """
    if model is None:
        score(parts, schedule, microbatches)
    elif isinstance(model, StartCopy):
        with model.in_use():
            score(parts, schedule, microbatches, adapters=True)
    else:
        model.score(microbatches)


def set_baseline(
    model: StartCopy | ReferenceModel | None,
    parts: Parts,
    schedule: Schedule,
    microbatches: Sequence[Microbatch],
    mesh: Mesh,
) -> None:
    """Set `Sequences.baseline` of microbatches on the ranks of the last stage. Collective.

    It is the mean log-ratio of the mismatched sequences of the global batch, or 0 if that is negative.

    Args:
        model: see `reference_of`.
    """
    mismatched = [each.mismatched for each in microbatches if each.mismatched is not None]
    scores = []
    for itself in (True, False):
        if itself:
            score(parts, schedule, mismatched, adapters=True)
        else:
            score_reference(model, parts, schedule, mismatched)
        each = [sequences.reference for sequences in (one.sequences for one in mismatched) if sequences]
        scores.append([values for values in each if values is not None])
    if not scores[0]:  # this rank has no head
        return
    ratios = torch.cat(scores[0]) - torch.cat(scores[1])
    own = torch.stack([ratios.sum(), ratios.new_tensor(len(ratios))])
    # cp ranks have the same sequences
    total, count = all_reduce(own * (mesh.cp.rank == 0), mesh.data).wait()
    baseline = (total / count.clamp(min=1)).clamp(min=0)
    for microbatch in microbatches:
        assert microbatch.sequences is not None, "preferences have sequences"
        microbatch.sequences = microbatch.sequences._replace(baseline=baseline)
