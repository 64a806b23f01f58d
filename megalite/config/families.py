"""Hugging Face config.json → ModelConfig, and what the way back (`tools/exporting`) needs to know: one row a family.

A row says which fields of a config.json carry over and under which of our names, what transformers assumes where a field is left
out, and the axis values that make the family what it is. A field that no row handles is refused by name unless it is null, without
influence on pretraining, or at the one value that means "off": a model must never be trained as something else than it says.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megalite.config.schema import ROPE_SCALING_KEYS, ConfigError, ModelConfig

Computed = dict[str, Callable[[dict[str, Any]], Any]]


@dataclass(frozen=True)
class Family:
    model_type: str
    architecture: str
    fields: dict[str, tuple[str, ...]]
    """config.json field → the ModelConfig fields that take its value."""
    defaults: dict[str, Any]
    """Where transformers assumes something else than _DEFAULTS; a field that neither names is required."""
    constants: dict[str, Any] = field(default_factory=dict)
    """ModelConfig fields whose value the family fixes, where it differs from ModelConfig's own default."""
    window: str | None = None
    """Which layers have a sliding window: every_layer (Mistral), or where layer_types is left out upper_layers (Qwen), every_other
    (Gemma 2) or without_rope (SmolLM3); None has no window."""
    computed: Computed = field(default_factory=dict)
    """ModelConfig fields that are a function of a config.json with its defaults."""
    own: str = ""
    """Further fields of its config.json, which `computed` reads or which have no influence on pretraining."""
    rope_types: tuple[str, ...] = tuple(ROPE_SCALING_KEYS)
    """Kinds of rotary scaling that transformers has for it."""

    @property
    def rope(self) -> bool:
        return "position" not in self.constants


def _fields(text: str) -> dict[str, tuple[str, ...]]:
    """`name` is called the same here; `theirs=ours`, or `theirs=ours+ours`, is not."""
    pairs = (word.partition("=") for word in text.split())
    return {theirs: tuple((ours or theirs).split("+")) for theirs, _, ours in pairs}


_LLAMA = """vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
    hidden_act max_position_embeddings initializer_range rms_norm_eps tie_word_embeddings attention_dropout """
_BIAS = "attention_bias=attention_bias+attention_out_bias "  # transformers' Llama and Qwen3: on q, k, v and o
_GPT2 = """vocab_size initializer_range tie_word_embeddings n_embd=hidden_size n_inner=intermediate_size n_layer=num_hidden_layers
    n_head=num_attention_heads n_positions=max_position_embeddings activation_function=hidden_act layer_norm_epsilon=rms_norm_eps
    embd_pdrop=embedding_dropout attn_pdrop=attention_dropout resid_pdrop=residual_dropout"""
