"""Rules for `model.mup`: its keys, and a base that exists."""

from megalite.config.mup import NAMED, OWN_KEYS, base_model, broken_heads, unknown_keys
from megalite.config.rule import Rule
from megalite.config.rules.context import RuleContext


def _not_positive(c: RuleContext) -> str | None:
    """A key whose value is no positive integer, or base_width, if it is missing."""
    mup = c.model.mup or {}
    values = {"base_width": None, **mup}
    wrong = (name for name, value in values.items() if type(value) is not int or value < 1)
    return next(wrong, None)


def _broken(c: RuleContext) -> str | None:
    return broken_heads(c.model, c.model.mup["base_width"]) if c.model.mup else None


def _legal_widths(c: RuleContext) -> str:
    name = _broken(c) or ""
    own, width = getattr(c.model, name), c.model.hidden_size
    legal = [width * part // own for part in range(1, own + 1) if width * part % own == 0]
    widths = ", ".join(map(str, legal))
    return f"Choose base_width from {widths}, or give the base's number as {name} in model.mup."


RULES: tuple[Rule, ...] = (
    Rule(
        "mup's keys",
        "model.mup",
        lambda c: c.model.mup is not None and unknown_keys(c.model),
        message=lambda c: f"has the unknown key {unknown_keys(c.model)[0]}",
        legal=f"Keys: {', '.join((*OWN_KEYS, *NAMED))}.",
    ),
    Rule(
        "mup's values",
        "model.mup",
        lambda c: c.model.mup is not None and _not_positive(c),
        message=lambda c: f"needs a positive integer as {_not_positive(c)}",
        legal="Write {base_width: W}, the hidden_size of the model for which learning rates were chosen, or "
        "{base_width: W, base_depth: L} with its number of layers.",
    ),
    Rule(
        "mup's base has whole heads",
        "model.mup",
        _broken,
        message=lambda c: (
            f"gives the base a part of a head: model.{_broken(c)} = "
            f"{getattr(c.model, _broken(c) or '')} times {c.model.mup['base_width']}"  # type: ignore[index]
            f" / {c.model.hidden_size}"
        ),
        legal=_legal_widths,
    ),
    Rule(
        "mup keeps the size of a head",
        "model.mup",
        lambda c: c.model.mup and base_model(c.model).head_size != c.model.head_size,
        message=lambda c: (
            f"gives the base heads of {base_model(c.model).head_size} channels, and this model "
            f"has {c.model.head_size}: mup scales the number of heads, not their size"
        ),
        legal="Set model.num_attention_heads in proportion to the width, or model.head_dim.",
    ),
    Rule(
        "mup starts from random weights",
        "model.mup",
        lambda c: c.model.mup and (c.model.initial_weights or "").startswith("hf:"),
        message="is incompatible with {model.init_from}: those weights were not trained with it, and their "
        "logits would be scaled",
        legal="Remove model.mup. A model that was trained with it is exported as a plain model, without it.",
    ),
    Rule(
        "mup and adapters of PEFT",
        "model.mup",
        lambda c: c.model.mup and c.lora.init_from is not None,
        message="is incompatible with {lora.init_from}: that adapter was trained on a model without its "
        "factors",
        legal="Remove model.mup, and start from the exported model, which has none.",
    ),
    Rule(
        "mup scales the logits of words",
        "model.mup",
        lambda c: c.model.mup and c.model.output_head == "reward",
        message="is incompatible with {model.output_head}",
        legal="Export the language model, which gives a plain model, and start the reward model from it.",
    ),
    Rule(
        "mup sets learning rates",
        "model.mup",
        lambda c: c.model.mup and c.optimizer.lr_scaling != "none",
        message="is incompatible with {optimizer.lr_scaling}: the batch size would change the rate that the "
        "base was tuned for",
        legal="Set optimizer.lr_scaling to none, and tune optimizer.lr at the base with this batch size.",
    ),
)
