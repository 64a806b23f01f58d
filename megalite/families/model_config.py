"""Hugging Face config.json → ModelConfig, and the tables for the reverse (`megalite.huggingface`).

families.yaml lists for each family which fields of a config.json map to which fields of ModelConfig,
transformers' defaults for missing fields, and the values that the family fixes. Any other field that
transformers reads is rejected by name unless it has the value that the family computes: a model must never be
trained as something other than what transformers computes. A field that transformers does not read, such as a
mark of a tool, is ignored (`unread_fields`).
"""

import functools
import json
import math
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from megalite.config.errors import ConfigError
from megalite.config.rule import show
from megalite.config.sections.model import ROPE_SCALING_KEYS, ModelConfig
from megalite.families import (
    deepseek,
    hunyuan,
    layer_lists,
    layer_shapes,
    layer_types,
    mamba,
    mixtures,
    query_scale,
)
from megalite.families.classifiers import classifier_of, is_reward_model
from megalite.families.refusal import refuse
from megalite.families.weight_files import INDEX, MODEL, weights_file

_GELU = "gelu_pytorch_tanh"
_SAME_ACT = {"swish": "silu", "gelu_python": "gelu", "gelu_accurate": "gelu_new", "gelu_python_tanh": _GELU}
"""transformers' further names of activations that we have."""
_OWN_ACT = {"clamped_swiglu": "gpt_oss", "xielu": "apertus"}
"""Activation → the only family with it."""
_ROPE_NAMES = {"su": "longrope"}
"""First names of types of rotary scaling."""
_LOCAL_ROPE = ("full_attention", "sliding_attention")
"""Entries of rope_parameters in families whose layers with a window have a base of their own."""
_NO_SWITCH = ("pattern", "pattern_or_none", "last_layers")
"""Values of Family.window without a switch use_sliding_window."""
_ROPE_ENTRIES = ("rope_theta", "rope_type", "type", "partial_rotary_factor")
_FURTHER_ENTRIES = {
    "yarn": ("mscale", "mscale_all_dim", "truncate"),
    "longrope": ("factor",),
    "su": ("factor",),
    "dynamic": ("factor",),
}
"""Entries of rope_scaling that transformers reads besides ROPE_SCALING_KEYS."""
_RESCALED = ("llama3", "yarn", "longrope")
"""Types for which a field original_max_position_embeddings of the config.json replaces that of rope_scaling.
"""


@dataclass(frozen=True)
class Family:
    model_type: str
    architecture: str
    fields: dict[str, tuple[str, ...]]
    """config.json field → the ModelConfig fields that have its value."""
    defaults: dict[str, Any]
    """transformers' defaults that differ from those of other families; a field without a default is required.
    """
    constants: dict[str, Any] = field(default_factory=dict)
    """ModelConfig fields whose value the family fixes, if it differs from ModelConfig's default."""
    window: str | None = None
    """Layers with a sliding window: every_layer (Mistral); or, if layer_types is missing, upper_layers
    (Qwen), without_rope (SmolLM3) or pattern: all but every n-th, n being the default of
    sliding_window_pattern, and all if that is null; None: no window. Behind the switch use_sliding_window:
    every_second_lower_layer, from the first to max_window_layers (Qwen2-MoE), every_layer_if_switched
    (Qwen3-MoE). Without a switch: last_layers, from max_window_layers on (dots1), and pattern_or_none, where
    a window of null differs from layers without one (EXAONE 4)."""
    local_rope_theta: float | None = None
    """Base of the rotary frequencies in layers with a window, by default; None: they have those of other
    layers."""
    derived: tuple[str, ...] = ()
    """Fields that its configuration class derives from others if they are null or missing; field=how."""
    computed: tuple[str, ...] = ()
    """ModelConfig fields computed from a config.json with its defaults; field=how if there is more than one
    way. `_COMPUTED_TOGETHER` has names for several fields."""
    own: str = ""
    """Other fields of its config.json, which `computed` reads or which have no influence on pretraining."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Other name in a config.json → the name in `fields` or `own` (transformers' attribute_map)."""
    sections: dict[str, dict[str, str]] = field(default_factory=dict)
    """Field that is an object → its entries, which are other names of fields."""
    only: str = ""
    """Other fields that transformers' code of the family reads, and of which one value is supported: null or
    the one in `neutral`."""
    rope_types: tuple[str, ...] = tuple(
        kind for kind in ROPE_SCALING_KEYS if kind not in ("longrope", "dynamic")
    )
    """Types of rotary scaling that transformers supports for it."""
    ignores_rope_scaling: bool = False
    """transformers ignores rope_scaling, a field of its own, and reads rope_parameters only."""
    rope_entries: str = ""
    """Further entries of its rotary fields, which `computed` reads or which have no influence on text. An
    export copies those that it does not write."""
    loader: str = "AutoModelForCausalLM"
    """The class of transformers that loads its directories."""
    multimodal: str | None = None
    """model_type of the multimodal model whose text_config is of this family."""

    @property
    def classifier(self) -> str | None:
        """The sequence classifier of transformers, which a reward model is; None if there is none."""
        return classifier_of(self.model_type, self.architecture)

    @property
    def rope(self) -> bool:
        return "position" not in self.constants

    @property
    def layer_ropes(self) -> bool:
        """Whether transformers reads rope_parameters alone, with an entry for each type of layer, which has
        the share of channels that rotate, too."""
        return "full_attention" in self.defaults.get("rope_parameters", {})


