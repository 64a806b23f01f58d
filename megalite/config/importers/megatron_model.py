"""Megatron-LM's arguments for the model's shape. Defaults are those of GPT: learned positions, LayerNorm, GELU, biases, tied embeddings."""

from __future__ import annotations

from typing import Any

from megalite.config.importers import megatron_latents
from megalite.config.importers.verdict import Row, Source, Table, Verdict, each, harmless, honoured, lost, missing, never, sets

HIDDEN, FEED_FORWARD = "hidden-size", "ffn-hidden-size"


def default_width(source: Source) -> int | None:
    """Width of the feed-forward block: 4 * hidden_size, or two thirds of it for a gated one, in whole 64."""
    hidden = source.size(HIDDEN)
    return hidden and (int(4 * hidden * 2 / 3 / 64) * 64 if source.on("swiglu") else 4 * hidden)


def _kv_heads(value: Any, source: Source) -> Verdict:
    """Without --group-query-attention, and with latents, every head has its own key and value."""
    if megatron_latents.is_on(source):
        return harmless("with latents every head has its own key and value")
    if not source.on("group-query-attention"):
        return harmless("group-query-attention is off")
    return honoured({"model.num_key_value_heads": source.size("num-query-groups") or 1})


def _position(value: Any, source: Source) -> Verdict:
    rotary = source.on("use-rotary-position-embeddings") or source.word("position-embedding-type") == "ROPE"
    kind = "rope" if rotary else {"LEARNED_ABSOLUTE": "learned", "NONE": "none"}.get(source.word("position-embedding-type"))
    return honoured({"model.position": kind}) if kind else lost("model.position is rope, learned or none")


def _rotary(option: str) -> Row:
    """A row of rotary embeddings, which apply only where positions are rotary."""
    off = harmless("positions are not rotary")
    return Row(
        lambda value, source: honoured({option: value}) if _position(None, source).options == {"model.position": "rope"} else off, option
    )


def _rope_scaling(value: Any, source: Source) -> Verdict:
    factor = source.number("rope-scaling-factor") or 8.0
    if not source.on("use-rope-scaling"):
        return harmless("use-rope-scaling is off")
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return honoured({"model.rope_scaling": scaling | {"original_max_position_embeddings": 8192}})


def _activation(value: Any, source: Source) -> Verdict:
    """GELU is the tanh approximation where it is fused with a bias, or OpenAI's; otherwise it is exact."""
    if source.on("swiglu"):
        return honoured({"model.hidden_act": "silu", "model.gated_mlp": True})
    if source.on("squared-relu"):
        return honoured({"model.hidden_act": "relu2", "model.gated_mlp": False})
    if source.on("quick-geglu"):
        return lost("set model.hidden_act and model.gated_mlp")
    exact = (source.on("disable-bias-linear") or source.on("no-bias-gelu-fusion")) and not source.on("openai-gelu")
    return honoured({"model.hidden_act": "gelu" if exact else "gelu_pytorch_tanh", "model.gated_mlp": False})


def _biases(value: Any, source: Source) -> Verdict:
    bias = not source.on("disable-bias-linear")
    if megatron_latents.is_on(source):
        return honoured({"model.mlp_bias": bias}, "latent attention has no biases" if bias else "")
    inner = bias or source.on("add-qkv-bias")
    return honoured({"model.attention_bias": inner, "model.attention_out_bias": bias, "model.mlp_bias": bias})


def _hidden_dropout(value: Any, source: Source) -> Verdict:
    return honoured({"model.residual_dropout": value, "model.embedding_dropout": value})


def _qk_norm(value: Any, source: Source) -> Verdict:
    if megatron_latents.is_on(source):
        return harmless("the latents have norms, as here")
    if source.word("normalization") != "RMSNORM":
        return lost("model.qk_norm: head is an RMSNorm; with LayerNorm there is none that all heads share")
    return honoured({"model.qk_norm": "head"})


