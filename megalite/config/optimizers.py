"""The options of the optimizers and of loss scaling: typed sections, as in schema.py."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass
class OptimizerConfig:
    name: Literal["adamw", "muon"] = "adamw"
    """AdamW for every tensor; or Muon for the matrices of the layers and AdamW for all other tensors."""
    lr: float = 3e-4
    """Peak learning rate. With muon that of the tensors that AdamW updates; muon.lr follows the same warm-up
    and decay."""
    min_lr: float = 0.0
    """Learning rate at the end of the decay."""
    warmup_steps: int = 0
    """Number of steps of linear warm-up from 0 to lr; or their share of train.steps, 5% or 0.05."""
    decay: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Learning-rate schedule after the warm-up. wsd: constant, then linear decay over the last
    wsd_decay_fraction of train.steps."""
    wsd_decay_fraction: float = 0.1
    """Fraction of train.steps over which wsd decays."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """AdamW's coefficients for the running averages of the gradient and of its square."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices; norms and biases never decay."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """Multiply lr and min_lr by global_batch_size / base_batch_size (linear) or by its square root (sqrt)."""
    base_batch_size: int | None = None
    """Global batch size, in sequences, for which lr was chosen; required by lr_scaling."""


@dataclass
class MuonConfig:
    """Muon (Jordan et al. 2024), with optimizer.name muon: the options have the names and the meaning of
    torch.optim.Muon's."""

    lr: float = 0.02
    """Peak learning rate of the matrices. Warm-up, decay and lr_scaling multiply it by the same factors as
    optimizer.lr."""
    momentum: float = 0.95
    """Coefficient of the running average of the gradient."""
    nesterov: bool = True
    """Orthogonalise the gradient mixed with the running average. false: the running average."""
    ns_steps: int = 5
    """Number of Newton-Schulz iterations."""
    ns_dtype: Literal["bf16", "compute"] = "bf16"
    """Dtype of the Newton-Schulz iterations. bf16: as torch.optim.Muon; compute: that of train.precision, but
    at least fp32."""
    weight_decay: float = 0.1
    """Decoupled weight decay of the matrices."""
    adjust_lr: Literal["original", "match_rms_adamw"] = "original"
    """Factor on the learning rate of an A x B matrix. original: sqrt(max(1, A / B)); match_rms_adamw: 0.2
    sqrt(max(A, B)), with which an update is as large as AdamW's, so that muon.lr may be the optimizer.lr of
    an AdamW run."""


@dataclass
class FP16Config:
    """Dynamic loss scaling of fp16, as in DeepSpeed."""

    initial_scale_power: int = 16
    """Exponent of the initial loss scale, 2 ** initial_scale_power."""
    loss_scale_window: int = 1000
    """Number of steps without overflow after which the scale is doubled."""
    hysteresis: int = 2
    """Number of overflows after which the scale is halved."""
    min_loss_scale: float = 1.0
    """Minimum loss scale."""