class Families(NamedTuple):
    """The content of families.yaml."""

    rows: dict[str, Family]
    defaults: dict[str, Any]
    kept: frozenset[str]
    ignored: frozenset[str]
    only: frozenset[str]
    neutral: dict[str, Any]
    window_fields: dict[str | None, tuple[str, ...]]
    refused: dict[str, str]
    """model_type of a family that is not supported → the reason."""


@functools.cache
def families() -> Families:
    import yaml

    read = yaml.safe_load(Path(__file__).with_name("families.yaml").read_text(encoding="utf-8"))
    rows = {}
    for name, row in read["families"].items():
        words = [
            word
            for part in row["fields"].split()
            for word in (read["fields"][part[1:]].split() if part[0] == "$" else [part])
        ]
        pairs = (word.partition("=") for word in words)
        row["fields"] = {theirs: tuple((ours or theirs).split("+")) for theirs, _, ours in pairs}
        row |= {key: tuple(row[key]) for key in ("derived", "computed", "rope_types") if key in row}
        rows[name] = Family(name, **row)
    kept, only = frozenset(read["kept"].split()), frozenset(read["only"].split())
    windows = {None: (), **{kind: tuple(text.split()) for kind, text in read["window_fields"].items()}}
    return Families(
        rows,
        read["defaults"],
        kept,
        kept | frozenset(read["ignored"].split()),
        only,
        read["neutral"],
        windows,
        read["refused"],
    )


def hf_shape(directory: str) -> dict[str, Any]:
    """The ModelConfig fields of a Hugging Face model's directory, for model.from_hf. Raises ConfigError
    naming that option."""
    try:
        shape = from_hf_config(hf_config(directory))
    except ConfigError as error:
        raise ConfigError(f"model.from_hf = {directory}: {error}") from None
    names = _tensor_names(Path(directory)) if shape.get("mtp_layers") else ()
    if names and not any(f"layers.{shape['num_hidden_layers']}." in name for name in names):
        # transformers writes a number of modules, 1 by default, and not their weights
        shape["mtp_layers"] = 0
    return shape


def _tensor_names(directory: Path) -> Collection[str]:
    """Names of the tensors in a directory's safetensors files; none if there are no such files, or if they
    cannot be read."""
    path = weights_file(directory, MODEL[:2])
    with suppress(OSError, ValueError, TypeError, KeyError):
        if path is None:
            return ()
        if path.name.endswith(INDEX):
            return list(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
        with open(path, "rb") as file:
            return list(json.loads(file.read(min(int.from_bytes(file.read(8), "little"), 100_000_000))))
    return ()


def hf_config(directory: str | Path, name: str = "config.json") -> dict[str, Any]:
    """The config.json of a Hugging Face model's directory, or another JSON file there; of a multimodal model,
    that of its language model.

    Raises ConfigError if it cannot be read.
    """
    path = Path(directory) / name
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path} could not be read: {error.strerror}. Pass the directory of a model."
        ) from None
    except ValueError as error:
        raise ConfigError(f"{path} is not a JSON object: {error}.") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is not a JSON object: it contains {show(content)[:40]}.")
    return _language_model(content)


