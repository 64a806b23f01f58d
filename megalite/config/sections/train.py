"""Length, batches, precision and memory of training."""

from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal, NamedTuple

from megalite.config import amounts
from megalite.config.amounts import duration_seconds
from megalite.config.option import FRACTION, NO_OPTION, NOT_NEGATIVE, POSITIVE, SIZE, option
from megalite.config.rule import Rule, duration_rule


class Horizon(NamedTuple):
    """What of a run's length was given as an amount of samples, from which steps are counted again at a
    resume with other batches.

    Attributes:
        samples: those of the whole run, if its length was given in tokens or epochs; None if it was given in
            steps.
        warmup: the warm-up as a share of the run; None if it was given in steps.
    """

    samples: int | None = None
    warmup: Fraction | None = None


class BatchSizeStep(NamedTuple):
    """Steps of one batch size: the number of steps before them, and of the samples that these read."""

    step: int
    samples: int
    size: int


class Finished(NamedTuple):
    """The part of a resumed run that had other batches: its steps, the samples that they read, and its
    levels."""

    step: int
    samples: int
    levels: tuple[BatchSizeStep, ...]


@dataclass
class TrainConfig:
    steps: int = option(100, SIZE, amount=amounts.STEPS)
    """Number of optimizer steps of the whole run. Or give tokens or epochs, which are resolved to steps: the
    later of file and command line counts."""
    tokens: int | None = option(None, SIZE, amount=amounts.TOKENS)
    """Tokens to train on, in place of steps, for example 10B or 300M: steps are tokens / (global_batch_size ·
    data.sequence_length)."""
    epochs: float | None = option(None, POSITIVE)
    """Passes through data.train, in place of steps, for example 3 or 0.5. An epoch of a blend ends before its
    first repeated sample."""
    global_batch_size: int = option(32, SIZE)
    """Sequences per optimizer step, over all ranks."""
    rampup_batch_size: list[int] | None = None
    """Start with smaller global batches, as in Megatron-LM: [START, INCREMENT, SAMPLES] grows from START to
    global_batch_size by INCREMENT, in equal parts of the first SAMPLES sequences. The learning rate then
    follows the samples. null: every batch is whole."""
    micro_batch_size: int = option(4, SIZE)
    """Sequences per forward pass on one rank."""
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp64"] = "fp32"
    """Compute dtype. bf16 and fp16 keep fp32 master weights and accumulate gradients in fp32; fp64 is for
    numerical proofs on CPU. auto: that of the run that is resumed; else bf16 on a GPU or a CPU with bf16
    units (AMX, AVX512-BF16), fp32 on another CPU."""
    grad_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype in which gradients are accumulated and sent. fp32: at least fp32, which is fp64 with
    train.precision = fp64; bf16: half the memory, at lower precision."""
    fp8: Literal["none", "block", "mxfp8"] = "none"
    """Multiply the matrices of layers in fp8 (e4m3), in the forward and for input gradients. block: fp32
    scales of 1 x 128 elements of activations and 128 x 128 of weights; mxfp8: power-of-two scales of 1 x 32.
    Embedding, head, routers, norms, recurrences, weight gradients, sums over ranks and the optimizer keep
    their precision, as do matrices whose part on a rank is not made of whole blocks. A CPU, and a GPU with
    train.kernels = torch, round the operands to fp8 and multiply in a wider precision; other GPUs without
    tensor cores for the recipe are rejected."""
    fp8_power_of_two: bool = False
    """With fp8: block, round scales so that they are powers of two."""
    fp8_weight_gradients: bool = False
    """With fp8: block, multiply in fp8 for the gradients of these matrices too, with scales of 1 x 128
    elements along the tokens. Results then depend on the micro-batch size."""
    fp8_first_last: int = option(0, NOT_NEGATIVE)
    """With fp8, the number of layers at each end of the model that keep train.precision."""
    recompute: str = "none"
    """Activations that backward recomputes: none, selective (attention), full (every layer), every-K (every
    K-th layer), budget (as little as memory_budget allows), or operations such as attn_norm+mlp_in, for all
    layers or in a list such as 4*mlp_in,8*none."""
    memory_budget: float | None = option(None, POSITIVE, amount=amounts.SIZE_OR_SHARE)
    """With recompute: budget, the memory that a rank may use, all of it counted: bytes, 20GB or 64GiB, or a
    share of the device, 0.9 or 90%. null: no budget."""
    kernels: Literal["auto", "triton", "torch"] = "auto"
    """Implementation of fused operations. auto: Triton on a GPU where it is installed, else PyTorch, and what
    was measured to be the fastest on this device; torch: PyTorch; triton: Triton, or an error where it cannot
    run."""
    fp32_matmul: Literal["auto", "mkl", "onednn", "bf16"] = "auto"
    """Library of fp32 matmuls on a CPU. auto: MKL or oneDNN, measured when the run begins; bf16:
    as auto, and oneDNN may round to bf16."""
    compile: bool = False
    """Compile the pure functions between the linears with torch.compile."""
    graphs: bool = False
    """Record the forward and backward of each pipeline stage as CUDA graphs in the second step, and replay
    them from then on: the host launches a whole pass with one call. For dense models without dropout whose
    steps the host limits."""
    loss_chunk: int | None = option(None, NOT_NEGATIVE)
    """Number of tokens whose logits exist at a time; their gradients are computed in the forward. 0: all
    tokens of a microbatch. null: 4096 on a GPU, 0 on a CPU. Below 2048 the accumulation of the weight
    gradient costs time. Training under a schedule with weight passes always uses 0."""
    objective: str = "cross_entropy"
    """What is minimized: cross_entropy of the next token; an objective over pairs of a chosen and a rejected
    completion, dpo or ipo (relative to a reference model), simpo, cpo or orpo (without one); kto, over
    completions that are good or bad; reward, a reward model of pairs; the divergence from a teacher,
    distillation; or your own, FILE.py:CLASS, or a name that a file of run.extensions registers."""
    grad_clip: float = option(1.0, NOT_NEGATIVE)
    """Maximum global gradient norm. 0: no clipping."""
    ema_decay: float | None = option(None, FRACTION)
    """Keep an exponential moving average of the weights, average = ema_decay * average + (1 - ema_decay) *
    weights after each applied step, for example 0.999. It is saved in checkpoints; validation.ema and --ema
    of megalite convert export, generate and evaluate use it. null: no average."""
    label_smoothing: float = option(0.0, FRACTION)
    """Label smoothing, over the whole vocabulary."""
    z_loss: float = option(0.0, NOT_NEGATIVE)
    """Coefficient of the z-loss, the squared log-partition function of the logits, which is added to the
    loss."""
    mtp_weight: float = option(0.3, POSITIVE)
    """With model.mtp_layers, weight of the mean of their losses, which is added to the loss."""
    indexer: Literal["sparse", "warmup"] = "sparse"
    """With model.index_topk and model.index_loss_coef, what is trained: all parameters, with attention to
    selected rows (sparse), or the indexers alone, with attention to all rows (warmup)."""
    stop_after: str | None = option(None, amount=amounts.DURATION)
    """Save a checkpoint and exit after this duration, for example 3h50m, 90m or 30s. null: no limit."""
    early_stopping_patience: int | None = option(None, SIZE)
    """End the run after this many validations in a row without an improvement of the loss. null: after
    train.steps only."""
    early_stopping_threshold: float = option(0.0, NOT_NEGATIVE)
    """A validation loss is an improvement if it is lower than that of the last improvement by more than this.
    """
    watchdog: str | None = option("5m", amount=amounts.DURATION)
    """When a rank makes no progress for this long, print where it is and write its stacks to stalls/ in the
    run's directory. null: off."""

    # No options: set by `config.run_length` and `config.rampup`, and not stored in config.yaml. `replace`
    # carries them.
    horizon: Horizon = field(default=Horizon(), compare=False, repr=False, metadata=NO_OPTION)
    finished: Finished | None = field(default=None, compare=False, repr=False, metadata=NO_OPTION)

    def recompute_of(self, layer: int) -> str:
        """What one layer recomputes: none, selective, full, or operations (`config.recomputation`)."""
        if self.recompute in ("none", "selective", "full"):
            return self.recompute
        from megalite.config.recompute import mode_of

        return mode_of(self.recompute, layer)


