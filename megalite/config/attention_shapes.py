"""The shape of each layer's attention: layers with a window, or single layers, may have one of their own."""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from megalite.config.rule import Rule, divisors

if TYPE_CHECKING:
    from megalite.config.rules.context import RuleContext

LOCAL_SIZES = ("num_attention_heads", "num_key_value_heads", "head_dim", "value_head_dim")
"""Entries of model.local_attention that are sizes."""
ROTATED_SHARE = "partial_rotary_factor"
"""The other entry: the share of a head's channels that rotate."""


class AttentionShape(NamedTuple):
    """The shape of a layer's attention.

    Attributes:
        heads: number of query heads.
        kv_heads: number of key-value heads.
        head_size: width of a query's or key's head.
        value_size: width of a value's head.
        rotary_dim: number of channels of a head that rotate.
    """

    heads: int
    kv_heads: int
    head_size: int
    value_size: int
    rotary_dim: int


def _first(c: "RuleContext", broken: Callable[[AttentionShape], bool]) -> tuple[AttentionShape, int] | None:
    """The first shape other than the model's own that is broken, and a layer that has it."""
    if c.model.layer_heads is None and c.model.local_attention is None:
        return None
    shapes = c.model.attention_shapes.items()
    return next(((shape, layer) for shape, layer in shapes if broken(shape)), None)


def _uneven(shape: AttentionShape) -> bool:
    return shape.heads % shape.kv_heads != 0


def _uneven_text(c: "RuleContext") -> str:
    uneven = _first(c, _uneven)
    assert uneven is not None
    (heads, kv_heads, *_), layer = uneven
    return (
        f"gives layer {layer} {heads} query heads for {kv_heads} key-value heads: every key-value head must "
        "be shared by the same number of query heads"
    )


def _shared_by(c: "RuleContext") -> str:
    """Numbers of key-value heads that the heads of the layer share evenly."""
    uneven = _first(c, _uneven)
    return "" if uneven is None else ", ".join(map(str, divisors(uneven[0].heads)))


def _odd(shape: AttentionShape) -> bool:
    return bool(shape.head_size % 2 or shape.rotary_dim % 2 or not 0 < shape.rotary_dim <= shape.head_size)


def _wrong_entry(c: "RuleContext") -> str | None:
    """What is wrong with an entry of model.local_attention; None: nothing."""
    for name, value in (c.model.local_attention or {}).items():
        if name not in (*LOCAL_SIZES, ROTATED_SHARE):
            return f"has an entry {name}"
        whole = isinstance(value, int) and not isinstance(value, bool)
        if name in LOCAL_SIZES and not (whole and value >= 1):
            return f"has a {name} that is not a positive size"
        if name == ROTATED_SHARE and not (isinstance(value, float) or whole):
            return f"has a {name} that is not a number"
    return None


RULES: tuple[Rule, ...] = (
    Rule(
        "entries of local_attention",
        "model.local_attention",
        _wrong_entry,
        message=lambda c: _wrong_entry(c) or "",
        legal=f"Legal entries: {', '.join((*LOCAL_SIZES, ROTATED_SHARE))}.",
    ),
    Rule(
        "local_attention needs a window",
        "model.local_attention",
        lambda c: c.model.local_attention is not None and c.model.sliding_window is None,
        message="has no effect: {model.sliding_window}",
        legal="Remove it, or set model.sliding_window to a width.",
    ),
    Rule(
        "one entry of layer_heads for each layer",
        "model.layer_heads",
        lambda c: c.model.layer_heads is not None and len(c.model.layer_heads) != c.model.num_hidden_layers,
        message="does not have one entry for each of {model.num_hidden_layers}",
        legal=lambda c: f"Write {c.model.num_hidden_layers} numbers.",
    ),
    Rule(
        "heads of layers are given once",
        "model.layer_heads",
        lambda c: c.model.layer_heads and "num_attention_heads" in (c.model.local_attention or {}),
        message="and num_attention_heads in model.local_attention both give the heads of a layer",
        legal="Remove one of the two.",
    ),
    Rule(
        "heads of each layer over key-value heads",
        "model.layer_heads",
        lambda c: c.model.layer_heads is not None and _first(c, _uneven),
        message=_uneven_text,
        legal=lambda c: f"Write multiples of the key-value heads, of which there are {c.model.kv_heads}.",
    ),
    Rule(
        "heads of a local layer over key-value heads",
        "model.local_attention",
        lambda c: c.model.layer_heads is None and _first(c, _uneven),
        message=_uneven_text,
        legal=lambda c: f"Set num_key_value_heads to one of {_shared_by(c)}.",
    ),
    Rule(
        "heads of local layers rotate in pairs",
        "model.local_attention",
        lambda c: c.model.local_attention is not None and c.model.position == "rope" and _first(c, _odd),
        message="gives heads, or the channels of them that rotate, a width that is not even: rotary "
        "embeddings (model.position = rope) rotate pairs of channels",
        legal="Set head_dim to a multiple of 2, and partial_rotary_factor so that 2, 4, 6 … channels rotate.",
    ),
    Rule(
        "another rotation has a base of its own",
        "model.local_attention",
        lambda c: (
            c.model.local_rotation is not None
            and c.model.position == "rope"
            and c.model.rope_local_theta is None
            and c.model.rope_scaling is not None
        ),
        message="changes the channels that rotate, to which model.rope_scaling does not apply",
        legal="Set model.rope_local_theta to the base of the layers with a window.",
    ),
)
