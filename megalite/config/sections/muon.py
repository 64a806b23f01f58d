"""The options of Muon."""

from dataclasses import dataclass
from typing import Literal

from megalite.config.option import FRACTION, NOT_NEGATIVE, SIZE, option
from megalite.config.rule import Rule


@dataclass
class MuonConfig:
    """Muon (Jordan et al. 2024), with optimizer.name muon: the options have the names and the meaning of
    torch.optim.Muon's."""

    lr: float = option(0.02, NOT_NEGATIVE)
    """Peak learning rate of the matrices. Warm-up, decay and lr_scaling multiply it by the same factors as
    optimizer.lr."""
    momentum: float = option(0.95, FRACTION)
    """Coefficient of the running average of the gradient."""
    nesterov: bool = True
    """Orthogonalise the gradient mixed with the running average. false: the running average."""
    ns_steps: int = option(5, SIZE)
    """Number of Newton-Schulz iterations."""
    ns_dtype: Literal["bf16", "compute"] = "bf16"
    """Dtype of the Newton-Schulz iterations. bf16: as torch.optim.Muon; compute: that of train.precision, but
    at least fp32."""
    weight_decay: float = option(0.1, NOT_NEGATIVE)
    """Decoupled weight decay of the matrices."""
    adjust_lr: Literal["original", "match_rms_adamw"] = "original"
    """Factor on the learning rate of an A x B matrix. original: sqrt(max(1, A / B)); match_rms_adamw: 0.2
    sqrt(max(A, B)), with which an update is as large as AdamW's, so that muon.lr may be the optimizer.lr of
    an AdamW run."""


RULES: tuple[Rule, ...] = (
    Rule(
        "fewer than 100 Newton-Schulz iterations",
        "muon.ns_steps",
        lambda c: c.muon.ns_steps >= 100,
        message="is too large for the number of Newton-Schulz iterations",
        legal="Legal values: 1 to 99; 5 is usual.",
    ),
)
