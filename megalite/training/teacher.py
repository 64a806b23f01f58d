"""A second, frozen model, whose forward runs before a step: a teacher, or an objective's reference model.

It has weights, stages and a runtime of its own on the mesh of the run, and computes without gradients and
dropout. The forward pass of a teacher over the microbatches of a step keeps the output of its last layer for
each of them (`model.objective.distillation`), that of a reference model the scores of their sequences.
Communication: that of a forward pass, and under ZeRO-3 one more gather of a teacher's head, which the loss
needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from megalite.assembly import parts as build
from megalite.assembly.scoring import score
from megalite.assembly.teacher import check_teacher, second_model, teacher_of
from megalite.checkpoint import CheckpointError
from megalite.checkpoint.agreement import raise_on_all_ranks
from megalite.config.errors import ConfigError
from megalite.config.schema import Config
from megalite.config.sections.distillation import stored_teacher
from megalite.data.dataset import Dataset
from megalite.data.teacher_words import TeacherWords, attach_words
from megalite.data.tokenizer.comparison import Tokenized, compare, of_data
from megalite.generation.sources import load_into, open_source
from megalite.mesh.mesh import Mesh
from megalite.model.objective.distillation import DistillationLosses, StoredLosses, TeacherStates
from megalite.objectives.objective import Objective
from megalite.parallel.microbatch import Microbatch
from megalite.system.activity import LOADING
from megalite.training.other_identity import OtherIdentity, Stored, resolved


def check(config: Config, world_size: int) -> list[str]:
    """Raise ConfigError if a second model does not fit the run or has another tokenizer than its data.

    Reads files alone, so that no process group is needed. Return lines for the user.
    """
    named = second_model(config)
    if named is None:
        return []
    (_, name), option = named, " = ".join(named)
    check_teacher(config, world_size)
    try:
        source = open_source(name)
    except CheckpointError as error:
        raise ConfigError(f"{option}: {error}") from None
    try:
        source.base()
    except CheckpointError as error:
        raise ConfigError(
            f"{option}: {error} For a second model, export it with `megalite convert export {name} DIR "
            f"--base PLACE`, and set {named[0]} to hf:DIR."
        ) from None
    tokenizer = source.tokenizer
    return compare(
        Tokenized(f"data.train = {config.data.train}", of_data(config.data)),
        Tokenized(option, tokenizer),
        allow=config.data.allow_tokenizer_change,
        way_out=f"Use data prepared with {tokenizer.name}, or another {option.split('.')[1].split()[0]}",
    )


class SecondModel:
    """The second model of a run, on one rank. Its creation is collective and loads its weights.

    Args:
        config: of the run, with a second model.
        objective: over sequences, whose scores its last stage computes.

    Attributes:
        identity: of its weights.
    """

    def __init__(self, config: Config, mesh: Mesh, device: torch.device, objective: Objective | None = None):
        config, self.identity = resolved(config, mesh)
        own = teacher_of(config)
        assert own is not None, "the run has a second model"
        self.config = own
        self.parts = build.build_parts(own, mesh, device, training=False, objective=objective)
        mesh.activity.enter(LOADING)
        named = second_model(config)
        try:
            with raise_on_all_ranks(mesh, CheckpointError):
                source = open_source(self.identity.model)
            load_into(self.parts, source, mesh)
        except CheckpointError as error:
            assert named is not None, "the run has a second model"
            raise CheckpointError(f"{' = '.join(named)}: {error}") from None


class ReferenceModel(SecondModel):
    """The reference model of an objective."""

    def score(self, microbatches: Sequence[Microbatch]) -> None:
        """Set `Sequences.reference` of microbatches on the ranks of the last stage. Collective."""
        plan = build.schedule(self.config, len(microbatches), forward_only=True)
        score(self.parts, plan, microbatches, adapters=True)
        self.parts.store.gatherer.begin_run(planned=False)  # frees weights that ZeRO-3 has gathered


class Teacher(SecondModel):
    """The teacher of a run.

    Args:
        config: of the run, with a teacher.
        parts: of the model that is trained. The losses of its last stage become those of a distillation.
    """

    def __init__(self, config: Config, parts: build.Parts, mesh: Mesh, device: torch.device):
        super().__init__(config, mesh, device)
        self._head_unit: int | None = None  # None on a rank without the head
        for number, stage in parts.stages.items():
            of_teacher = self.parts.stages[number]
            if stage.head is not None and of_teacher.head is not None:
                of_teacher.sequence_losses = TeacherStates(of_teacher.head)
                stage.sequence_losses = DistillationLosses(stage.head, of_teacher.head, config.distillation)
                self._head_unit = of_teacher.head_unit

    def run(self, microbatches: Sequence[Microbatch]) -> None:
        """Set `Microbatch.teacher` of microbatches on the ranks of the last stage. Collective."""
        plan = build.schedule(self.config, len(microbatches), forward_only=True)
        self.parts.runtime.run(plan, microbatches, step=0, loss_scale=0.0, training=False)
        gatherer = self.parts.store.gatherer
        gatherer.begin_run(planned=False)
        if self._head_unit is not None:
            gatherer.acquire(self._head_unit)  # until the next run: the loss computes the teacher's logits


def use_stored_words(parts: build.Parts, config: Config) -> Stored:
    """Let the losses of the last stage be those of a distillation from stored words."""
    for stage in parts.stages.values():
        if stage.head is not None:
            stage.sequence_losses = StoredLosses(stage.head, config.distillation)
    (words, _), name = _words_of(config), str(config.distillation.teacher)
    model = f"the {words.number} most probable words of {words.model}"
    return Stored(OtherIdentity("distillation.teacher", name, model, f"{words.number} of {words.weights}"))


def attach_stored_words(config: Config, data: Sequence[Dataset | None]) -> None:
    """Let the rows of datasets have the stored words of the teacher.

    Raises:
        ConfigError: they have another vocabulary or temperature, are of other rows, end early, or are
            damaged.
    """
    options, (words, option) = config.distillation, _words_of(config)
    if words.vocabulary != config.model.vocabulary:
        raise ConfigError(
            f"{option} has the words of {words.model}, whose vocabulary has {words.vocabulary:,} tokens, but "
            f"model.vocab_size = {config.model.vocabulary:,}. Use a teacher with the vocabulary of the model."
        )
    if words.temperature != options.temperature:
        raise ConfigError(
            f"{option} has probabilities at the temperature {words.temperature:g}, but "
            "distillation.temperature = "
            f"{options.temperature:g}. Set it to {words.temperature:g}, or score the data again."
        )
    for dataset in data:
        if dataset is not None:
            attach_words(dataset, lambda each: words.of_rows(each, config.data, option))


def _words_of(config: Config) -> tuple[TeacherWords, str]:
    """Return the stored words of the teacher of a run, and the option that names them, with its value."""
    directory = stored_teacher(config.distillation)
    assert directory is not None, "the teacher is stored"
    option = f"distillation.teacher = {config.distillation.teacher}"
    return TeacherWords.of(Path(directory), option), option
