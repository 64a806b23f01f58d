"""The options of a run: typed sections whose field docstrings are the `--help` text."""

from dataclasses import Field, dataclass, field, fields
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, NamedTuple

from megalite.config.checkpoints import CheckpointConfig as CheckpointConfig
from megalite.config.checkpoints import ValidationConfig as ValidationConfig
from megalite.config.lora import EXPERTS as EXPERTS
from megalite.config.lora import PROJECTIONS as PROJECTIONS
from megalite.config.lora import SAVED_MODULES as SAVED_MODULES
from megalite.config.lora import LoraConfig as LoraConfig
from megalite.config.optimizers import FP16Config as FP16Config
from megalite.config.optimizers import MuonConfig
from megalite.config.optimizers import OptimizerConfig as OptimizerConfig


class ConfigError(Exception):
    """A configuration that cannot run. Each of its messages names the option, its value, the reason and a way
    out."""

    @property
    def messages(self) -> tuple[str, ...]:
        return tuple(map(str, self.args))

    def __str__(self) -> str:
        if len(self.args) == 1:
            return str(self.args[0])
        return "\n".join(
            [f"There are {len(self.args)} mistakes:", *(f"- {message}" for message in self.messages)]
        )


NO_OPTION = {"option": False}
"""Metadata of a field that is part of a section's state and no option."""
ROPE_SCALING_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"),
    "longrope": ("original_max_position_embeddings", "short_factor", "long_factor", "attention_factor"),
}
"""rope_type → the other keys of model.rope_scaling, all required. yarn may have `truncate: false`, too."""


@dataclass
class RunConfig:
    dir: str = "runs"
    """Parent directory of the run's own directory, `run.dir/run.name`."""
    name: str = "run"
    """Name of the run. Its configuration, metrics, checkpoints and traces are stored in `run.dir/run.name`.
    """
    seed: int = 1234
    """Random seed. Random numbers are keyed by name and step, so every topology draws the same ones."""
    deterministic: bool = False
    """Use only deterministic algorithms, and accumulate the two gradients of a tied embedding separately, to
    add them in a fixed order."""
    timeout: str = "10m"
    """End the run when a rank does not answer a collective for this long, for example 10m or 1h. Saves and
    loads may take longer."""
    overwrite: bool = False
    """Let a new run use the directory of an old one (checkpoint.load none or of another run), which is
    renamed to NAME.old-1 first."""

    @property
    def directory(self) -> Path:
        """The run's own directory."""
        return Path(self.dir) / self.name


