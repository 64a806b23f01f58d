"""Megatron-LM's arguments for the model's shape.

Defaults are those of GPT: learned positions, LayerNorm, GELU, biases, tied embeddings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megalite.importers import megatron_latent_attention as latent_attention
from megalite.importers.megatron_patterns import marked_layers, number_of_layers
from megalite.importers.verdict import (
    ImportedFile,
    KeyRule,
    Table,
    Verdict,
    each,
    harmless,
    honoured,
    lost,
    missing,
    never,
    sets,
)

HIDDEN, FEED_FORWARD = "hidden-size", "ffn-hidden-size"


def default_width(source: ImportedFile) -> int | None:
    """Return the default width of the feed-forward block.

    It is 4 * hidden_size, or two thirds of it for a gated block, rounded to a multiple of 64.
    """
    hidden = source.size(HIDDEN)
    return hidden and (int(4 * hidden * 2 / 3 / 64) * 64 if source.on("swiglu") else 4 * hidden)


def _kv_heads(value: Any, source: ImportedFile) -> Verdict:
    """Map the number of key-value heads.

    Without --group-query-attention, and in latent attention, every head has its own key and value.
    """
    if latent_attention.is_on(source):
        return harmless("every head has its own key and value in latent attention")
    if not source.on("group-query-attention"):
        return harmless("group-query-attention is off")
    return honoured({"model.num_key_value_heads": source.get("num-query-groups")})


def _position(value: Any, source: ImportedFile) -> Verdict:
    """Map the positions. Latent attention always uses rotary positions."""
    if latent_attention.is_on(source):
        learned = source.word("position-embedding-type", "learned_absolute") == "LEARNED_ABSOLUTE"
        rotary = not learned or source.on("use-rotary-position-embeddings")
        return honoured(
            {"model.position": "rope"},
            "" if rotary else "latent attention uses rotary positions only, without learned ones",
        )
    rotary = source.on("use-rotary-position-embeddings") or source.word("position-embedding-type") == "ROPE"
    kind = (
        "rope"
        if rotary
        else {"LEARNED_ABSOLUTE": "learned", "NONE": "none"}.get(source.word("position-embedding-type"))
    )
    return (
        honoured({"model.position": kind}) if kind else lost("model.position must be rope, learned or none")
    )


def _rotary(option: str) -> KeyRule:
    """Return a row of rotary embeddings, which apply only where positions are rotary."""

    def judge(value: Any, source: ImportedFile) -> Verdict:
        position = _position(None, source)
        if position.options == {"model.position": "rope"} or position.kind == "lost":
            return honoured({option: value})
        return harmless("positions are not rotary")

    return KeyRule(judge, option)


def _rope_scaling(value: Any, source: ImportedFile) -> Verdict:
    """Map Llama 3's scaling of the model's rotary embeddings. Latent attention has separate ones."""
    if not source.on("use-rope-scaling"):
        return harmless("use-rope-scaling is off")
    if latent_attention.is_on(source):
        return harmless("does not apply to the rotary embeddings of latent attention")
    if _position(None, source).options.get("model.position", "rope") != "rope":
        return harmless("positions are not rotary")
    factor = source.number("rope-scaling-factor")
    if factor is None:
        return lost("set model.rope_scaling")
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    options = {"model.rope_scaling": scaling | {"original_max_position_embeddings": 8192}}
    return honoured(
        options, "" if factor == 8 else "pretrain_gpt.py always scales by 8 and ignores rope-scaling-factor"
    )


def _interpolation(value: Any, source: ImportedFile) -> Verdict:
    if (
        latent_attention.is_on(source)
        or _position(None, source).options.get("model.position", "rope") != "rope"
    ):
        return harmless("only applies to rotary positions without latent attention")
    return lost("use model.rope_scaling {rope_type: linear, factor: F}")


def _by_value(key: str, row: KeyRule) -> KeyRule:
    """Return the row of a switch whose value is another key.

    If that key is missing, its default is listed as such.
    """
    missing_value = harmless(f"determined by {key}")

    def judge(value: Any, source: ImportedFile) -> Verdict:
        verdict = row.judge(value, source)
        return verdict if key in source.leaves or verdict.kind == "harmless" else missing_value

    return KeyRule(judge, row.option)


def _activation(value: Any, source: ImportedFile) -> Verdict:
    """Map the activation. GELU is the tanh approximation if it is fused with a bias or OpenAI's."""
    if source.on("swiglu"):
        return honoured({"model.hidden_act": "silu", "model.gated_mlp": True})
    if source.on("squared-relu"):
        return honoured({"model.hidden_act": "relu2", "model.gated_mlp": False})
    if source.on("quick-geglu"):
        return lost("set model.hidden_act and model.gated_mlp")
    exact = (source.on("disable-bias-linear") or source.on("no-bias-gelu-fusion")) and not source.on(
        "openai-gelu"
    )
    return honoured({"model.hidden_act": "gelu" if exact else "gelu_pytorch_tanh", "model.gated_mlp": False})