def stored_dtype(config: dict[str, Any]) -> str | None:
    """The dtype of the weights that a config.json names, under transformers 5's name or the older one; None
    if it names none."""
    return config.get("dtype") or config.get("torch_dtype")


def loader_of(config: dict[str, Any]) -> str:
    """The class of transformers that loads the model of a config.json."""
    row = families().rows.get(config.get("model_type", ""))
    if row is None:
        return Family.loader
    is_classifier = config.get("architectures") == [row.classifier]
    return "AutoModelForSequenceClassification" if is_classifier else row.loader


def end_ids(directory: str | Path) -> list[int]:
    """The `eos_token_id` of a model's generation_config.json or, if that has none, of its config.json; empty
    if neither names one.

    Raises ConfigError if a file cannot be read.
    """
    for name in ("generation_config.json", "config.json"):
        if (Path(directory) / name).is_file() and (
            ids := hf_config(directory, name).get("eos_token_id")
        ) is not None:
            return ids if isinstance(ids, list) else [ids]
    return []


def _language_model(config: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a multimodal model's language model, with the token ids of the whole; another
    model's as it is."""
    known, inner = families(), config.get("text_config")
    if not isinstance(inner, dict):
        return config
    row = known.rows.get(inner.get("model_type", ""))
    if row is None or row.multimodal != config.get("model_type"):
        return config
    tied = {name: config[name] for name in ("tie_word_embeddings",) if name in config}
    return (
        tied | inner | {name: config[name] for name in known.kept & config.keys() if config[name] is not None}
    )


def _global_layers(given: dict[str, Any]) -> list[int]:
    local = layer_shapes.local_layers(given) if given["sliding_window"] is not None else []
    return [layer for layer in range(given["num_hidden_layers"]) if layer not in local]


def _beside_windows(given: dict[str, Any]) -> list[int]:
    """EXAONE's layers without a window do not rotate, if others have one."""
    window, pattern = given["sliding_window"], given["sliding_window_pattern"]
    if window is None and given["model_type"] == "exaone_moe":
        raise refuse("sliding_window", None, "is not supported by the exaone_moe family. It needs a number.")
    if window is not None and not given["layer_types"] and not isinstance(pattern, int):
        raise refuse(
            "sliding_window_pattern",
            pattern,
            "is not supported without layer_types. Legal values: 1 and above.",
        )
    return [] if window is None else _global_layers(given)


def _youtu_deviation(given: dict[str, Any]) -> float:
    """By default a function of the width."""
    value = given["initializer_range"]
    return float(2.0 / (5.0 * given["hidden_size"]) ** 0.5 if value is None else value)


def _falcon_kv_heads(given: dict[str, Any]) -> int:
    """num_kv_heads counts in the new architecture only; the older one has as many as heads, or one."""
    heads = given["num_attention_heads"]
    if given["new_decoder_architecture"]:
        return int(given["num_kv_heads"] or heads)
    return 1 if given["multi_query"] else int(heads)


def _falcon_block(given: dict[str, Any]) -> str:
    """The new architecture has two norms by default, the older one has one norm for both."""
    new, parallel, norms = (
        given["new_decoder_architecture"],
        given["parallel_attn"],
        given["num_ln_in_parallel_attn"],
    )
    if new and not parallel:
        raise refuse(
            "parallel_attn",
            parallel,
            "is incompatible with new_decoder_architecture = True, which is parallel.",
        )
    if norms == 2 and not new:
        raise refuse(
            "num_ln_in_parallel_attn",
            norms,
            "is incompatible with new_decoder_architecture = False, which has one norm.",
        )
    if not parallel:
        return "none"
    return "two_norms" if new and norms != 1 else "shared_norm"


def _without_rope(given: dict[str, Any]) -> list[int]:
    """SmolLM3's no_rope_layers is 1 for layers with rotary embeddings; if it is missing, every interval-th
    layer has none."""
    layers, interval = range(given["num_hidden_layers"]), given["no_rope_layer_interval"]
    used = given["no_rope_layers"] or [(layer + 1) % interval for layer in layers]
    return [layer for layer in layers if not used[layer]]


def _rotary_share(given: dict[str, Any]) -> float:
    """The first files have the number of channels that rotate, rotary_dim, in place of their share."""
    share, channels = given["partial_rotary_factor"], given.get("rotary_dim")
    if share is None and channels is not None:
        return float(channels / given["head_dim"])
    return 1.0 if share is None else float(share)


def _clamped_swiglu(given: dict[str, Any]) -> str:
    """gpt-oss's activation, of which other numbers are refused."""
    for name, only in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
        if given[name] != only:
            raise refuse(name, given[name], f"is not supported. Legal value: {only}.")
    return "clamped_swiglu"


_COMPUTED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "embedding_scale": lambda given: given["hidden_size"] ** 0.5,
    "attention_scale": lambda given: given["query_pre_attn_scalar"] ** -0.5,
    "logit_scale": lambda given: 1 / given["logits_scaling"],
    "no_rope_layers": _without_rope,
    "no_rope_layers=global": _global_layers,
    "no_rope_layers=beside_windows": _beside_windows,
    "num_key_value_heads": _falcon_kv_heads,
    "qk_norm=qk_layernorm": lambda given: "each_head" if given["qk_layernorm"] else "none",
    "qk_norm=use_qk_norm": lambda given: "each_head" if given["use_qk_norm"] else "none",
    "qk_norm=heads": lambda given: "head" if given["use_qk_norm"] else "none",
    "attention_scale=latents": deepseek.attention_scale,
    "num_key_value_heads=all": deepseek.kv_heads,
    "mlp_only_layers=first": deepseek.dense_layers,
    "mlp_only_layers=first_or_types": deepseek.dense_layers_of_types,
    "layer_blocks=indexed": deepseek.indexed_layers,
    "indexer_types": deepseek.indexer_types,
    "shared_expert_intermediate_size": deepseek.shared_width,
    "n_group": deepseek.groups,
    "topk_group": deepseek.topk_group,
    "mtp_layers": deepseek.mtp_layers,
    "num_experts=routed": mixtures.routed,
    "n_group=alone": mixtures.groups,
    "group_score": mixtures.group_score,
    "initializer_range=youtu": _youtu_deviation,
    "topk_group=alone": mixtures.topk_group,
    "router_scores=softmax": functools.partial(deepseek.scores, "softmax"),
    "router_scores=sigmoid": functools.partial(deepseek.scores, "sigmoid"),
    "hidden_act=clamped_swiglu": _clamped_swiglu,
    "num_experts_per_tok=hunyuan": hunyuan.experts_per_token,
    "layer_blocks=qwen3_next": layer_types.qwen3_next,
    "layer_blocks=qwen3_5": functools.partial(layer_types.qwen3_5, "feed_forward"),
    "layer_blocks=qwen3_5_moe": functools.partial(layer_types.qwen3_5, "mixture"),
    "layer_blocks=olmo": layer_types.olmo,
    "post_norm_layers": layer_types.olmo_post_norm,
    "position=olmo": layer_types.olmo_position,
    **{name: functools.partial(layer_types.olmo_width, name) for name in layer_types.OLMO_WIDTHS},
    "layer_blocks=kimi": layer_types.kimi,
    "tie_word_embeddings=untied": layer_types.untied,
    "shared_expert_intermediate_size=kimi": layer_types.kimi_shared,
    "n_group=kimi": layer_types.kimi_groups,
    "topk_group=kimi": layer_types.kimi_topk_group,
    "layer_blocks=lfm2": layer_types.lfm2,
    "intermediate_size=lfm2": layer_types.lfm2_width,
    "layer_blocks=lfm2_moe": layer_types.lfm2_moe,
    "partial_rotary_factor=rotary_dim": _rotary_share,
    "embedding_scale=mup": lambda given: given["hidden_size"] ** 0.5 if given["mup_enabled"] else None,
    "mlp_only_layers=types": layer_lists.dense_layers,
    "mlp_only_layers=first_dense": layer_lists.first_dense_layers,
    "mlp_only_layers=afmoe": layer_lists.afmoe_dense_layers,
    "mlp_only_layers=interval": layer_lists.interval_dense_layers,
    "shared_expert_intermediate_size=granite": layer_lists.granite_shared,
    "shared_expert_intermediate_size=ernie": layer_lists.ernie_shared,
    "no_rope_layers=cohere2_moe": layer_lists.cohere2_moe_without_rope,
    "parallel_block": _falcon_block,
    "parallel_block=shared_norm": lambda given: "shared_norm" if given["use_parallel_residual"] else "none",
    "parallel_block=two_norms": lambda given: "two_norms" if given["use_parallel_residual"] else "none",
    "local_attention=mimo": layer_shapes.mimo_local,
    "sink_layers=local": layer_shapes.local_layers,
    "attention_out_multiplier=values": functools.partial(layer_shapes.or_one, "attention_value_scale"),
    "routed_scaling_factor=or_one": functools.partial(layer_shapes.or_one, "routed_scaling_factor"),
    "layer_heads": layer_shapes.layer_heads,
    "attention_gate_width": layer_shapes.gate_width,
    "layer_blocks=bamba": mamba.bamba_layers,
    "layer_blocks=granite": mamba.granite_layers,
    "layer_blocks=nemotron": mamba.nemotron_layers,
    "layer_blocks=falcon_h1": lambda given: [mamba.FALCON_H1_LAYER] * given["num_hidden_layers"],
    "num_hidden_layers=nemotron": lambda given: len(mamba.nemotron_layers(given)),
    "mamba_head_dim=expanded": mamba.head_dim,
    "mamba_head_dim=own_width": mamba.head_dim,
    "mamba_time_step_limit": mamba.time_step_limit,
    "hidden_act=convolution": functools.partial(mamba.activation, "hidden_act"),
    "position": mamba.position,
    "tie_word_embeddings=never": mamba.never_tied,
    "mamba_proj_bias=one": mamba.one_bias,
    "mamba_norm": mamba.norm,
    "mamba_multipliers": functools.partial(mamba.multipliers, "ssm_multipliers", 5),
    "mlp_multipliers": functools.partial(mamba.multipliers, "mlp_multipliers", 2),
    **{f"{name}=nemotron": functools.partial(mamba.nemotron_value, name) for name in mamba.NEMOTRON_NAMES},
}
_COMPUTED_TOGETHER: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "experts=granite": mamba.granite_experts,
    "experts=nemotron": mamba.nemotron_experts,
    "query_scale": query_scale.query_scale,
    "norm=cohere2_moe": layer_lists.cohere2_moe_norm,
    "experts=cohere2_moe": layer_lists.cohere2_moe_experts,
}
"""The same for several fields."""
_DERIVED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "layer_types=afmoe": layer_lists.afmoe_types,
    "layer_types=cohere2_moe": layer_lists.cohere2_moe_types,
    "mlp_layer_types=one_dense": functools.partial(layer_lists.dense_first, 1),
    "mlp_layer_types=first_dense": layer_lists.first_dense_kinds,
}


