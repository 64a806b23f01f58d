"""The options of AdEMAMix."""

from dataclasses import dataclass

from megalite.config.option import FRACTION, NOT_NEGATIVE, option
from megalite.config.rule import Rule


@dataclass
class AdEMAMixConfig:
    """AdEMAMix (Pagliardini et al. 2024), with optimizer.name ademamix: AdamW with a slow average of the
    gradient besides. Its other options are those of optimizer."""

    alpha: float = option(5.0, NOT_NEGATIVE)
    """Factor of the slow average of the gradient in an update."""
    beta3: float = option(0.9999, FRACTION)
    """Coefficient of the slow average."""
    schedule_steps: int = option(0, NOT_NEGATIVE)
    """Number of steps over which alpha rises from 0, and beta3 from the first of optimizer.betas. The paper
    takes train.steps."""


RULES: tuple[Rule, ...] = (
    Rule(
        "a slow average",
        "ademamix.beta3",
        lambda c: c.optimizer.name == "ademamix" and c.ademamix.beta3 < c.optimizer.betas[0],
        message="is below the first of {optimizer.betas}, but the slow average must be the slower one",
        legal="Set it to 0.999 to 0.9999.",
    ),
)
