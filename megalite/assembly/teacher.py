"""The configuration of a teacher (`distillation.teacher`): a second, frozen model on the layout of a run.

It is read from the teacher's files without its weights, and without torch, because the planner asks for it.
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
from megalite.config.schema import Config
from megalite.config.sections.distillation import DistillationConfig, distils
from megalite.config.sections.model import ModelConfig
from megalite.config.sections.preference import PreferenceConfig
from megalite.families.model_config import hf_shape
from megalite.model.kinds import windows
from megalite.model.mtp.losses import without_further_losses

HF = "hf:"


def teacher_of(config: Config) -> Config | None:
    """Return the configuration of forwards of the teacher in a run, or None without a teacher.

    The layout, the schedule, the batch and the precision are those of the run.

    Raises:
        ConfigError: the teacher's files cannot be read.
    """
    name = config.distillation.teacher
    if not distils(config) or name is None:
        return None
    own = _saved(name)
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
def _saved(name: str) -> Config:
    """Return the configuration that was saved with a model; of a Hugging Face directory, the model alone."""
    option = f"distillation.teacher = {name}"
    if name.startswith(HF):
        directory = name.removeprefix(HF)
        try:
            return Config(model=ModelConfig(**hf_shape(directory)))
        except ConfigError as error:
            reason = str(error).removeprefix(f"model.from_hf = {directory}: ")
            raise ConfigError(f"{option}: {reason}") from None
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


def check_teacher(config: Config, world_size: int) -> None:
    """Raise ConfigError if the teacher does not fit the run: its vocabulary, positions or layout."""
    teacher = teacher_of(config)
    if teacher is None:
        return
    option = f"distillation.teacher = {config.distillation.teacher}"
    model, own = teacher.model, config.model
    if model.vocab_size != own.vocab_size:
        raise ConfigError(
            f"{option} has a vocabulary of {model.vocabulary:,} tokens, but model.vocab_size = "
            f"{own.vocabulary:,}: a divergence needs the same tokens. Use a teacher with the tokenizer and "
            "the vocabulary of the model."
        )
    if (length := config.data.sequence_length) > model.max_position_embeddings:
        raise ConfigError(
            f"{option} reads up to {model.max_position_embeddings:,} positions, but data.sequence_length "
            f"= {length:,}. Set data.sequence_length to {model.max_position_embeddings}, or use another "
            "teacher."
        )
    if config.parallel.cp > 1 and windows(model) != windows(own):
        raise ConfigError(
            f"{option} has other attention windows than the model, but parallel.cp = {config.parallel.cp} "
            "cuts sequences for one set of windows. Set parallel.cp to 1, or use another teacher."
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
