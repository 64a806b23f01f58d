"""Rules for the model and its adapters: options that fit each other."""

import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from megalite.config.rule import (
    CHECKPOINT_EXAMPLE,
    Rule,
    RuleContext,
    describe_legal,
    divisors,
    is_checkpoint,
    multiples,
)
from megalite.config.schema import (
    EXPERTS,
    PROJECTIONS,
    ROPE_SCALING_KEYS,
    SAVED_MODULES,
    LoraConfig,
    ModelConfig,
)


def _layers_exist(name: str) -> Rule:
    def broken(c: RuleContext) -> bool:
        layers = getattr(c.model, name) or []
        return len(set(layers)) < len(layers) or not set(layers) <= set(range(c.model.num_hidden_layers))

    return Rule(
        f"{name} exist",
        f"model.{name}",
        broken,
        message="does not list distinct layers of this model",
        legal=lambda c: f"Legal entries: 0 to {c.model.num_hidden_layers - 1}, each once.",
    )


def _init_from(c: RuleContext) -> str:
    return c.model.initial_weights or ""


def _own_weights(c: RuleContext) -> str:
    """The way out for what is no checkpoint: hf: for a Hugging Face model, else an example."""
    from megalite.families.hub import is_id  # with the libraries of a network

    path = _init_from(c)
    if os.path.isfile(Path(path, "config.json")) or is_id(path):
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
            f"needs {c.model.rotary_dim // 2} numbers, one for each pair of channels, in longrope's "
            "short_factor and long_factor"
        )
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


def _rotates_part_of_a_pair(c: RuleContext) -> bool:
    factor, channels = c.model.partial_rotary_factor, c.model.rotary_dim
    return factor != 1 and (not 0 < factor < 1 or channels % 2 == 1 or channels == 0)


_ALONE = "Remove it, or leave lora.targets out: then all projections of the model have adapters."


def _without_rank(c: RuleContext) -> bool:
    """Whether there are no adapters, and yet an option that is about them."""
    plain = LoraConfig()
    names = ("dropout", "targets", "init_from", "ranks", "alphas", "dora", "modules_to_save", "scaling")
    return not c.lora.rank and any(
        (getattr(c.lora, name) or None) != (getattr(plain, name) or None) for name in names
    )


def _names(option: str, c: RuleContext) -> list[str]:
    return list(getattr(c.lora, option) or ())


def _first(option: str, wrong: Callable[[RuleContext, str], bool], c: RuleContext) -> str:
    """The first name in an option that is wrong, else an empty text."""
    return next((name for name in _names(option, c) if wrong(c, name)), "")


def _attention_has(c: RuleContext) -> tuple[str, ...]:
    """The projections of a model with this kind of attention, feed-forward included."""
    if c.model.kv_lora_rank is None:
        return tuple(role for role in PROJECTIONS if role not in ("q_a", "q_b", "kv_a", "kv_b"))
    queries = ("q",) if c.model.q_lora_rank is None else ("q_a", "q_b")
    return (*queries, "kv_a", "kv_b", "o", "gate", "up", "down")


def _unknown(option: str, known: tuple[str, ...]) -> Rule:
    find = partial(_first, option, lambda c, name: name not in known)
    return Rule(
        f"lora.{option} are known",
        f"lora.{option}",
        find,
        message=lambda c: f"names {find(c)}",
        legal=f"Legal names: {', '.join(known)}.",
    )


def _adapted(option: str) -> Rule:
    find = partial(
        _first, option, lambda c, name: not c.lora.adapts(name) or name == "gate" and not c.model.gated_mlp
    )
    return Rule(
        f"lora.{option} are of targets",
        f"lora.{option}",
        lambda c: c.lora.rank and find(c),
        message=lambda c: f"names {find(c)}, which has no adapter",
        legal="Remove the entry, or add it to lora.targets.",
    )


def _of_experts(c: RuleContext) -> str:
    """The first of lora.targets that is a part of experts, else an empty text."""
    return _first("targets", lambda c, name: name in EXPERTS, c)


