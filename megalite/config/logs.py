"""The options of console lines and of metrics: a typed section, as in schema.py. Imports no torch."""

from dataclasses import dataclass
from typing import Literal

WANDB_PROJECT = "megalite"
"""The project of logging.wandb: true, unless the environment variable WANDB_PROJECT names another."""


@dataclass
class LoggingConfig:
    interval: int = 1
    """Print one console line every `interval` steps; metrics.jsonl has every step."""
    loss_by_source: bool = False
    """With a blend, record the training loss of each member in metrics.jsonl, as loss/PREFIX."""
    tensorboard: bool | str | None = False
    """Write TensorBoard scalars. true: to the run's tensorboard/ directory; a directory: there. false or null: off."""
    wandb: bool | str | None = None
    """Log to Weights & Biases, which needs the wandb package. A name: to this project; true: to the project in the environment variable
    WANDB_PROJECT, or megalite. false or null: off."""
    wandb_entity: str | None = None
    """User or team that the project belongs to. null: your default entity, or WANDB_ENTITY."""
    wandb_group: str | None = None
    """Group of runs on Weights & Biases that this run is shown in. null: none, or WANDB_RUN_GROUP."""
    wandb_tags: list[str] | None = None
    """Tags of the run on Weights & Biases. null: none, or WANDB_TAGS."""
    wandb_name: str | None = None
    """Name of the run on Weights & Biases. null: run.name."""
    wandb_mode: Literal["online", "offline", "disabled"] | None = None
    """online: upload while training; offline: store in the run's directory for `wandb sync`; disabled: do nothing. null: WANDB_MODE, or
    online."""