def from_hf_config(config: dict[str, Any]) -> dict[str, Any]:
    """The ModelConfig fields of a Hugging Face config.json. Raises ConfigError naming the family or field
    that is not supported."""
    known, family, config = families(), *_of_family(config)
    stated = {name: value for name, value in config.items() if name != "rope_parameters" or value is not None}
    shape, given = dict(family.constants), known.defaults | family.defaults | stated
    for theirs, ours in family.fields.items():
        if theirs not in given:
            raise ConfigError(f"config.json: {theirs} is missing, but required for {family.model_type}.")
        shape |= dict.fromkeys(ours, given[theirs])
    if shape["intermediate_size"] is None:  # GPT-2's n_inner: null
        shape["intermediate_size"] = 4 * shape["hidden_size"]
    legal_act = [
        act
        for act in ModelConfig.__annotations__["hidden_act"].__args__
        if _OWN_ACT.get(act, family.model_type) == family.model_type
    ]
    if shape["hidden_act"] == "gelu" and family.model_type == "gemma":
        shape["hidden_act"] = _GELU  # Gemma's first files say gelu and mean this; transformers does the same
    shape["hidden_act"] = _SAME_ACT.get(shape["hidden_act"], shape["hidden_act"])
    if shape["hidden_act"] not in legal_act:
        raise refuse(
            "hidden_act", shape["hidden_act"], f"is not supported. Legal values: {', '.join(legal_act)}."
        )
    try:
        shape |= _compute(family, given)
        shape = mamba.without_unused(shape)
        shape |= _read_window(given, family, shape)
        if family.rope and shape.get("position") != "none":
            shape = layer_shapes.with_rope(shape, _read_rope(config, family, given, shape))
    except (TypeError, LookupError, ArithmeticError) as error:
        raise ConfigError(f"config.json: a value has the wrong type or length: {error}.") from None
    _refuse_unhandled(config, family, shape)
    return shape | ({"output_head": "reward"} if is_reward_model(config, family.classifier) else {})


