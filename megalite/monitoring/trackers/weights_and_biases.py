"""Weights & Biases: a run of a project, on its server or in the run directory."""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence

from megalite.config.load import to_dict
from megalite.config.sections.logging import PROJECT
from megalite.monitoring.trackers.client import Measurement, TrackedRun


class WeightsAndBiases:
    """Client of a run on Weights & Biases. A resumed run keeps its identifier."""

    def __init__(self, run: TrackedRun, step: int):
        import wandb

        options = run.config.logging
        run.identity = run.identity or uuid.uuid4().hex
        project = options.wandb if isinstance(options.wandb, str) else os.environ.get("WANDB_PROJECT")
        self._run = wandb.init(
            project=project or PROJECT,
            entity=options.wandb_entity,
            group=options.wandb_group,
            tags=options.wandb_tags,
            name=options.wandb_name or run.run_dir.name,
            mode=options.wandb_mode,
            id=run.identity,
            dir=str(run.run_dir),
            config=to_dict(run.config),
            resume="allow",
        )

    def log(self, measurements: Sequence[Measurement]) -> None:
        for measurement in measurements:
            self._run.log(dict(measurement.scalars), step=measurement.step)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))
