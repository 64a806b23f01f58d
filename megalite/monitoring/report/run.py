"""Reads a run's directory: configuration, metrics of every step, validation, and predictions.

Everything except config.yaml may be missing, half-written or still growing: a report can be made while a run trains.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from megalite.config.dims import ParallelDims
from megalite.config.load import from_dict
from megalite.config.schema import Config, ConfigError
from megalite.model.adapters import total_parameters
from megalite.parallel.pipeline.bubble import Plan
from megalite.parallel.pipeline.bubble import plan as planned
from megalite.parallel.pipeline.schedule import Costs, ScheduleError
from megalite.planning.drawing import measured

METRICS, ENVIRONMENT, PREDICTION, SUMMARY = "metrics.jsonl", "environment.json", "prediction.json", "summary.json"
FILES = ("config.yaml", METRICS, ENVIRONMENT, PREDICTION, SUMMARY, measured.TIMELINE)
"""What a report is made of."""
PHASES = "time_"  # metrics.jsonl's keys of a step's phases start with this


class ReportError(Exception):
    """A directory without anything to report; the message says why."""


@dataclass(frozen=True)
class Run:
    """The content of one run's directory. `steps` and `validations` are the lines of metrics.jsonl, oldest first; `summary` is
    summary.json, empty before the first start."""

    name: str
    config: Config
    options: dict[str, Any]
    steps: list[dict[str, Any]]
    validations: list[dict[str, Any]]
    recorded: measured.MeasuredRun | None
    environment: dict[str, Any]
    prediction: dict[str, Any]
    summary: dict[str, Any]

    def sums(self, key: str) -> dict[int, float]:
        """The sum of a key over all steps up to each: the tokens seen, or the seconds trained.

        What `KEY_seen` counts is taken from there: it has the steps that a rollback has removed, too.
        """
        if self.steps and all(f"{key}_seen" in line for line in self.steps):
            return {line["step"]: line[f"{key}_seen"] for line in self.steps}
        return dict(zip((line["step"] for line in self.steps), accumulate(line.get(key) or 0 for line in self.steps), strict=True))

    def curve(self, key: str) -> tuple[list[int], list[float]]:
        """The steps that have a number under this key, and these numbers."""
        found = [(line["step"], line[key]) for line in (*self.steps, *self.validations) if isinstance(line.get(key), int | float)]
        return [step for step, _ in found], [float(value) for _, value in found]

    def names(self, prefix: str) -> list[str]:
        """The names under which the run has numbers: what follows the prefix in keys, in the order in which they first appear."""
        lines = (*self.steps, *self.validations)
        found = dict.fromkeys(key for line in lines for key, value in line.items() if key.startswith(prefix) and value is not None)
        return [key.removeprefix(prefix) for key in found]

    def typical(self, key: str) -> float | None:
        """The median over the second half of the steps, to exclude start-up."""
        _, values = self.curve(key)
        return median(values[len(values) // 2 :]) if values else None

    @property
    def phases(self) -> list[str]:
        """The keys of a step's phases, in the order in which they are written."""
        return [key for key in (self.steps[-1] if self.steps else {}) if key.startswith(PHASES)]

    @property
    def parameters(self) -> int:
        return total_parameters(self.config.model, self.config.lora)

    def schedule(self) -> Plan | None:
        """The pipeline of a step, with the durations that the run recorded, or else those that its schedule was planned for."""
        if self.recorded is not None:
            return self.recorded.plan
        parallel = self.config.parallel
        if parallel.pp == 1 or parallel.dp is None:
            return None
        sizes = (parallel.pp, ParallelDims.of(self.config).microbatches, parallel.virtual_stages)
        return planned(parallel.schedule, *sizes, Costs(*parallel.schedule_costs))


def read_all(directories: Sequence[Path]) -> list[Run]:
    """Read several runs. Runs of the same name are called by their directories. Raises ReportError if one is not a run."""
    runs = [read(directory) for directory in directories]
    names = [run.name for run in runs]
    return [replace(run, name=str(at)) if names.count(run.name) > 1 else run for run, at in zip(runs, directories, strict=True)]


def read(directory: Path) -> Run:
    """Read a run's directory. Raises ReportError if it is not one."""
    try:
        options = yaml.safe_load((directory / "config.yaml").read_text(encoding="utf-8")) or {}
        config = from_dict(options)
    except OSError as error:
        raise ReportError(f"{directory}: config.yaml can not be read: {error.strerror}. Give the directory of a run.") from None
    except (ConfigError, yaml.YAMLError) as error:
        raise ReportError(f"{directory / 'config.yaml'}: {error}") from None
    lines = _lines(directory / METRICS)
    try:
        recorded = measured.read(directory) if (directory / measured.TIMELINE).exists() else None
    except ScheduleError as error:
        raise ReportError(str(error)) from None
    steps, validations = [line for line in lines if "loss" in line], [line for line in lines if "val_loss" in line]
    extras = (_object(directory / name) for name in (ENVIRONMENT, PREDICTION, SUMMARY))
    return Run(directory.resolve().name, config, options, steps, validations, recorded, *extras)


def _lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of metrics.jsonl; a line that is being written is left out."""
    if not path.exists():
        return []
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").split("\n"), start=1):
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
        if not isinstance(found[-1], dict) or not isinstance(found[-1].get("step"), int):
            raise ReportError(f"{path}, line {number}: not a line of a run's metrics, since it has no step.")
    return found


def _object(path: Path) -> dict[str, Any]:
    """The content of a JSON file; empty if there is none, or while it is being written."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
