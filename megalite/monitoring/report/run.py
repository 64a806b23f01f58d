"""Reads a run's directory: configuration, metrics of every step, validation, and the segments with their
predictions.

Everything except config.yaml may be missing, half-written or still growing: a report can be made while a run
trains.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import yaml

from megalite.config.errors import ConfigError
from megalite.config.load import flatten, from_dict, to_dict
from megalite.config.schema import Config
from megalite.config.values import nest
from megalite.model.adapter_parameters import total_parameters
from megalite.monitoring import starts
from megalite.monitoring.report.segments import RunSegment, segments
from megalite.parallel.pipeline.schedule import ScheduleError
from megalite.planner.report.drawing import measured

METRICS, ENVIRONMENT, PREDICTION, SUMMARY = (
    "metrics.jsonl",
    "environment.json",
    "prediction.json",
    "summary.json",
)
FILES = ("config.yaml", METRICS, starts.FILE, ENVIRONMENT, PREDICTION, SUMMARY, measured.TIMELINE)
"""What a report is made of."""
PHASES = "time_"  # metrics.jsonl's keys of a step's phases start with this


class ReportError(Exception):
    """A directory without anything to report; the message says why."""


@dataclass(frozen=True)
class RecordedRun:
    """The content of one run's directory.

    Attributes:
        config, options, environment: of the newest start.
        steps, validations: the lines of metrics.jsonl, oldest first.
        starts: of the run, the earliest first, with all options of this version; at least one.
        recorded: the timeline of some steps, if the run has recorded one.
        summary: summary.json, empty before the first start.
    """

    name: str
    config: Config
    options: dict[str, Any]
    steps: list[dict[str, Any]]
    validations: list[dict[str, Any]]
    starts: list[starts.Start]
    recorded: measured.MeasuredRun | None
    environment: dict[str, Any]
    summary: dict[str, Any]

    @cached_property
    def segments(self) -> list[RunSegment]:
        """Its parts with different layouts, hardware or options, the earliest first; at least one."""
        return segments(self.starts, self.steps)

    def recorded_in(self, segment: RunSegment) -> measured.MeasuredRun | None:
        """The recorded timeline, if it is of a segment's steps."""
        return self.recorded if self.recorded is not None and segment.is_recorded_by(self.recorded) else None

    def sums(self, key: str) -> dict[int, float]:
        """The sum of a key over all steps up to each: the tokens seen, or the seconds trained.

        What `KEY_seen` counts is taken from there: it has the steps that a rollback has removed, too.
        """
        if self.steps and all(f"{key}_seen" in line for line in self.steps):
            return {line["step"]: line[f"{key}_seen"] for line in self.steps}
        return dict(
            zip(
                (line["step"] for line in self.steps),
                accumulate(line.get(key) or 0 for line in self.steps),
                strict=True,
            )
        )

    def curve(self, key: str) -> tuple[list[int], list[float]]:
        """The steps that have a number under this key, and these numbers."""
        points = [
            (line["step"], line[key])
            for line in (*self.steps, *self.validations)
            if isinstance(line.get(key), int | float)
        ]
        return [step for step, _ in points], [float(value) for _, value in points]

    def names(self, prefix: str) -> list[str]:
        """The names under which the run has numbers: what follows the prefix in keys, in the order in which
        they first appear."""
        lines = (*self.steps, *self.validations)
        keys = dict.fromkeys(
            key
            for line in lines
            for key, value in line.items()
            if key.startswith(prefix) and value is not None
        )
        return [key.removeprefix(prefix) for key in keys]

    @property
    def phases(self) -> list[str]:
        """The keys of a step's phases, in the order in which they are first written."""
        return list(dict.fromkeys(key for line in self.steps for key in line if key.startswith(PHASES)))

    @property
    def parameters(self) -> int:
        return total_parameters(self.config.model, self.config.lora)


def read_all(directories: Sequence[Path]) -> list[RecordedRun]:
    """Read several runs. Runs of the same name are called by their directories. Raises ReportError if one is
    not a run."""
    runs = [read(directory) for directory in directories]
    names = [run.name for run in runs]
    return [
        replace(run, name=str(at)) if names.count(run.name) > 1 else run
        for run, at in zip(runs, directories, strict=True)
    ]


def read(directory: Path) -> RecordedRun:
    """Read a run's directory. Raises ReportError if it is not one."""
    try:
        options = yaml.safe_load((directory / "config.yaml").read_text(encoding="utf-8")) or {}
        options = nest(flatten(options, "in the configuration"))
        config = from_dict(options)
    except OSError as error:
        raise ReportError(
            f"{directory}: config.yaml cannot be read: {error.strerror}. Give the directory of a run."
        ) from None
    except (ConfigError, yaml.YAMLError) as error:
        raise ReportError(f"{directory / 'config.yaml'}: {error}") from None
    lines = _lines(directory / METRICS)
    try:
        recorded = measured.read(directory) if (directory / measured.TIMELINE).exists() else None
    except ScheduleError as error:
        raise ReportError(str(error)) from None
    steps, validations = (
        [line for line in lines if "loss" in line],
        [line for line in lines if "val_loss" in line],
    )
    environment, prediction, summary = (
        _object(directory / name) for name in (ENVIRONMENT, PREDICTION, SUMMARY)
    )
    begun = [replace(start, options=_whole(start.options)) for start in starts.read(directory)]
    if not begun:  # a run of an earlier version: its last start is all that is known
        after = steps[0]["step"] - 1 if steps else 0
        begun = [starts.Start(after, to_dict(config), environment, prediction=prediction)]
    return RecordedRun(
        directory.resolve().name, config, options, steps, validations, begun, recorded, environment, summary
    )


def _whole(options: dict[str, Any]) -> dict[str, Any]:
    """Options with the defaults of those that an earlier version did not have; as they are if this version
    cannot read them."""
    try:
        return to_dict(from_dict(options))
    except ConfigError:
        return options


def _lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of metrics.jsonl; a line that is being written is left out."""
    if not path.exists():
        return []
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").split("\n"), start=1):
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
        if not isinstance(records[-1], dict) or not isinstance(records[-1].get("step"), int):
            raise ReportError(f"{path}, line {number}: not a line of a run's metrics, since it has no step.")
    return records


def _object(path: Path) -> dict[str, Any]:
    """The content of a JSON file; empty if there is none, or while it is being written."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
