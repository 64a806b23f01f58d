"""The rules of the model's section: what its options need beside each other."""

import math
import os
from pathlib import Path
from typing import Any

from megalite.config import attention_shapes as shapes
from megalite.config import layer_blocks
from megalite.config.repository_id import is_repository_id
from megalite.config.rule import (
    CHECKPOINT_EXAMPLE,
    Rule,
    describe_legal,
    divisors,
    import_first,
    is_checkpoint,
    multiples,
)
from megalite.config.rules.context import RuleContext
from megalite.config.sections.model import ROPE_SCALING_KEYS, ModelConfig


def _layers_exist(name: str) -> Rule:
    def broken(c: RuleContext) -> bool:
        layers = getattr(c.model, name) or []
        return len(set(layers)) < len(layers) or not set(layers) <= set(range(c.model.num_hidden_layers))

    return Rule(
        f"{name} exist",
        f"model.{name}",
        broken,
        message="must list distinct layers of this model",
        legal=lambda c: f"Legal entries: 0 to {c.model.num_hidden_layers - 1}, each once.",
    )


def _changed(c: RuleContext, name: str) -> bool:
    """Whether an option of the model is not at its default."""
    return getattr(c.model, name) != getattr(ModelConfig(), name)


def _needs(name: str, what: str, option: str, way_out: str) -> Rule:
    """Return the rule that an option has no effect without another one, which stands for `what`.

    Args:
        way_out: how to set the other one.
    """
    return Rule(
        f"{name} needs {what}",
        f"model.{name}",
        lambda c: not getattr(c.model, option) and _changed(c, name),
        message=f"has no effect: {{model.{option}}}",
        legal=f"Remove it, or set model.{option}{way_out}.",
    )


def _not_with(name: str, what: str, option: str, means: str, legal: str) -> Rule:
    """Return the rule that an option must be at its default beside another one.

    Args:
        what, means: what the other one stands for, in the rule's name and in the message.
    """
    return Rule(
        f"{name} is incompatible with {what}",
        f"model.{name}",
        lambda c: getattr(c.model, option) is not None and _changed(c, name),
        message=f"is incompatible with {means}, {{model.{option}}}",
        legal=legal,
    )


_WITHOUT_EXPERTS = tuple(
    _needs(name, "experts", "num_experts", "")
    for name in (
        *(
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "moe_latent_size",
            "router_aux_loss_coef",
            "router_z_loss_coef",
        ),
        *("router_scores", "routed_scaling_factor", "router_logit_bias", "n_group", "expert_capacity_factor"),
        "mixture_out_multiplier",
    )
)

_MIXTURE = (
    *_WITHOUT_EXPERTS,
    Rule(
        "a token's experts exist",
        "model.num_experts_per_tok",
        lambda c: c.model.num_experts and c.model.num_experts_per_tok > c.model.num_experts,
        message="exceeds {model.num_experts}",
        legal=lambda c: range(1, (c.model.num_experts or 1) + 1),
    ),
    Rule(
        "norm_topk_min of renormalized weights",
        "model.norm_topk_min",
        lambda c: c.model.norm_topk_min is not None and not (c.model.num_experts and c.model.norm_topk_prob),
        message="has no effect: {model.num_experts}, {model.norm_topk_prob}",
        legal="Remove it, or set model.num_experts, and model.norm_topk_prob to true.",
    ),
    _layers_exist("mlp_only_layers"),
    Rule(
        "a mixture is left",
        "model.num_experts",
        lambda c: c.model.num_experts and not c.model.has_mixtures,
        message="has no effect: all layers are dense because of model.decoder_sparse_step, "
        "model.mlp_only_layers or model.layer_blocks",
        legal="Remove it, or make a layer a mixture.",
    ),
    Rule(
        "clamped_swiglu is gated",
        "model.hidden_act",
        lambda c: c.model.hidden_act == "clamped_swiglu" and not c.model.gated_mlp,
        message="requires a gate, but {model.gated_mlp}",
        legal="Set model.gated_mlp to true.",
    ),
    Rule(
        "xielu is plain",
        "model.hidden_act",
        lambda c: c.model.hidden_act == "xielu" and (c.model.gated_mlp or c.model.num_experts),
        message="is not supported with {model.gated_mlp}, {model.num_experts}: a gate and experts have no "
        "trained numbers of an activation",
        legal="Set model.gated_mlp to false and model.num_experts to null.",
    ),
)