def _compute(family: Family, given: dict[str, Any]) -> dict[str, Any]:
    """The fields that are computed, after completing the config.json with those that are derived."""
    for name in family.derived:
        derived = name.partition("=")[0]
        if given[derived] is None:
            given[derived] = _DERIVED[name](given)
    shape: dict[str, Any] = {}
    for name in family.computed:
        if name in _COMPUTED_TOGETHER:
            shape |= _COMPUTED_TOGETHER[name](given)
        else:
            shape[name.partition("=")[0]] = _COMPUTED[name](given)
    return shape


def _of_family(config: dict[str, Any]) -> tuple[Family, dict[str, Any]]:
    """The family of a config.json, and its fields under the names in `Family.fields`."""
    known, config = families(), _language_model(config)
    family = known.rows.get(config.get("model_type", ""))
    if family is None:
        kind = config.get("model_type")
        if reason := known.refused.get(str(kind)):
            raise refuse("model_type", kind, reason)
        raise refuse(
            "model_type",
            kind,
            f"is not supported. Legal values: {', '.join(known.rows)}.",
        )
    named = {alias: config[alias] for alias in family.aliases if alias in config}
    own = {name: value for name, value in config.items() if name not in named}
    others = [(alias, family.aliases[alias], value) for alias, value in named.items()]
    for section, names in family.sections.items():
        inner = config.get(section) or {}
        others += [(f"{section}.{key}", name, inner[key]) for key, name in names.items() if key in inner]
    for alias, name, value in others:
        if name in own and own[name] != value:
            raise refuse(
                alias,
                value,
                f"contradicts {name} = {own[name]!r}: both are names of one field. Remove one of them.",
            )
        own[name] = value
    return family, own


