"""Traces, timelines and memory snapshots."""

from dataclasses import dataclass, field

from megalite.config.option import SIZE, option
from megalite.config.rule import Rule


@dataclass
class ProfilingConfig:
    timeline: bool = False
    """Record when each pipeline action of `steps` runs on each rank and compare with the simulator, in the
    run's traces/timeline.json."""
    steps: list[int] = field(default_factory=lambda: [3, 5])
    """First and last step to record and trace, counted from 1."""
    ranks: list[int] = field(default_factory=list)
    """Ranks on which torch.profiler traces these steps, into the run's traces/, with the pipeline actions
    labelled."""
    hardware: str | None = option(None, path=True)
    """Hardware for which the planner predicts the step time that is reported when the run ends: a name that
    `megalite plan` knows, or a file written by its --calibrate. null: the GPU of this run."""
    memory_snapshot: int | None = option(None, SIZE)
    """Step after which `ranks` (rank 0 if empty) write a snapshot of what GPU memory is used for; one is also
    written when memory runs out. null: no snapshot."""


RULES: tuple[Rule, ...] = (
    Rule(
        "profiled steps are a range",
        "profiling.steps",
        lambda c: len(c.profiling.steps) != 2 or not 1 <= c.profiling.steps[0] <= c.profiling.steps[1],
        message="must be a first and a last step",
        legal="Steps are counted from 1, for example [3, 5].",
    ),
)