_DEFAULTS = {
    **dict.fromkeys(("vocab_size", "num_key_value_heads", "head_dim", "n_inner", "layer_types"), None),
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias"), False),
    **dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.1),
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "layer_norm_epsilon": 1e-5,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "use_sliding_window": False,
    "max_window_layers": 28,
    "hidden_act": "silu",
    "activation_function": "gelu_new",
}
"""What transformers assumes for a field that a config.json leaves out."""
_MISTRAL_DEFAULTS = {"num_key_value_heads": 8, "max_position_embeddings": 131072}
_QWEN_DEFAULTS = {"num_key_value_heads": 32, "max_position_embeddings": 32768}
_OLMO2_DEFAULTS = {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048}
_PHI3_DEFAULTS = {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "sliding_window": None, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
_GELU = "gelu_pytorch_tanh"
_GEMMA_DEFAULTS = {"hidden_act": _GELU, "max_position_embeddings": 8192, "head_dim": 256, "tie_word_embeddings": True}
_GEMMA_DEFAULTS |= {"hidden_activation": _GELU, "num_key_value_heads": 16}
_GEMMA2_DEFAULTS = _GEMMA_DEFAULTS | {"num_key_value_heads": 4, "query_pre_attn_scalar": 256}
_GEMMA2_DEFAULTS |= {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_GEMMA2_CAPS = "attn_logit_softcapping=attention_softcap final_logit_softcapping=logit_softcap"
_SMOLLM3_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "rope_theta": 2e6,
}
_SMOLLM3_DEFAULTS |= {"sliding_window": None, "no_rope_layers": None, "no_rope_layer_interval": 4}


def _without_rope(given: dict[str, Any]) -> list[int]:
    """SmolLM3's no_rope_layers is 1 where there are rotary embeddings; every interval-th layer has none where it is left out."""
    layers, interval = range(given["num_hidden_layers"]), given["no_rope_layer_interval"]
    used = given["no_rope_layers"] or [(layer + 1) % interval for layer in layers]
    return [layer for layer in layers if not used[layer]]


_EMBEDDING: Computed = {"embedding_scale": lambda given: given["hidden_size"] ** 0.5}
_QUERIES: Computed = {"attention_scale": lambda given: given["query_pre_attn_scalar"] ** -0.5}
_ROPE: Computed = {"no_rope_layers": _without_rope}
_OLMO2_AXES = {"norm_placement": "post", "qk_norm": "full"}
_GEMMA2_AXES = {"norm_placement": "both", "norm_offset": 1.0}
_GPT2_BIASES = dict.fromkeys(("attention_bias", "attention_out_bias", "mlp_bias"), True)
_GPT2_AXES = {"position": "learned", "norm": "layer", "gated_mlp": False} | _GPT2_BIASES

_BIASED = _fields(_LLAMA + _BIAS)
_BIASED_MLP = _fields(_LLAMA + _BIAS + "mlp_bias")
_PHI3 = _fields(_LLAMA + "embd_pdrop=embedding_dropout resid_pdrop=residual_dropout")
_GEMMA2 = _fields(_LLAMA.replace("hidden_act", "hidden_activation=hidden_act") + _BIAS + _GEMMA2_CAPS)
_SCALAR, _LAYERS = "query_pre_attn_scalar cache_implementation", "no_rope_layers no_rope_layer_interval pretraining_tp"

_ROWS = (
    Family("llama", "LlamaForCausalLM", _BIASED_MLP, {"max_position_embeddings": 2048}),
    Family("mistral", "MistralForCausalLM", _fields(_LLAMA), _MISTRAL_DEFAULTS, window="every_layer"),
    Family("qwen2", "Qwen2ForCausalLM", _fields(_LLAMA), _QWEN_DEFAULTS, {"attention_bias": True}, "upper_layers"),
    Family("qwen3", "Qwen3ForCausalLM", _BIASED, _QWEN_DEFAULTS | {"head_dim": 128}, {"qk_norm": "head"}, "upper_layers"),
    Family("olmo2", "Olmo2ForCausalLM", _BIASED, _OLMO2_DEFAULTS, _OLMO2_AXES),
    Family("phi3", "Phi3ForCausalLM", _PHI3, _PHI3_DEFAULTS, {}, "every_layer", {}, "original_max_position_embeddings", ("default",)),
    Family("gemma", "GemmaForCausalLM", _BIASED, _GEMMA_DEFAULTS, {"norm_offset": 1.0}, None, _EMBEDDING),
    Family("gemma2", "Gemma2ForCausalLM", _GEMMA2, _GEMMA2_DEFAULTS, _GEMMA2_AXES, "every_other", _EMBEDDING | _QUERIES, _SCALAR),
    Family("smollm3", "SmolLM3ForCausalLM", _BIASED_MLP, _SMOLLM3_DEFAULTS, {}, "without_rope", _ROPE, _LAYERS),
    Family("gpt2", "GPT2LMHeadModel", _fields(_GPT2), {"tie_word_embeddings": True}, _GPT2_AXES),
)
FAMILIES = {row.model_type: row for row in _ROWS}

_WINDOW = ("sliding_window",)
_SWITCHED = (*_WINDOW, "use_sliding_window", "max_window_layers")
_WINDOW_FIELDS = {None: (), "every_layer": _WINDOW, "every_other": _WINDOW, "upper_layers": _SWITCHED, "without_rope": _SWITCHED}

_IDENTITY = """model_type architectures transformers_version torch_dtype dtype auto_map _name_or_path _commit_hash
    id2label label2id num_labels _num_labels problem_type finetuning_task task_specific_params generation_config"""
_RUNTIME = """use_cache return_dict output_hidden_states output_attentions torchscript gradient_checkpointing
    keys_to_ignore_at_inference _attn_implementation attn_implementation _attn_implementation_autoset transformers.js_config"""
_TOKENS = "bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id decoder_start_token_id tokenizer_class prefix"
_GENERATION = """do_sample early_stopping max_length min_length max_new_tokens num_beams num_beam_groups diversity_penalty
    temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size
    bad_words_ids num_return_sequences output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id
    remove_invalid_values suppress_tokens begin_suppress_tokens exponential_decay_length_penalty"""
_GPT2_HEADS = "n_ctx summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout"
KEPT = frozenset(f"use_cache {_TOKENS} {_GENERATION}".split())
"""Those of them that the way back to a config.json takes over from the file that a model came with."""
_IGNORED = KEPT | frozenset(f"{_IDENTITY} {_RUNTIME} {_GPT2_HEADS}".split())
"""Fields without influence on the mathematics of pretraining (n_ctx repeats n_positions; summary_* belong to another head)."""

_OFF = """is_encoder_decoder is_decoder add_cross_attention tie_encoder_decoder use_bfloat16 tf_legacy_loss
    scale_attn_by_inverse_layer_idx reorder_and_upcast_attn attention_bias mlp_bias use_bidirectional_attention use_mrope
    rope_interleaved"""
_ONE_VALUE = {
    "pretraining_tp": 1,
    "chunk_size_feed_forward": 0,
    "pruned_heads": {},
    "scale_attn_weights": True,
    "partial_rotary_factor": 1.0,
    "truncate": True,
    "is_llama_config": True,
    **dict.fromkeys(("hidden_act", "hidden_activation"), _GELU),  # Gemma's other name for the same
}
_NEUTRAL: dict[str, Any] = dict.fromkeys(_OFF.split(), False) | _ONE_VALUE
"""Fields accepted at this value only: at any other they would change what the model computes."""


def _refuse(name: str, value: Any, why: str) -> ConfigError:
    return ConfigError(f"config.json: {name} = {value!r} {why}")


def from_hf_config(config: dict[str, Any]) -> dict[str, Any]:
    """The ModelConfig fields of a Hugging Face config.json. Raises ConfigError naming a family or field that is not handled."""
    family = FAMILIES.get(config.get("model_type", ""))
    if family is None:
        raise _refuse("model_type", config.get("model_type"), f"is not handled. Legal values: {', '.join(FAMILIES)}.")
    shape, given = dict(family.constants), _DEFAULTS | family.defaults | config
    for theirs, ours in family.fields.items():
        if theirs not in given:
            raise ConfigError(f"config.json: {theirs} is missing; every {family.model_type} configuration needs it.")
        shape |= dict.fromkeys(ours, given[theirs])
    if shape["intermediate_size"] is None:  # GPT-2's n_inner: null
        shape["intermediate_size"] = 4 * shape["hidden_size"]
    legal_act = ModelConfig.__annotations__["hidden_act"].__args__
    if shape["hidden_act"] == "gelu" and family.model_type == "gemma":
        shape["hidden_act"] = _GELU  # what its first files mean, as transformers has it
    if shape["hidden_act"] not in legal_act:
        raise _refuse("hidden_act", shape["hidden_act"], f"is not handled. Legal values: {', '.join(legal_act)}.")
    try:
        shape |= {ours: value(given) for ours, value in family.computed.items()}
        if family.rope:
            shape |= _read_rope(config, family, given)
        shape |= _read_window(given, family, shape)
    except (TypeError, LookupError, ArithmeticError) as error:
        raise ConfigError(f"config.json: a value of it has the wrong type or length: {error}.") from None
    _refuse_unhandled(config, family)
    return shape


def _read_rope(config: dict[str, Any], family: Family, given: dict[str, Any]) -> dict[str, Any]:
    """rope_theta and rope_scaling, from transformers 5's rope_parameters or from the two older fields."""
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = parameters.pop("rope_theta", None) or given["rope_theta"]
    kind = parameters.pop("rope_type", None) or parameters.get("type", "default")
    parameters.pop("type", None)  # the name of rope_type before transformers 4.43
    if kind not in family.rope_types:
        raise _refuse("rope_scaling", kind, f"is not handled. Legal values of rope_type: {', '.join(family.rope_types)}.")
    if kind == "yarn":
        parameters = _complete_yarn(parameters, given["max_position_embeddings"])
    for name, value in parameters.items():
        if name not in ROPE_SCALING_KEYS[kind] and _NEUTRAL.get(name) != value:
            raise _refuse(f"rope_scaling.{name}", value, f"is not handled with rope_type {kind}.")
    scaling = {name: parameters[name] for name in ROPE_SCALING_KEYS[kind] if name in parameters}
    return {"rope_theta": float(theta), "rope_scaling": None if kind == "default" else {"rope_type": kind, **scaling}}


def _complete_yarn(parameters: dict[str, Any], longest: int) -> dict[str, Any]:
    """YaRN's parameters with what transformers takes for those left out; mscale and mscale_all_dim are only a way to write the factor."""
    given = {key: value for key, value in parameters.items() if value is not None}
    scale, all_dim = given.pop("mscale", 0), given.pop("mscale_all_dim", 0)
    grown = 0.1 * math.log(given["factor"]) if given.get("factor", 0) > 1 else 0.0
    attention = (scale * grown + 1) / (all_dim * grown + 1) if scale and all_dim else grown + 1
    return {"original_max_position_embeddings": longest, "beta_fast": 32, "beta_slow": 1, "attention_factor": attention} | given


def _read_window(given: dict[str, Any], family: Family, shape: dict[str, Any]) -> dict[str, Any]:
    """sliding_window and the layers that use it."""
    types, window = given["layer_types"], given["sliding_window"]
    if family.window == "every_layer":
        return {"sliding_window": window}
    if window is not None and (family.window == "every_other" or (family.window and given["use_sliding_window"])):
        layers = range(shape["num_hidden_layers"])
        if types:
            local = [layer for layer in layers if types[layer] == "sliding_attention"]
        elif family.window == "without_rope":
            local = shape["no_rope_layers"]
        else:
            local = list(layers[::2] if family.window == "every_other" else layers[given["max_window_layers"] :])
        return {"sliding_window": window, "sliding_window_layers": local}
    if family.window != "every_other" and types and set(types) != {"full_attention"}:
        raise _refuse("layer_types", sorted(set(types)), f"needs a sliding window, which this {family.model_type} configuration has not.")
    return {}


def _refuse_unhandled(config: dict[str, Any], family: Family) -> None:
    handled = {*family.fields, *_WINDOW_FIELDS[family.window], "layer_types", *_IGNORED, *family.own.split()}
    if family.rope:
        handled |= {"rope_theta", "rope_scaling", "rope_parameters"}
    for name, value in config.items():
        if name in handled or value is None or (name in _NEUTRAL and value == _NEUTRAL[name]):
            continue
        legal = f"Legal value: {_NEUTRAL[name]!r}." if name in _NEUTRAL else f"Remove it if a {family.model_type} model computes the same."
        raise _refuse(name, value, f"is not handled by the {family.model_type} family. {legal}")
