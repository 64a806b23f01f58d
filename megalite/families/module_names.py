"""Names of the modules of Hugging Face's models, one table per family.

A table maps each Hugging Face module to our modules; each has a weight, a bias or both. A fused module holds
several of ours, in this order, and a transposed module stores its matrix as [in, out]. `theirs` is a Hugging
Face name, `ours` megalite's.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from megalite.config.sections.model import ModelConfig
from megalite.families import classifiers


@dataclass(frozen=True)
class Names:
    """A family's table.

    Attributes:
        ends: modules outside the layers.
        layers: prefix of the layers' names.
        layer: modules of one layer.
        base: prefix of the model without its head, which files of such a model do not have.
        transposed: modules whose matrix is stored as [in, out].
        grouped: the module that holds queries, keys and values by key-value head: its queries, its keys, its
            values, then the next head's.
        interleaved: whether rotary embeddings rotate neighboring channels.
        backwards: whether they rotate in the opposite direction.
        interleaved_indexer: whether those of an indexer do.
        ignored: suffixes of names that are not weights (masks and frequencies, which older versions stored).
        expert: modules of one expert that `mlp.experts.in` holds, in this order. Their names follow a name
            that ends in {}.{}.
        stacked: whether files have the experts of a layer as two tensors only, as transformers' modules.
        bare: modules whose tensors have no .weight at the end of their names, and _bias instead of .bias.
        router_bias: the tensor of an MoE block that is added to the scores when experts are chosen; empty if
            files have none.
        router_bias_rows: rows of that tensor if it is a matrix.
        fp32: our module of a layer whose weight transformers keeps in fp32 in a model of any dtype; empty if
            there is none.
        mtp: modules of an MTP layer besides those of a layer; empty if files have none.
        multimodal: prefix of the whole names in files of a multimodal model, and the prefixes of its other
            parts, which are not read.
        nested: what follows `base` in files of a multimodal model.
        kept: prefixes of tensors that transformers does not read with the language model. A conversion keeps
            them aside, and an export has them again. {} is the number of layers.
        spellings: parts of names that files have in place of those in the table, and the latter.
        memory: parts of names in files, and what transformers' modules, and so PEFT, have in their place.
        by_head: modules whose rows are stored by head: the first head's rows of all parts, then the next
            head's; and the field of ModelConfig that counts the heads.
        mixer: what the roles of the matrices of its mixers begin with.
        xielu: tensors of a layer that hold constants of its activation, which is xIELU, and their values.
    """

    ends: dict[str, str]
    layers: str
    layer: dict[str, str]
    base: str = "model."
    transposed: tuple[str, ...] = ()
    grouped: str | None = None
    interleaved: bool = False
    backwards: bool = False
    interleaved_indexer: bool = False
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)
    expert: tuple[str, ...] = ("gate_proj", "up_proj")
    stacked: bool = False
    bare: tuple[str, ...] = ()
    router_bias: str = ""
    router_bias_rows: int | None = None
    fp32: tuple[str, ...] = ()
    mtp: dict[str, str] = field(default_factory=dict)
    multimodal: tuple[str, tuple[str, ...]] | None = None
    nested: str = ""
    kept: tuple[str, ...] = ()
    spellings: tuple[tuple[str, str], ...] = ()
    memory: tuple[tuple[str, str], ...] = ()
    by_head: dict[str, str] = field(default_factory=dict)
    mixer: str = ""
    xielu: dict[str, float] = field(default_factory=dict)


_ENDS = {"model.embed_tokens": "embedding", "model.norm": "norm", "lm_head": "head"}
_QKV = {
    "self_attn.q_proj": "attention.q",
    "self_attn.k_proj": "attention.k",
    "self_attn.v_proj": "attention.v",
}
_GATE_UP = {"mlp.gate_proj": "mlp.gate", "mlp.up_proj": "mlp.up"}
_OUT = {"self_attn.o_proj": "attention.out", "mlp.down_proj": "mlp.down"}
_LINEARS = _QKV | _GATE_UP | _OUT
EACH_HEAD = ("q_norm", "k_norm", "layernorm.norms.{}")
"""Ends of the modules that may hold a norm of each head."""
CONVOLUTIONS = ("conv1d", "conv.conv")
"""Ends of the modules that are convolutions."""
_STABLELM_NORM = {
    "self_attn.q_layernorm.norms.{}": "attention.q_norm",
    "self_attn.k_layernorm.norms.{}": "attention.k_norm",
}
_QK_NORM = {"self_attn.q_norm": "attention.q_norm", "self_attn.k_norm": "attention.k_norm"}
_BEFORE = {"input_layernorm": "input_norm", "post_attention_layernorm": "mlp_norm"}
_AFTER = {
    "post_attention_layernorm": "attention.output_norm",
    "post_feedforward_layernorm": "mlp.output_norm",
}
_AROUND = {"input_layernorm": "input_norm", "pre_feedforward_layernorm": "mlp_norm"} | _AFTER
_GATE_UP_FUSED = {"mlp.gate_up_proj": "mlp.gate mlp.up"}
_FUSED = {"self_attn.qkv_proj": "attention.q attention.k attention.v"} | _GATE_UP_FUSED | _OUT
_GPT2_LINEARS = {
    "attn.c_attn": "attention.q attention.k attention.v",
    "attn.c_proj": "attention.out",
    "mlp.c_fc": "mlp.up",
    "mlp.c_proj": "mlp.down",
}

_FALCON_LINEARS = {
    "self_attention.query_key_value": "attention.q attention.k attention.v",
    "self_attention.dense": "attention.out",
    "mlp.dense_h_to_4h": "mlp.up",
    "mlp.dense_4h_to_h": "mlp.down",
}
_NEOX_LINEARS = {
    theirs.replace("self_attention", "attention"): ours for theirs, ours in _FALCON_LINEARS.items()
}

_MIXTURE = {
    "mlp.gate": "mlp.router",
    "mlp.experts.{}.{}": "mlp.experts.in",
    "mlp.experts.{}.down_proj": "mlp.experts.down",
}
_ROUTER_GATE = {"mlp.router.gate": "mlp.router"} | {
    theirs: ours for theirs, ours in _MIXTURE.items() if ours != "mlp.router"
}
_SHARED = {"mlp.shared_expert_gate": "mlp.shared_gate"}
_SHARED |= {f"mlp.shared_expert.{part}_proj": f"mlp.shared.{part}" for part in ("gate", "up", "down")}
_LATENT = {f"self_attn.{part}_proj": f"attention.{part}" for part in ("q", "q_a", "q_b", "kv_b")}
_LATENT |= {f"self_attn.{part}_layernorm": f"attention.{part}_norm" for part in ("q_a", "kv_a")}
_LATENT |= {"self_attn.kv_a_proj_with_mqa": "attention.kv_a"}
_SHARED_EXPERTS = {f"mlp.shared_experts.{part}_proj": f"mlp.shared.{part}" for part in ("gate", "up", "down")}
_DEEPSEEK = _LATENT | _GATE_UP | _OUT | _BEFORE | _MIXTURE | _SHARED_EXPERTS
_INDEXER = {
    "self_attn.indexer.wq_b": "attention.indexer.q",
    "self_attn.indexer.wk": "attention.indexer.k",
    "self_attn.indexer.k_norm": "attention.indexer.k_norm",
    "self_attn.indexer.weights_proj": "attention.indexer.weights",
}
_MTP = {
    "enorm": "mtp.enorm",
    "hnorm": "mtp.hnorm",
    "eh_proj": "mtp.eh_proj",
    "shared_head.norm": "mtp.norm",
}
MTP_COPIES = {"embed_tokens": "embedding", "shared_head.head": "head"}
"""Modules of a layer that predicts a further token which repeat one of ours outside the layers."""
_MIXTRAL = {
    "block_sparse_moe.gate": "mlp.router",
    "block_sparse_moe.experts.{}.{}": "mlp.experts.in",
    "block_sparse_moe.experts.{}.w2": "mlp.experts.down",
}

_FINAL_NORM = {"model.embed_tokens": "embedding", "model.final_layernorm": "norm", "lm_head": "head"}
_PRE_FF = {"input_layernorm": "input_norm", "pre_ff_layernorm": "mlp_norm"}
_FEED_FORWARD = {f"feed_forward.{part}_proj": f"mlp.{part}" for part in ("gate", "up", "down")}

_GRANITE_EXPERTS = {
    "block_sparse_moe.router.layer": "mlp.router",
    "block_sparse_moe.input_linear": "mlp.experts.in",
    "block_sparse_moe.output_linear": "mlp.experts.down",
}
_GRANITE_MEMORY = (
    ("block_sparse_moe.input_linear.weight", "block_sparse_moe.experts.gate_up_proj"),
    ("block_sparse_moe.output_linear.weight", "block_sparse_moe.experts.down_proj"),
)


def _mamba(prefix: str) -> dict[str, str]:
    """The modules of a Mamba-2 mixer."""
    own = {
        "in_proj": "mixer.z mixer.x mixer.B mixer.C mixer.dt",
        "conv1d": "mixer.conv_x mixer.conv_B mixer.conv_C",
        "A_log": "mixer.a_log",
        "D": "mixer.d",
        "dt_bias": "mixer.dt_bias",
        "norm": "mixer.norm",
        "out_proj": "mixer.out",
    }
    return {f"{prefix}.{theirs}": ours for theirs, ours in own.items()}


_GATED_QKV = _QKV | {"self_attn.q_proj": "attention.q attention.gate"}
_DELTA = {
    "linear_attn.conv1d": "mixer.conv_q mixer.conv_k mixer.conv_v",
    "linear_attn.A_log": "mixer.a_log",
    "linear_attn.dt_bias": "mixer.dt_bias",
    "linear_attn.norm": "mixer.norm",
    "linear_attn.out_proj": "mixer.out",
}
_QWEN_DELTA = _DELTA | {
    "linear_attn.in_proj_qkv": "mixer.q mixer.k mixer.v",
    **{f"linear_attn.in_proj_{part}": f"mixer.{part}" for part in "zba"},
}
_QWEN3_NEXT_DELTA = _DELTA | {
    "linear_attn.in_proj_qkvz": "mixer.q mixer.k mixer.v mixer.z",
    "linear_attn.in_proj_ba": "mixer.b mixer.a",
}


def _separate_delta(prefix: str, parts: dict[str, str]) -> dict[str, str]:
    """The modules of a delta block that has a module for each of its parts."""
    own = {f"{part}_proj": f"mixer.{part}" for part in ("q", "k", "v", "b")}
    own |= {f"{part}_conv1d": f"mixer.conv_{part}" for part in "qkv"}
    own |= {"A_log": "mixer.a_log", "dt_bias": "mixer.dt_bias", "o_norm": "mixer.norm", "o_proj": "mixer.out"}
    return {f"{prefix}.{theirs}": ours for theirs, ours in (own | parts).items()}


_KIMI_DELTA = _separate_delta(
    "self_attn", {f"{part}_proj": f"mixer.{part}" for part in ("f_a", "f_b", "g_a", "g_b")}
)


def _either(one: dict[str, str], other: dict[str, str]) -> dict[str, str]:
    """The modules of two kinds of blocks, which have some names in common."""
    return {
        theirs: " ".join(each[theirs] for each in (one, other) if theirs in each) for theirs in one | other
    }


_LFM2_ENDS = {"model.embed_tokens": "embedding", "model.embedding_norm": "norm", "lm_head": "head"}
_LFM2 = _QKV | {
    "self_attn.out_proj": "attention.out",
    "self_attn.q_layernorm": "attention.q_norm",
    "self_attn.k_layernorm": "attention.k_norm",
    "operator_norm": "input_norm",
    "ffn_norm": "mlp_norm",
    "conv.in_proj": "mixer.B mixer.C mixer.x",
    "conv.conv": "mixer.conv",
    "conv.out_proj": "mixer.out",
    "feed_forward.w1": "mlp.gate",
    "feed_forward.w3": "mlp.up",
    "feed_forward.w2": "mlp.down",
}

_LLAMA = Names(_ENDS, "model.layers", _LINEARS | _BEFORE)
_FALCON = Names(
    {"transformer.word_embeddings": "embedding", "transformer.ln_f": "norm", "lm_head": "head"},
    "transformer.h",
    _BEFORE | _FALCON_LINEARS,
    base="transformer.",
    grouped="query_key_value",
)
_GRANITE_MOE = Names(
    _ENDS,
    "model.layers",
    _QKV | {"self_attn.o_proj": "attention.out"} | _BEFORE | _GRANITE_EXPERTS,
    memory=_GRANITE_MEMORY,
)
_QWEN3_5 = Names(
    _ENDS,
    "model.layers",
    _LINEARS | _GATED_QKV | _BEFORE | _QK_NORM | _QWEN_DELTA,
    nested="language_model.",
    kept=("mtp.", "model.visual."),
    by_head={"self_attn.q_proj": "num_attention_heads"},
    mixer="delta_",
)
_DEEPSEEK_V3 = Names(
    _ENDS,
    "model.layers",
    _DEEPSEEK,
    interleaved=True,
    router_bias="mlp.gate.e_score_correction_bias",
    fp32=("mlp.router.weight",),
    mtp=_MTP,
)
_SPARSE = replace(
    _DEEPSEEK_V3,
    layer=_DEEPSEEK | _INDEXER,
    fp32=("mlp.router.weight", "attention.indexer.weights.weight"),
)
_MISTRAL3 = ("language_model.", ("vision_tower.", "multi_modal_projector."))
_DOTS = Names(
    _ENDS,
    "model.layers",
    _LINEARS | _BEFORE | _QK_NORM | _MIXTURE | _SHARED_EXPERTS,
    router_bias="mlp.gate.e_score_correction_bias",
    fp32=("mlp.router.weight",),
)
_LIKE_LLAMA = ["llama", "mistral", "qwen2", "gemma", "smollm3", "granite", "nemotron", "ministral", "arcee"]
_LIKE_LLAMA += ["seed_oss", "jais2"]
_HUNYUAN_NORM = {
    "self_attn.query_layernorm": "attention.q_norm",
    "self_attn.key_layernorm": "attention.k_norm",
}
FAMILY_NAMES = {
    **dict.fromkeys(_LIKE_LLAMA, _LLAMA),
    "qwen3": Names(_ENDS, "model.layers", _LINEARS | _BEFORE | _QK_NORM),
    "ernie4_5": Names(_ENDS, "model.layers", _LINEARS | _BEFORE, interleaved=True),
    "hunyuan_v1_dense": Names(_ENDS, "model.layers", _LINEARS | _BEFORE | _HUNYUAN_NORM),
    "hunyuan_v1_moe": Names(
        _ENDS,
        "model.layers",
        _LINEARS
        | _BEFORE
        | _HUNYUAN_NORM
        | {"mlp.gate.wg" if theirs == "mlp.gate" else theirs: ours for theirs, ours in _MIXTURE.items()}
        | {f"mlp.shared_mlp.{part}_proj": f"mlp.shared.{part}" for part in ("gate", "up", "down")},
    ),
    "nanochat": Names(
        {theirs: ours for theirs, ours in _ENDS.items() if ours != "norm"},
        "model.layers",
        _QKV | {"self_attn.o_proj": "attention.out", "mlp.fc1": "mlp.up", "mlp.fc2": "mlp.down"},
        backwards=True,
    ),
    "apertus": Names(
        _ENDS,
        "model.layers",
        _LINEARS
        | _QK_NORM
        | {"attention_layernorm": "input_norm", "feedforward_layernorm": "mlp_norm"}
        | {f"mlp.act_fn.{alpha}": f"mlp.{alpha}" for alpha in ("alpha_p", "alpha_n")},
        bare=("act_fn.alpha_p", "act_fn.alpha_n"),
        xielu={"mlp.act_fn.beta": 0.5, "mlp.act_fn.eps": -1e-6},
    ),
    **dict.fromkeys(
        ("olmo2", "olmo3", "exaone4"), Names(_ENDS, "model.layers", _LINEARS | _AFTER | _QK_NORM)
    ),
    "gemma2": Names(_ENDS, "model.layers", _LINEARS | _AROUND),
    "gemma3_text": Names(
        _ENDS,
        "model.layers",
        _LINEARS | _AROUND | _QK_NORM,
        multimodal=("language_model.", ("vision_tower.", "multi_modal_projector.")),
    ),
    **dict.fromkeys(
        ("cohere", "cohere2"), Names(_ENDS, "model.layers", _LINEARS | _BEFORE | _QK_NORM, interleaved=True)
    ),
    "stablelm": Names(_ENDS, "model.layers", _LINEARS | _BEFORE | _STABLELM_NORM),
    "starcoder2": Names(
        _ENDS, "model.layers", _LINEARS | _BEFORE | {"mlp.c_fc": "mlp.up", "mlp.c_proj": "mlp.down"}
    ),
    "glm": Names(_ENDS, "model.layers", _QKV | _GATE_UP_FUSED | _OUT | _BEFORE, interleaved=True),
    "glm4": Names(
        _ENDS,
        "model.layers",
        _QKV
        | _GATE_UP_FUSED
        | _OUT
        | _BEFORE
        | {"post_self_attn_layernorm": "attention.output_norm", "post_mlp_layernorm": "mlp.output_norm"},
        interleaved=True,
    ),
    "gpt_neox": Names(
        {"gpt_neox.embed_in": "embedding", "gpt_neox.final_layer_norm": "norm", "embed_out": "head"},
        "gpt_neox.layers",
        _BEFORE | _NEOX_LINEARS,
        base="gpt_neox.",
        ignored=("rotary_emb.inv_freq", "attention.bias", "attention.masked_bias"),
        grouped="query_key_value",
    ),
    "falcon": _FALCON,
    "falcon, two_norms": replace(
        _FALCON, layer={"ln_attn": "input_norm", "ln_mlp": "mlp_norm"} | _FALCON_LINEARS
    ),
    "mixtral": Names(_ENDS, "model.layers", _LINEARS | _BEFORE | _MIXTRAL, expert=("w1", "w3")),
    "olmoe": Names(_ENDS, "model.layers", _LINEARS | _BEFORE | _QK_NORM | _MIXTURE),
    "qwen2_moe": Names(_ENDS, "model.layers", _LINEARS | _BEFORE | _MIXTURE | _SHARED),
    "qwen3_moe": Names(_ENDS, "model.layers", _LINEARS | _BEFORE | _QK_NORM | _MIXTURE),
    "deepseek_v2": Names(_ENDS, "model.layers", _DEEPSEEK, interleaved=True, fp32=("mlp.router.weight",)),
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v32": _SPARSE,
    "glm_moe_dsa": replace(_SPARSE, interleaved_indexer=True),
    "glm4_moe": Names(
        _ENDS,
        "model.layers",
        _LINEARS | _BEFORE | _QK_NORM | _MIXTURE | _SHARED_EXPERTS,
        router_bias="mlp.gate.e_score_correction_bias",
        fp32=("mlp.router.weight",),
        mtp=_MTP,
    ),
    "dots1": _DOTS,
    "solar_open": replace(_DOTS, layer=_LINEARS | _BEFORE | _MIXTURE | _SHARED_EXPERTS),
    "exaone_moe": replace(_DOTS, router_bias="mlp.e_score_correction_bias", kept=("mtp.",)),
    "ministral3": replace(_LLAMA, multimodal=_MISTRAL3),
    "glm4_moe_lite": _DEEPSEEK_V3,
    "youtu": Names(_ENDS, "model.layers", _LATENT | _GATE_UP | _OUT | _BEFORE, interleaved=True),
    "mistral4": Names(_ENDS, "model.layers", _DEEPSEEK, interleaved=True, stacked=True, multimodal=_MISTRAL3),
    "gpt_oss": Names(
        _ENDS,
        "model.layers",
        _QKV
        | _BEFORE
        | {
            "self_attn.o_proj": "attention.out",
            "self_attn.sinks": "attention.sinks",
            "mlp.router": "mlp.router",
            "mlp.experts.gate_up_proj": "mlp.experts.in",
            "mlp.experts.down_proj": "mlp.experts.down",
        },
        bare=("self_attn.sinks", "experts.gate_up_proj", "experts.down_proj"),
    ),
    "mimo_v2_flash": Names(
        _ENDS,
        "model.layers",
        _LINEARS | _BEFORE | _MIXTURE | {"self_attn.attention_sink_bias": "attention.sinks"},
        bare=("self_attn.attention_sink_bias",),
        router_bias="mlp.gate.e_score_correction_bias",
        fp32=("mlp.router.weight",),
        kept=("model.mtp.",),
        memory=(("self_attn.attention_sink_bias", "self_attn.sinks"),),
    ),
    "laguna": Names(
        _ENDS,
        "model.layers",
        _LINEARS
        | {"self_attn.g_proj": "attention.gate"}
        | _BEFORE
        | _QK_NORM
        | _MIXTURE
        | {f"mlp.shared_expert.{part}_proj": f"mlp.shared.{part}" for part in ("gate", "up", "down")},
        router_bias="mlp.experts.e_score_correction_bias",
        memory=(("mlp.shared_expert.", "mlp.shared_experts."),),
    ),
    "bamba": Names(
        _FINAL_NORM,
        "model.layers",
        _QKV | {"self_attn.o_proj": "attention.out"} | _PRE_FF | _FEED_FORWARD | _mamba("mamba"),
        mixer="mamba_",
    ),
    "falcon_h1": Names(
        _FINAL_NORM,
        "model.layers",
        _QKV | {"self_attn.o_proj": "attention.out"} | _PRE_FF | _FEED_FORWARD | _mamba("mamba"),
        mixer="mamba_",
    ),
    "granitemoehybrid": Names(
        _ENDS,
        "model.layers",
        _QKV
        | {"self_attn.o_proj": "attention.out"}
        | _BEFORE
        | _mamba("mamba")
        | _GRANITE_EXPERTS
        | {
            # without experts the shared expert is the feed-forward block
            "shared_mlp.input_linear": "mlp.gate mlp.up mlp.shared.gate mlp.shared.up",
            "shared_mlp.output_linear": "mlp.down mlp.shared.down",
        },
        memory=_GRANITE_MEMORY,
        mixer="mamba_",
    ),
    "nemotron_h": Names(
        {"backbone.embeddings": "embedding", "backbone.norm_f": "norm", "lm_head": "head"},
        "backbone.layers",
        # a layer is one block
        {
            "norm": "input_norm mlp_norm",
            **{f"mixer.{part}_proj": f"attention.{part}" for part in "qkv"},
            "mixer.o_proj": "attention.out",
            "mixer.up_proj": "mlp.up",
            "mixer.down_proj": "mlp.down",
            "mixer.gate": "mlp.router",
            "mixer.experts.{}.{}": "mlp.experts.in",
            "mixer.experts.{}.down_proj": "mlp.experts.down",
            "mixer.shared_experts.up_proj": "mlp.shared.up",
            "mixer.shared_experts.down_proj": "mlp.shared.down",
            "mixer.fc1_latent_proj": "mlp.latent_in",
            "mixer.fc2_latent_proj": "mlp.latent_out",
        }
        | _mamba("mixer"),
        base="backbone.",
        expert=("up_proj",),
        router_bias="mixer.gate.e_score_correction_bias",
        fp32=("mlp.router.weight",),
        kept=("mtp.",),
        memory=(("backbone.", "model."),),
        mixer="mamba_",
    ),
    "qwen3_next": Names(
        _ENDS,
        "model.layers",
        _LINEARS | _GATED_QKV | _BEFORE | _QK_NORM | _MIXTURE | _SHARED | _QWEN3_NEXT_DELTA,
        kept=("mtp.",),
        by_head={
            "self_attn.q_proj": "num_attention_heads",
            "in_proj_qkvz": "linear_num_key_heads",
            "in_proj_ba": "linear_num_key_heads",
        },
        mixer="delta_",
    ),
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": replace(_QWEN3_5, layer=_QWEN3_5.layer | _MIXTURE | _SHARED),
    "olmo_hybrid": Names(
        _ENDS,
        "model.layers",
        _LINEARS
        | _AFTER
        | _QK_NORM
        | _separate_delta("linear_attn", {"a_proj": "mixer.a", "g_proj": "mixer.z"})
        | {"attention_layer_norm": "input_norm", "feedforward_layer_norm": "mlp_norm"},
        kept=("mtp.",),
        # transformers writes the first name in layers with attention, too
        spellings=(("feedforward_layer_norm", "post_attention_layernorm"),),
        memory=(
            ("attention_layer_norm", "input_layernorm"),
            ("feedforward_layer_norm", "post_attention_layernorm"),
        ),
        mixer="delta_",
    ),
    "kimi_linear": Names(
        _ENDS,
        "model.layers",
        _either(_LATENT | _OUT, _KIMI_DELTA)
        | _GATE_UP
        | _BEFORE
        | _MIXTRAL
        | {f"block_sparse_moe.{theirs[4:]}": ours for theirs, ours in _SHARED_EXPERTS.items()},
        expert=("w1", "w3"),
        router_bias="block_sparse_moe.gate.e_score_correction_bias",
        fp32=("mlp.router.weight", "mixer.dt_bias"),
        # transformers writes the first name in dense layers, too
        spellings=((".block_sparse_moe.", ".mlp."),),
        memory=(
            (".block_sparse_moe.", ".mlp."),
            ("self_attn.f_a_proj", "self_attn.forget_gate.f_a_proj"),
            ("self_attn.f_b_proj", "self_attn.forget_gate.f_b_proj"),
        ),
        mixer="delta_",
    ),
    "lfm2": Names(_LFM2_ENDS, "model.layers", _LFM2, mixer="conv_"),
    "lfm2_moe": Names(
        _LFM2_ENDS,
        "model.layers",
        _LFM2
        | {
            "feed_forward.gate": "mlp.router",
            "feed_forward.experts.{}.{}": "mlp.experts.in",
            "feed_forward.experts.{}.w2": "mlp.experts.down",
        },
        expert=("w1", "w3"),
        router_bias="feed_forward.expert_bias",
        mixer="conv_",
    ),
    "granitemoe": _GRANITE_MOE,
    "granitemoeshared": replace(
        _GRANITE_MOE,
        layer=_GRANITE_MOE.layer
        | {
            "shared_mlp.input_linear": "mlp.shared.gate mlp.shared.up",
            "shared_mlp.output_linear": "mlp.shared.down",
        },
    ),
    "flex_olmo": Names(_ENDS, "model.layers", _LINEARS | _AFTER | _QK_NORM | _MIXTURE),
    "minimax_m2": Names(
        _ENDS,
        "model.layers",
        _LINEARS | _BEFORE | _QK_NORM | _MIXTRAL,
        expert=("w1", "w3"),
        router_bias="block_sparse_moe.e_score_correction_bias",
    ),
    "ernie4_5_moe": Names(
        _ENDS,
        "model.layers",
        _LINEARS | _BEFORE | _MIXTURE | _SHARED_EXPERTS,
        interleaved=True,
        router_bias="mlp.moe_statics.e_score_correction_bias",
        router_bias_rows=1,
        fp32=("mlp.router.weight",),
        kept=("model.mtp_",),
    ),
    "hy_v3": Names(
        _ENDS,
        "model.layers",
        _LINEARS
        | _BEFORE
        | _QK_NORM
        | _ROUTER_GATE
        | {f"mlp.shared_mlp.{part}_proj": f"mlp.shared.{part}" for part in ("gate", "up", "down")},
        router_bias="mlp.expert_bias",
        fp32=("mlp.router.weight",),
        kept=("model.layers.{}.",),
        memory=((".mlp.shared_mlp.", ".mlp.shared_experts."), (".mlp.router.gate.", ".mlp.gate.")),
    ),
    "afmoe": Names(
        _ENDS,
        "model.layers",
        _LINEARS
        | {"self_attn.gate_proj": "attention.gate"}
        | _QK_NORM
        | _ROUTER_GATE
        | _SHARED_EXPERTS
        | {
            "input_layernorm": "input_norm",
            "post_attention_layernorm": "attention.output_norm",
            "pre_mlp_layernorm": "mlp_norm",
            "post_mlp_layernorm": "mlp.output_norm",
        },
        router_bias="mlp.expert_bias",
    ),
    "cohere2_moe": Names(
        _ENDS, "model.layers", _LINEARS | _BEFORE | _MIXTURE | _SHARED_EXPERTS, interleaved=True
    ),
    "phi3": Names(_ENDS, "model.layers", _FUSED | _BEFORE),
    "gpt2": Names(
        {
            "transformer.wte": "embedding",
            "transformer.wpe": "positions",
            "transformer.ln_f": "norm",
            "lm_head": "head",
        },
        "transformer.h",
        {"ln_1": "input_norm", "ln_2": "mlp_norm"} | _GPT2_LINEARS,
        base="transformer.",
        transposed=tuple(_GPT2_LINEARS),
        ignored=("attn.bias", "attn.masked_bias"),
    ),
}


def names_of(model: ModelConfig, family: str) -> Names:
    """The table of a model, with its number of layers; some families have another one for another
    `parallel_block`."""
    names = FAMILY_NAMES.get(f"{family}, {model.parallel_block}", FAMILY_NAMES[family])
    if model.output_head == "reward":
        ends = {theirs: ours for theirs, ours in names.ends.items() if ours != "head"}
        names = replace(names, ends=ends | {classifiers.MODULE: "score"})
    return replace(names, kept=tuple(prefix.format(model.num_hidden_layers) for prefix in names.kept))
