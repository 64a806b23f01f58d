"""Console, TensorBoard and Weights & Biases."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

from megalite.config.option import SIZE, option
from megalite.config.rule import Rule

WANDB_PROJECT = "megalite"
"""The project of logging.wandb: true, unless the environment variable WANDB_PROJECT names another."""


@dataclass
class LoggingConfig:
    interval: int = option(1, SIZE)
    """Print one console line every `interval` steps; metrics.jsonl has every step."""
    loss_by_source: bool = False
    """With a blend, record the training loss of each member in metrics.jsonl, as loss/PREFIX."""
    fp8_interval: int | None = option(None, SIZE)
    """With train.fp8, record every `fp8_interval` steps how operands are rounded: shares of saturated and
    flushed elements, and errors, by layer and matrix in metrics.jsonl. null: never."""
    tensorboard: bool | str | None = option(False, path=True)
    """Write TensorBoard scalars. true: to the run's tensorboard/ directory; a directory: there. false or
    null: off."""
    wandb: bool | str | None = None
    """Log to Weights & Biases, which needs the wandb package. A name: to this project; true: to the project
    in the environment variable WANDB_PROJECT, or megalite. false or null: off."""
    wandb_entity: str | None = None
    """User or team that the project belongs to. null: your default entity, or WANDB_ENTITY."""
    wandb_group: str | None = None
    """Group of runs on Weights & Biases that this run is shown in. null: none, or WANDB_RUN_GROUP."""
    wandb_tags: list[str] | None = None
    """Tags of the run on Weights & Biases. null: none, or WANDB_TAGS."""
    wandb_name: str | None = None
    """Name of the run on Weights & Biases. null: run.name."""
    wandb_mode: Literal["online", "offline", "disabled"] | None = None
    """online: upload while training; offline: store in the run's directory for `wandb sync`; disabled: do
    nothing. null: WANDB_MODE, or online."""


_WANDB = tuple(
    Rule(
        f"logging.{name} needs wandb",
        f"logging.{name}",
        partial(lambda name, c: getattr(c.logging, name) is not None and not c.logging.wandb, name),
        message="has no effect: {logging.wandb}",
        legal="Set logging.wandb to true or to the name of a project, or remove it.",
    )
    for name in ("wandb_entity", "wandb_group", "wandb_tags", "wandb_name", "wandb_mode")
)

RULES: tuple[Rule, ...] = (*_WANDB,)
