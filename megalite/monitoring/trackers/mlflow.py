"""MLflow: a run of an experiment on a tracking server, or in a store of this machine."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megalite.config.load import to_dict
from megalite.config.rule import show
from megalite.config.sections.logging import PROJECT
from megalite.monitoring.gpu import MEMORY, SENSORS
from megalite.monitoring.trackers.client import Measurement, TrackedRun
from megalite.system.messages import say

UNLESS_SET = {
    # a request ends soon: the queue of megalite sends it again
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
MOST_METRICS, MOST_PARAMETERS = 1000, 100
"""Of one request, by MLflow's own limits."""
LONGEST_NAME, LONGEST_VALUE = 250, 6000  # characters
SYSTEM = {*SENSORS, *MEMORY, "peak_memory_bytes"}
"""Metrics that MLflow shows among those of the system, which are named system/METRIC."""


class MLflow:
    """Client of a run on MLflow.

    Options are parameters of the run, which MLflow does not change: an option that differs after a resume is
    the tag resumed.OPTION.
    """

    def __init__(self, run: TrackedRun, step: int):
        for name, value in UNLESS_SET.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient

        options = run.config.logging
        self._client = MlflowClient(tracking_uri=options.mlflow_uri)
        known = None if run.identity is None else self._find(run.identity)
        if known is None:
            experiment = options.mlflow if isinstance(options.mlflow, str) else None
            created = self._client.create_run(
                self._experiment(experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT),
                run_name=run.run_dir.name,
                tags={"mlflow.source.name": "megalite train", **(options.mlflow_tags or {})},
            )
            run.identity, known = created.info.run_id, created
        else:
            self._client.update_run(known.info.run_id, status="RUNNING")
        self._id = known.info.run_id
        self._log_options(flat(to_dict(run.config)), known.data.params)

    def _find(self, identity: str) -> Any:
        """Return the run, or None if MLflow does not have it."""
        from mlflow.exceptions import MlflowException

        try:
            known = self._client.get_run(identity)
        except MlflowException as error:
            if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                raise
            known = None
        if known is None or known.info.lifecycle_stage != "active":
            say(f"MLflow does not have the run {identity} anymore. A new one gets the next steps")
            return None
        return known

    def _experiment(self, name: str) -> str:
        existing = self._client.get_experiment_by_name(name)
        return self._client.create_experiment(name) if existing is None else existing.experiment_id

    def _log_options(self, options: Mapping[str, str], known: Mapping[str, str]) -> None:
        from mlflow.entities import Param, RunTag

        new = [Param(name, value) for name, value in options.items() if name not in known]
        changed = [
            RunTag(f"resumed.{name}", value)
            for name, value in options.items()
            if name in known and known[name] != value
        ]
        for part in _parts(new, MOST_PARAMETERS):
            self._client.log_batch(self._id, params=part)
        for part in _parts(changed, MOST_PARAMETERS):
            self._client.log_batch(self._id, tags=part)

    def log(self, measurements: Sequence[Measurement]) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(metric_name(name), value, round(1000 * measurement.time), measurement.step)
            for measurement in measurements
            for name, value in measurement.scalars.items()
        ]
        for part in _parts(metrics, MOST_METRICS):
            self._client.log_batch(self._id, metrics=part)

    def close(self, failed: bool) -> None:
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


def flat(tree: Mapping[str, Any]) -> dict[str, str]:
    """Return section.key → value, as text of at most the length that MLflow stores."""
    return {
        f"{section}.{key}": show(value)[:LONGEST_VALUE]
        for section, values in tree.items()
        for key, value in values.items()
    }


def metric_name(name: str) -> str:
    """Return the name of a metric on MLflow, which takes no absolute or relative paths and few signs."""
    parts = [part for part in re.sub(r"[^\w\-. :/]", "_", name).split("/") if part not in ("", ".")]
    whole = "/".join("_" if part == ".." else part for part in parts)
    return (f"system/{whole}" if name in SYSTEM else whole)[-LONGEST_NAME:].lstrip("/")


def _parts(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (items[first : first + size] for first in range(0, len(items), size))