def _of_no_layer(c: RuleContext) -> bool:
    """Whether lora.targets names matrices of dense feed-forwards alone, and there are none: nothing would be
    trained."""
    dense = c.model.shared_expert_intermediate_size or not all(
        map(c.model.is_mixture, range(c.model.num_hidden_layers))
    )
    targets = set(_names("targets", c))
    return bool(
        c.lora.rank
        and targets
        and targets <= {"gate", "up", "down"}
        and not dense
        and not c.lora.modules_to_save
    )


_WITH_EXPERTS = tuple(
    Rule(
        f"lora.{option} and experts",
        f"lora.{option}",
        partial(lambda option, c: getattr(c.lora, option) and _of_experts(c), option),
        message=lambda c: f"is not supported for {_of_experts(c)} of lora.targets, as in PEFT",
        legal=f"Set it to {off}, or remove {' and '.join(EXPERTS)} from lora.targets.",
    )
    for option, off in (("dropout", "0"), ("dora", "false"))
)

_WITHOUT_EXPERTS = tuple(
    Rule(
        f"{name} needs experts",
        f"model.{name}",
        partial(
            lambda name, c: (
                not c.model.num_experts and getattr(c.model, name) != getattr(ModelConfig(), name)
            ),
            name,
        ),
        message="has no effect: {model.num_experts}",
        legal="Remove it, or set model.num_experts.",
    )
    for name in (
        *(
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "router_aux_loss_coef",
            "router_z_loss_coef",
        ),
        *("router_scores", "routed_scaling_factor", "router_logit_bias", "n_group", "expert_capacity_factor"),
    )
)

_AHEAD = (
    Rule(
        "modules of multi-token prediction look up tokens only",
        "model.mtp_layers",
        lambda c: c.model.mtp_layers and c.model.position == "learned",
        message="does not fit {model.position}: the modules look up further tokens, which have no learned "
        "positions of their own",
        legal="Set it to 0, or model.position to rope or none.",
    ),
    Rule(
        "modules of multi-token prediction and scaled logits",
        "model.mtp_layers",
        lambda c: c.model.mtp_layers and c.model.logit_scale is not None,
        message="does not fit {model.logit_scale}: the modules read the final norm, which that would scale",
        legal="Set it to 0, or model.logit_scale to null.",
    ),
    Rule(
        "adapters and modules of multi-token prediction",
        "model.mtp_layers",
        lambda c: c.model.mtp_layers and c.lora.rank,
        message="does not fit {lora.rank}: PEFT's models do not have these modules, so that an adapter of "
        "them could not be exported",
        legal="Set it to 0, which leaves them out.",
    ),
)

_GROUPS = (
    Rule(
        "groups divide the experts",
        "model.n_group",
        lambda c: c.model.n_group and c.model.num_experts and c.model.num_experts % c.model.n_group,
        message="does not divide {model.num_experts}: groups are equal",
        legal=lambda c: divisors(c.model.num_experts or 1),
    ),
    Rule(
        "a group has two experts",
        "model.n_group",
        lambda c: (
            c.model.n_group
            and c.model.num_experts
            and c.model.router_scores == "sigmoid"
            and 2 * c.model.n_group > c.model.num_experts
        ),
        message="leaves less than two of {model.num_experts} in a group, whose score is the sum of its two "
        "best experts",
        legal=lambda c: [
            groups
            for groups in divisors(c.model.num_experts or 1)
            if 2 * groups <= (c.model.num_experts or 0)
        ],
    ),
    Rule(
        "topk_group needs groups",
        "model.topk_group",
        lambda c: c.model.topk_group > (c.model.n_group or 1),
        message="is more than {model.n_group}",
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
        message="is more than the experts in {model.topk_group} of {model.n_group} groups",
        legal=lambda c: range(
            1, c.model.topk_group * (c.model.num_experts or 1) // (c.model.n_group or 1) + 1
        ),
    ),
)


