"""Console and trackers."""

from dataclasses import dataclass
from typing import Literal

from megalite.config.option import SIZE, option
from megalite.config.rule import Rule

PROJECT = "megalite"
"""The project or experiment of a tracker that is true, unless an environment variable names another."""


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
    mlflow: bool | str | None = None
    """Log to MLflow, which needs the mlflow package. A name: to this experiment; true: to the experiment in
    the environment variable MLFLOW_EXPERIMENT_NAME, or megalite. false or null: off."""
    mlflow_uri: str | None = None
    """Address of MLflow's tracking server or store. null: MLFLOW_TRACKING_URI, or MLflow's default."""
    mlflow_tags: dict[str, str] | None = None
    """Tags of the run on MLflow, name: value. null: none."""
    trackio: bool | str | None = None
    """Log to Trackio, which needs the trackio package. A name: to this project; true: to the project in the
    environment variable TRACKIO_PROJECT, or megalite. false or null: off."""
    trackio_group: str | None = None
    """Group of runs on Trackio that this run is shown in. null: none."""


_OF_TRACKERS = {
    "wandb": ("entity", "group", "tags", "name", "mode"),
    "mlflow": ("uri", "tags"),
    "trackio": ("group",),
}


def _needs(tracker: str, name: str) -> Rule:
    option = f"{tracker}_{name}"
    return Rule(
        f"logging.{option} needs {tracker}",
        f"logging.{option}",
        lambda c: getattr(c.logging, option) is not None and not getattr(c.logging, tracker),
        message=f"has no effect: {{logging.{tracker}}}",
        legal=f"Set logging.{tracker} to true or to a name, or remove it.",
    )


RULES: tuple[Rule, ...] = tuple(
    _needs(tracker, name) for tracker, names in _OF_TRACKERS.items() for name in names
)
