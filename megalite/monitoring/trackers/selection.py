"""The trackers, and which of them the options select."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from megalite.config import run_files
from megalite.config.errors import ConfigError
from megalite.config.rule import show
from megalite.config.schema import Config
from megalite.config.sections.logging import LoggingConfig
from megalite.monitoring.trackers.client import Client, TrackedRun
from megalite.monitoring.trackers.recipient import Recipient


class Tracker(NamedTuple):
    """A tracker.

    Attributes:
        option: the option of `logging` that selects it, which is also the name of its package.
        title: its name in messages.
        client: module in this package, and class.
        extra: the extra of megalite that installs it.
        identity: the file in the run directory that keeps the run's identifier.
        rewinds: whether a client that is opened at an earlier step removes the later ones.
    """

    option: str
    title: str
    client: tuple[str, str]
    extra: str
    identity: str = ""
    rewinds: bool = False


TRACKERS = (
    Tracker("tensorboard", "TensorBoard", ("tensorboard", "TensorBoard"), "log", rewinds=True),
    Tracker(
        "wandb", "Weights & Biases", ("weights_and_biases", "WeightsAndBiases"), "log", run_files.WANDB_ID
    ),
    Tracker("mlflow", "MLflow", ("mlflow", "MLflow"), "mlflow", run_files.MLFLOW_ID),
    Tracker("trackio", "Trackio", ("trackio", "Trackio"), "trackio", run_files.TRACKIO_NAME),
)


def selected(options: LoggingConfig) -> list[Tracker]:
    """Return the trackers that the options select."""
    return [tracker for tracker in TRACKERS if getattr(options, tracker.option)]


def check_packages(options: LoggingConfig) -> None:
    """Raise ConfigError if an option requires a package that is not installed.

    Every rank can check this before the run starts.
    """
    for tracker in selected(options):
        if find_spec(tracker.option) is None:
            raise ConfigError(
                f"logging.{tracker.option}={show(getattr(options, tracker.option))} requires the package "
                f"{tracker.option}. Install it with `pip install 'megalite[{tracker.extra}]'`, or leave the "
                "option unset."
            )


def open_recipients(config: Config, run_dir: Path, step: int) -> list[Recipient]:
    """Return the recipients selected by the options, to continue after a step."""
    return [
        Recipient(
            tracker.title,
            _opener(tracker, TrackedRun(run_dir, config, tracker.identity, starts=step == 0)),
            step,
            tracker.rewinds,
        )
        for tracker in selected(config.logging)
    ]


def _opener(tracker: Tracker, run: TrackedRun) -> Callable[[int], Client]:
    """Return the function that opens a tracker's client, to continue after a step."""
    module, name = tracker.client

    def open_at(step: int) -> Client:  # its library is imported here, in the recipient's thread
        return getattr(import_module(f"{__package__}.{module}"), name)(run, step)

    return open_at