def _without_latents(name: str) -> Rule:
    return Rule(
        f"{name} needs latents",
        f"model.{name}",
        lambda c: c.model.kv_lora_rank is None and getattr(c.model, name) != getattr(ModelConfig(), name),
        message="has no effect: {model.kv_lora_rank}",
        legal="Remove it, or set model.kv_lora_rank.",
    )


def _not_with_latents(name: str, legal: str) -> Rule:
    return Rule(
        f"{name} does not fit latents",
        f"model.{name}",
        lambda c: c.model.kv_lora_rank is not None and getattr(c.model, name) != getattr(ModelConfig(), name),
        message="does not fit latent attention, {model.kv_lora_rank}",
        legal=legal,
    )


_LATENTS = (
    *map(_without_latents, ("q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")),
    _not_with_latents("head_dim", "Remove it, and set model.qk_nope_head_dim and model.qk_rope_head_dim."),
    _not_with_latents("qk_norm", "Set it to none: the latents have norms."),
    _not_with_latents("attention_bias", "Set it to false."),
    _not_with_latents("attention_sinks", "Set it to false."),
    _not_with_latents("attention_out_bias", "Set it to false."),
    _not_with_latents("partial_rotary_factor", "Remove it, and set model.qk_rope_head_dim."),
    Rule(
        "every head has its key and value",
        "model.num_key_value_heads",
        lambda c: c.model.kv_lora_rank is not None and c.model.kv_heads != c.model.num_attention_heads,
        message="does not fit latent attention, in which each of {model.num_attention_heads} has its own key "
        "and value",
        legal="Remove it.",
    ),
)

_MIXTURE = (
    *_WITHOUT_EXPERTS,
    Rule(
        "a token's experts exist",
        "model.num_experts_per_tok",
        lambda c: c.model.num_experts and c.model.num_experts_per_tok > c.model.num_experts,
        message="is more than {model.num_experts}",
        legal=lambda c: range(1, (c.model.num_experts or 1) + 1),
    ),
    _layers_exist("mlp_only_layers"),
    Rule(
        "a mixture is left",
        "model.num_experts",
        lambda c: c.model.num_experts and not c.model.has_mixtures,
        message="has no effect: model.decoder_sparse_step and model.mlp_only_layers make every layer dense",
        legal="Remove it, or leave a layer out of mlp_only_layers.",
    ),
    Rule(
        "clamped_swiglu is gated",
        "model.hidden_act",
        lambda c: c.model.hidden_act == "clamped_swiglu" and not c.model.gated_mlp,
        message="has a gate, and {model.gated_mlp}",
        legal="Set model.gated_mlp to true.",
    ),
)