_NORMS = (
    Rule(
        "norms after the rotation",
        "model.qk_norm_after_rope",
        lambda c: c.model.qk_norm_after_rope and (c.model.qk_norm == "none" or c.model.position != "rope"),
        message="has no effect: {model.qk_norm}, {model.position}",
        legal="Remove it, or set model.qk_norm to a norm and model.position to rope.",
    ),
    Rule(
        "norms of heads without weights",
        "model.qk_norm_weight",
        lambda c: not c.model.qk_norm_weight and c.model.qk_norm != "head",
        message="is not supported with {model.qk_norm}",
        legal="Remove it, or set model.qk_norm to head.",
    ),
    Rule(
        "no bias without a weight",
        "model.norm_weight",
        lambda c: not c.model.norm_weight and c.model.norm == "layer" and c.model.norm_bias,
        message="is incompatible with {model.norm_bias}",
        legal="Set model.norm_bias to false, or model.norm_weight to true.",
    ),
    Rule(
        "modules of multi-token prediction read the embedding itself",
        "model.embedding_norm",
        lambda c: c.model.embedding_norm and c.model.mtp_layers,
        message="is incompatible with {model.mtp_layers}: the modules have norms of their own for it",
        legal="Set it to false, or model.mtp_layers to 0.",
    ),
)

_GROUPS = (
    Rule(
        "groups divide the experts",
        "model.n_group",
        lambda c: c.model.n_group and c.model.num_experts and c.model.num_experts % c.model.n_group,
        message="must divide {model.num_experts} into groups of the same size",
        legal=lambda c: divisors(c.model.num_experts or 1),
    ),
    Rule(
        "a group has two experts",
        "model.n_group",
        lambda c: (
            c.model.n_group
            and c.model.num_experts
            and c.model.counted_in_group * c.model.n_group > c.model.num_experts
        ),
        message="leaves fewer than two of {model.num_experts} in a group, but the score of a group is the "
        "sum of its two "
        "best experts",
        legal=lambda c: [
            groups
            for groups in divisors(c.model.num_experts or 1)
            if 2 * groups <= (c.model.num_experts or 0)
        ],
    ),
    _needs("group_score", "groups", "n_group", ""),
    Rule(
        "topk_group needs groups",
        "model.topk_group",
        lambda c: c.model.topk_group > (c.model.n_group or 1),
        message="exceeds {model.n_group}",
        legal=lambda c: range(1, (c.model.n_group or 1) + 1),
    ),
    Rule(
        "groups have a token's experts",
        "model.num_experts_per_tok",
        lambda c: (
            c.model.n_group
            and c.model.num_experts
            and c.model.num_experts_per_tok * c.model.n_group > c.model.topk_group * c.model.num_experts
        ),
        message="exceeds the number of experts in {model.topk_group} of {model.n_group} groups",
        legal=lambda c: range(
            1, c.model.topk_group * (c.model.num_experts or 1) // (c.model.n_group or 1) + 1
        ),
    ),
)

_MTP = (
    Rule(
        "modules of multi-token prediction look up tokens only",
        "model.mtp_layers",
        lambda c: c.model.mtp_layers and c.model.position == "learned",
        message="is incompatible with {model.position}: the modules read further tokens, which have no "
        "learned "
        "positions of their own",
        legal="Set it to 0, or model.position to rope or none.",
    ),
)


def _not_with_latents(name: str, legal: str) -> Rule:
    return _not_with(name, "latents", "kv_lora_rank", "latent attention", legal)


