"""The starts of a run in starts.jsonl, one per line.

A line contains what a resume may change: options, hardware, kernels and predictions. The other files in the
directory that contain them (config.yaml, environment.json, prediction.json) only describe the newest start,
and metrics.jsonl contains the steps of all starts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megalite.config import run_files
from megalite.monitoring.metrics import lines_up_to
from megalite.system.files import write_synced
from megalite.system.messages import write_or_say


def now() -> str:
    """Return the current time in UTC."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True)
class Start:
    """One start of a run, a line of starts.jsonl.

    Attributes:
        step: the last step that was done before it; 0 for the first start.
        options: the resolved configuration by section.
        environment: the content of environment.json: ranks, device, versions.
        kernels: descriptions of the selected implementations.
        prediction: `step_time_s` (seconds), `step_time_interval_s` and `bubble_fraction`, each None if not
            predicted.
        change: of an elastic run: ranks, layout, where the state came from, seconds (`size_changes`).
        started: time in UTC.
    """

    step: int
    options: dict[str, Any]
    environment: dict[str, Any] = field(default_factory=dict)
    kernels: list[str] = field(default_factory=list)
    prediction: dict[str, Any] = field(default_factory=dict)
    change: dict[str, Any] = field(default_factory=dict)
    started: str = field(default_factory=now)


def add(directory: Path, start: Start) -> None:
    """Append a start.

    Starts after later steps are removed, because those steps are repeated. If the file cannot be written, a
    line is printed.
    """
    file = directory / run_files.STARTS
    lines = [*lines_up_to(file, start.step), json.dumps(asdict(start))]
    write_or_say(file, lambda path: write_synced(path, "".join(f"{line}\n" for line in lines)))


def read(directory: Path) -> list[Start]:
    """Return the starts of a run, the earliest first. Runs of versions without the file have none."""
    starts = []
    with suppress(OSError):
        for line in (directory / run_files.STARTS).read_text(encoding="utf-8").splitlines():
            with suppress(ValueError, TypeError, KeyError):
                known = {
                    name: value
                    for name, value in json.loads(line).items()
                    if name in Start.__dataclass_fields__
                }
                starts.append(Start(**known))
    return sorted((start for start in starts if isinstance(start.step, int)), key=lambda start: start.step)


def start_of(starts: Sequence[Start], step: int) -> Start | None:
    """Return the start that did a step, or None if it is not recorded."""
    return next((start for start in reversed(starts) if start.step < step), None)