@dataclass
class ModelConfig:
    """The model. Fields have the names of Hugging Face's LlamaConfig, if it has them."""

    preset: str | None = None
    """Named model shape: tiny, gpt2-124m, llama-3.2-1b, llama-3-8b, llama-3.1-8b, llama-3-70b, llama-3.1-70b,
    mixtral-8x7b, olmoe-1b-7b, qwen3-30b-a3b, qwen3-235b-a22b, deepseek-v2-lite, deepseek-v3, gpt-oss-20b or
    gpt-oss-120b. It replaces the shape that earlier files give; other fields of this section beside it, or
    later, override it."""
    from_hf: str | None = None
    """Hugging Face model whose config.json gives the shape: a directory, or org/name on the Hub. No weights
    are read. It replaces the shape that earlier files give, as a preset does."""
    init_from: str | None = None
    """Initial weights, for a run that starts at step 0: a checkpoint directory (optimizer state and data
    position are not used), a run's directory for its newest checkpoint, or hf:DIR for a Hugging Face
    directory or org/name on the Hub (set from_hf to DIR for the shape). null or none: random weights; with
    from_hf and chat data, which are meant for fine-tuning, they must be asked for with none."""
    resize_embeddings: Literal["mean", "init"] | None = None
    """Rows for tokens that were added to the tokenizer: if the vocabulary is larger than that of init_from,
    its embedding and head are read and get further rows. mean: the mean of the old rows; init: random, as
    those of a new model. vocab_size is then that of the data, where that is larger. null: the vocabularies
    must be equal."""
    vocab_size: int | None = None
    """Vocabulary size. null: that of the training data."""
    hidden_size: int = 256
    """Width of the residual stream."""
    intermediate_size: int = 688
    """Inner width of the feed-forward block."""
    num_hidden_layers: int = 4
    """Number of transformer layers."""
    mtp_layers: int = 0
    """Number of modules of multi-token prediction (DeepSeek-V3): each has one more layer, and in training
    predicts one token further ahead. Evaluation and generation do not use them."""
    num_attention_heads: int = 4
    """Number of query heads."""
    num_key_value_heads: int | None = None
    """Number of key-value heads (grouped-query attention). null: num_attention_heads."""
    head_dim: int | None = None
    """Width of one attention head. null: hidden_size / num_attention_heads."""
    kv_lora_rank: int | None = None
    """Multi-head latent attention (DeepSeek-V2): width of the latent that keys and values are computed from.
    null: there are no latents."""
    q_lora_rank: int | None = None
    """With kv_lora_rank, width of the latent that queries are computed from. null: they are computed from the
    layer's input."""
    qk_nope_head_dim: int = 128
    """With kv_lora_rank, channels of a query's or key's head that do not rotate."""
    qk_rope_head_dim: int = 64
    """With kv_lora_rank, channels of a query's or key's head that rotate; those of keys are the same in all
    heads."""
    v_head_dim: int = 128
    """With kv_lora_rank, width of a value's head."""
    max_position_embeddings: int = 2048
    """Maximum sequence length, in tokens; also the number of rows of a learned position table."""
    tie_word_embeddings: bool = False
    """Share the embedding's weight with the output head."""
    position: Literal["rope", "learned", "none"] = "rope"
    """Position encoding: rotary embeddings (rope), a learned table added to the embedding (learned), or none.
    """
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    rope_local_theta: float | None = None
    """Base of the rotary frequencies in the layers with a sliding window, to which rope_scaling then does not
    apply (Gemma-3). null: all layers have the same frequencies."""
    partial_rotary_factor: float = 1.0
    """Share of each head's channels that rotary embeddings rotate; the others keep their values."""
    rope_scaling: dict[str, Any] | None = None
    """Rotary scaling, as in Hugging Face: {rope_type: linear, factor: F}, {rope_type: llama3, factor: F,
    low_freq_factor: L, high_freq_factor: H, original_max_position_embeddings: N}, {rope_type: yarn, factor:
    F, original_max_position_embeddings: N, beta_fast: 32, beta_slow: 1, attention_factor: A} or {rope_type:
    longrope, original_max_position_embeddings: N, short_factor: [..], long_factor: [..], attention_factor:
    A}, where sequences longer than N have the long factors. null: no scaling."""
    no_rope_layers: list[int] | None = None
    """Indices (0-based) of the layers without rotary embeddings. null: every layer has them."""
    norm: Literal["rms", "layer"] = "rms"
    """Normalisation: RMSNorm, or LayerNorm."""
    norm_bias: bool = True
    """Bias of LayerNorm. RMSNorm has none."""
    norm_placement: Literal["pre", "post", "both"] = "pre"
    """Position of the norms: before each block (pre), after it and before the residual addition (post), or
    both."""
    norm_offset: float = 0.0
    """Constant added to the norm's weight; 1.0 gives Gemma's (1 + w)."""
    parallel_block: Literal["none", "shared_norm", "two_norms"] = "none"
    """Attention and feed-forward read the same input, and both are added to it. none: the feed-forward reads
    the sum of input and attention; shared_norm: in parallel, with one norm for both (Falcon-7B); two_norms:
    in parallel, each with its norm (GPT-NeoX)."""
    rms_norm_eps: float = 1e-5
    """Epsilon of every norm, RMSNorm and LayerNorm."""
    qk_norm: Literal["none", "head", "full", "each_head"] = "none"
    """Norm of queries and keys: RMSNorm per head (head, Qwen3) or over the full width (full, OLMo-2),
    LayerNorm without bias per head with weights of its own for each head (each_head, Command-R+), or none."""
    hidden_act: Literal[
        "silu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu", "relu2", "clamped_swiglu"
    ] = "silu"
    """Activation of the feed-forward block; gelu_new, gelu_fast and gelu_pytorch_tanh are all the tanh
    approximation of GELU, relu2 is the square of relu, clamped_swiglu limits gate and up as gpt-oss does."""
    gated_mlp: bool = True
    """Gated feed-forward: act(gate) * up (SwiGLU with silu). false: act(up)."""
    num_experts: int | None = None
    """Number of experts of a layer whose feed-forward is a mixture of experts. null: every feed-forward is
    dense."""
    num_experts_per_tok: int = 2
    """Number of experts that process a token: those with the largest router probabilities."""
    moe_intermediate_size: int | None = None
    """Inner width of one expert. null: intermediate_size."""
    norm_topk_prob: bool = True
    """Divide the probabilities of a token's experts by their sum; false: the outputs are weighted with the
    probabilities themselves."""
    router_logit_bias: bool = False
    """Routers add a learned bias to their logits (gpt-oss)."""
    router_scores: Literal["softmax", "sigmoid"] = "softmax"
    """What a router makes of its logits: probabilities (softmax), or a score for each expert by itself
    (sigmoid, DeepSeek-V3)."""
    routed_scaling_factor: float = 1.0
    """Factor on the weights of a token's experts."""
    n_group: int | None = None
    """Number of equal groups of experts; a token chooses its experts from the topk_group best groups. A
    group's score is its largest one (softmax), or the sum of its two largest (sigmoid). null: no groups."""
    topk_group: int = 1
    """With n_group, number of groups that a token chooses its experts from."""
    shared_expert_intermediate_size: int | None = None
    """Inner width of an expert that processes every token, next to the chosen ones. null: there is none."""
    shared_expert_gate: bool = True
    """Multiply the shared expert's output by a learned sigmoid gate of the token (Qwen2-MoE)."""
    decoder_sparse_step: int = 1
    """Every n-th layer is a mixture: those whose 1-based number n divides. The others are dense."""
    mlp_only_layers: list[int] | None = None
    """Indices (0-based) of further layers that are dense. null: none."""
    router_balance: Literal["global", "sequence", "bias"] = "global"
    """How the experts are kept equally loaded: by an auxiliary loss from the load of the previous step
    (global) or of each sequence (sequence), or by a bias on the choice, which each step moves against the
    load (bias). The layout of ranks changes none of them."""
    router_aux_loss_coef: float = 0.0
    """Coefficient of the auxiliary loss of router_balance (bias: that of each sequence), averaged over tokens
    and layers. 0: no loss."""
    router_z_loss_coef: float = 0.0
    """Coefficient of the mean squared log-sum-exp of the router's logits, which keeps them small. 0: no loss.
    """
    router_bias_rate: float = 0.001
    """With router_balance bias, how far a step moves each expert's bias."""
    expert_capacity_factor: float | None = None
    """In training an expert processes at most ceil(factor * sequence_length * num_experts_per_tok /
    num_experts) tokens of each sequence, first choices first, then by position; it drops the others, which
    keep what their other experts give. null: none is dropped."""
    attention_bias: bool = False
    """Bias on the query, key and value projections."""
    attention_out_bias: bool = False
    """Bias on the attention output projection."""
    mlp_bias: bool = False
    """Bias on the feed-forward projections."""
    sliding_window: int | None = None
    """Number of most recent positions, the token's own included, that a token attends to. null: all."""
    sliding_window_layers: list[int] | None = None
    """Indices (0-based) of the layers that use sliding_window. null: every layer."""
    attention_scale: float | None = None
    """Factor on the attention scores. null: head_dim ** -0.5."""
    attention_softcap: float | None = None
    """Cap of the attention scores: cap * tanh(scores / cap) (Gemma-2). null: no cap."""
    attention_sinks: bool = False
    """Every head has a learned score that joins the softmax over the keys and has no value (gpt-oss)."""
    logit_scale: float | None = None
    """Factor on the logits, before their cap. null: 1."""
    logit_softcap: float | None = None
    """Cap of the logits: cap * tanh(logits / cap) (Gemma-2). null: no cap."""
    embedding_scale: float | None = None
    """Factor on the embedding's output (Gemma: hidden_size ** 0.5). null: 1."""
    residual_multiplier: float = 1.0
    """Factor on the output of attention and of the feed-forward, before the residual addition."""
    initializer_range: float = 0.02
    """Standard deviation of the initial weights; divided by sqrt(2 * num_hidden_layers) for output
    projections."""
    embedding_dropout: float = 0.0
    """Dropout probability on the embedding's output."""
    attention_dropout: float = 0.0
    """Dropout probability on the attention probabilities."""
    residual_dropout: float = 0.0
    """Dropout probability on each block's output, before the residual addition."""

    @property
    def initial_weights(self) -> str | None:
        """What init_from names; None for random weights, whether they were asked for or not."""
        return None if self.init_from == "none" else self.init_from

    @property
    def kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        """Width of a query's or key's head."""
        if self.kv_lora_rank is not None:
            return self.qk_nope_head_dim + self.qk_rope_head_dim
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def value_size(self) -> int:
        """Width of a value's head."""
        return self.head_size if self.kv_lora_rank is None else self.v_head_dim

    @property
    def rotary_width(self) -> int:
        """Width of what rotary embeddings are applied to: a head, or the channels of it that latent attention
        has for them."""
        return self.head_size if self.kv_lora_rank is None else self.qk_rope_head_dim

    @property
    def biased_choice(self) -> bool:
        """Whether routers add a bias to their scores when they choose; it may come with weights that are
        trained on without moving it."""
        return self.router_balance == "bias" or self.router_scores == "sigmoid"

    @property
    def expert_width(self) -> int:
        """Inner width of one expert."""
        return self.moe_intermediate_size or self.intermediate_size

    @property
    def has_mixtures(self) -> bool:
        return any(map(self.is_mixture, range(self.num_hidden_layers)))

    @property
    def rotary_dim(self) -> int:
        """Number of channels of a head that rotate."""
        return int(self.rotary_width * self.partial_rotary_factor)

    @property
    def longrope_context(self) -> int | None:
        """The sequence length beyond which longrope has its long factors; None: another rotary scaling."""
        scaling = self.rope_scaling or {}
        return scaling["original_max_position_embeddings"] if scaling.get("rope_type") == "longrope" else None

    @property
    def vocabulary(self) -> int:
        """The vocabulary size. Raises ValueError if it is not known yet."""
        if self.vocab_size is None:
            raise ValueError("model.vocab_size is not set: it comes from the training data, or must be given")
        return self.vocab_size

    @property
    def vocabulary_tables(self) -> list[str]:
        """The modules with a row for each token, as lora.modules_to_save names them: a tied head is the
        embedding."""
        return ["embedding"] if self.tie_word_embeddings else ["embedding", "head"]

    def window(self, layer: int) -> int | None:
        """Number of positions that a token of this layer attends to, its own included; None: all."""
        local = self.sliding_window_layers is None or layer in self.sliding_window_layers
        return self.sliding_window if local else None

    def is_mixture(self, layer: int) -> bool:
        """Whether the layer's feed-forward is a mixture of experts."""
        return (
            bool(self.num_experts)
            and layer not in (self.mlp_only_layers or ())
            and (layer + 1) % self.decoder_sparse_step == 0
        )

    def uses_rope(self, layer: int) -> bool:
        return self.position == "rope" and layer not in (self.no_rope_layers or ())

    def local_rope(self, layer: int) -> bool:
        """Whether the layer's rotary frequencies are those of rope_local_theta."""
        return self.rope_local_theta is not None and self.uses_rope(layer) and self.window(layer) is not None


