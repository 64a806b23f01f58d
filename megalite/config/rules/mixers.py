"""Rules for delta, mamba and convolution blocks: sizes that fit each other, and the ranks of parallel.tp and
parallel.cp."""

from collections.abc import Callable
from dataclasses import fields

from megalite.config.dims import shared_evenly, whole_heads
from megalite.config.layer_blocks import blocks_in
from megalite.config.rule import Rule, describe_legal, divisors
from megalite.config.rules.context import RuleContext
from megalite.config.sections.model import ModelConfig

KINDS = ("delta", "mamba", "convolution")
OWN_FIELDS = {
    kind: [each.name for each in fields(ModelConfig) if each.metadata.get("kinds") == (kind,)]
    for kind in KINDS
}


def _has(c: RuleContext, kind: str) -> bool:
    return any(kind in blocks_in(entry) for entry in c.model.layer_blocks or ())


def whole_mixers(c: RuleContext, tp: int) -> bool:
    """Whether each of `tp` ranks has whole heads or channels of the model's blocks with a state."""
    model = c.model
    heads = {
        "delta": (model.linear_num_value_heads, model.linear_num_key_heads),
        "mamba": (model.mamba_num_heads, model.mamba_n_groups),
        "convolution": (model.hidden_size, 1),
    }
    return all(whole_heads(*heads[kind], tp) for kind in KINDS if _has(c, kind))


def _unused(kind: str) -> Rule:
    """Return the rule that fields of a kind need a block of the kind."""
    plain = ModelConfig()

    def field(c: RuleContext) -> str | None:
        changed = (name for name in OWN_FIELDS[kind] if getattr(c.model, name) != getattr(plain, name))
        return None if _has(c, kind) else next(changed, None)

    return Rule(
        f"fields of {kind} blocks need one",
        "model.layer_blocks",
        field,
        value=lambda c: c.model.layer_blocks,
        message=lambda c: f"has no {kind} block, and model.{field(c)} is set",
        legal=f"Name {kind} in the layers that have such a block, or remove the option.",
    )


def _fits(
    kind: str, name: str, option: str, broken: Callable[[ModelConfig], object], message: str, way_out: str
) -> Rule:
    return Rule(
        name,
        f"model.{option}",
        lambda c: _has(c, kind) and broken(c.model),
        message=message,
        legal=way_out,
    )


def _splits(kind: str, option: str, of: str) -> Rule:
    """Return the rule that parallel.tp divides a number of heads."""
    return Rule(
        f"tp divides {of}",
        "parallel.tp",
        lambda c: _has(c, kind) and getattr(c.model, option) % c.parallel.tp,
        message=f"does not divide {{model.{option}}}: each rank must hold whole {of}",
        legal=lambda c: divisors(getattr(c.model, option)),
    )


def _shares(kind: str, option: str, of: str) -> Rule:
    """Return the rule that parallel.tp splits or replicates what heads share."""
    return Rule(
        f"tp fits {of}",
        "parallel.tp",
        lambda c: _has(c, kind) and not shared_evenly(getattr(c.model, option), c.parallel.tp),
        message=f"neither divides {{model.{option}}} nor is a multiple of it: {of} are split or replicated "
        "evenly",
        legal=lambda c: [
            tp for tp in range(1, c.parallel.tp + 1) if shared_evenly(getattr(c.model, option), tp)
        ],
    )


def _exchanges(kind: str, heads: str, shared: str, of: str) -> Rule:
    """Return the rule that Ulysses splits a tp rank's heads, and splits or replicates what they share."""

    def sizes(c: RuleContext) -> list[int]:
        count, groups = (max(getattr(c.model, name) // c.parallel.tp, 1) for name in (heads, shared))
        return [cp for cp in divisors(count) if shared_evenly(groups, cp)]

    return Rule(
        f"ulysses divides {of}",
        "parallel.cp",
        lambda c: (
            _has(c, kind)
            and c.parallel.context == "ulysses"
            and c.parallel.cp > 1
            and c.parallel.cp not in sizes(c)
        ),
        message=f"does not fit {{model.{heads}}} and {{model.{shared}}} with {{parallel.tp}}: with "
        f"parallel.context = ulysses each rank computes whole {of}",
        legal=lambda c: (
            f"{describe_legal(c.parallel.cp, sizes(c))} Or set parallel.context to gather, ring or auto."
        ),
    )


RULES: tuple[Rule, ...] = (
    *map(_unused, KINDS),
    _fits(
        "delta",
        "value heads over key heads",
        "linear_num_value_heads",
        lambda model: model.linear_num_value_heads % model.linear_num_key_heads,
        "is not a multiple of {model.linear_num_key_heads}: every key head must be shared by the same number "
        "of value heads",
        "Change one of the two.",
    ),
    _fits(
        "delta",
        "a decay by channel has a key head for each value head",
        "linear_num_key_heads",
        lambda model: (
            model.delta_decay == "channel" and model.linear_num_key_heads != model.linear_num_value_heads
        ),
        "is not {model.linear_num_value_heads}, as required by {model.delta_decay}",
        "Set both to the same number.",
    ),
    _fits(
        "mamba",
        "mamba heads over groups",
        "mamba_n_groups",
        lambda model: model.mamba_num_heads % model.mamba_n_groups,
        "does not divide {model.mamba_num_heads}: every group must have the same number of heads",
        "Change one of the two.",
    ),
    _fits(
        "mamba",
        "limits of mamba's steps",
        "mamba_time_step_limit",
        lambda model: (
            (limit := model.mamba_time_step_limit) is not None and (len(limit) != 2 or limit[0] >= limit[1])
        ),
        "must be two numbers, the smallest and the largest step",
        "Write [0.0, .inf] for no limits, or null.",
    ),
    _fits(
        "mamba",
        "mamba's five multipliers",
        "mamba_multipliers",
        lambda model: model.mamba_multipliers is not None and len(model.mamba_multipliers) != 5,
        "must be five numbers, for z, x, B, C and dt",
        "Write five numbers, or null.",
    ),
    _fits(
        "mamba",
        "mamba's biases have no factor before them",
        "mamba_proj_bias",
        lambda model: model.mamba_proj_bias and model.mamba_in_multiplier != 1.0,
        "is incompatible with {model.mamba_in_multiplier}",
        "Set it to false, or the factor to 1.0.",
    ),
    _splits("delta", "linear_num_value_heads", "value heads of delta blocks"),
    _shares("delta", "linear_num_key_heads", "key heads of delta blocks"),
    _exchanges("delta", "linear_num_value_heads", "linear_num_key_heads", "value heads of delta blocks"),
    _exchanges("mamba", "mamba_num_heads", "mamba_n_groups", "heads of mamba blocks"),
    _splits("mamba", "mamba_num_heads", "heads of mamba blocks"),
    _shares("mamba", "mamba_n_groups", "groups of mamba blocks"),
    _splits("convolution", "hidden_size", "channels of convolution blocks"),
)
