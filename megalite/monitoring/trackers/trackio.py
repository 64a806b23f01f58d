"""Trackio: a run of a project in the database of this machine, on a server, or in a Space."""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence

from megalite.config.load import to_dict
from megalite.config.sections.logging import PROJECT
from megalite.monitoring.trackers.client import Measurement, TrackedRun


class Trackio:
    """Client of a run on Trackio.

    Trackio finds a run by its name, so that the name of each is its own: a resumed run keeps it.
    """

    def __init__(self, run: TrackedRun, step: int):
        import trackio

        options = run.config.logging
        run.identity = run.identity or f"{run.run_dir.name}-{uuid.uuid4().hex[:8]}"
        project = options.trackio if isinstance(options.trackio, str) else os.environ.get("TRACKIO_PROJECT")
        self._run = trackio.init(
            project=project or PROJECT,
            name=run.identity,
            group=options.trackio_group,
            config=to_dict(run.config),
            resume="allow",
            embed=False,
        )

    def log(self, measurements: Sequence[Measurement]) -> None:
        for measurement in measurements:
            self._run.log(dict(measurement.scalars), step=measurement.step)

    def close(self, failed: bool) -> None:
        self._run.finish()
