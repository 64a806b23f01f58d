"""What a run is: typed sections whose field docstrings are the `--help` text. Imports no torch."""

from dataclasses import dataclass, field
from typing import Any, Literal


class ConfigError(Exception):
    """A configuration that can not run; the message names option, value, reason and way out."""


ROPE_SCALING_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"),
}
"""rope_type → the further keys of model.rope_scaling, each of them required."""


@dataclass
class RunConfig:
    dir: str = "runs"
    """Directory under which the run's own directory (`run.dir/run.name`) is made."""
    name: str = "run"
    """Name of the run: configuration, metrics, checkpoints and traces lie in `run.dir/run.name`."""
    seed: int = 1234
    """Seed of everything random. Randomness is keyed by name and step, so every topology draws the same numbers."""
    deterministic: bool = False
    """Only deterministic algorithms; tied embedding gradients are kept apart so that they add in one order."""
    timeout: str = "10m"
    """The run ends when a rank does not answer for this long, for example 10m or 1h."""


@dataclass
class ModelConfig:
    """The model as a row of axis values; fields carry their Hugging Face Llama names where one exists."""

    preset: str | None = None
    """A named shape (tiny, gpt2-124m, llama-3.2-1b, llama-3-8b, llama-3-70b); other fields of this section override it."""
    from_hf: str | None = None
    """Directory of a Hugging Face model whose config.json gives the shape (no weights are read)."""
    init_from: str | None = None
    """Weights that start the run at step 0: a checkpoint directory (no optimizer state, no data position), or hf:DIR for a Hugging Face
    directory, whose shape from_hf gives."""
    vocab_size: int | None = None
    """Vocabulary size; defaults to that of the training data."""
    hidden_size: int = 256
    """Width of the residual stream."""
    intermediate_size: int = 688
    """Inner width of the feed-forward block."""
    num_hidden_layers: int = 4
    """Number of transformer layers."""
    num_attention_heads: int = 4
    """Number of query heads."""
    num_key_value_heads: int | None = None
    """Number of key-value heads (grouped-query attention); defaults to num_attention_heads."""
    head_dim: int | None = None
    """Width of one head; defaults to hidden_size / num_attention_heads."""
    max_position_embeddings: int = 2048
    """Longest sequence that the model is made for; the rows of a learned position table."""
    tie_word_embeddings: bool = False
    """Whether the output head shares the embedding's weight."""
    position: Literal["rope", "learned", "none"] = "rope"
    """How positions enter: rotary embeddings, a learned table added to the embedding, or not at all."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    rope_scaling: dict[str, Any] | None = None
    """Rotary scaling in Hugging Face form: {rope_type: linear, factor: F}, {rope_type: llama3, factor: F, low_freq_factor: L,
    high_freq_factor: H, original_max_position_embeddings: N} or {rope_type: yarn, factor: F, original_max_position_embeddings: N,
    beta_fast: 32, beta_slow: 1, attention_factor: A}."""
    no_rope_layers: list[int] | None = None
    """Layers (0-based) without rotary embeddings."""
    norm: Literal["rms", "layer"] = "rms"
    """Normalisation: RMSNorm, or LayerNorm with bias."""
    norm_placement: Literal["pre", "post", "both"] = "pre"
    """Norm before each block (pre), after it and before the residual sum (post), or both."""
    norm_offset: float = 0.0
    """Added to the norm's weight (1.0 gives Gemma's (1 + w) form)."""
    rms_norm_eps: float = 1e-5
    """Epsilon of every norm, of either kind."""
    qk_norm: Literal["none", "head", "full"] = "none"
    """RMSNorm of queries and keys: per head (Qwen3), over the full width (OLMo-2), or none."""
    hidden_act: Literal["silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu"] = "silu"
    """Activation of the feed-forward block (gelu_new and gelu_pytorch_tanh are the tanh form)."""
    gated_mlp: bool = True
    """Gated feed-forward, act(gate) * up (SwiGLU with silu); otherwise act(up)."""
    attention_bias: bool = False
    """Bias on the query, key and value projections."""
    attention_out_bias: bool = False
    """Bias on the attention output projection."""
    mlp_bias: bool = False
    """Bias on the feed-forward projections."""
    sliding_window: int | None = None
    """Attention sees at most this many positions, itself included; none is unlimited."""
    sliding_window_layers: list[int] | None = None
    """Layers (0-based) that use sliding_window; none means every layer."""
    attention_scale: float | None = None
    """Factor on the attention scores; defaults to head_dim ** -0.5."""
    attention_softcap: float | None = None
    """Scores become cap * tanh(scores / cap) (Gemma-2)."""
    logit_softcap: float | None = None
    """Logits become cap * tanh(logits / cap) (Gemma-2)."""
    embedding_scale: float | None = None
    """Factor on the embedding's output (Gemma: hidden_size ** 0.5)."""
    initializer_range: float = 0.02
    """Standard deviation of initial weights; output projections take it / sqrt(2 * num_hidden_layers)."""
    embedding_dropout: float = 0.0
    """Dropout on the embedding's output."""
    attention_dropout: float = 0.0
    """Dropout on attention probabilities."""
    residual_dropout: float = 0.0
    """Dropout on each block's output before the residual sum."""

    @property
    def kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def vocabulary(self) -> int:
        """The vocabulary size, once it is known."""
        if self.vocab_size is None:
            raise ValueError("model.vocab_size is not set: it comes from the training data, or must be given")
        return self.vocab_size

    def window(self, layer: int) -> int | None:
        """Positions that a layer's attention sees, itself included; None is unlimited."""
        local = self.sliding_window_layers is None or layer in self.sliding_window_layers
        return self.sliding_window if local else None

    def uses_rope(self, layer: int) -> bool:
        return self.position == "rope" and layer not in (self.no_rope_layers or ())


