"""The planner's interface for commands that choose a layout: the search, its explanation, the configuration.

`api` has the predictions for a given run.
"""

from megalite.planner.cost.operations import Software  # properties of the training software that is predicted
from megalite.planner.first_config import (
    RunRequest,  # the user's choices for a new run
    cpu_device,  # this machine's CPU as a device
    first_config,  # the configuration of a new run
)
from megalite.planner.report import (
    explanation,  # sentences, tables and JSON about plans
    published_errors,  # errors of predictions of published runs, by kind
)
from megalite.planner.report.fp8_effect import fp8_effect  # what fp8 changes in the step time, as a line
from megalite.planner.report.zero2_hint import zero2_hint  # a line about ZeRO-2 between nodes
from megalite.planner.search.best_first import (
    Plan,  # a layout with its predicted time and memory
    Search,  # finds the fastest plans that fit
)
from megalite.planner.search.neighbours import (
    better,  # layouts with one change that fit, and are faster
    differing,  # number of choices in which two layouts differ
)
from megalite.planner.search.run_config import (
    apply_layout,  # the configuration with a layout
    first_broken_rule,  # the message of the rule that a layout breaks
    nodes_for,  # number of nodes for some GPUs
    to_commented_yaml,  # a configuration file with the options' documentation
    to_run_config,  # the configuration that runs a plan
    to_yaml,  # a configuration file
)
from megalite.planner.time.prediction import choice_of  # the layout of a configuration
from megalite.planner.time.step import (
    LayoutChoice,  # a layout of a model over ranks
    PlannedJob,  # the model, device and batch that a layout is chosen for
    Stepper,  # predicts step times of layouts
    StepTime,  # a predicted step time and its parts
)

__all__ = [
    "LayoutChoice",
    "Plan",
    "PlannedJob",
    "RunRequest",
    "Search",
    "Software",
    "StepTime",
    "Stepper",
    "apply_layout",
    "better",
    "choice_of",
    "cpu_device",
    "differing",
    "explanation",
    "first_broken_rule",
    "first_config",
    "fp8_effect",
    "nodes_for",
    "published_errors",
    "to_commented_yaml",
    "to_run_config",
    "to_yaml",
    "zero2_hint",
]