@dataclass
class ParallelConfig:
    """The mesh pp × dp × cp × tp, and how each axis is used."""

    tp: int = 1
    """Tensor-parallel size: number of ranks over which each layer's matrices are split."""
    pp: int = 1
    """Pipeline-parallel size: number of ranks over which the layers are split."""
    dp: int | None = None
    """Data-parallel size: number of replicas over which the global batch is split. null: world size / (tp ·
    pp · cp)."""
    cp: int = 1
    """Context-parallel size: number of ranks over which each sequence is split."""
    context: Literal["ulysses", "gather", "ring"] = "ulysses"
    """With cp > 1, what attention exchanges: heads for positions (ulysses), all keys and values at once
    (gather) or rank by rank (ring)."""
    context_inner: int = 1
    """With context ring, number of neighbouring ranks, best those of a node, that exchange heads for
    positions (ulysses); the ring is between such groups. 1: a ring over all ranks."""
    context_parts: Literal["zigzag", "balanced"] = "zigzag"
    """With context gather or ring, the part of a row that a rank holds: an early and a late run (zigzag), or
    with documents the blocks that give all ranks equally much attention to compute (balanced), chosen anew
    for every microbatch."""
    sequence_parallel: bool = False
    """Split the activations between tensor-parallel regions along the sequence."""
    ep: int = 1
    """Expert-parallel size: number of ranks over which the experts of a layer are split, each whole on its
    rank. They are the innermost ranks of dp · cp · tp."""
    expert_dispatch: Literal["all_to_all", "all_gather"] = "all_to_all"
    """With ep > 1, how tokens reach their experts: rows are sent to the ranks of their experts (all_to_all),
    or all rows to all ep ranks (all_gather), which suits a small ep."""
    dp_shard: int | None = None
    """Number of data-parallel ranks over which ZeRO shards; the shards are replicated over the other ranks
    (HSDP). null: all of them."""
    zero: int = 1
    """ZeRO stage. 0: nothing is sharded over dp; 1: master weights and optimizer state are; 2: gradients too;
    3: weights too."""
    zero3_reshard: Literal["action", "step"] = "action"
    """With ZeRO-3, free a layer's gathered weights after each use (action: gathered again for every
    microbatch and pass), or at the end of the step (step)."""
    reduce_dtype: Literal["wide", "bf16"] = "wide"
    """Communication dtype of the gradient reduction over dp. wide: the accumulate dtype; bf16: cast to bf16,
    sent, and summed in fp32."""
    powersgd_rank: int | None = None
    """With ZeRO 0 or 1, send gradient matrices as two factors with this many columns (PowerSGD). null: no
    compression."""
    bucket_mb: float = 25.0
    """Maximum size of a gradient bucket, in MB of fp32, or with a unit: 25MB, 32MiB. A layer is never split:
    one that is larger has a bucket of its own."""
    offload: Literal["none", "cpu", "disk"] = "none"
    """Where master weights and optimizer state are stored: on the device (none), in CPU memory (cpu) or in a
    memory-mapped file (disk). With cpu and disk the optimizer runs on the CPU."""
    offload_dir: str | None = None
    """Directory of the files of offload disk, best on a fast local disk. null: `offload/` in the run's
    directory. The files are scratch."""
    offload_parameters: bool = False
    """With ZeRO-3, keep the weights' shards in CPU memory; each layer is copied to the device when it is
    used."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "v-half"] = "1f1b"
    """Pipeline schedule; `megalite bubble --compare` shows the time and memory that each costs."""
    virtual_stages: int | None = None
    """Stages per pipeline rank, for schedule interleaved. null: 2 for interleaved, zb-v and v-half, 1 for the
    others."""
    schedule_costs: list[float] = field(default_factory=lambda: [1.0, 1.0, 1.0, 0.0])
    """Durations for which a schedule with a split backward is planned, in any unit: forward, input gradient
    and weight gradient of one rank, and one message."""
    optimistic_step: bool = True
    """With zb-h2 and zb-v, update before the global gradient norm is known, and correct the update if the
    norm clips. Keeps a copy of the optimizer's state; has no effect with offload."""
    partition: list[int] | None = None
    """Number of layers of each stage, first to last, for example [3, 5, 5, 3]. null: balanced by cost,
    embedding and head included."""
    layer_costs: list[float] | None = None
    """Costs of the embedding, each layer and the head, in any unit, for the balanced partition. null:
    estimated FLOPs."""