@dataclass
class LoraConfig:
    """Low-rank adapters (LoRA, Hu et al. 2021). With a rank the whole model is frozen, and they alone are trained."""

    rank: int = 0
    """Rank of the adapters; 0 trains the model itself."""
    alpha: float = 16.0
    """An adapted weight is W + alpha / rank * B A."""
    dropout: float = 0.0
    """Dropout on what the adapters read."""
    targets: list[Literal["q", "k", "v", "o", "gate", "up", "down"]] | None = None
    """Projections that have adapters, in every layer; by default, or where none is named, all that the model has."""
    init_from: str | None = None
    """Directory of a PEFT adapter that starts the run at step 0, on top of model.init_from; none draws A and sets B to zero."""

    def adapts(self, role: str) -> bool:
        """Whether projections of this role have adapters."""
        return self.rank > 0 and role != "" and (not self.targets or role in self.targets)


@dataclass
class ParallelConfig:
    """The mesh pp × dp × cp × tp, and how each axis is used."""

    tp: int = 1
    """Tensor-parallel size: ranks that share each layer's matrices."""
    pp: int = 1
    """Pipeline-parallel size: stages that share the layers."""
    dp: int | None = None
    """Data-parallel size: replicas that share the global batch; defaults to world / (tp · pp · cp)."""
    cp: int = 1
    """Context-parallel size: ranks that share each sequence. Only 1 until ring attention lands."""
    sequence_parallel: bool = False
    """Split activations between tensor-parallel regions along the sequence."""
    dp_shard: int | None = None
    """Data-parallel ranks that share their states under ZeRO, replicated over the others (HSDP); by default all of them."""
    zero: int = 1
    """ZeRO stage: 0 replicates optimizer state over dp, 1 shards master weights and moments, 2 gradients too, 3 weights too."""
    zero3_reshard: Literal["action", "step"] = "action"
    """With ZeRO-3, free a layer's weights after each use (gathered again for each microbatch and pass), or at the end of the step."""
    reduce_dtype: Literal["wide", "bf16"] = "wide"
    """What gradients travel in over data parallelism: wide as they accumulate, bf16 rounded to half of that, and added in fp32."""
    powersgd_rank: int | None = None
    """With ZeRO 0 and 1, send gradient matrices as two factors of so many columns (PowerSGD); none sends them whole."""
    bucket_mb: float = 25.0
    """Gradients are reduced in buckets of at most this many MB (fp32); a layer is never cut apart, so one that is larger has its own."""
    offload: Literal["none", "cpu", "disk"] = "none"
    """Where master weights and Adam's moments lie: beside the weights, in CPU memory, or in a memory-mapped file; updated on the CPU."""
    offload_dir: str | None = None
    """Directory on a fast local disk for offload disk; by default `offload/` in the run's directory. The files are scratch."""
    offload_parameters: bool = False
    """With ZeRO-3, keep the shards of the weights in CPU memory; layers come to the device as they are used."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "v-half"] = "1f1b"
    """Pipeline schedule; `megalite bubble --compare` shows what each costs in time and memory."""
    virtual_stages: int | None = None
    """Stages on each pipeline rank, for schedule interleaved (default 2); zb-v and v-half have 2, the others 1."""
    schedule_costs: list[float] = field(default_factory=lambda: [1.0, 1.0, 1.0, 0.0])
    """What a schedule with a split backward is planned for: duration of forward, input and weight gradient of a rank, and of a message."""
    optimistic_step: bool = True
    """Under zb-h2 and zb-v, update before the whole gradient norm is known and correct it if that clips. Takes a copy: not with offload."""
    partition: list[int] | None = None
    """Layers of each stage, first to last, for example [3, 5, 5, 3]; by default balanced by cost, embedding and head counted."""
    layer_costs: list[float] | None = None
    """Measured cost of the embedding, each layer and the head, in any unit, for the balanced partition; by default estimated FLOPs."""


@dataclass
class DataConfig:
    train: str | list[str] | dict[str, float] | None = None
    """Token file PREFIX (PREFIX.bin, PREFIX.idx), a list of them, or {PREFIX: weight}."""
    validation: float | str | list[str] | dict[str, float] | None = None
    """The same for validation, or the fraction of the training data that is held out at its end."""
    shuffle: bool = True
    """Shuffle samples, as a pure function of (seed, epoch, dataset)."""
    sequence_length: int = 256
    """Tokens of one sample."""
    packing: bool = False
    """Of chat data: a sample holds as many whole conversations as fit, none of which sees another; otherwise one, padded."""
    reset_positions: bool = False
    """Treat EOS as a document's end: positions restart and attention does not cross."""
    eod_mask_loss: bool = False
    """Do not count the loss of the prediction made from an EOS token (the first token of the next document)."""