def _older_rope(config: dict[str, Any], family: Family) -> dict[str, Any]:
    """The field rope_scaling."""
    older: dict[str, Any] = config.get("rope_scaling") or {}
    if not family.ignores_rope_scaling:
        return older
    if _rope_type(older) not in ("default", _rope_type(config.get("rope_parameters") or {})):
        raise refuse(
            "rope_scaling",
            older,
            "is not read by transformers in this family. Write it as rope_parameters.",
        )
    return {}


def _read_rope(
    config: dict[str, Any], family: Family, given: dict[str, Any], shape: dict[str, Any]
) -> dict[str, Any]:
    """The rotary fields, from transformers 5's rope_parameters or from the older fields."""
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(config.get(name) or {}, dict):
            raise refuse(name, config[name], "is not an object. Write it as {rope_type: …, factor: …}.")
    if family.layer_ropes:
        read = functools.partial(_read_frequencies, family=family, given=given)
        return layer_shapes.read_rope(
            config, family.defaults, given, lambda entry, share: read(entry, shape=share)
        )
    older, newer = _older_rope(config, family), config.get("rope_parameters") or {}
    if family.local_rope_theta is None:
        # in transformers' order
        parameters = dict(older or newer or family.defaults.get("rope_parameters") or {})
        if (
            config.get("original_max_position_embeddings") is not None
            and parameters.get("rope_type", parameters.get("type")) in _RESCALED
        ):
            parameters["original_max_position_embeddings"] = config["original_max_position_embeddings"]
        return _read_frequencies(parameters, family, given, shape)
    parameters = dict(newer or older)
    local = dict(parameters.pop("sliding_attention", None) or {})
    if "full_attention" in parameters:
        parameters = {**(parameters["full_attention"] or {}), **older}
    elif config.get("rope_parameters") and "rope_theta" in parameters:
        raise refuse(
            "rope_parameters",
            parameters,
            "has no entries full_attention and sliding_attention: transformers would not read it.",
        )
    frequencies = _read_frequencies(parameters, family, given, shape)
    theta = float(
        local.pop("rope_theta", None) or given.get("rope_local_base_freq") or family.local_rope_theta
    )
    if local.get("rope_type", "default") != "default":
        raise refuse(
            "rope_parameters.sliding_attention",
            local,
            "is not supported: layers with a window have no rotary scaling.",
        )
    same = theta == frequencies["rope_theta"] and frequencies["rope_scaling"] is None
    return frequencies | {
        "rope_local_theta": None if same or not shape.get("sliding_window_layers") else theta
    }


