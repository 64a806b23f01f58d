"""Dynamic loss scaling."""

from dataclasses import dataclass

from megalite.config.option import NOT_NEGATIVE, POSITIVE, SIZE, option


@dataclass
class FP16Config:
    """Dynamic loss scaling of fp16, as in DeepSpeed."""

    initial_scale_power: int = option(16, NOT_NEGATIVE)
    """Exponent of the initial loss scale, 2 ** initial_scale_power."""
    loss_scale_window: int = option(1000, SIZE)
    """Number of steps without overflow after which the scale is doubled."""
    hysteresis: int = option(2, SIZE)
    """Number of overflows after which the scale is halved."""
    min_loss_scale: float = option(1.0, POSITIVE)
    """Minimum loss scale."""