def _biases(value: Any, source: ImportedFile) -> Verdict:
    bias = not source.on("disable-bias-linear")
    if latent_attention.is_on(source):
        return honoured({"model.mlp_bias": bias}, "latent attention has no biases" if bias else "")
    inner = bias or source.on("add-qkv-bias")
    return honoured({"model.attention_bias": inner, "model.attention_out_bias": bias, "model.mlp_bias": bias})


def _hidden_dropout(value: Any, source: ImportedFile) -> Verdict:
    return honoured({"model.residual_dropout": value, "model.embedding_dropout": value})


def _qk_norm(value: Any, source: ImportedFile) -> Verdict:
    if latent_attention.is_on(source):
        return harmless("norms of the latents are always used")
    if source.word("normalization") != "RMSNORM":
        return lost("model.qk_norm: head is an RMSNorm; a LayerNorm shared by all heads is not supported")
    return honoured({"model.qk_norm": "head"})


def _without_latents(row: KeyRule) -> KeyRule:
    """Return a row of heads whose widths the arguments of latent attention give, if it is on."""
    off = harmless("determined by qk-head-dim, qk-pos-emb-head-dim and v-head-dim")
    return KeyRule(
        lambda value, source: off if latent_attention.is_on(source) else row.judge(value, source), row.option
    )


def _window(value: Any, source: ImportedFile) -> Verdict:
    """Map the window: (left, right) positions next to the token's own; -1 is unlimited."""
    sizes = [
        int(part)
        for part in str(value).replace("[", "").replace("]", "").strip("()").split(",")
        if part.strip().lstrip("-").isdigit()
    ]
    if len(sizes) != 2 or sizes[0] < 0:
        return lost("set model.sliding_window to a number of positions")
    return honoured({"model.sliding_window": sizes[0] + 1})


def _chosen_layers(
    option: str, chosen: Callable[[bool], bool], needs: Callable[[ImportedFile], str]
) -> KeyRule:
    """Return a row for a pattern of layers: the last of every N, or a list such as ([0]*3+[1])*8.

    Args:
        needs: the reason why it has no effect, or an empty string.
    """

    def judge(value: Any, source: ImportedFile) -> Verdict:
        if off := needs(source):
            return harmless(off)
        layers = number_of_layers(source)
        marked = (
            [(layer + 1) % value == 0 for layer in range(layers or 0)]
            if type(value) is int and value > 0
            else None
        )
        if marked is None and layers:
            marked = marked_layers(value, layers)
        if not layers or marked is None:
            return lost(f"set {option}")
        return honoured({option: [layer for layer in range(layers) if chosen(marked[layer])]})

    return KeyRule(judge, option)


def _full_layers(value: Any, source: ImportedFile) -> Verdict:
    """Return the layers with a sliding window.

    An integer N selects all but the last of every N layers, a list the layers with 1.
    """
    number = type(value) is int
    row = _chosen_layers(
        "model.sliding_window_layers",
        (lambda marked: not marked) if number else (lambda marked: marked),
        lambda source: "" if "window-size" in source.leaves else "window-size is not set",
    )
    return row.judge(value, source)


def _no_rope(source: ImportedFile) -> str:
    return (
        ""
        if _position(None, source).options.get("model.position", "rope") == "rope"
        else "positions are not rotary"
    )