RULES: tuple[Rule, ...] = (
    *_MIXTURE,
    *_GROUPS,
    *_AHEAD,
    *_LATENTS,
    Rule(
        "preset or from_hf",
        "model.from_hf",
        lambda c: c.model.from_hf and c.model.preset,
        message="and {model.preset} both give the shape",
        legal="Remove one of the two.",
    ),
    Rule(
        "init_from exists",
        "model.init_from",
        lambda c: (path := _init_from(c)) and path[:3] != "hf:" and not is_checkpoint(path),
        message="is neither a checkpoint (it has no manifest.json) nor a run that has saved one",
        legal=_own_weights,
    ),
    Rule(
        "init_from hf exists",
        "model.init_from",
        lambda c: (
            (path := _init_from(c)).startswith("hf:") and not (Path(path[3:]) / "config.json").is_file()
        ),
        message="names no Hugging Face model: there is no config.json",
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
        message="does not divide {model.hidden_size}, and model.head_dim is not given",
        legal=_legal_heads,
    ),
    Rule(
        "heads over key-value heads",
        "model.num_key_value_heads",
        lambda c: c.model.num_attention_heads % c.model.kv_heads,
        message="does not divide {model.num_attention_heads}: each key-value head is shared by the same "
        "number of query heads",
        legal=lambda c: divisors(c.model.num_attention_heads),
    ),
    Rule(
        "even head width for rope",
        "model.head_dim",
        lambda c: c.model.position == "rope" and c.model.kv_lora_rank is None and c.model.head_size % 2,
        value=lambda c: c.model.head_size,
        message="is odd: rotary embeddings (model.position = rope) rotate pairs of channels",
        legal=lambda c: multiples(c.model.head_size, 2),
    ),
    Rule(
        "even rotating width for rope",
        "model.qk_rope_head_dim",
        lambda c: (
            c.model.position == "rope" and c.model.kv_lora_rank is not None and c.model.qk_rope_head_dim % 2
        ),
        message="is odd: rotary embeddings (model.position = rope) rotate pairs of channels",
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
        legal="Remove it, or set model.position to rope and give model.sliding_window.",
    ),
    Rule(
        "parallel_block with norms before",
        "model.parallel_block",
        lambda c: c.model.parallel_block != "none" and c.model.norm_placement != "pre",
        message="does not fit {model.norm_placement}: in parallel, attention and feed-forward have norms at "
        "their input only",
        legal="Set model.norm_placement to pre, or model.parallel_block to none.",
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
        message="has nothing to scale: {model.position}",
        legal="Remove it, or set model.position to rope.",
    ),
    Rule(
        "rope_scaling type",
        "model.rope_scaling.rope_type",
        lambda c: c.model.rope_scaling is not None and _rope_type(c) not in ROPE_SCALING_KEYS,
        value=_rope_type,
        message="is not a known kind of rotary scaling",
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
        message="has no effect: model.sliding_window is not given",
        legal="Remove it, or give model.sliding_window.",
    ),
    Rule(
        "lora has a rank",
        "lora.rank",
        _without_rank,
        message="trains the model itself, but other options of lora are set",
        legal="Set it, for example to 16, or remove the others.",
    ),
    _unknown("targets", (*PROJECTIONS, *EXPERTS)),
    _unknown("ranks", (*PROJECTIONS, *EXPERTS)),
    _unknown("alphas", (*PROJECTIONS, *EXPERTS)),
    _unknown("modules_to_save", SAVED_MODULES),
    Rule(
        "lora.targets are there",
        "lora.targets",
        lambda c: "gate" in _names("targets", c) and not c.model.gated_mlp,
        message="names gate, but {model.gated_mlp}",
        legal=_ALONE,
    ),
    Rule(
        "lora.targets are of this attention",
        "lora.targets",
        partial(_first, "targets", lambda c, name: name in PROJECTIONS and name not in _attention_has(c)),
        message=lambda c: (
            f"names {_first('targets', lambda c, name: name not in _attention_has(c), c)}, which this model "
            "does not have"
        ),
        legal=_ALONE,
    ),
    Rule(
        "adapters of experts need experts",
        "lora.targets",
        lambda c: not c.model.num_experts and _of_experts(c),
        message=lambda c: f"names {_of_experts(c)}, but the model has no experts",
        legal=_ALONE,
    ),
    *_WITH_EXPERTS,
    Rule(
        "adapters are of some layer",
        "lora.targets",
        _of_no_layer,
        message="names matrices of dense feed-forwards, and every layer of this model has a mixture of "
        "experts: nothing would be trained",
        legal=f"Name {' and '.join(EXPERTS)}, or projections of attention.",
    ),
    _adapted("ranks"),
    _adapted("alphas"),
    Rule(
        "a tied head is saved with the embedding",
        "lora.modules_to_save",
        lambda c: (
            c.model.tie_word_embeddings
            and "head" in _names("modules_to_save", c)
            and "embedding" not in _names("modules_to_save", c)
        ),
        message="names head, but {model.tie_word_embeddings}: the head is the embedding",
        legal="Name embedding, which trains both.",
    ),
    Rule(
        "lora.init_from is an adapter",
        "lora.init_from",
        lambda c: (
            c.lora.init_from
            and not (c.model.initial_weights and Path(c.lora.init_from, "adapter_config.json").is_file())
        ),
        message="is not a PEFT adapter, a directory with adapter_config.json, for {model.init_from}",
        legal="Set both options, model.init_from to the model that it adapts.",
    ),
)