RULES: tuple[Rule, ...] = (
    Rule(
        "fp8 with a wide range",
        "train.fp8",
        lambda c: c.train.fp8 != "none" and c.train.precision == "fp16",
        message="is not supported with {train.precision}, whose range is too narrow for scaled products",
        legal="Set train.precision to bf16 or fp32.",
    ),
    Rule(
        "powers of two for blocks",
        "train.fp8_power_of_two",
        lambda c: c.train.fp8_power_of_two and c.train.fp8 != "block",
        message="has no effect with {train.fp8}",
        legal="Remove it, or set train.fp8 to block.",
    ),
    Rule(
        "weight gradients in blocks",
        "train.fp8_weight_gradients",
        lambda c: c.train.fp8_weight_gradients and c.train.fp8 != "block",
        message="is not supported with {train.fp8}",
        legal="Remove it, or set train.fp8 to block.",
    ),
    Rule(
        "outer layers with fp8",
        "train.fp8_first_last",
        lambda c: c.train.fp8_first_last and c.train.fp8 == "none",
        message="has no effect with {train.fp8}",
        legal="Remove it, or set train.fp8 to block or mxfp8.",
    ),
    Rule(
        "inner layers with fp8",
        "train.fp8_first_last",
        lambda c: c.train.fp8 != "none" and 2 * c.train.fp8_first_last >= c.model.num_hidden_layers,
        message="leaves no layer of {model.num_hidden_layers} for {train.fp8}",
        legal=lambda c: f"Legal values: 0 to {(c.model.num_hidden_layers - 1) // 2}.",
    ),
    Rule(
        "bf16 gradients of bf16",
        "train.grad_dtype",
        lambda c: c.train.grad_dtype == "bf16" and c.train.precision != "bf16",
        message=lambda c: f"requires train.precision = bf16, not {c.train.precision}",
        legal="Remove it, or set train.precision to bf16.",
    ),
    Rule(
        "a budget says how much",
        "train.memory_budget",
        lambda c: c.train.recompute == "budget" and c.train.memory_budget is None,
        message="is required by {train.recompute}",
        legal="Set the memory of a rank, in bytes such as 70GB or as a fraction of the device such as 0.9.",
    ),
    Rule(
        "what a budget is for",
        "train.memory_budget",
        lambda c: c.train.recompute != "budget" and c.train.memory_budget is not None,
        message="has no effect with {train.recompute}",
        legal="Set train.recompute to budget, or remove it.",
    ),
    duration_rule("stop_after is a duration", "train.stop_after", "3h50m, 90m or 30s"),
    Rule(
        "watchdog is a duration",
        "train.watchdog",
        lambda c: not duration_seconds(c.train.watchdog or "5m"),
        message="is not a duration",
        legal="Use hours, minutes and seconds in this order: 5m, 90s or 1h; or null to turn it off.",
    ),
    Rule(
        "threshold with patience",
        "train.early_stopping_threshold",
        lambda c: c.train.early_stopping_threshold and c.train.early_stopping_patience is None,
        message="has no effect: {train.early_stopping_patience}",
        legal="Set train.early_stopping_patience, or remove it.",
    ),
)
