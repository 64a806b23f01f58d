"""When validation is run, and over how much data."""

from dataclasses import dataclass

from megalite.config import amounts
from megalite.config.option import SIZE, option


@dataclass
class ValidationConfig:
    interval: int | None = option(None, SIZE, amount=amounts.STEPS)
    """Validate every `interval` steps and at the end. null: never."""
    batches: int | None = option(None, SIZE)
    """Number of global batches per validation. null: all validation data."""
    ema: bool = False
    """Validate with the average of train.ema_decay in place of the weights."""
    monitor: str | None = None
    """Name of the validation set whose loss checkpoint.keep_best and train.early_stopping_patience follow.
    null: val_loss, of all sets."""
