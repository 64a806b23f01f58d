"""Hugging Face config.json → ModelConfig, and what the way back (`tools/exporting`) needs to know: one row a family.

A row says which fields of a config.json carry over and under which of our names, what transformers assumes where a field is left
out, and the axis values that make the family what it is. A field that no row handles is refused by name unless it is null, without
influence on pretraining, or at the one value that means "off": a model must never be trained as something else than it says.
"""

from dataclasses import dataclass, field
from typing import Any

from megalite.config.schema import ROPE_SCALING_KEYS, ConfigError, ModelConfig


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
    """How a sliding window is written: every_layer (Mistral), upper_layers (Qwen: use_sliding_window and layer_types), or not at all."""

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
    **dict.fromkeys(("vocab_size", "num_key_value_heads", "head_dim", "n_inner"), None),
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias"), False),
    **dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.1),
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "layer_norm_epsilon": 1e-5,
    "hidden_act": "silu",
    "activation_function": "gelu_new",
}
"""What transformers assumes for a field that a config.json leaves out."""
_MISTRAL_DEFAULTS = {"num_key_value_heads": 8, "max_position_embeddings": 131072}
_QWEN_DEFAULTS = {"num_key_value_heads": 32, "max_position_embeddings": 32768}
_GPT2_BIASES = dict.fromkeys(("attention_bias", "attention_out_bias", "mlp_bias"), True)
_GPT2_AXES = {"position": "learned", "norm": "layer", "gated_mlp": False} | _GPT2_BIASES

_ROWS = (
    Family("llama", "LlamaForCausalLM", _fields(_LLAMA + _BIAS + "mlp_bias"), {"max_position_embeddings": 2048}),
    Family("mistral", "MistralForCausalLM", _fields(_LLAMA), _MISTRAL_DEFAULTS, window="every_layer"),
    Family("qwen2", "Qwen2ForCausalLM", _fields(_LLAMA), _QWEN_DEFAULTS, {"attention_bias": True}, "upper_layers"),
    Family("qwen3", "Qwen3ForCausalLM", _fields(_LLAMA + _BIAS), _QWEN_DEFAULTS | {"head_dim": 128}, {"qk_norm": "head"}, "upper_layers"),
    Family("gpt2", "GPT2LMHeadModel", _fields(_GPT2), {"tie_word_embeddings": True}, _GPT2_AXES),
)
FAMILIES = {row.model_type: row for row in _ROWS}

_WINDOW_FIELDS = {
    None: (),
    "every_layer": ("sliding_window",),
    "upper_layers": ("sliding_window", "use_sliding_window", "max_window_layers"),
}

_IDENTITY = """model_type architectures transformers_version torch_dtype dtype auto_map _name_or_path _commit_hash
    id2label label2id num_labels _num_labels problem_type finetuning_task task_specific_params generation_config"""
_RUNTIME = """use_cache return_dict output_hidden_states output_attentions torchscript gradient_checkpointing
    keys_to_ignore_at_inference _attn_implementation attn_implementation _attn_implementation_autoset"""
_TOKENS = "bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id decoder_start_token_id tokenizer_class prefix"
_GENERATION = """do_sample early_stopping max_length min_length max_new_tokens num_beams num_beam_groups diversity_penalty
    temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size
    bad_words_ids num_return_sequences output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id
    remove_invalid_values suppress_tokens begin_suppress_tokens exponential_decay_length_penalty"""
_GPT2_HEADS = "n_ctx summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout"
_IGNORED = frozenset(f"{_IDENTITY} {_RUNTIME} {_TOKENS} {_GENERATION} {_GPT2_HEADS}".split())
"""Fields without influence on the mathematics of pretraining (n_ctx repeats n_positions; summary_* belong to another head)."""

_OFF = """is_encoder_decoder is_decoder add_cross_attention tie_encoder_decoder use_bfloat16 tf_legacy_loss
    scale_attn_by_inverse_layer_idx reorder_and_upcast_attn"""
_ONE_VALUE = {
    "pretraining_tp": 1,
    "chunk_size_feed_forward": 0,
    "pruned_heads": {},
    "scale_attn_weights": True,
    "partial_rotary_factor": 1.0,
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
    if shape["hidden_act"] not in legal_act:
        raise _refuse("hidden_act", shape["hidden_act"], f"is not handled. Legal values: {', '.join(legal_act)}.")
    if family.rope:
        shape |= _read_rope(config)
    shape |= _read_window(config, family, shape["num_hidden_layers"])
    _refuse_unhandled(config, family)
    return shape


def _read_rope(config: dict[str, Any]) -> dict[str, Any]:
    """rope_theta and rope_scaling, from transformers 5's rope_parameters or from the two older fields."""
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = parameters.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    kind = parameters.pop("rope_type", None) or parameters.get("type", "default")
    parameters.pop("type", None)  # the name of rope_type before transformers 4.43
    if kind not in ROPE_SCALING_KEYS:
        raise _refuse("rope_scaling", kind, f"is not handled. Legal values of rope_type: {', '.join(ROPE_SCALING_KEYS)}.")
    for name, value in parameters.items():
        if name not in ROPE_SCALING_KEYS[kind] and _NEUTRAL.get(name) != value:
            raise _refuse(f"rope_scaling.{name}", value, f"is not handled with rope_type {kind}.")
    scaling = {name: parameters[name] for name in ROPE_SCALING_KEYS[kind] if name in parameters}
    return {"rope_theta": float(theta), "rope_scaling": None if kind == "default" else {"rope_type": kind, **scaling}}


def _read_window(config: dict[str, Any], family: Family, layers: int) -> dict[str, Any]:
    """sliding_window and the layers that use it."""
    types = config.get("layer_types")
    window = config.get("sliding_window", 4096)  # the default of all three families that have one
    if family.window == "every_layer":
        return {"sliding_window": window}
    if family.window == "upper_layers" and config.get("use_sliding_window", False) and window is not None:
        first = config.get("max_window_layers", 28)
        types = types or ["sliding_attention" if layer >= first else "full_attention" for layer in range(layers)]
        return {"sliding_window": window, "sliding_window_layers": [i for i, kind in enumerate(types) if kind == "sliding_attention"]}
    if types and set(types) != {"full_attention"}:
        raise _refuse("layer_types", sorted(set(types)), f"needs a sliding window, which this {family.model_type} configuration has not.")
    return {}


def _refuse_unhandled(config: dict[str, Any], family: Family) -> None:
    handled = {*family.fields, *_WINDOW_FIELDS[family.window], "layer_types", *_IGNORED}
    if family.rope:
        handled |= {"rope_theta", "rope_scaling", "rope_parameters"}
    for name, value in config.items():
        if name in handled or value is None or (name in _NEUTRAL and value == _NEUTRAL[name]):
            continue
        legal = f"Legal value: {_NEUTRAL[name]!r}." if name in _NEUTRAL else f"Remove it if a {family.model_type} model computes the same."
        raise _refuse(name, value, f"is not handled by the {family.model_type} family. {legal}")