@dataclass
class DataConfig:
    train: str | list[str] | dict[str, float] | None = None
    """Training data: a token file's PREFIX (of PREFIX.bin and PREFIX.idx), a list of prefixes, or {PREFIX:
    weight} for a blend."""
    validation: float | str | list[str] | dict[str, float] | dict[str, str] | None = None
    """Validation data: the same; or several sets, {NAME: prefix}, each with a loss of its own; or the
    fraction of the training data that is held out at its end, 0.05 or 5%. null: no validation."""
    shuffle: bool = True
    """Shuffle the training samples. The order depends on (seed, epoch, dataset) only."""
    sequence_length: int = 256
    """Length of one sample, in tokens."""
    packing: bool = False
    """For chat data: fill each sample with as many whole conversations as fit, which do not attend to each
    other. false: one, padded."""
    reset_positions: bool = False
    """Treat EOS as the end of a document: positions restart after it, and attention does not cross it."""
    eod_mask_loss: bool = False
    """Exclude from the loss the prediction made from an EOS token, which is the first token of the next
    document."""
    allow_tokenizer_change: bool = False
    """Accept data made with another tokenizer than other data, the starting weights or the checkpoint that
    the run resumes."""


class Horizon(NamedTuple):
    """What of a run's length was given as an amount of samples, from which steps are counted again at a
    resume with other batches.

    Attributes:
        samples: those of the whole run, if its length was given in tokens or epochs; None if it was given in
        steps. warmup: the warm-up as a share of the run; None if it was given in steps.
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
    steps: int = 100
    """Number of optimizer steps of the whole run. Or give tokens or epochs, which are resolved to steps: the
    later of file and command line counts."""
    tokens: int | None = None
    """Tokens to train on, in place of steps, for example 10B or 300M: steps are tokens / (global_batch_size ·
    data.sequence_length)."""
    epochs: float | None = None
    """Passes through data.train, in place of steps, for example 3 or 0.5. An epoch of a blend ends before its
    first repeated sample."""
    global_batch_size: int = 32
    """Sequences per optimizer step, over all ranks."""
    rampup_batch_size: list[int] | None = None
    """Start with smaller global batches, as in Megatron-LM: [START, INCREMENT, SAMPLES] grows from START to
    global_batch_size by INCREMENT, in equal parts of the first SAMPLES sequences. The learning rate then
    follows the samples. null: every batch is whole."""
    micro_batch_size: int = 4
    """Sequences per forward pass on one rank."""
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp64"] = "fp32"
    """Compute dtype. bf16 and fp16 keep fp32 master weights and accumulate gradients in fp32; fp64 is for
    numerical proofs on CPU. auto: that of the run that is resumed; else bf16 on a GPU or a CPU with bf16
    units (AMX, AVX512-BF16), fp32 on another CPU."""
    grad_dtype: Literal["wide", "bf16"] = "wide"
    """Dtype in which gradients are accumulated and sent. wide: fp32 (fp64 under fp64); bf16: half the memory,
    at lower precision."""
    recompute: str = "none"
    """Activations that backward recomputes: none, selective (attention), full (every layer), every-K (every
    K-th layer), budget (as little as memory_budget allows), or operations such as attn_norm+mlp_in, for all
    layers or in a list such as 4*mlp_in,8*none."""
    memory_budget: float | None = None
    """With recompute: budget, the memory that a rank may use, all of it counted: bytes, 20GB or 64GiB, or a
    share of the device, 0.9 or 90%. null: no budget."""
    kernels: Literal["auto", "triton", "torch"] = "auto"
    """Implementation of fused operations. auto: Triton on a GPU where it is installed, else PyTorch, and what
    was measured to be the fastest on this device; torch: PyTorch; triton: Triton, or an error where it cannot
    run."""
    fp32_products: Literal["auto", "mkl", "onednn", "bf16"] = "auto"
    """Library of matrix products in fp32 on a CPU. auto: MKL or oneDNN, measured when the run begins; bf16:
    as auto, and oneDNN may round to bf16."""
    compile: bool = False
    """Compile the pure functions between the linears with torch.compile."""
    loss_chunk: int | None = None
    """Number of tokens whose logits exist at a time; their gradients are computed in the forward. 0: all
    tokens of a microbatch. null: 4096 on a GPU, 0 on a CPU. Below 2048 the accumulation of the weight
    gradient costs time. Training under a schedule with weight passes always uses 0."""
    grad_clip: float = 1.0
    """Maximum global gradient norm. 0: no clipping."""
    ema_decay: float | None = None
    """Keep an exponential moving average of the weights, average = ema_decay * average + (1 - ema_decay) *
    weights after each applied step, for example 0.999. It is saved in checkpoints; validation.ema and --ema
    of megalite convert export, generate and evaluate use it. null: no average."""
    label_smoothing: float = 0.0
    """Label smoothing, over the whole vocabulary."""
    z_loss: float = 0.0
    """Coefficient of the z-loss, the squared log-partition function of the logits, which is added to the
    loss."""
    mtp_weight: float = 0.3
    """With model.mtp_layers, weight of the mean of their losses, which is added to the loss."""
    stop_after: str | None = None
    """Save a checkpoint and exit after this duration, for example 3h50m, 90m or 30s. null: no limit."""
    early_stopping_patience: int | None = None
    """End the run after this many validations in a row without an improvement of the loss. null: after
    train.steps only."""
    early_stopping_threshold: float = 0.0
    """A validation loss is an improvement if it is lower than that of the last improvement by more than this.
    """
    watchdog: str | None = "5m"
    """When a rank makes no progress for this long, print where it is and write its stacks to stalls/ in the
    run's directory. null: off."""

    # No options: set by `config.amounts` and `config.rampup`, and not stored in config.yaml. `replace`
    # carries them.
    horizon: Horizon = field(default=Horizon(), compare=False, repr=False, metadata=NO_OPTION)
    finished: Finished | None = field(default=None, compare=False, repr=False, metadata=NO_OPTION)

    def recompute_of(self, layer: int) -> str:
        """What one layer recomputes: none, selective, full, or operations (`config.recomputation`)."""
        if self.recompute in ("none", "selective", "full"):
            return self.recompute
        from megalite.config.recompute import mode_of

        return mode_of(self.recompute, layer)


