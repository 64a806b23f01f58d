"""llama.cpp's architectures: which one computes a family, and what it can compute.

An architecture fixes in code what a configuration of Hugging Face says in fields. `Architecture` states what
differs between those that are supported; a model that needs more is rejected by name.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from megalite.config.sections.model import ModelConfig


@dataclass(frozen=True)
class Architecture:
    """One of llama.cpp's architectures.

    Attributes:
        name: `general.architecture`, the prefix of its keys.
        interleaved: whether rotary embeddings rotate neighbouring channels (ggml's type NORM), or the halves
            of the channels that rotate (NEOX).
        windows: how layers with a sliding window are told: each in an array, every layer but each n-th one in
            a key, every layer but each n-th one for a fixed n, or not at all.
        names: name of one of our modules of a layer → its name, where it is not that of other architectures.
        fused: what is one tensor: queries, keys and values, or the feed-forward's gate and up.
        head: whether the head is stored even if it is the embedding.
        scale: whether `attention.scale` is read. Others have 1 / sqrt(head_dim), and the model's scale is
            multiplied into the queries.
        embedding_scale: a key, sqrt(hidden_size) in any case, or multiplied into the embedding.
        logit_scale: a key of a factor, a key of a divisor, or multiplied into the head.
        rope_types: types of rotary scaling besides linear and yarn, which all have.
        recurrent: how layers without attention are told: zero key-value heads, every layer but each n-th one,
            or not at all.
        no_rope: how layers without rotary embeddings are told: every n-th one for a fixed n, those without a
            window, all of them by `rope.scaling.finetuned`, or not at all.
        activations: values of hidden_act.
        biases: our modules of a layer that may have a bias.
        value_heads_in_turn: whether value heads of delta blocks are ordered by their number within a key
            head.
        fixed: field of ModelConfig → the one value that is computed, or a tuple of all of them.
        square: whether the heads' widths must add up to hidden_size.
        all_heads: whether there must be a key-value head for each head.
        tied: whether the embedding must be the head.
        dense: which layers of a model with experts may have none: the first ones, or none of them.
        window_layers: the number of layers with which there are windows; None: any.
    """

    name: str
    interleaved: bool = False
    windows: Literal["array", "period"] | int | None = None
    names: dict[str, str] = field(default_factory=dict)
    fused: tuple[Literal["qkv", "gate_up"], ...] = ()
    head: bool = False
    scale: bool = False
    embedding_scale: Literal["key", "sqrt", "weights"] = "weights"
    logit_scale: Literal["factor", "divisor", "weights"] = "weights"
    rope_types: tuple[str, ...] = ()
    recurrent: Literal["kv_heads", "interval"] | None = None
    no_rope: Literal["global", "finetuned", "family"] | int | None = None
    activations: tuple[str, ...] = ("silu",)
    biases: tuple[str, ...] = ()
    value_heads_in_turn: bool = False
    fixed: dict[str, Any] = field(default_factory=dict)
    square: bool = False
    all_heads: bool = False
    tied: bool = False
    dense: Literal["leading"] | None = None
    window_layers: int | None = None

    def of(self, model: ModelConfig) -> Architecture:
        """Return the architecture of a model: some have another one with experts, or without mixers."""
        if self.name == "nemotron_h" and model.has_mixtures:
            return replace(self, name="nemotron_h_moe")
        if self.name == "granitehybrid" and not any(
            "mamba" in model.block_names(layer) for layer in range(model.num_hidden_layers)
        ):
            name = "granitemoe" if model.has_mixtures else "granite"
            return replace(self, name=name, recurrent=None, no_rope=None)
        return self


_QKV = ("attention.q", "attention.k", "attention.v")
_ATTENTION = (*_QKV, "attention.out")
_MLP = ("mlp.gate", "mlp.up", "mlp.down")
_ALL = (*_ATTENTION, *_MLP)
_GELU = ("gelu", "gelu_new", "gelu_pytorch_tanh")  # llama.cpp's is that of tanh, from a table in fp16
_POST_ATTENTION = {"mlp_norm": "post_attention_norm"}
_NORMED, _NOT_NORMED = {"norm_topk_prob": True}, {"norm_topk_prob": False}

_LLAMA = Architecture("llama", interleaved=True, rope_types=("llama3",), biases=_ALL)
_QWEN2 = Architecture("qwen2", biases=_QKV, square=True)
_OLMO2 = Architecture("olmo2", windows="period", head=True, square=True)
_GEMMA = Architecture("gemma", embedding_scale="sqrt", activations=_GELU, tied=True)
_GRANITE = Architecture(
    "granite",
    interleaved=True,
    scale=True,
    embedding_scale="key",
    logit_scale="divisor",
    rope_types=("llama3",),
    biases=_ALL,
)
_GRANITE_MOE = replace(_GRANITE, name="granitemoe", biases=_ATTENTION, fixed=_NORMED)
_GRANITE_HYBRID = replace(_GRANITE, name="granitehybrid", recurrent="kv_heads", fixed=_NORMED)
_COHERE = Architecture(
    "command-r", interleaved=True, logit_scale="factor", tied=True, square=True, fixed={"qk_norm": "none"}
)
_DEEPSEEK = Architecture("deepseek2", interleaved=True, dense="leading")
_GLM4_MOE = Architecture("glm4moe", names=_POST_ATTENTION, biases=_QKV, dense="leading")
_QWEN35 = Architecture(
    "qwen35", recurrent="interval", names=_POST_ATTENTION, value_heads_in_turn=True, fixed=_NORMED
)

ARCHITECTURES: dict[str, Architecture] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "ministral": _LLAMA,
    "mixtral": replace(_LLAMA, fixed=_NORMED),
    "qwen2": _QWEN2,
    "qwen2_moe": replace(_QWEN2, name="qwen2moe", head=True, fixed=_NOT_NORMED),
    "qwen3": Architecture("qwen3"),
    "qwen3_moe": Architecture("qwen3moe", fixed=_NORMED),
    "olmo2": _OLMO2,
    "olmo3": _OLMO2,
    "olmoe": Architecture("olmoe", head=True, all_heads=True, square=True, fixed=_NOT_NORMED),
    "phi3": Architecture("phi3", fused=("gate_up",), square=True, rope_types=("longrope",)),
    "gemma": _GEMMA,
    "gemma2": replace(_GEMMA, name="gemma2", windows="period"),
    "gemma3_text": replace(_GEMMA, name="gemma3", windows="period", tied=False),
    "smollm3": Architecture("smollm3", interleaved=True, no_rope=4),
    "gpt2": Architecture("gpt2", fused=("qkv",), biases=_ALL, activations=_GELU),
    "starcoder2": Architecture(
        "starcoder2",
        biases=_ALL,
        square=True,
        activations=_GELU,
        fixed={"attention_bias": True, "mlp_bias": True},
    ),
    "gpt_neox": Architecture("gptneox", fused=("qkv",), head=True, biases=_ALL, activations=_GELU),
    "falcon": Architecture("falcon", fused=("qkv",), activations=_GELU),
    "nemotron": Architecture("nemotron", head=True, biases=_ALL, square=True, activations=("relu2",)),
    "arcee": Architecture("arcee", interleaved=True, activations=("relu2",), rope_types=("llama3",)),
    "jais2": Architecture("jais2", biases=_ALL, activations=("relu2",)),
    "apertus": Architecture(
        "apertus", head=True, biases=_ATTENTION, activations=("xielu",), rope_types=("llama3",)
    ),
    "stablelm": Architecture("stablelm", head=True, biases=_QKV),
    "glm": Architecture("chatglm", interleaved=True, fused=("gate_up",), biases=_QKV, square=True),
    "glm4": Architecture("glm4", interleaved=True, fused=("gate_up",), biases=_QKV),
    "cohere": _COHERE,
    "cohere2": replace(_COHERE, name="cohere2", windows="period", no_rope="global"),
    "seed_oss": Architecture("seed_oss", names=_POST_ATTENTION, biases=_QKV),
    "ernie4_5": Architecture("ernie4_5", interleaved=True, biases=_ATTENTION),
    "ernie4_5_moe": Architecture("ernie4_5-moe", interleaved=True, dense="leading", fixed=_NORMED),
    "hunyuan_v1_dense": Architecture("hunyuan-dense", rope_types=("dynamic",)),
    "hunyuan_v1_moe": Architecture("hunyuan-moe", rope_types=("dynamic",), fixed=_NORMED),
    "exaone4": Architecture(
        "exaone4", windows=4, window_layers=64, rope_types=("llama3",), no_rope="global", square=True
    ),
    "exaone_moe": Architecture(
        "exaone-moe", windows="array", rope_types=("llama3",), no_rope="global", dense="leading"
    ),
    "ministral3": Architecture("mistral3", interleaved=True),
    "mistral4": replace(_DEEPSEEK, name="mistral4"),
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "glm4_moe_lite": _DEEPSEEK,
    "youtu": _DEEPSEEK,
    "glm4_moe": _GLM4_MOE,
    "solar_open": _GLM4_MOE,
    "dots1": Architecture("dots1", head=True, all_heads=True, dense="leading"),
    "minimax_m2": Architecture("minimax-m2", head=True, fixed=_NORMED),
    "mimo_v2_flash": Architecture("mimo2", windows="array", head=True, dense="leading", fixed=_NORMED),
    "afmoe": Architecture("afmoe", windows=4, embedding_scale="sqrt", no_rope="global", dense="leading"),
    "gpt_oss": Architecture(
        "gpt-oss",
        windows=2,
        head=True,
        names=_POST_ATTENTION,
        activations=("clamped_swiglu",),
        biases=(*_ATTENTION, "mlp.router", "mlp.experts.in", "mlp.experts.down"),
        fixed=_NORMED,
    ),
    "granite": _GRANITE,
    "granitemoe": _GRANITE_MOE,
    "granitemoeshared": _GRANITE_MOE,
    "bamba": _GRANITE_HYBRID,
    "granitemoehybrid": replace(_GRANITE_HYBRID, no_rope="finetuned"),
    "falcon_h1": Architecture("falcon-h1", names={"mlp_norm": "ffn_norm."}, biases=_MLP),
    "nemotron_h": Architecture(
        "nemotron_h",
        recurrent="kv_heads",
        names={"mlp_norm": "attn_norm"},
        no_rope="family",
        activations=("relu2",),
    ),
    "qwen3_next": replace(_QWEN35, name="qwen3next", value_heads_in_turn=False),
    "qwen3_5_text": _QWEN35,
    "qwen3_5_moe_text": replace(_QWEN35, name="qwen35moe"),
    "kimi_linear": Architecture(
        "kimi-linear", recurrent="kv_heads", no_rope="family", dense="leading", fixed=_NORMED
    ),
    "lfm2": Architecture("lfm2", recurrent="kv_heads", square=True),
    "lfm2_moe": Architecture(
        "lfm2moe",
        recurrent="kv_heads",
        square=True,
        dense="leading",
        fixed=_NORMED | {"routed_scaling_factor": 1.0},
    ),
}
"""Hugging Face's family → the architecture."""