_LATENTS = (
    *(
        _needs(name, "latents", "kv_lora_rank", "")
        for name in ("q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    ),
    _not_with_latents("head_dim", "Remove it, and set model.qk_nope_head_dim and model.qk_rope_head_dim."),
    _not_with_latents("qk_norm", "Set it to none: the latents have norms."),
    _not_with_latents("attention_bias", "Set it to false."),
    _not_with_latents("attention_sinks", "Set it to false."),
    _not_with_latents("attention_gate", "Set it to false."),
    *(_not_with_latents(name, "Remove it.") for name in ("value_head_dim", "layer_heads", "local_attention")),
    _not_with_latents("attention_out_bias", "Set it to false."),
    _not_with_latents("partial_rotary_factor", "Remove it, and set model.qk_rope_head_dim."),
    Rule(
        "every head has its key and value",
        "model.num_key_value_heads",
        lambda c: c.model.kv_lora_rank is not None and c.model.kv_heads != c.model.num_attention_heads,
        message="is incompatible with latent attention, in which each of {model.num_attention_heads} has its "
        "own key "
        "and value",
        legal="Remove it.",
    ),
)


def _indexer_needs(name: str) -> Rule:
    return Rule(
        f"an indexer needs {name}",
        "model.index_topk",
        lambda c: c.model.index_topk is not None and getattr(c.model, name) is None,
        message=f"requires model.{name}, the width of a latent, which is null",
        legal=f"Set model.{name}, or remove model.index_topk.",
    )


def _not_with_indexer(name: str, legal: str) -> Rule:
    return _not_with(name, "an indexer", "index_topk", "attention to selected rows", legal)


_INDEXED = (
    *(
        _needs(name, "an indexer", "index_topk", "")
        for name in ("index_n_heads", "index_head_dim", "indexer_types", "index_loss_coef")
    ),
    *map(_indexer_needs, ("kv_lora_rank", "q_lora_rank")),
    _not_with_indexer("sliding_window", "Remove it."),
    _not_with_indexer("attention_softcap", "Remove it."),
    _not_with_indexer("attention_dropout", "Set it to 0."),
    Rule(
        "the rotating channels of an indexer are some of its own",
        "model.index_head_dim",
        lambda c: c.model.index_topk is not None and c.model.index_head_dim < c.model.qk_rope_head_dim,
        message="is smaller than {model.qk_rope_head_dim}, the number of its channels that rotate",
        legal="Make it at least as large, or model.qk_rope_head_dim smaller.",
    ),
    Rule(
        "an indexer type for each layer",
        "model.indexer_types",
        lambda c: (
            c.model.indexer_types is not None and len(c.model.indexer_types) != c.model.num_hidden_layers
        ),
        value=lambda c: len(c.model.indexer_types or ()),
        message="is the number of entries, which must be {model.num_hidden_layers}",
        legal="Write one entry for each layer.",
    ),
    Rule(
        "indexer types are known",
        "model.indexer_types",
        lambda c: set(c.model.indexer_types or ()) - {"full", "shared"},
        message="has an entry that is neither full nor shared",
        legal="Write full or shared for each layer.",
    ),
    Rule(
        "a selection to share",
        "model.indexer_types",
        lambda c: any(
            "indexed_attention" in c.model.block_names(layer) and c.model.selecting_layer(layer) < 0
            for layer in range(c.model.num_hidden_layers)
        ),
        message="has a shared layer before the first full one: there is no selection to share",
        legal="Make the first layer with indexed_attention full.",
    ),
)


def _init_from(c: RuleContext) -> str:
    return c.model.initial_weights or ""


def _own_weights(c: RuleContext) -> str:
    """The way out for what is no checkpoint: hf: for a Hugging Face model, an import, else an example."""
    path = _init_from(c)
    if (other := import_first(path)) is not None:
        return other
    if os.path.isfile(Path(path, "config.json")) or is_repository_id(path):
        return (
            f"The weights of a Hugging Face model are hf:{path}; set model.from_hf to {path} for its shape."
        )
    return CHECKPOINT_EXAMPLE


def _hf_weights(c: RuleContext) -> str:
    """The way out for hf: before what is no Hugging Face model."""
    path = _init_from(c).removeprefix("hf:")
    if is_checkpoint(path):
        return f"It is a checkpoint of megalite: set it to {path}."
    return "Give the directory of one after hf:."


def _legal_heads(c: RuleContext) -> list[int]:
    """Numbers of heads that divide the hidden size, if possible into heads that rope can rotate and key-value
    heads can be shared by."""
    all_heads, kv = divisors(c.model.hidden_size), c.model.num_key_value_heads or 1
    even = 2 if c.model.position == "rope" else 1
    return [
        heads for heads in all_heads if heads % kv == 0 and c.model.hidden_size // heads % even == 0
    ] or all_heads


def _rotates_part_of_a_pair(c: RuleContext) -> bool:
    factor, channels = c.model.partial_rotary_factor, c.model.rotary_dim
    return factor != 1 and (not 0 < factor < 1 or channels % 2 == 1 or channels == 0)


def _rope_type(c: RuleContext) -> Any:
    return (c.model.rope_scaling or {}).get("rope_type")


def _scaling_problem(c: RuleContext) -> str | None:
    """Why the values of rope_scaling cannot be used, given that its type is known; None if they can."""
    scaling = dict(c.model.rope_scaling or {})
    kind = scaling.pop("rope_type", "default")
    required = ROPE_SCALING_KEYS[kind]
    if kind == "yarn" and not isinstance(scaling.pop("truncate", True), bool):
        return "has a truncate that is neither true nor false"
    if set(scaling) != set(required):
        return f"does not have the keys of rope_type {kind}"
    lists = [value for value in scaling.values() if isinstance(value, list)]
    numbers = [value for value in scaling.values() if not isinstance(value, list)] + [
        value for each in lists for value in each
    ]
    if not all(isinstance(v, (int, float)) and math.isfinite(v) and v > 0 for v in numbers):
        return "holds a value that is not a positive number"
    if [len(each) for each in lists] != ([c.model.rotary_dim // 2] * 2 if kind == "longrope" else []):
        return (
            f"requires {c.model.rotary_dim // 2} numbers, one for each pair of channels, in longrope's "
            "short_factor and long_factor"
        )
    if kind == "dynamic" and c.model.rotary_dim <= 2:
        return "requires more than 2 rotating channels in a head"
    if kind == "llama3" and scaling["high_freq_factor"] <= scaling["low_freq_factor"]:
        return "has high_freq_factor <= low_freq_factor, between which it interpolates"
    return None


def _scaling_example(c: RuleContext) -> str:
    lists = {"short_factor": "[N, …]", "long_factor": "[N, …]"}
    keys = [
        f"rope_type: {_rope_type(c)}",
        *(f"{key}: {lists.get(key, 'N')}" for key in ROPE_SCALING_KEYS[_rope_type(c)]),
    ]
    return f"Write {{{', '.join(keys)}}}, every N a positive number."


RULES: tuple[Rule, ...] = (
    *layer_blocks.RULES,
    *_MIXTURE,
    *_NORMS,
    *_GROUPS,
    *_MTP,
    *_LATENTS,
    *(
        _needs(name, "a gate", "attention_gate", " to true")
        for name in ("attention_gate_act", "attention_gate_width")
    ),
    _layers_exist("sink_layers"),
    _needs("sink_layers", "sinks", "attention_sinks", " to true"),
    Rule(
        "query_scale_beta and its positions",
        "model.query_scale_beta",
        lambda c: (c.model.query_scale_beta is None) != (c.model.query_scale_positions is None),
        message="and {model.query_scale_positions} are one factor of positions",
        legal="Set both, or neither.",
    ),
    Rule(
        "scaled queries rotate",
        "model.query_scale_beta",
        lambda c: (
            c.model.query_scale_beta is not None and (c.model.position != "rope" or c.model.no_rope_layers)
        ),
        message="is supported with rotary embeddings in every layer only: {model.position}, "
        "{model.no_rope_layers}",
        legal="Set it to null, or model.position to rope and model.no_rope_layers to null.",
    ),
    *_INDEXED,
    Rule(
        "gates have no sinks beside them",
        "model.attention_gate",
        lambda c: c.model.attention_gate and c.model.attention_sinks,
        message="is incompatible with {model.attention_sinks}",
        legal="Set one of them to false.",
    ),
    Rule(
        "a factor on the input of attention alone",
        "model.attention_in_multiplier",
        lambda c: (
            c.model.attention_in_multiplier != 1.0
            and (c.model.attention_bias or c.model.attention_out_bias or c.model.attention_gate)
        ),
        message="is incompatible with {model.attention_bias}, {model.attention_out_bias} or "
        "{model.attention_gate}",
        legal="Set it to 1.0, or the others to false.",
    ),
    Rule(
        "a factor on keys without norms",
        "model.key_multiplier",
        lambda c: (
            (c.model.attention_in_multiplier, c.model.key_multiplier) != (1.0, 1.0)
            and c.model.qk_norm != "none"
        ),
        message="and {model.attention_in_multiplier} are incompatible with {model.qk_norm}",
        legal="Set both to 1.0, or model.qk_norm to none.",
    ),
    *(
        _not_with_latents(name, "Set it to 1.0.")
        for name in ("attention_in_multiplier", "key_multiplier", "attention_out_multiplier")
    ),
    Rule(
        "two factors of the feed-forward",
        "model.mlp_multipliers",
        lambda c: (
            (factors := c.model.mlp_multipliers) is not None
            and (len(factors) != 2 or not c.model.gated_mlp or c.model.num_experts)
        ),
        message="must be two numbers, of a gated feed-forward without experts: {model.gated_mlp}, "
        "{model.num_experts}",
        legal="Write those of the gate and of the output, or null.",
    ),
    Rule(
        "preset or from_hf",
        "model.from_hf",
        lambda c: c.model.from_hf and c.model.preset,
        message="and {model.preset} both set the shape",
        legal="Remove one of the two.",
    ),
    Rule(
        "init_from exists",
        "model.init_from",
        lambda c: (path := _init_from(c)) and path[:3] != "hf:" and not is_checkpoint(path),
        message="is neither a checkpoint (manifest.json is missing) nor a run with a checkpoint",
        legal=_own_weights,
    ),
    Rule(
        "init_from hf exists",
        "model.init_from",
        lambda c: (
            (path := _init_from(c)).startswith("hf:") and not (Path(path[3:]) / "config.json").is_file()
        ),
        message="is not a Hugging Face model: config.json is missing",
        legal=_hf_weights,
    ),
    Rule(
        "hidden size over heads",
        "model.num_attention_heads",
        lambda c: (
            c.model.head_dim is None
            and c.model.kv_lora_rank is None
            and c.model.hidden_size % c.model.num_attention_heads
        ),
        message="does not divide {model.hidden_size}, and model.head_dim is not set",
        legal=_legal_heads,
    ),
    Rule(
        "heads over key-value heads",
        "model.num_key_value_heads",
        lambda c: c.model.num_attention_heads % c.model.kv_heads,
        message="does not divide {model.num_attention_heads}: every key-value head must be shared by the "
        "same "
        "number of query heads",
        legal=lambda c: divisors(c.model.num_attention_heads),
    ),
    Rule(
        "even head width for rope",
        "model.head_dim",
        lambda c: c.model.position == "rope" and c.model.kv_lora_rank is None and c.model.head_size % 2,
        value=lambda c: c.model.head_size,
        message="must be even, because rotary embeddings (model.position = rope) rotate pairs of channels",
        legal=lambda c: multiples(c.model.head_size, 2),
    ),
    Rule(
        "even rotating width for rope",
        "model.qk_rope_head_dim",
        lambda c: (
            c.model.position == "rope" and c.model.kv_lora_rank is not None and c.model.qk_rope_head_dim % 2
        ),
        message="must be even, because rotary embeddings (model.position = rope) rotate pairs of channels",
        legal=lambda c: multiples(c.model.qk_rope_head_dim, 2),
    ),
    Rule(
        "partial_rotary_factor rotates pairs",
        "model.partial_rotary_factor",
        _rotates_part_of_a_pair,
        message=lambda c: (
            f"rotates {c.model.rotary_dim} of the {c.model.head_size} channels of a head: they rotate in "
            "pairs"
        ),
        legal=lambda c: (
            "Legal values: 2, 4, 6 … channels, as a share of a head's width. "
            + describe_legal(
                c.model.partial_rotary_factor,
                [channels / c.model.rotary_width for channels in range(2, c.model.rotary_width + 1, 2)],
            )
        ),
    ),
    Rule(
        "partial_rotary_factor needs rope",
        "model.partial_rotary_factor",
        lambda c: c.model.partial_rotary_factor != 1 and c.model.position != "rope",
        message="has no effect: {model.position}",
        legal="Remove it, or set model.position to rope.",
    ),
    Rule(
        "rope_local_theta needs rope and a window",
        "model.rope_local_theta",
        lambda c: (
            c.model.rope_local_theta is not None
            and (c.model.position != "rope" or c.model.sliding_window is None)
        ),
        message="has no effect: {model.position}, {model.sliding_window}",
        legal="Remove it, or set model.position to rope and model.sliding_window to a width.",
    ),
    Rule(
        "parallel_block with norms before",
        "model.parallel_block",
        lambda c: c.model.parallel_block != "none" and c.model.norm_placement != "pre",
        message="is incompatible with {model.norm_placement}: parallel blocks have norms only at "
        "their input only",
        legal="Set model.norm_placement to pre, or model.parallel_block to none.",
    ),
    Rule(
        "post_norm_layers without parallel_block",
        "model.post_norm_layers",
        lambda c: c.model.parallel_block != "none" and c.model.post_norm_layers,
        message="is incompatible with {model.parallel_block}: parallel blocks have norms at their input only",
        legal="Remove it, or set model.parallel_block to none.",
    ),
    Rule(
        "norm_bias of a LayerNorm",
        "model.norm_bias",
        lambda c: not c.model.norm_bias and c.model.norm != "layer",
        message="has no effect: {model.norm}",
        legal="Remove it, or set model.norm to layer.",
    ),
    Rule(
        "rope_scaling needs rope",
        "model.rope_scaling",
        lambda c: c.model.rope_scaling and c.model.position != "rope",
        message="has no effect with {model.position}",
        legal="Remove it, or set model.position to rope.",
    ),
    Rule(
        "rope_scaling type",
        "model.rope_scaling.rope_type",
        lambda c: c.model.rope_scaling is not None and _rope_type(c) not in ROPE_SCALING_KEYS,
        value=_rope_type,
        message="is not a supported rotary scaling",
        legal=lambda c: (
            "Write rope_type in place of type, its name in older files."
            if "type" in (c.model.rope_scaling or {})
            else list(ROPE_SCALING_KEYS)
        ),
    ),
    Rule(
        "rope_scaling values",
        "model.rope_scaling",
        _scaling_problem,
        message=lambda c: _scaling_problem(c) or "",
        legal=_scaling_example,
    ),
    _layers_exist("post_norm_layers"),
    _layers_exist("no_rope_layers"),
    Rule(
        "no_rope_layers needs rope",
        "model.no_rope_layers",
        lambda c: c.model.no_rope_layers and c.model.position != "rope",
        message="has no effect: {model.position}",
        legal="Remove it, or set model.position to rope.",
    ),
    _layers_exist("sliding_window_layers"),
    Rule(
        "sliding_window_layers needs a window",
        "model.sliding_window_layers",
        lambda c: c.model.sliding_window_layers is not None and c.model.sliding_window is None,
        message="has no effect, because model.sliding_window is not set",
        legal="Remove it, or set model.sliding_window.",
    ),
    Rule(
        "rows are added to weights",
        "model.resize_embeddings",
        lambda c: c.model.resize_embeddings is not None and c.model.initial_weights is None,
        message="adds rows to the embedding of model.init_from, which is not set",
        legal="Set model.init_from, or remove it: random weights have the vocabulary of the data.",
    ),
    *shapes.RULES,
)
