"""How far predictions of runs like a given one were from published speeds.

published_errors.yaml has the errors by kind of run and GPU; `python -m benchmarks.held_out` writes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from megalite.config.files import read_tree
from megalite.model.cost.records import Share
from megalite.model.kinds import dispatch_of
from megalite.planner.cost.state_exchange import recurrences
from megalite.planner.time.step import LayoutChoice, PlannedJob

ROWS = Path(__file__).with_name("published_errors.yaml")
NARROW = 16
"""Mixtures of this many experts or more, whose experts are narrow, are a kind of their own."""
LONG = 32_768
"""Sequences of this many tokens or more, split over context-parallel ranks, are one too."""


@dataclass(frozen=True)
class PublishedError:
    """Errors of the published runs of one kind on one GPU: predicted / measured speed - 1.

    Attributes:
        rows: number of runs.
        held_out: whether each was predicted with constants fitted without its table.
        median: of the absolute errors; 80 % of them are at most `within`.
        lowest, highest: of all.
    """

    kind: str
    gpu: str
    rows: int
    held_out: bool
    median: float
    within: float
    lowest: float
    highest: float

    def sentence(self) -> str:
        """Return the errors as a sentence."""
        many = f"{self.rows} published runs are" if self.rows > 1 else "one published run is"
        how = "" if self.held_out else ", with constants fitted to other kinds"
        spread = f"median error {self.median:.1%}, 80 % within {self.within:.0%}, " if self.rows > 1 else ""
        return (
            f"Of this kind ({self.kind}, {self.gpu.upper()}) {many} compared{how}: {spread}"
            f"predicted speeds {self.lowest:+.0%} to {self.highest:+.0%} off."
        )


def kind_of(job: PlannedJob, choice: LayoutChoice, fp8: bool) -> str:
    """Return the kind of a run, whose predictions have errors of its own.

    Args:
        fp8: whether matmuls are in fp8.
    """
    model = job.model
    if job.lora is not None and job.lora.rank > 0:
        return "adapters"
    if recurrences(model, Share(1)):
        return "recurrent layers"
    if (dispatch := dispatch_of(model)) is not None:
        return f"mixtures of {'narrow' if dispatch.experts >= NARROW else 'wide'} experts"
    if choice.cp > 1 and job.sequence_length >= LONG:
        return "long sequences with context parallelism"
    if fp8:
        return "fp8"
    return "hybrid sharding" if choice.dp_shard is not None and choice.zero == 3 else "dense models"


@cache
def published_errors() -> tuple[PublishedError, ...]:
    """Return the errors of all kinds."""
    tree: dict[str, list[dict[str, Any]]] = read_tree(str(ROWS), "published errors")
    return tuple(PublishedError(**row) for row in tree["errors"])


def describe_error(job: PlannedJob, choice: LayoutChoice) -> tuple[PublishedError | None, str]:
    """Return the errors of runs like this one on its GPU, None if there are none, and a sentence."""
    kind = kind_of(job, choice, job.fp8.recipe != "none")
    alike = {error.gpu: error for error in published_errors() if error.kind == kind}
    if (error := alike.get(job.device.name)) is not None:
        return error, error.sentence()
    if alike:
        listed = " ".join(error.sentence() for error in alike.values())
        return None, f"No published run of this kind on {job.device.name} has been compared. {listed}"
    return None, f"No published run of this kind ({kind}) has been compared with a prediction."