@dataclass
class TrainConfig:
    steps: int = 100
    """Optimizer steps of the whole run."""
    global_batch_size: int = 32
    """Sequences of one optimizer step, over all ranks."""
    micro_batch_size: int = 4
    """Sequences of one forward pass on one rank."""
    precision: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    """Compute precision; bf16 and fp16 keep fp32 master weights and accumulate in fp32; fp64 is for proof on CPU."""
    grad_dtype: Literal["wide", "bf16"] = "wide"
    """What gradients accumulate and travel in: wide is fp32 (fp64 under fp64); bf16 halves their memory and loses digits."""
    recompute: str = "none"
    """Activations recomputed in backward: none, selective (attention), full (every layer), or every-K (every K-th layer)."""
    kernels: Literal["auto", "triton", "torch"] = "auto"
    """Triton kernels: auto takes them on a GPU where Triton is installed, torch never does, triton ends the run where none can run."""
    compile: bool = False
    """Compile the pure functions between linears with torch.compile."""
    loss_chunk: int | None = None
    """Tokens whose logits exist at a time, with their gradients computed in the forward; 0 takes all of a microbatch. By default 4096 on a
    GPU and 0 on a CPU. Below 2048 adding up the weight gradient costs time. Schedules with weight passes always take all in training."""
    grad_clip: float = 1.0
    """Clip the global gradient norm at this value; 0 turns clipping off."""
    label_smoothing: float = 0.0
    """Label smoothing over the global vocabulary."""
    z_loss: float = 0.0
    """Coefficient of the squared log-partition added to the loss."""
    stop_after: str | None = None
    """Save and exit after this much time, for example 3h50m, 90m or 30s."""
    watchdog: str | None = "5m"
    """A rank that gets nowhere for this long says where it is, and writes its stacks to stalls/ in the run's directory; none is silent."""

    def recompute_of(self, layer: int) -> str:
        """What `recompute` means for one layer: none, selective or full."""
        if not self.recompute.startswith("every-"):
            return self.recompute
        return "full" if layer % int(self.recompute.removeprefix("every-")) == 0 else "none"


@dataclass
class FP16Config:
    """fp16's dynamic loss scale, by DeepSpeed's rules."""

    initial_scale_power: int = 16
    """The loss scale starts at 2 to this power."""
    loss_scale_window: int = 1000
    """Steps without overflow after which the scale is doubled."""
    hysteresis: int = 2
    """Overflows after which the scale is halved."""
    min_loss_scale: float = 1.0
    """The scale is not halved below this."""


@dataclass
class OptimizerConfig:
    lr: float = 3e-4
    """Peak learning rate."""
    min_lr: float = 0.0
    """Learning rate at the end of decay."""
    warmup_steps: int = 0
    """Steps of linear warm-up from 0 to lr."""
    decay: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Learning-rate schedule after warm-up; wsd stays constant and falls linearly over the last wsd_decay_fraction of the steps."""
    wsd_decay_fraction: float = 0.1
    """Share of train.steps over which wsd decays."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """AdamW's averaging coefficients of the gradient and of its square."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices (norms and biases never decay)."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """Multiply lr and min_lr by global_batch_size / base_batch_size, or by its square root."""
    base_batch_size: int | None = None
    """Batch size at which lr was chosen, for lr_scaling."""


