"""The shape of the model, and what its initial weights are."""

from dataclasses import dataclass
from typing import Any, Literal

from megalite.config.attention_shapes import ROTATED_SHARE, AttentionShape
from megalite.config.layer_blocks import blocks_in, groups_in
from megalite.config.option import FRACTION, NOT_NEGATIVE, POSITIVE, SIZE, option

ROPE_SCALING_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"),
    "longrope": ("original_max_position_embeddings", "short_factor", "long_factor", "attention_factor"),
    "dynamic": ("alpha",),
}
"""rope_type → the other keys of model.rope_scaling, all required. yarn may have `truncate: false`, too."""


ATTENTION, INDEXED, MIXTURE, MTP = ("attention",), ("indexed_attention",), ("mixture",), ("mtp",)
LATENTS = ("latent_attention", *INDEXED)
ANY_ATTENTION, ANY_FEED_FORWARD = (*ATTENTION, *LATENTS), ("feed_forward", "mixture")
DELTA, MAMBA, CONVOLUTION = ("delta",), ("mamba",), ("convolution",)
"""Whose fields some of ModelConfig's are (`option`)."""


@dataclass
class ModelConfig:
    """The model. Fields have the names of Hugging Face's LlamaConfig, if it has them."""

    preset: str | None = None
    """Named model shape: tiny, gpt2-124m, llama-3.2-1b, llama-3-8b, llama-3.1-8b, llama-3-70b, llama-3.1-70b,
    mixtral-8x7b, olmoe-1b-7b, qwen3-30b-a3b, qwen3-235b-a22b, deepseek-v2-lite, deepseek-v3, deepseek-v3.2,
    glm-5, gpt-oss-20b or gpt-oss-120b. It replaces the shape that earlier files give; other fields of this
    section beside it, or later, override it."""
    from_hf: str | None = option(None, path=True)
    """Hugging Face model whose config.json gives the shape: a directory, or org/name on the Hub. No weights
    are read. It replaces the shape that earlier files give, as a preset does."""
    init_from: str | None = option(None, path=True)
    """Initial weights, for a run that starts at step 0: a checkpoint directory (optimizer state and data
    position are not used), a run's directory for its newest checkpoint, or hf:DIR for a Hugging Face
    directory or org/name on the Hub (set from_hf to DIR for the shape). null or none: random weights; with
    from_hf and chat data, which are meant for fine-tuning, they must be asked for with none."""
    resize_embeddings: Literal["mean", "init"] | None = None
    """Rows for tokens that were added to the tokenizer: if the vocabulary is larger than that of init_from,
    its embedding and head are read and get further rows. mean: the mean of the old rows; init: random, as
    those of a new model. vocab_size is then that of the data, where that is larger. null: the vocabularies
    must be equal."""
    vocab_size: int | None = option(None, SIZE)
    """Vocabulary size. null: that of the training data."""
    hidden_size: int = option(256, SIZE)
    """Width of the residual stream."""
    intermediate_size: int = option(688, SIZE, kinds=ANY_FEED_FORWARD)
    """Inner width of the feed-forward block."""
    num_hidden_layers: int = option(4, SIZE)
    """Number of transformer layers."""
    layer_blocks: list[str] | None = None
    """Kinds of the blocks of each layer: joined by + they follow each other (attention+feed_forward,
    delta+mixture), joined by | they are beside each other, with one norm for all of them
    (mamba|attention+feed_forward); a layer may have one block (mamba). Known are attention, latent_attention,
    indexed_attention, delta (gated delta rule), mamba (Mamba-2), convolution, feed_forward and mixture. null:
    attention (latent_attention with kv_lora_rank, indexed_attention with index_topk), then mixture in layers
    with experts, else feed_forward; so have the layers of mtp_layers."""
    mtp_layers: int = option(0, NOT_NEGATIVE, kinds=MTP)
    """Number of modules of multi-token prediction (DeepSeek-V3): each has one more layer, and in training
    predicts one token further ahead. Evaluation and generation do not use them."""
    num_attention_heads: int = option(4, SIZE, kinds=ANY_ATTENTION)
    """Number of query heads."""
    num_key_value_heads: int | None = option(None, SIZE, kinds=ANY_ATTENTION)
    """Number of key-value heads (grouped-query attention). null: num_attention_heads."""
    head_dim: int | None = option(None, SIZE, kinds=ANY_ATTENTION)
    """Width of one attention head. null: hidden_size / num_attention_heads."""
    value_head_dim: int | None = option(None, SIZE, kinds=ATTENTION)
    """Width of a value's head, if it is not that of a key (MiMo-V2). null: head_dim, and with kv_lora_rank
    v_head_dim."""
    layer_heads: list[int] | None = option(None, SIZE, kinds=ATTENTION)
    """Number of query heads of each layer (Laguna). null: every layer has num_attention_heads."""
    local_attention: dict[str, Any] | None = option(None, kinds=ATTENTION)
    """What is different in the layers with a sliding window: {num_attention_heads: N, num_key_value_heads: N,
    head_dim: N, value_head_dim: N, partial_rotary_factor: S}, each entry only if it is. null: their attention
    has the shape of that of other layers."""
    kv_lora_rank: int | None = option(None, SIZE, kinds=LATENTS)
    """Multi-head latent attention (DeepSeek-V2): width of the latent that keys and values are computed from.
    null: there are no latents."""
    q_lora_rank: int | None = option(None, SIZE, kinds=LATENTS)
    """With kv_lora_rank, width of the latent that queries are computed from. null: they are computed from the
    layer's input."""
    qk_nope_head_dim: int = option(128, SIZE, kinds=LATENTS)
    """With kv_lora_rank, channels of a query's or key's head that do not rotate."""
    qk_rope_head_dim: int = option(64, SIZE, kinds=LATENTS)
    """With kv_lora_rank, channels of a query's or key's head that rotate; those of keys are the same in all
    heads."""
    v_head_dim: int = option(128, SIZE, kinds=LATENTS)
    """With kv_lora_rank, width of a value's head."""
    index_topk: int | None = option(None, SIZE, kinds=INDEXED)
    """Sparse attention (DeepSeek-V3.2, with kv_lora_rank and q_lora_rank): number of rows that a token
    attends to, those that an indexer scores highest. null: all rows."""
    index_n_heads: int = option(64, SIZE, kinds=INDEXED)
    """With index_topk, number of an indexer's heads."""
    index_head_dim: int = option(128, SIZE, kinds=INDEXED)
    """With index_topk, width of an indexer's head, of which the first qk_rope_head_dim channels rotate."""
    indexer_types: list[str] | None = option(None, kinds=INDEXED)
    """With index_topk, full or shared for each layer: it has an indexer, or attends to the rows that the last
    full layer has selected (GLM-5). null: all are full; so are the layers of mtp_layers."""
    index_loss_coef: float = option(0.0, NOT_NEGATIVE, kinds=INDEXED)
    """With index_topk, coefficient of the loss that trains the indexers, the mean over tokens of the
    divergence of their scores from the probabilities of attention. 0: no loss, and the indexers are not
    trained."""
    max_position_embeddings: int = option(2048, SIZE)
    """Maximum sequence length, in tokens; also the number of rows of a learned position table."""
    tie_word_embeddings: bool = False
    """Share the embedding's weight with the output head."""
    output_head: Literal["vocabulary", "reward"] = "vocabulary"
    """What the head computes for each token: the logits of the vocabulary, or one number, whose value at the
    last token is the reward of a text (train.objective: reward)."""
    position: Literal["rope", "learned", "none"] = "rope"
    """Position encoding: rotary embeddings (rope), a learned table added to the embedding (learned), or none.
    """
    rope_theta: float = option(10000.0, POSITIVE, kinds=ANY_ATTENTION)
    """Base of the rotary frequencies."""
    rope_local_theta: float | None = option(None, POSITIVE, kinds=ANY_ATTENTION)
    """Base of the rotary frequencies in the layers with a sliding window, to which rope_scaling then does not
    apply (Gemma-3). null: all layers have the same frequencies."""
    partial_rotary_factor: float = option(1.0, kinds=ANY_ATTENTION)
    """Share of each head's channels that rotary embeddings rotate; the others keep their values."""
    rope_scaling: dict[str, Any] | None = option(None, kinds=ANY_ATTENTION)
    """Rotary scaling, as in Hugging Face: {rope_type: linear, factor: F}, {rope_type: llama3, factor: F,
    low_freq_factor: L, high_freq_factor: H, original_max_position_embeddings: N}, {rope_type: yarn, factor:
    F, original_max_position_embeddings: N, beta_fast: 32, beta_slow: 1, attention_factor: A} or {rope_type:
    longrope, original_max_position_embeddings: N, short_factor: [..], long_factor: [..], attention_factor:
    A}, where sequences longer than N have the long factors, or {rope_type: dynamic, alpha: A}, which
    multiplies rope_theta by A ** (d / (d - 2)) for d rotating channels (Hunyuan). null: no scaling."""
    no_rope_layers: list[int] | None = option(None, kinds=ANY_ATTENTION)
    """Indices (0-based) of the layers without rotary embeddings. null: every layer has them."""
    norm: Literal["rms", "layer"] = "rms"
    """Normalisation: RMSNorm, or LayerNorm."""
    norm_bias: bool = True
    """Bias of LayerNorm. RMSNorm has none."""
    norm_weight: bool = True
    """Weights of the norms of the residual stream and of the blocks' outputs. false: these norms only divide
    by the root mean square or the standard deviation (nanochat)."""
    embedding_norm: bool = False
    """Norm of the embedding's output, before the first layer (nanochat)."""
    norm_placement: Literal["pre", "post", "both"] = "pre"
    """Position of the norms: before each block (pre), after it and before the residual addition (post), or
    both."""
    post_norm_layers: list[int] | None = None
    """Indices (0-based) of layers whose norms are after each block only, whatever norm_placement says
    (OLMo-Hybrid). null: none."""
    norm_offset: float = 0.0
    """Constant added to the norm's weight, if it has one; 1.0 gives Gemma's (1 + w)."""
    norm_rounding: Literal["normalized", "product"] = "normalized"
    """What RMSNorms round to 16 bits: the normalized value, before it is multiplied by the weight
    (normalized: Llama), or only the product (product: OLMo-2, gpt-oss, Nemotron-H; also with norm_offset)."""
    parallel_block: Literal["none", "shared_norm", "two_norms"] = "none"
    """Attention and feed-forward read the same input, and both are added to it. none: the feed-forward reads
    the sum of input and attention; shared_norm: in parallel, with one norm for both (Falcon-7B); two_norms:
    in parallel, each with its norm (GPT-NeoX)."""
    rms_norm_eps: float = option(1e-5, POSITIVE)
    """Epsilon of every norm, RMSNorm and LayerNorm."""
    qk_norm: Literal["none", "head", "full", "each_head"] = option("none", kinds=ATTENTION)
    """Norm of queries and keys: RMSNorm per head (head, Qwen3) or over the full width (full, OLMo-2),
    LayerNorm without bias per head with weights of its own for each head (each_head, Command-R+), or none."""
    qk_norm_after_rope: bool = option(False, kinds=ATTENTION)
    """Queries and keys are normed after they are rotated (Hunyuan), not before."""
    qk_norm_weight: bool = option(True, kinds=ATTENTION)
    """Weights of the norms of queries and keys. false, with qk_norm head: there are none (nanochat)."""
    hidden_act: Literal[
        "silu",
        "gelu",
        "gelu_new",
        "gelu_fast",
        "gelu_pytorch_tanh",
        "relu",
        "relu2",
        "clamped_swiglu",
        "xielu",
    ] = option("silu", kinds=ANY_FEED_FORWARD)
    """Activation of the feed-forward block; gelu_new, gelu_fast and gelu_pytorch_tanh are all the tanh
    approximation of GELU, relu2 is the square of relu, clamped_swiglu limits gate and up as gpt-oss does,
    xielu has two trained numbers in each layer (Apertus)."""
    gated_mlp: bool = option(True, kinds=ANY_FEED_FORWARD)
    """Gated feed-forward: act(gate) * up (SwiGLU with silu). false: act(up)."""
    num_experts: int | None = option(None, SIZE, kinds=MIXTURE)
    """Number of experts of a layer whose feed-forward is a mixture of experts. null: every feed-forward is
    dense."""
    num_experts_per_tok: int = option(2, SIZE, kinds=MIXTURE)
    """Number of experts that process a token: those with the largest router probabilities."""
    moe_intermediate_size: int | None = option(None, SIZE, kinds=MIXTURE)
    """Inner width of one expert. null: intermediate_size."""
    norm_topk_prob: bool = option(True, kinds=MIXTURE)
    """Divide the probabilities of a token's experts by their sum; false: the outputs are weighted with the
    probabilities themselves."""
    norm_topk_eps: float = option(1e-20, POSITIVE, kinds=MIXTURE)
    """Added to the sum by which norm_topk_prob divides (LFM2-MoE: 1e-6)."""
    norm_topk_min: float | None = option(None, POSITIVE, kinds=MIXTURE)
    """Least sum by which norm_topk_prob divides (ERNIE 4.5: 1e-12). null: any."""
    router_logit_bias: bool = option(False, kinds=MIXTURE)
    """Routers add a learned bias to their logits (gpt-oss)."""
    router_scores: Literal["softmax", "sigmoid"] = option("softmax", kinds=MIXTURE)
    """What a router makes of its logits: probabilities (softmax), or a score for each expert by itself
    (sigmoid, DeepSeek-V3)."""
    routed_scaling_factor: float = option(1.0, POSITIVE, kinds=MIXTURE)
    """Factor on the weights of a token's experts."""
    n_group: int | None = option(None, SIZE, kinds=MIXTURE)
    """Number of equal groups of experts; a token chooses its experts from the topk_group best groups. null:
    no groups."""
    group_score: Literal["auto", "largest", "two_largest"] = option("auto", kinds=MIXTURE)
    """With n_group, score of a group: its largest one, or the sum of its two largest. auto: largest with
    softmax, two_largest with sigmoid."""
    topk_group: int = option(1, SIZE, kinds=MIXTURE)
    """With n_group, number of groups that a token chooses its experts from."""
    shared_expert_intermediate_size: int | None = option(None, SIZE, kinds=MIXTURE)
    """Inner width of an expert that processes every token, next to the chosen ones. null: there is none."""
    shared_expert_gate: bool = option(True, kinds=MIXTURE)
    """Multiply the shared expert's output by a learned sigmoid gate of the token (Qwen2-MoE)."""
    mixture_out_multiplier: float = option(1.0, POSITIVE, kinds=MIXTURE)
    """Factor on the output of a mixture, the sum of the chosen and the shared experts (Command-A+: 0.5, their
    mean)."""
    moe_latent_size: int | None = option(None, SIZE, kinds=MIXTURE)
    """Width of the latent that a mixture's experts read and write (Nemotron-H): every token is projected to
    it before the experts, and back after them. null: experts have the width of the model."""
    decoder_sparse_step: int = option(1, SIZE, kinds=MIXTURE)
    """Every n-th layer is a mixture: those whose 1-based number n divides. The others are dense."""
    mlp_only_layers: list[int] | None = option(None, kinds=MIXTURE)
    """Indices (0-based) of further layers that are dense. null: none."""
    router_balance: Literal["global", "sequence", "bias"] = option("global", kinds=MIXTURE)
    """How the experts are kept equally loaded: by an auxiliary loss from the load of the previous step
    (global) or of each sequence (sequence), or by a bias on the choice, which each step moves against the
    load (bias). The layout of ranks changes none of them."""
    router_aux_loss_coef: float = option(0.0, NOT_NEGATIVE, kinds=MIXTURE)
    """Coefficient of the auxiliary loss of router_balance (bias: that of each sequence), averaged over tokens
    and layers. 0: no loss."""
    router_z_loss_coef: float = option(0.0, NOT_NEGATIVE, kinds=MIXTURE)
    """Coefficient of the mean squared log-sum-exp of the router's logits, which keeps them small. 0: no loss.
    """
    router_bias_rate: float = option(0.001, NOT_NEGATIVE, kinds=MIXTURE)
    """With router_balance bias, how far a step moves each expert's bias."""
    expert_capacity_factor: float | None = option(None, POSITIVE, kinds=MIXTURE)
    """In training an expert processes at most ceil(factor * sequence_length * num_experts_per_tok /
    num_experts) tokens of each sequence, first choices first, then by position; it drops the others, which
    keep what their other experts give. null: none is dropped."""
    attention_bias: bool = option(False, kinds=ATTENTION)
    """Bias on the query, key and value projections."""
    attention_out_bias: bool = option(False, kinds=ATTENTION)
    """Bias on the attention output projection."""
    mlp_bias: bool = option(False, kinds=ANY_FEED_FORWARD)
    """Bias on the feed-forward projections."""
    sliding_window: int | None = option(None, SIZE, kinds=ANY_ATTENTION)
    """Number of most recent positions, the token's own included, that a token attends to. null: all."""
    sliding_window_layers: list[int] | None = option(None, kinds=ANY_ATTENTION)
    """Indices (0-based) of the layers that use sliding_window. null: every layer."""
    attention_scale: float | None = option(None, POSITIVE, kinds=ANY_ATTENTION)
    """Factor on the attention scores. null: head_dim ** -0.5."""
    query_scale_beta: float | None = option(None, POSITIVE, kinds=ANY_ATTENTION)
    """Factor on the queries of each position: 1 + beta * log(1 + floor(position / query_scale_positions)), of
    positions in documents (Ministral 3). null: 1."""
    query_scale_positions: int | None = option(None, SIZE, kinds=ANY_ATTENTION)
    """With query_scale_beta, number of positions from which on queries have a factor."""
    attention_softcap: float | None = option(None, POSITIVE, kinds=ANY_ATTENTION)
    """Cap of the attention scores: cap * tanh(scores / cap) (Gemma-2). null: no cap."""
    attention_sinks: bool = option(False, kinds=ATTENTION)
    """Every head has a learned score that joins the softmax over the keys and has no value (gpt-oss)."""
    sink_layers: list[int] | None = option(None, kinds=ATTENTION)
    """Indices (0-based) of the layers with attention_sinks (MiMo-V2: those with a window). null: every layer.
    """
    attention_gate: bool = option(False, kinds=ATTENTION)
    """Multiply the output of every head by sigmoid(gate), a projection of the layer's input as wide as the
    queries, before the output projection (Qwen3-Next)."""
    attention_gate_act: Literal["sigmoid", "softplus"] = option("sigmoid", kinds=ATTENTION)
    """Function of attention_gate: sigmoid, or softplus (Laguna)."""
    attention_gate_width: Literal["channel", "head"] = option("channel", kinds=ATTENTION)
    """What attention_gate has a value for: each channel of a head, or each head (Laguna)."""
    linear_num_key_heads: int = option(16, SIZE, kinds=DELTA)
    """Number of heads of queries and keys of delta blocks (gated delta rule)."""
    linear_num_value_heads: int = option(32, SIZE, kinds=DELTA)
    """Number of heads of values of delta blocks, each with a state; a multiple of linear_num_key_heads."""
    linear_key_head_dim: int = option(128, SIZE, kinds=DELTA)
    """Width of a key's head of delta blocks."""
    linear_value_head_dim: int = option(128, SIZE, kinds=DELTA)
    """Width of a value's head of delta blocks."""
    linear_conv_kernel_dim: int = option(4, SIZE, kinds=DELTA)
    """Width of the causal convolution of delta blocks, in tokens."""
    delta_decay: Literal["head", "channel"] = option("head", kinds=DELTA)
    """Decay of the states of delta blocks: one for each head (gated delta rule, Qwen3-Next), or one for each
    channel of a key (Kimi delta attention)."""
    delta_negative_eigenvalues: bool = option(False, kinds=DELTA)
    """Delta blocks replace values with strengths up to 2, not 1, so that states may change their sign."""
    delta_norm_eps: float | None = option(None, POSITIVE, kinds=DELTA)
    """Epsilon of the gated norm of delta blocks. null: rms_norm_eps."""
    gated_norm_rounding: Literal["normalized", "product"] = option("normalized", kinds=(*DELTA, *MAMBA))
    """What the gated norms of delta and mamba blocks round to 16 bits: the normalized value, before it is
    multiplied by the weight (normalized), or only the result (product: Falcon H1 and Kimi Linear)."""
    mamba_num_heads: int = option(128, SIZE, kinds=MAMBA)
    """Number of heads of mamba blocks (Mamba-2), each with a state."""
    mamba_head_dim: int = option(64, SIZE, kinds=MAMBA)
    """Width of a head of mamba blocks."""
    mamba_state_size: int = option(128, SIZE, kinds=MAMBA)
    """Width of the state of each channel of mamba blocks."""
    mamba_n_groups: int = option(8, SIZE, kinds=MAMBA)
    """Number of groups of heads of mamba blocks, each with its own B and C; it divides mamba_num_heads."""
    mamba_conv_kernel: int = option(4, SIZE, kinds=MAMBA)
    """Width of the causal convolution of mamba blocks, in tokens."""
    mamba_conv_bias: bool = option(True, kinds=MAMBA)
    """Bias on the convolution of mamba blocks."""
    mamba_proj_bias: bool = option(False, kinds=MAMBA)
    """Bias on the projections of mamba blocks."""
    mamba_norm: Literal["gate_first", "norm_first", "none"] = option("gate_first", kinds=MAMBA)
    """Norm of the output of mamba blocks by group: after the gate (gate_first), before it (norm_first), or
    no norm, the gate alone (none)."""
    mamba_time_step_limit: list[float] | None = option(None, NOT_NEGATIVE, kinds=MAMBA)
    """Smallest and largest step Δ of mamba blocks. null: no limits."""
    mamba_multipliers: list[float] | None = option(None, kinds=MAMBA)
    """Factors on the parts z, x, B, C and dt of the input projection of mamba blocks (Falcon-H1). null: 1."""
    mamba_in_multiplier: float = option(1.0, POSITIVE, kinds=MAMBA)
    """Factor on the input of mamba blocks."""
    mamba_out_multiplier: float = option(1.0, POSITIVE, kinds=MAMBA)
    """Factor on the output of mamba blocks."""
    conv_kernel: int = option(3, SIZE, kinds=CONVOLUTION)
    """Width of the causal convolution of convolution blocks (LFM2), in tokens."""
    conv_bias: bool = option(False, kinds=CONVOLUTION)
    """Bias on the convolution and the projections of convolution blocks."""
    attention_in_multiplier: float = option(1.0, POSITIVE, kinds=ATTENTION)
    """Factor on the input of attention (Falcon-H1)."""
    key_multiplier: float = option(1.0, POSITIVE, kinds=ATTENTION)
    """Factor on the keys (Falcon-H1)."""
    attention_out_multiplier: float = option(1.0, POSITIVE, kinds=ATTENTION)
    """Factor on the output of attention (Falcon-H1)."""
    mlp_multipliers: list[float] | None = option(None, POSITIVE, kinds=("feed_forward",))
    """Factors on the gate, before its activation, and on the output of the feed-forward (Falcon-H1). null: 1.
    """
    logit_scale: float | None = option(None, POSITIVE)
    """Factor on the logits, before their cap. null: 1."""
    logit_softcap: float | None = option(None, POSITIVE)
    """Cap of the logits: cap * tanh(logits / cap) (Gemma-2). null: no cap."""
    embedding_scale: float | None = option(None, POSITIVE)
    """Factor on the embedding's output (Gemma: hidden_size ** 0.5). null: 1."""
    residual_multiplier: float = option(1.0, POSITIVE)
    """Factor on the output of attention and of the feed-forward, before the residual addition."""
    initializer_range: float = option(0.02, POSITIVE)
    """Standard deviation of the initial weights; divided by the square root of the number of blocks, two in a
    layer without layer_blocks, for output projections."""
    mup: dict[str, Any] | None = None
    """Maximal update parametrization (Yang et al. 2022): the learning rate that is best at base_width stays
    so at this hidden_size. {base_width: W} is the width for which it was chosen, at which this is the plain
    model; base_depth: L its number of layers (default: the same). Sizes of the base follow from the width:
    inner widths and numbers of heads are in proportion to it, everything else is equal. Further keys are
    fields of this section, as num_key_value_heads: 8, that differ from this rule in the base."""
    embedding_dropout: float = option(0.0, FRACTION)
    """Dropout probability on the embedding's output."""
    attention_dropout: float = option(0.0, FRACTION, kinds=ANY_ATTENTION)
    """Dropout probability on the attention probabilities."""
    residual_dropout: float = option(0.0, FRACTION)
    """Dropout probability on each block's output, before the residual addition."""

    @property
    def initial_weights(self) -> str | None:
        """What init_from names; None for random weights, whether they were asked for or not."""
        return None if self.init_from == "none" else self.init_from

    @property
    def width_growth(self) -> float:
        """hidden_size over that of mup's base; 1 without mup."""
        return self.hidden_size / self.mup["base_width"] if self.mup else 1.0

    @property
    def depth_growth(self) -> float:
        """num_hidden_layers over that of mup's base; 1 without mup."""
        return self.num_hidden_layers / (self.mup or {}).get("base_depth", self.num_hidden_layers)

    @property
    def logit_factor(self) -> float | None:
        """Factor on the input of the head: that of logit_scale and of mup. None: 1."""
        if self.width_growth == 1.0:
            return self.logit_scale
        return (self.logit_scale or 1.0) / self.width_growth

    @property
    def residual_factor(self) -> float:
        """Factor on what a block adds to the residual stream: residual_multiplier and mup's for the depth."""
        return self.residual_multiplier / self.depth_growth

    @property
    def rounds_normalized(self) -> bool:
        """Whether RMSNorms round the normalized value before they multiply it by the weight."""
        return self.norm_rounding == "normalized"

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
        return (self.value_head_dim or self.head_size) if self.kv_lora_rank is None else self.v_head_dim

    def attention_shape(self, layer: int) -> AttentionShape:
        """The shape of a layer's attention: heads, key-value heads, widths, and what rotates."""
        local: dict[str, Any] = {} if self.window(layer) is None else self.local_attention or {}
        heads = local.get("num_attention_heads", self.num_attention_heads)
        if self.layer_heads is not None and layer < len(self.layer_heads):
            heads = self.layer_heads[layer]
        kv_heads, size = (
            local.get("num_key_value_heads", self.kv_heads),
            local.get("head_dim", self.head_size),
        )
        if local:
            value_size = local.get("value_head_dim", self.value_head_dim or size)
            rotated = int(size * local.get(ROTATED_SHARE, self.partial_rotary_factor))
        else:
            value_size, rotated = self.value_size, self.rotary_dim
        return AttentionShape(heads, kv_heads, size, value_size, rotated)

    @property
    def attention_shapes(self) -> dict[AttentionShape, int]:
        """The shapes that attention has in the layers, each with the first layer that has it."""
        if self.layer_heads is None and self.local_attention is None:
            return {self.attention_shape(0): 0}
        first: dict[AttentionShape, int] = {}
        for layer in range(self.num_hidden_layers + self.mtp_layers):
            first.setdefault(self.attention_shape(layer), layer)
        return first

    @property
    def rotation(self) -> tuple[int, int]:
        """Width of what rotary embeddings are applied to, and number of its channels that rotate."""
        return self.rotary_width, self.rotary_dim

    @property
    def local_rotation(self) -> tuple[int, int] | None:
        """The same in the layers with a window; None: these have the rotary tables of other layers."""
        local = self.local_attention or {}
        if self.rope_local_theta is None and not local.keys() & {"head_dim", ROTATED_SHARE}:
            return None
        size = local.get("head_dim", self.rotary_width)
        return size, int(size * local.get(ROTATED_SHARE, self.partial_rotary_factor))

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
    def counted_in_group(self) -> int:
        """Number of largest scores whose sum is the score of a group of experts."""
        by_scores = "two_largest" if self.router_scores == "sigmoid" else "largest"
        score = by_scores if self.group_score == "auto" else self.group_score
        return 2 if score == "two_largest" else 1

    @property
    def expert_width(self) -> int:
        """Inner width of one expert."""
        return self.moe_intermediate_size or self.intermediate_size

    @property
    def expert_input(self) -> int:
        """Width of what experts read and write."""
        return self.moe_latent_size or self.hidden_size

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
        has_own = self.output_head == "vocabulary" and not self.tied_head
        return ["embedding", "head"] if has_own else ["embedding"]

    @property
    def tied_head(self) -> bool:
        """Whether the embedding is also the head."""
        return self.tie_word_embeddings and self.output_head == "vocabulary"

    def selecting_layer(self, layer: int) -> int:
        """The layer whose indexer selects the rows of a layer: the last full one up to it; -1: none."""
        types = self.indexer_types or ()
        for index in range(layer, -1, -1):
            full = index >= len(types) or types[index] == "full"
            if full and "indexed_attention" in self.block_names(index):
                return index
        return -1

    def selects_before(self, layer: int) -> bool:
        """Whether the first layer with an indexer's rows, from this one on, takes those of a layer before
        this one."""
        following = range(layer, self.num_hidden_layers)
        first = next((each for each in following if "indexed_attention" in self.block_names(each)), None)
        return first is not None and 0 <= self.selecting_layer(first) < layer

    def window(self, layer: int) -> int | None:
        """Number of positions that a token of this layer attends to, its own included; None: all."""
        local = self.sliding_window_layers is None or layer in self.sliding_window_layers
        return self.sliding_window if local else None

    @property
    def block_count(self) -> int:
        """The number of blocks that add to the residual stream, without those of mtp_layers."""
        if self.layer_blocks is None:
            return 2 * self.num_hidden_layers
        return sum(len(blocks_in(entry)) for entry in self.layer_blocks)

    def block_groups(self, layer: int) -> tuple[tuple[str, ...], ...]:
        """The kinds of a layer's blocks, in the order of the forward: in groups that follow each other, of
        blocks that layer_blocks has beside each other."""
        if self.layer_blocks is not None and layer < len(self.layer_blocks):
            return groups_in(self.layer_blocks[layer])
        attention = "attention" if self.kv_lora_rank is None else "latent_attention"
        if self.index_topk is not None:
            attention = "indexed_attention"
        return (attention,), ("mixture" if self.is_mixture(layer) else "feed_forward",)

    def block_names(self, layer: int) -> tuple[str, ...]:
        """The kinds of a layer's blocks, in the order of the forward."""
        if self.layer_blocks is not None and layer < len(self.layer_blocks):
            return blocks_in(self.layer_blocks[layer])
        return tuple(name for group in self.block_groups(layer) for name in group)

    def is_mixture(self, layer: int) -> bool:
        """Whether the layer's feed-forward is a mixture of experts."""
        if self.layer_blocks is not None and layer < len(self.layer_blocks):
            return "mixture" in blocks_in(self.layer_blocks[layer])
        return (
            bool(self.num_experts)
            and layer not in (self.mlp_only_layers or ())
            and (layer + 1) % self.decoder_sparse_step == 0
        )

    def uses_rope(self, layer: int) -> bool:
        return self.position == "rope" and layer not in (self.no_rope_layers or ())

    def local_rope(self, layer: int) -> bool:
        """Whether the layer has the rotary tables of layers with a window."""
        local = self.local_rotation is not None and self.window(layer) is not None
        return local and self.uses_rope(layer)

    def has_sinks(self, layer: int) -> bool:
        """Whether the heads of the layer's attention have sinks."""
        return self.attention_sinks and (self.sink_layers is None or layer in self.sink_layers)
