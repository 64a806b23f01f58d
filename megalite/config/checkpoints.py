"""The options of checkpoints and validation: typed sections, as in schema.py."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass
class CheckpointConfig:
    interval: int | None = None
    """Save every `interval` steps, at the end and on a signal. null: every checkpoint.minutes, at the end and
    on a signal."""
    minutes: float | None = 15.0
    """Where checkpoint.interval is null: save every so many minutes, or less often, so that saves take at
    most 5 % of the time. null: only at the end and on a signal."""
    keep: int | None = None
    """Number of newest checkpoints to keep. null: keep all, of those that checkpoint.minutes saves the newest
    2."""
    keep_every: int | None = None
    """Besides the newest `keep` checkpoints, keep each one whose step is a multiple of this. null: no others.
    """
    keep_best: bool = False
    """Save also after each validation with the lowest loss so far, and never remove that checkpoint, which
    `checkpoints/best` names."""
    async_save: bool = False
    """Copy the state and write it to disk while training continues. Costs as much CPU memory as the state
    that this rank saves."""
    verify: Literal["read", "full"] = "read"
    """Which checksums are verified before a checkpoint is used: those of the chunks that are read (read), or
    all, split over the ranks (full)."""
    load: str = "auto"
    """auto: resume from the run's newest checkpoint, if there is one; none: start at step 0; otherwise a
    checkpoint directory to resume, or a run's directory for its newest."""
    allow: list[Literal["data", "horizon"]] = field(default_factory=list)
    """Changes accepted on resume: other training data (data), another train.steps (horizon)."""


@dataclass
class ValidationConfig:
    interval: int | None = None
    """Validate every `interval` steps and at the end. null: never."""
    batches: int | None = None
    """Number of global batches per validation. null: all validation data."""
    ema: bool = False
    """Validate with the average of train.ema_decay in place of the weights."""
    monitor: str | None = None
    """Name of the validation set whose loss checkpoint.keep_best and train.early_stopping_patience follow.
    null: val_loss, of all sets."""