@dataclass
class CheckpointConfig:
    interval: int | None = None
    """Save every so many steps; none saves only at the end and on a signal."""
    keep: int | None = None
    """Keep only the newest so many checkpoints; none keeps all."""
    keep_every: int | None = None
    """Keep, beside those, every checkpoint whose step is a multiple of this."""
    async_save: bool = False
    """Copy what is to be saved and write it while training goes on; takes as much CPU memory as this rank saves."""
    verify: Literal["read", "full"] = "read"
    """Check, before a checkpoint is used, what is read of it, or every byte of it (split over the ranks)."""
    load: str = "auto"
    """auto resumes from the run's newest checkpoint where there is one; none starts afresh; or a checkpoint directory."""
    allow: list[Literal["data", "horizon"]] = field(default_factory=list)
    """Changes accepted on resume: other data, another number of steps."""


@dataclass
class FaultsConfig:
    """What is done about steps that went wrong, and which faults are made on purpose, to rehearse."""

    spike_sigma: float | None = None
    """Skip a step whose loss lies more than so many standard deviations above the mean of the last accepted steps; none never does."""
    spike_window: int = 100
    """Accepted steps that mean and deviation are taken of; nothing is a spike before there are so many."""
    skip_limit: int = 10
    """Steps skipped in a row after which the run ends. An overflow that only makes fp16's loss scale smaller is not counted."""
    rollback: bool = False
    """Instead of ending then, return to the last checkpoint and go on with the samples that come next, at most three times."""
    inject: str | list[str] | None = None
    """Faults KIND:rank=R,step=S to rehearse with, separated by spaces or in a list; short --faults. Kinds and options: docs/faults.md."""


@dataclass
class ValidationConfig:
    interval: int | None = None
    """Validate every so many steps, and at the end; none never does."""
    batches: int | None = None
    """Global batches of one validation; none takes the whole validation data."""


@dataclass
class LoggingConfig:
    interval: int = 1
    """Print one console line every so many steps (metrics.jsonl has every step)."""
    tensorboard: bool = False
    """Write TensorBoard scalars to the run's tensorboard/ directory."""
    wandb: str | None = None
    """Weights & Biases project to log to (needs the wandb package)."""


@dataclass
class ProfilingConfig:
    timeline: bool = False
    """Record when each action of a few steps runs on each rank, and compare that with the simulator: traces/timeline.json of the run."""
    steps: list[int] = field(default_factory=lambda: [3, 5])
    """First and last step that are recorded and traced, counted from 1."""
    ranks: list[int] = field(default_factory=list)
    """Ranks on which torch.profiler traces these steps, into the run's traces/, with the pipeline's actions by name."""
    hardware: str | None = None
    """What the planner predicts the time of a step for, told when the run ends: a name that `megalite plan` knows, or a file that its
    --calibrate wrote; by default the GPU that the run is on."""
    memory_snapshot: int | None = None
    """Write what every byte of GPU memory is used for after this step, on these ranks (by default 0), and where memory runs out."""


@dataclass
class NetworkConfig:
    """How ranks reach each other. An option sets a variable of the environment before the process group starts; one set there wins."""

    interface: str | None = None
    """Network interface of NCCL and gloo, for example eth0."""
    debug: Literal["VERSION", "WARN", "INFO", "TRACE"] | None = None
    """How much NCCL says."""
    ib_devices: str | None = None
    """InfiniBand devices that NCCL uses, for example mlx5_0,mlx5_1."""
    ib_gid_index: int | None = None
    """Global identifier that NCCL takes under RoCE, often 3."""
    ib_timeout: int | None = None
    """InfiniBand's acknowledgement times out after 4.096 µs * 2 ^ this; NCCL's own is 20, large networks take 22 or 23."""
    ib_retries: int | None = None
    """How often InfiniBand then tries again; NCCL's own is 7."""
    variables: dict[str, Any] | None = None
    """Any other variables, for example {NCCL_NVLS_ENABLE: 0}."""
    test: bool = False
    """Measure the links between ranks for 3 seconds at start, and name the slowest."""


@dataclass
class Config:
    """One run, complete: what `--print_config` prints and the run directory stores."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    fp16: FP16Config = field(default_factory=FP16Config)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    faults: FaultsConfig = field(default_factory=FaultsConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
