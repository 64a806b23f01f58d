"""The configuration of a second, frozen model on the layout of a run: a teacher (`distillation.teacher`), or
the reference model of an objective (`preference.reference`).

It is read from the model's files without its weights, and without torch, because the planner asks for it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from pathlib import Path

from megalite.config.errors import ConfigError
from megalite.config.load import from_dict
from megalite.config.rules import LAYOUT_RULES, MODEL_RULES
from megalite.config.rules.context import RuleContext
from megalite.config.samples import longest_inputs
from megalite.config.schema import Config
from megalite.config.sections.distillation import DistillationConfig, distils, stored_teacher
from megalite.config.sections.model import ModelConfig
from megalite.config.sections.preference import SCORES, PreferenceConfig, reference_model
from megalite.data.stored_record import RECORDS, words_record
from megalite.families.model_config import hf_shape
from megalite.model.kinds import windows
from megalite.model.mtp.losses import without_further_losses
from megalite.objectives.find import objective_class

HF = "hf:"


def second_model(config: Config) -> tuple[str, str] | None:
    """Return the option that names the second model of a run, and the name; None: it has none."""
    if distils(config):
        name = None if stored_teacher(config.distillation) is not None else config.distillation.teacher
        return None if name is None else ("distillation.teacher", name)
    name = reference_model(config.preference)
    return None if name is None or not _referred(config) else ("preference.reference", name)


def stored_words(config: Config) -> int | None:
    """Return the number of a teacher's words that a run reads for each token; None: it reads none.

    Raises:
        ConfigError: their directory cannot be read.
    """
    directory = stored_teacher(config.distillation) if distils(config) else None
    return None if directory is None else _number_of_words(directory)


@lru_cache(maxsize=4)
def _number_of_words(directory: str) -> int:
    with words_record(Path(directory)) as record:
        return int(record["number"])


def keeps_start(config: Config) -> bool:
    """Whether a run keeps a copy of the weights that it trains, because its reference is its start.

    Adapters that start at 0 need none if nothing else is trained: the start is the model without them.
    """
    lora = config.lora
    at_zero = lora.init_from is None and lora.start == "default"
    off = lora.rank and at_zero and not lora.modules_to_save
    return _referred(config) and config.preference.reference is None and not off


def _referred(config: Config) -> bool:
    return objective_class(config.train.objective).needs_reference


def teacher_of(config: Config) -> Config | None:
    """Return the configuration of forwards of the second model of a run, or None without one.

    The layout, the schedule, the batch and the precision are those of the run.

    Raises:
        ConfigError: its files cannot be read.
    """
    named = second_model(config)
    if named is None:
        return None
    own = _saved(*named)
    train = replace(
        config.train,
        objective="cross_entropy",
        recompute="none",
        memory_budget=None,
        fp8="none",
        ema_decay=None,
        indexer="sparse",
        label_smoothing=0.0,
        z_loss=0.0,
    )
    parallel = replace(
        config.parallel,
        partition=None,
        layer_costs=None,
        offload="none",
        offload_parameters=False,
        powersgd_rank=None,
    )
    return replace(
        config,
        model=replace(without_further_losses(own.model), init_from=None, resize_embeddings=None),
        lora=replace(own.lora, init_from=None),
        parallel=parallel,
        train=train,
        preference=PreferenceConfig(),
        distillation=DistillationConfig(),
    )


@lru_cache(maxsize=4)
def _saved(option: str, name: str) -> Config:
    """Return the configuration that was saved with a model; of a Hugging Face directory, the model alone."""
    option = f"{option} = {name}"
    if name.startswith(HF):
        directory = name.removeprefix(HF)
        try:
            return Config(model=ModelConfig(**hf_shape(directory)))
        except ConfigError as error:
            reason = str(error).removeprefix(f"model.from_hf = {directory}: ")
            raise ConfigError(f"{option}: {reason}") from None
    if (scheme := _scheme_of(Path(name))) is not None:
        what = "a Hugging Face directory" if scheme == HF else "a directory that megalite score has made"
        raise ConfigError(f"{option} is {what}. Set it to {scheme}{name}.")
    checkpoints = import_module("megalite.checkpoint")  # reading a manifest needs no torch, writing one does
    try:
        state = checkpoints.manifest_of(checkpoints.find(Path(name))).state
    except checkpoints.CheckpointError as error:
        raise ConfigError(f"{option}: {error}") from None
    if "config" not in state:
        raise ConfigError(
            f"{option} contains no configuration. Use a checkpoint written by megalite train or megalite "
            "convert."
        )
    return from_dict(state["config"])


def _positions(config: Config, model: ModelConfig) -> int:
    """Return the largest number of positions that a second model reads in a row."""
    length, objective = config.data.sequence_length, objective_class(config.train.objective)
    # a prompt with the completion of another example is as long as a row, and so is padding, for which
    # learned positions must exist
    if length <= model.max_position_embeddings or objective.needs_baseline or model.position == "learned":
        return length
    return longest_inputs(config.data)


def _scheme_of(place: Path) -> str | None:
    """Return what the name of a directory should begin with; None: nothing, or it is not known."""
    if any((place / record).is_file() for record in RECORDS):
        return SCORES
    return HF if (place / "config.json").is_file() else None


def check_teacher(config: Config, world_size: int) -> None:
    """Raise ConfigError if the second model does not fit the run: its vocabulary, positions or layout."""
    teacher, named = teacher_of(config), second_model(config)
    if teacher is None or named is None:
        return
    option, role = " = ".join(named), "teacher" if distils(config) else "reference"
    model, own = teacher.model, config.model
    if model.vocab_size != own.vocab_size:
        raise ConfigError(
            f"{option} has a vocabulary of {model.vocabulary:,} tokens, but model.vocab_size = "
            f"{own.vocabulary:,}: both models need the same tokens. Use a {role} with the tokenizer and the "
            "vocabulary of the model."
        )
    if model.output_head != "vocabulary":
        raise ConfigError(
            f"{option} is a reward model, which has no log-probabilities. Use a language model."
        )
    if (length := _positions(config, model)) > (most := model.max_position_embeddings):
        what, way = f"data.sequence_length = {length:,}", f"Set data.sequence_length to {most}"
        if length < config.data.sequence_length:
            what = f"a document of the data has {length:,}"
            way = f"Prepare the data again with --max_length {most}"
        raise ConfigError(
            f"{option} reads up to {most:,} positions, but {what}. {way}, or use another {role}."
        )
    if config.parallel.cp > 1 and windows(model) != windows(own):
        raise ConfigError(
            f"{option} has other attention windows than the model, but parallel.cp = {config.parallel.cp} "
            f"cuts sequences for one set of windows. Set parallel.cp to 1, or use another {role}."
        )
    facts = RuleContext(
        model=model,
        lora=teacher.lora,
        parallel=teacher.parallel,
        data=config.data,
        train=teacher.train,
        world_size=world_size,
    )
    for rule in (*MODEL_RULES, *LAYOUT_RULES):
        if rule.broken(facts):
            raise ConfigError(f"{option} does not fit this run: {rule.describe(facts)}")