def _rope_type(parameters: dict[str, Any]) -> str:
    return str(parameters.get("rope_type") or parameters.get("type", "default"))


def _read_frequencies(
    parameters: dict[str, Any], family: Family, given: dict[str, Any], shape: dict[str, Any]
) -> dict[str, Any]:
    """rope_theta, rope_scaling and, in families that have it, partial_rotary_factor."""
    theta = parameters.pop("rope_theta", None) or shape.get("rope_theta") or given["rope_theta"]
    partial = {}
    if "partial_rotary_factor" in shape:
        partial = {
            "partial_rotary_factor": float(
                parameters.pop("partial_rotary_factor", None) or shape["partial_rotary_factor"]
            )
        }
    kind = parameters.pop("rope_type", None) or parameters.get("type", "default")
    kind = _ROPE_NAMES.get(kind, kind)
    parameters.pop("type", None)  # rope_type's name before transformers 4.43
    if kind not in family.rope_types:
        raise refuse(
            "rope_scaling.rope_type", kind, f"is not supported. Legal values: {', '.join(family.rope_types)}."
        )
    if kind == "dynamic" and not parameters.get("alpha"):
        raise refuse(
            "rope_scaling.alpha",
            parameters.get("alpha"),
            "is not supported with rope_type dynamic: frequencies that change with the length of a sequence. "
            "Legal values: numbers above 0.",
        )
    if kind == "longrope":
        parameters = _complete_longrope(parameters, given)
    if kind == "yarn":
        parameters = _complete_yarn(parameters, given["max_position_embeddings"])
    exact = {"truncate": False} if kind == "yarn" and parameters.get("truncate", True) is False else {}
    rotated = parameters.get("partial_rotary_factor")
    if "partial_rotary_factor" in family.rope_entries.split():  # the share of the channels that rotate at all
        whole = shape["qk_nope_head_dim"] + shape["qk_rope_head_dim"]
        rotated = None if rotated and int(whole * rotated) == shape["qk_rope_head_dim"] else rotated
    if rotated not in (None, 1.0):
        raise refuse(
            "rope_scaling.partial_rotary_factor",
            rotated,
            f"is not supported by the {family.model_type} family. Legal value: 1.0.",
        )
    scaling = {name: parameters[name] for name in ROPE_SCALING_KEYS[kind] if name in parameters} | exact
    return {
        "rope_theta": float(theta),
        "rope_scaling": None if kind == "default" else {"rope_type": kind, **scaling},
        **partial,
    }