@dataclass
class FaultsConfig:
    """Handling of bad steps, and faults injected on purpose for tests."""

    spike_sigma: float | None = None
    """Skip a step whose loss exceeds the mean of the last accepted steps by more than this many standard
    deviations. null: never."""
    spike_window: int = 100
    """Number of accepted steps over which that mean and deviation are computed; no step counts as a spike
    before there are that many."""
    skip_limit: int = 10
    """Number of consecutive skipped steps after which the run ends. Overflows that only lower fp16's loss
    scale are not counted."""
    rollback: bool = False
    """Instead of ending the run, return to the last checkpoint and continue with the samples that follow the
    skipped ones, at most three times."""
    inject: str | list[str] | None = None
    """Faults to inject, KIND:rank=R,step=S, separated by spaces or as a list; also --faults. docs/faults.md
    lists kinds and options."""


WANDB_PROJECT = "megalite"
"""The project of logging.wandb: true, unless the environment variable WANDB_PROJECT names another."""


@dataclass
class LoggingConfig:
    interval: int = 1
    """Print one console line every `interval` steps; metrics.jsonl has every step."""
    loss_by_source: bool = False
    """With a blend, record the training loss of each member in metrics.jsonl, as loss/PREFIX."""
    tensorboard: bool | str | None = False
    """Write TensorBoard scalars. true: to the run's tensorboard/ directory; a directory: there. false or
    null: off."""
    wandb: bool | str | None = None
    """Log to Weights & Biases, which needs the wandb package. A name: to this project; true: to the project
    in the environment variable WANDB_PROJECT, or megalite. false or null: off."""
    wandb_entity: str | None = None
    """User or team that the project belongs to. null: your default entity, or WANDB_ENTITY."""
    wandb_group: str | None = None
    """Group of runs on Weights & Biases that this run is shown in. null: none, or WANDB_RUN_GROUP."""
    wandb_tags: list[str] | None = None
    """Tags of the run on Weights & Biases. null: none, or WANDB_TAGS."""
    wandb_name: str | None = None
    """Name of the run on Weights & Biases. null: run.name."""
    wandb_mode: Literal["online", "offline", "disabled"] | None = None
    """online: upload while training; offline: store in the run's directory for `wandb sync`; disabled: do
    nothing. null: WANDB_MODE, or online."""


