"""What is saved, and what a run resumes."""

import os
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from megalite.config import amounts
from megalite.config.option import POSITIVE, SIZE, option
from megalite.config.rule import (
    CHECKPOINT_EXAMPLE,
    Rule,
    is_checkpoint,
)

if TYPE_CHECKING:
    from megalite.config.rules.context import RuleContext


@dataclass
class CheckpointConfig:
    interval: int | None = option(None, SIZE, amount=amounts.STEPS)
    """Save every `interval` steps, at the end and on a signal. null: every checkpoint.minutes, at the end and
    on a signal."""
    minutes: float | None = option(15.0, POSITIVE)
    """Where checkpoint.interval is null: save every so many minutes, or less often, so that saves take at
    most 5 % of the time. null: only at the end and on a signal."""
    keep: int | None = option(None, SIZE)
    """Number of newest checkpoints to keep. null: keep all, of those that checkpoint.minutes saves the newest
    2."""
    keep_every: int | None = option(None, SIZE, amount=amounts.STEPS)
    """Besides the newest `keep` checkpoints, keep each one whose step is a multiple of this. null: no others.
    """
    keep_best: bool = False
    """Save also after each validation with the lowest loss so far, and never remove that checkpoint, which
    `checkpoints/best` names."""
    async_save: bool = False
    """Copy the state and write it to disk while training continues. Costs as much CPU memory as the state
    that this rank saves."""
    copy_interval: int | None = option(None, SIZE, amount=amounts.STEPS)
    """Every so many steps, copy the state to memory that outlives the ranks, from which a restart resumes. A
    node keeps two copies, and two of another node's. null: none."""
    verify: Literal["read", "full"] = "read"
    """Which checksums are verified before a checkpoint is used: those of the chunks that are read (read), or
    all, split over the ranks (full)."""
    load: str = option("auto", path=True)
    """auto: resume from the run's newest checkpoint, if there is one; none: start at step 0; otherwise a
    checkpoint directory to resume, or a run's directory for its newest."""
    allow: list[Literal["data", "horizon", "objective", "optimizer"]] = field(default_factory=list)
    """Changes accepted on resume: other training data (data), another train.steps (horizon), another
    train.objective or preference.reference (objective), another optimizer.name (optimizer)."""

    @property
    def names_checkpoint(self) -> bool:
        """Whether `load` names the checkpoint to resume."""
        return self.load not in ("auto", "none")


STARTS = {
    **dict.fromkeys(("true", "latest", "last", "newest", "resume"), "auto"),
    **dict.fromkeys(("false", "null", "scratch"), "none"),
}
"""What other programs call the values of checkpoint.load."""


def _start(c: "RuleContext") -> str:
    """The way out for a checkpoint that is not there."""
    load = c.checkpoint.load
    if os.path.isfile(Path(load, "config.json")):
        return f"It is a Hugging Face model: set model.init_from to hf:{load} and model.from_hf to {load}."
    word = STARTS.get(load.lower()) or next(iter(get_close_matches(load, ("auto", "none"), n=1)), None)
    return f"Nearest: {word}." if word else CHECKPOINT_EXAMPLE


RULES: tuple[Rule, ...] = (
    Rule(
        "checkpoint exists",
        "checkpoint.load",
        lambda c: c.checkpoint.names_checkpoint and not is_checkpoint(c.checkpoint.load),
        message="is neither auto nor none, nor a checkpoint (manifest.json is missing), nor a run with "
        "saved one",
        legal=_start,
    ),
    Rule(
        "keep_every beside keep",
        "checkpoint.keep_every",
        lambda c: c.checkpoint.keep_every and c.checkpoint.keep is None,
        message="has no effect, because all checkpoints are kept unless checkpoint.keep is set",
        legal="Set checkpoint.keep as well, or remove it.",
    ),
)