def _complete_longrope(parameters: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """LongRoPE's parameters with transformers' defaults."""
    known = {key: value for key, value in parameters.items() if value is not None}
    original = given["original_max_position_embeddings"]
    factor = known.pop("factor", given["max_position_embeddings"] / original)
    attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return {"attention_factor": attention} | known | {"original_max_position_embeddings": original}


def _complete_yarn(parameters: dict[str, Any], longest: int) -> dict[str, Any]:
    """YaRN's parameters with transformers' defaults; mscale and mscale_all_dim are another way to write
    attention_factor."""
    given = {key: value for key, value in parameters.items() if value is not None}
    scale, all_dim = given.pop("mscale", 0), given.pop("mscale_all_dim", 0)
    grown = 0.1 * math.log(given["factor"]) if given.get("factor", 0) > 1 else 0.0
    attention = (scale * grown + 1) / (all_dim * grown + 1) if scale and all_dim else grown + 1
    return {
        "original_max_position_embeddings": longest,
        "beta_fast": 32,
        "beta_slow": 1,
        "attention_factor": attention,
    } | given


def _read_window(given: dict[str, Any], family: Family, shape: dict[str, Any]) -> dict[str, Any]:
    """sliding_window and the layers that use it."""
    types, window = given["layer_types"], given["sliding_window"]
    if "sliding_window_size" in family.own.split() and given.get("sliding_window_size") is not None:
        window = given["sliding_window_size"] + 1  # without the token itself
    if family.window == "every_layer":
        return {"sliding_window": window}
    if window is not None and family.window and (family.window in _NO_SWITCH or given["use_sliding_window"]):
        if types or family.window in ("pattern", "pattern_or_none"):
            local = layer_shapes.local_layers(given)
        elif family.window == "without_rope":
            local = shape["no_rope_layers"]
        elif family.window == "every_second_lower_layer":
            local = list(range(0, min(given["max_window_layers"], shape["num_hidden_layers"]), 2))
        elif family.window == "every_layer_if_switched":
            local = list(range(shape["num_hidden_layers"]))
        else:
            local = list(range(given["max_window_layers"], shape["num_hidden_layers"]))
        return {"sliding_window": window, "sliding_window_layers": local}
    by_blocks = "layer_blocks" in shape
    if not by_blocks and family.window != "pattern" and types and set(types) != {"full_attention"}:
        raise refuse(
            "layer_types",
            sorted(set(types)),
            f"requires a sliding window, which this {family.model_type} configuration does not have.",
        )
    return {}


def _unhandled(config: dict[str, Any], family: Family) -> dict[str, Any]:
    """The fields of a config.json that nothing reads here, without those that say what the family computes in
    any case."""
    known = families()
    handled = {*family.fields, *known.window_fields[family.window], "layer_types", "quantization_config"}
    handled |= {*known.ignored, *family.own.split()}
    if family.layer_ropes:
        handled |= {"rope_parameters"}
    elif family.rope:
        handled |= {"rope_theta", "rope_scaling", "rope_parameters"}
        handled |= {"original_max_position_embeddings"} if family.local_rope_theta is None else set()

    def is_neutral(name: str, value: Any) -> bool:
        return value is None or (name in known.neutral and value == known.neutral[name])

    return {
        name: value for name, value in config.items() if name not in handled and not is_neutral(name, value)
    }


def _read_elsewhere(family: Family) -> frozenset[str]:
    """Fields that transformers reads, and of which one value is supported."""
    rope = {"partial_rotary_factor"} if family.rope and not family.layer_ropes else set()
    return families().only | rope | {*family.only.split()}


def _refuse_unhandled(config: dict[str, Any], family: Family, shape: dict[str, Any]) -> None:
    """Raise ConfigError naming a field that transformers reads, and whose value is not what the model
    computes."""
    if config.get("quantization_config") is not None:
        from megalite.families.quantization import check_quantization  # few files have one

        check_quantization(config["quantization_config"], family.model_type)
    read = _read_elsewhere(family)
    for name, value in _unhandled(config, family).items():
        stated = {"num_key_value_heads": "kv_heads", "head_dim": "head_size"}.get(name)
        only = getattr(ModelConfig(**shape), stated) if stated else families().neutral.get(name)
        if name in read and value != only:
            legal = (
                f"Legal value: {only!r}."
                if only is not None
                else f"Remove it if a {family.model_type} model computes the same."
            )
            raise refuse(name, value, f"is not supported by the {family.model_type} family. {legal}")


def unread_fields(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of a supported config.json that are ignored because transformers does not read them in this
    family."""
    family, config = _of_family(config)
    unread = {
        name: value
        for name, value in _unhandled(config, family).items()
        if name not in _read_elsewhere(family)
    }
    if family.rope:
        unread |= _unread_rope(config, family)
    return unread


def _unread_rope(config: dict[str, Any], family: Family) -> dict[str, Any]:
    """The entries of the rotary fields that are not of their rope_type."""
    unread: dict[str, Any] = {}
    for name in ("rope_parameters", "rope_scaling"):
        whole = config.get(name) or {}
        parts = {
            f"{name}.{part}": whole[part] for part in _LOCAL_ROPE if isinstance(whole.get(part), dict)
        } or {name: whole}
        for place, entries in parts.items():
            kind = entries.get("rope_type") or entries.get("type") or "default"
            read = {
                *ROPE_SCALING_KEYS.get(_ROPE_NAMES.get(kind, kind), ()),
                *_ROPE_ENTRIES,
                *_FURTHER_ENTRIES.get(kind, ()),
                *family.rope_entries.split(),
            }
            unread |= {f"{place}.{entry}": value for entry, value in entries.items() if entry not in read}
    return unread


def unread_note(config: dict[str, Any]) -> list[str]:
    """A line for the user about the fields that are ignored; none if there are none."""
    unread = unread_fields(config)
    listed = ", ".join(f"{name} = {show(value)[:40]}" for name, value in unread.items())
    return (
        [
            f"config.json: ignored, as transformers does not read them in a {config['model_type']} model: "
            f"{listed}"
        ]
        if unread
        else []
    )