def _without_latents(row: Row) -> Row:
    """A row of heads whose widths the arguments of latent attention give, if it is on."""
    off = harmless("qk-head-dim, qk-pos-emb-head-dim and v-head-dim say it")
    return Row(lambda value, source: off if megatron_latents.is_on(source) else row.judge(value, source), row.option)


def _window(value: Any, source: Source) -> Verdict:
    """(left, right) positions beside the token's own; -1 is unlimited."""
    sizes = [
        int(part) for part in str(value).replace("[", "").replace("]", "").strip("()").split(",") if part.strip().lstrip("-").isdigit()
    ]
    if len(sizes) != 2 or sizes[0] < 0:
        return lost("set model.sliding_window to a number of positions")
    return honoured({"model.sliding_window": sizes[0] + 1})


PADDED = "the vocabulary is not padded: any size can be split over tp"
TABLE: Table = {
    "num-layers": sets("model.num_hidden_layers"),
    HIDDEN: sets("model.hidden_size"),
    FEED_FORWARD: sets("model.intermediate_size"),
    "num-attention-heads": sets("model.num_attention_heads"),
    "kv-channels": _without_latents(sets("model.head_dim")),
    **each("", "group-query-attention num-query-groups", Row(_kv_heads, "model.num_key_value_heads")),
    **each("", "seq-length encoder-seq-length", sets("data.sequence_length")),
    "max-position-embeddings": sets("model.max_position_embeddings"),
    **each("", "position-embedding-type use-rotary-position-embeddings", Row(_position, "model.position")),
    "no-position-embedding": never("model.position says which positions there are"),
    "rotary-base": _rotary("model.rope_theta"),
    "rotary-percent": _without_latents(_rotary("model.partial_rotary_factor")),
    "rotary-interleaved": missing("channels are rotated in halves"),
    "rotary-seq-len-interpolation-factor": missing("model.rope_scaling {rope_type: linear, factor: F} is the same"),
    **each("", "use-rope-scaling rope-scaling-factor", Row(_rope_scaling, "model.rope_scaling")),
    "normalization": sets("model.norm", {"LAYERNORM": "layer", "RMSNORM": "rms"}, "model.norm is rms or layer"),
    **each("", "norm-epsilon layernorm-epsilon", sets("model.rms_norm_eps")),
    "apply-layernorm-1p": sets("model.norm_offset", {"TRUE": 1.0}),
    **each("", "swiglu squared-relu quick-geglu openai-gelu no-bias-gelu-fusion", Row(_activation, "model.hidden_act")),
    **each("", "disable-bias-linear add-qkv-bias", Row(_biases, "model.attention_bias")),
    "untie-embeddings-and-output-weights": Row(
        lambda value, _: honoured({"model.tie_word_embeddings": not value}), "model.tie_word_embeddings"
    ),
    "attention-dropout": sets("model.attention_dropout"),
    "hidden-dropout": Row(_hidden_dropout, "model.residual_dropout"),
    "init-method-std": sets("model.initializer_range"),
    "mtp-num-layers": sets("model.mtp_layers"),
    "mtp-loss-scaling-factor": sets("train.mtp_weight"),
    "qk-layernorm": Row(_qk_norm, "model.qk_norm"),
    "window-size": Row(_window, "model.sliding_window"),
    "vocab-size": sets("model.vocab_size"),
    "make-vocab-size-divisible-by": never(PADDED),
    "parallel-block": missing("model.parallel_block is nearest"),
    **each(
        "",
        "apply-query-key-layer-scaling attention-softmax-in-fp32 no-masked-softmax-fusion",
        never("attention is computed in fp32 where needed"),
    ),
    "is-hybrid-model": missing("every layer has attention"),
}


def defaults(source: Source) -> dict[str, Any]:
    """GPT's defaults that differ from ours; nothing if no model is given."""
    if HIDDEN not in source.leaves:
        return {}
    return {
        **{"position-embedding-type": "learned_absolute", "normalization": "LayerNorm", "swiglu": False, "disable-bias-linear": False},
        **{
            "untie-embeddings-and-output-weights": False,
            "attention-dropout": 0.1,
            "hidden-dropout": 0.1,
            FEED_FORWARD: default_width(source),
        },
    }