PADDED = "padding is not needed: any vocabulary size can be split over tp"
TABLE: Table = {
    "encoder-num-layers": sets("model.num_hidden_layers"),
    HIDDEN: sets("model.hidden_size"),
    FEED_FORWARD: sets("model.intermediate_size"),
    "num-attention-heads": sets("model.num_attention_heads"),
    "kv-channels": _without_latents(sets("model.head_dim")),
    "group-query-attention": _by_value("num-query-groups", KeyRule(_kv_heads, "model.num_key_value_heads")),
    "num-query-groups": KeyRule(_kv_heads, "model.num_key_value_heads"),
    **each("", "seq-length encoder-seq-length", sets("data.sequence_length")),
    "max-position-embeddings": sets("model.max_position_embeddings"),
    **each(
        "", "position-embedding-type use-rotary-position-embeddings", KeyRule(_position, "model.position")
    ),
    "no-position-embedding": never("determined by model.position"),
    "rotary-base": _rotary("model.rope_theta"),
    "rotary-percent": _without_latents(_rotary("model.partial_rotary_factor")),
    "rotary-interleaved": missing("interleaved rotary channels are not supported"),
    "rotary-seq-len-interpolation-factor": KeyRule(_interpolation, "model.rope_scaling"),
    "use-rope-scaling": _by_value("rope-scaling-factor", KeyRule(_rope_scaling, "model.rope_scaling")),
    "rope-scaling-factor": KeyRule(_rope_scaling, "model.rope_scaling"),
    "no-rope-freq": _chosen_layers("model.no_rope_layers", lambda marked: marked, _no_rope),
    "normalization": sets(
        "model.norm", {"LAYERNORM": "layer", "RMSNORM": "rms"}, "model.norm must be rms or layer"
    ),
    **each("", "norm-epsilon layernorm-epsilon", sets("model.rms_norm_eps")),
    "apply-layernorm-1p": sets("model.norm_offset", {"TRUE": 1.0}),
    **each(
        "",
        "swiglu squared-relu quick-geglu openai-gelu no-bias-gelu-fusion",
        KeyRule(_activation, "model.hidden_act"),
    ),
    **each("", "disable-bias-linear add-qkv-bias", KeyRule(_biases, "model.attention_bias")),
    "untie-embeddings-and-output-weights": KeyRule(
        lambda value, _: honoured({"model.tie_word_embeddings": not value}), "model.tie_word_embeddings"
    ),
    "attention-dropout": sets("model.attention_dropout"),
    "hidden-dropout": KeyRule(_hidden_dropout, "model.residual_dropout"),
    "init-method-std": sets("model.initializer_range"),
    "mtp-loss-scaling-factor": sets("train.mtp_weight"),
    "qk-layernorm": KeyRule(_qk_norm, "model.qk_norm"),
    "window-size": KeyRule(_window, "model.sliding_window"),
    "window-attn-skip-freq": KeyRule(_full_layers, "model.sliding_window_layers"),
    "vocab-size": sets("model.vocab_size"),
    "make-vocab-size-divisible-by": never(PADDED),
    "parallel-block": missing("the closest option is model.parallel_block"),
    **each(
        "",
        "apply-query-key-layer-scaling attention-softmax-in-fp32 no-masked-softmax-fusion",
        never("attention uses fp32 where needed"),
    ),
    "padded-vocab-size": sets("model.vocab_size"),
    "num-key-value-heads": sets("model.num_key_value_heads"),
}


def defaults(source: ImportedFile) -> dict[str, Any]:
    """Return GPT's defaults that differ from megalite's; empty if the file does not specify a model."""
    values: dict[str, Any] = {}
    if source.on("group-query-attention") and not latent_attention.is_on(source):
        values["num-query-groups"] = 1
    if source.on("use-rope-scaling"):
        values["rope-scaling-factor"] = 8.0
    if latent_attention.is_on(source):
        values |= latent_attention.DEFAULTS
    if HIDDEN not in source.leaves:
        return values
    return values | {
        **{
            "position-embedding-type": "learned_absolute",
            "normalization": "LayerNorm",
            "swiglu": False,
            "disable-bias-linear": False,
        },
        **{
            "untie-embeddings-and-output-weights": False,
            "attention-dropout": 0.1,
            "hidden-dropout": 0.1,
            FEED_FORWARD: default_width(source),
        },
    }
