"""Content of a run directory: configuration, metrics, validation, and segments with their predictions.

All files except config.yaml may be missing, incomplete or still growing, because a report can be created
during training.
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

from megalite.config import run_files
from megalite.config.errors import ConfigError
from megalite.config.load import flatten, from_dict, to_dict
from megalite.config.schema import Config
from megalite.config.values import nest
from megalite.model.adapter_parameters import total_parameters
from megalite.monitoring import starts
from megalite.monitoring.report.segments import RunSegment, segments
from megalite.parallel.pipeline.schedule import ScheduleError
from megalite.planner.drawing import measured

FILES = (
    run_files.CONFIG,
    run_files.METRICS,
    run_files.STARTS,
    run_files.ENVIRONMENT,
    run_files.PREDICTION,
    run_files.SUMMARY,
    run_files.TIMELINE,
)
"""Files from which a report is created."""
PHASES = "time_"  # prefix of the keys of a step's phases in metrics.jsonl


class ReportError(Exception):
    """Raised if a directory does not contain a run that can be reported."""


@dataclass(frozen=True)
class RecordedRun:
    """Content of a run directory.

    Attributes:
        config, options, environment: of the newest start.
        steps, validations: lines of metrics.jsonl, oldest first.
        starts: starts of the run, oldest first, with all options of this version; at least one.
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
        """Parts of the run with different layouts, hardware or options, oldest first; at least one."""
        return segments(self.starts, self.steps)

    def recorded_in(self, segment: RunSegment) -> measured.MeasuredRun | None:
        """Return the recorded timeline if it belongs to the steps of a segment."""
        return self.recorded if self.recorded is not None and segment.is_recorded_by(self.recorded) else None

    def sums(self, key: str) -> dict[int, float]:
        """Return the cumulative sum of a key by step, such as the tokens seen or the seconds trained.

        If `KEY_seen` exists, its values are used, because they include the steps that a rollback has removed.
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
        """Return the steps that have a number under this key, and the numbers."""
        points = [
            (line["step"], line[key])
            for line in (*self.steps, *self.validations)
            if isinstance(line.get(key), int | float)
        ]
        return [step for step, _ in points], [float(value) for _, value in points]

    def names(self, prefix: str) -> list[str]:
        """Return the names that follow a prefix in the keys of the run, in order of first appearance."""
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
        """Keys of the phases of a step, in order of first appearance."""
        return list(dict.fromkeys(key for line in self.steps for key in line if key.startswith(PHASES)))

    @property
    def parameters(self) -> int:
        return total_parameters(self.config.model, self.config.lora)


def read_all(directories: Sequence[Path]) -> list[RecordedRun]:
    """Read several runs. Runs with the same name are identified by their directories.

    Raises:
        ReportError: one of the directories is not a run.
    """
    runs = [read(directory) for directory in directories]
    names = [run.name for run in runs]
    return [
        replace(run, name=str(at)) if names.count(run.name) > 1 else run
        for run, at in zip(runs, directories, strict=True)
    ]


def read(directory: Path) -> RecordedRun:
    """Read a run directory. Raises ReportError if it is not one."""
    try:
        options = yaml.safe_load((directory / run_files.CONFIG).read_text(encoding="utf-8")) or {}
        options = nest(flatten(options, "in the configuration"))
        config = from_dict(options)
    except OSError as error:
        raise ReportError(
            f"Could not read {directory}/config.yaml: {error.strerror}. Pass a run directory."
        ) from None
    except (ConfigError, yaml.YAMLError) as error:
        raise ReportError(f"{directory / run_files.CONFIG}: {error}") from None
    lines = _lines(directory / run_files.METRICS)
    try:
        recorded = measured.read(directory) if (directory / run_files.TIMELINE).exists() else None
    except ScheduleError as error:
        raise ReportError(str(error)) from None
    steps, validations = (
        [line for line in lines if "loss" in line],
        [line for line in lines if "val_loss" in line],
    )
    environment, prediction, summary = (
        _object(directory / name) for name in (run_files.ENVIRONMENT, run_files.PREDICTION, run_files.SUMMARY)
    )
    begun = [replace(start, options=_whole(start.options)) for start in starts.read(directory)]
    if not begun:  # a run of an earlier version, of which only the last start is known
        after = steps[0]["step"] - 1 if steps else 0
        begun = [starts.Start(after, to_dict(config), environment, prediction=prediction)]
    return RecordedRun(
        directory.resolve().name, config, options, steps, validations, begun, recorded, environment, summary
    )


def _whole(options: dict[str, Any]) -> dict[str, Any]:
    """Add defaults for options that an earlier version did not have.

    The options are returned unchanged if this version cannot read them.
    """
    try:
        return to_dict(from_dict(options))
    except ConfigError:
        return options


def _lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of metrics.jsonl, without a line that is being written."""
    if not path.exists():
        return []
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").split("\n"), start=1):
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
        if not isinstance(records[-1], dict) or not isinstance(records[-1].get("step"), int):
            raise ReportError(f"{path}, line {number} is not a metrics record: missing key 'step'.")
    return records


def _object(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file, or an empty dict if it is missing or being written."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