@dataclass
class ProfilingConfig:
    timeline: bool = False
    """Record when each pipeline action of `steps` runs on each rank and compare with the simulator, in the
    run's traces/timeline.json."""
    steps: list[int] = field(default_factory=lambda: [3, 5])
    """First and last step to record and trace, counted from 1."""
    ranks: list[int] = field(default_factory=list)
    """Ranks on which torch.profiler traces these steps, into the run's traces/, with the pipeline actions
    labelled."""
    hardware: str | None = None
    """Hardware for which the planner predicts the step time that is reported when the run ends: a name that
    `megalite plan` knows, or a file written by its --calibrate. null: the GPU of this run."""
    memory_snapshot: int | None = None
    """Step after which `ranks` (rank 0 if empty) write a snapshot of what GPU memory is used for; one is also
    written when memory runs out. null: no snapshot."""


@dataclass
class NetworkConfig:
    """Communication between ranks. An option sets an environment variable before the process group starts; a
    variable that is already set is kept. null leaves the variable unset."""

    interface: str | None = None
    """Network interface of NCCL and gloo, for example eth0."""
    debug: Literal["VERSION", "WARN", "INFO", "TRACE"] | None = None
    """NCCL's log level."""
    ib_devices: str | None = None
    """InfiniBand devices that NCCL uses, for example mlx5_0,mlx5_1."""
    ib_gid_index: int | None = None
    """Index of the global identifier that NCCL uses under RoCE, often 3."""
    ib_timeout: int | None = None
    """Exponent of the InfiniBand acknowledgement timeout, 4.096 µs * 2 ** ib_timeout. NCCL's default is 20;
    large networks use 22 or 23."""
    ib_retries: int | None = None
    """Number of InfiniBand retries after a timeout. NCCL's default is 7."""
    variables: dict[str, Any] | None = None
    """Other environment variables, for example {NCCL_NVLS_ENABLE: 0}."""
    test: bool = False
    """Measure the links between ranks for 3 seconds at start, and report the slowest."""


@dataclass
class Config:
    """All options of a run, as `--print_config` prints them and the run's directory stores them."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    fp16: FP16Config = field(default_factory=FP16Config)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    muon: MuonConfig = field(default_factory=MuonConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    faults: FaultsConfig = field(default_factory=FaultsConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)


SHORT = {
    **{name: f"parallel.{name}" for name in ("tp", "pp", "dp", "cp", "ep", "zero")},
    "faults": "faults.inject",
}
SECTIONS = [section.name for section in fields(Config)]
OPTIONS: dict[str, Field[Any]] = {
    f"{section.name}.{key.name}": key
    for section in fields(Config)
    for key in fields(section.type)  # type: ignore[arg-type]
    if key.metadata != NO_OPTION
}
"""Every option, section.key → its dataclass field."""
