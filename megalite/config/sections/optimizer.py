"""The optimizer and its learning-rate schedule."""

from dataclasses import dataclass
from typing import Any, Literal

from megalite.config import amounts
from megalite.config.extensions import BUILT_IN, EXTENSIONS, is_own_optimizer
from megalite.config.option import FRACTION, NOT_NEGATIVE, POSITIVE, SHARE_OF_STEPS, SIZE, option
from megalite.config.rule import Rule, suggestion


@dataclass
class OptimizerConfig:
    name: str = "adamw"
    """adamw, lion or ademamix for every tensor; muon for the matrices of the layers and AdamW for all other
    tensors; or your own, FILE:CLASS or a name that a file in run.extensions registers."""
    moments: Literal["fp32", "bf16", "8bit"] = "fp32"
    """Precision of the moments that an elementwise optimizer keeps. bf16 is rounded stochastically; 8bit has
    block-wise codes as bitsandbytes' 8-bit optimizers, for matrices. Muon's moment of matrices stays fp32."""
    lr: float = option(3e-4, NOT_NEGATIVE)
    """Peak learning rate. With muon that of the tensors that AdamW updates; muon.lr follows the same warm-up
    and decay."""
    min_lr: float = option(0.0, NOT_NEGATIVE)
    """Learning rate at the end of the decay."""
    warmup_steps: int = option(0, NOT_NEGATIVE, amount=amounts.STEPS_OR_SHARE)
    """Number of steps of linear warm-up from 0 to lr; or their share of train.steps, 5% or 0.05."""
    decay: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Learning-rate schedule after the warm-up. wsd: constant, then linear decay over the last
    wsd_decay_fraction of train.steps."""
    wsd_decay_fraction: float = option(0.1, SHARE_OF_STEPS, amount=amounts.PERCENTAGE)
    """Fraction of train.steps over which wsd decays."""
    betas: list[float] = option([0.9, 0.95], FRACTION)
    """AdamW's coefficients for the running averages of the gradient and of its square."""
    eps: float = option(1e-8, POSITIVE)
    """AdamW's epsilon."""
    weight_decay: float = option(0.1, NOT_NEGATIVE)
    """Decoupled weight decay of matrices; norms and biases never decay."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """Multiply lr and min_lr by global_batch_size / base_batch_size (linear) or by its square root (sqrt)."""
    base_batch_size: int | None = option(None, SIZE)
    """Global batch size, in sequences, for which lr was chosen; required by lr_scaling."""


NAMES = ("adamw", "muon", "lion", "ademamix")
"""The optimizers of megalite (`optimizer.registry`)."""
BUILT_IN["optimizer"] = NAMES


def _is_unknown(c: Any) -> bool:
    return c.optimizer.name not in NAMES and not is_own_optimizer(c.optimizer.name)


def _known(c: Any) -> str:
    names = (*NAMES, *EXTENSIONS.optimizers)
    return (
        f"Legal values: {', '.join(names)}, FILE:CLASS for your own, or a name that a file in run.extensions "
        f"registers.{suggestion(c.optimizer.name, names)}"
    )


RULES: tuple[Rule, ...] = (
    Rule("a known optimizer", "optimizer.name", _is_unknown, message="is unknown", legal=_known),
    Rule(
        "min_lr below lr",
        "optimizer.min_lr",
        lambda c: c.optimizer.min_lr > c.optimizer.lr,
        message="exceeds {optimizer.lr}",
        legal=lambda c: f"Legal values: 0 to {c.optimizer.lr}. Nearest: {c.optimizer.lr}.",
    ),
    Rule(
        "two betas",
        "optimizer.betas",
        lambda c: len(c.optimizer.betas) != 2,
        message="must be a pair of numbers",
        legal="For example [0.9, 0.95].",
    ),
    Rule(
        "lr_scaling has its base",
        "optimizer.lr_scaling",
        lambda c: c.optimizer.lr_scaling != "none" and c.optimizer.base_batch_size is None,
        message="requires optimizer.base_batch_size, the batch size for which optimizer.lr was chosen",
        legal="Set it, or set optimizer.lr_scaling to none.",
    ),
)
