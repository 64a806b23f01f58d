"""The kinds of blocks that model.layer_blocks may name, and its rules.

attention+feed_forward          a layer of these two blocks, one after the other
attention+mixture               experts in place of the feed-forward
delta+mixture                   a gated delta rule in place of attention
attention|feed_forward          beside each other: both read the same norm, and both are added to its input
mixture                         a layer of one block
"""

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, NamedTuple, get_args

from megalite.config.rule import Rule
from megalite.config.sections.parallel import ContextMethod

if TYPE_CHECKING:
    from megalite.config.rules.context import RuleContext


class BlockOption(NamedTuple):
    """A kind of block that model.layer_blocks may name.

    Attributes:
        slot: the slot of a layer that it takes.
        context: the values of parallel.context that it supports with more than one cp rank.
    """

    slot: str
    context: tuple[str, ...]


@cache  # plans ask for each layer, very often
def groups_in(entry: str) -> tuple[tuple[str, ...], ...]:
    """The kinds that an entry of model.layer_blocks names, in groups that follow each other; the blocks of a
    group are beside each other."""
    return tuple(tuple(name.strip() for name in group.split("|")) for group in entry.split("+"))


@cache
def blocks_in(entry: str) -> tuple[str, ...]:
    """The kinds that an entry of model.layer_blocks names."""
    return tuple(name for group in groups_in(entry) for name in group)


EVERY_CONTEXT: tuple[str, ...] = get_args(ContextMethod)
LAYER_BLOCKS = {
    "attention": BlockOption("attention", EVERY_CONTEXT),
    "latent_attention": BlockOption("attention", EVERY_CONTEXT),
    "indexed_attention": BlockOption("attention", ("ulysses", "gather", "auto")),
    "delta": BlockOption("mixer", EVERY_CONTEXT),
    "mamba": BlockOption("mixer", EVERY_CONTEXT),
    "convolution": BlockOption("mixer", EVERY_CONTEXT),
    "feed_forward": BlockOption("mlp", EVERY_CONTEXT),
    "mixture": BlockOption("mlp", EVERY_CONTEXT),
}
"""By name. `megalite.model.kinds` adds kinds that are registered."""


def _listed(c: "RuleContext") -> list[tuple[str, ...]]:
    """The kinds of the blocks of each layer that model.layer_blocks lists."""
    return [blocks_in(entry) for entry in c.model.layer_blocks or ()]


def _unknown_block(c: "RuleContext") -> str | None:
    return next((name for names in _listed(c) for name in names if name not in LAYER_BLOCKS), None)


def _same_slot(c: "RuleContext") -> str | None:
    """The first entry with two blocks of one slot."""
    for entry in c.model.layer_blocks or ():
        slots = [LAYER_BLOCKS[name].slot for name in blocks_in(entry) if name in LAYER_BLOCKS]
        if len(set(slots)) < len(slots):
            return entry
    return None


def _two_mixers(c: "RuleContext") -> str | None:
    """The first entry in which attention and a block with a state follow each other."""
    for entry in c.model.layer_blocks or ():
        slots = [{LAYER_BLOCKS[n].slot for n in group if n in LAYER_BLOCKS} for group in groups_in(entry)]
        if any("mixer" in group for group in slots) and any(
            "attention" in group and "mixer" not in group for group in slots
        ):
            return entry
    return None


def _beside(c: "RuleContext") -> str | None:
    """The first entry with blocks beside each other."""
    return next((entry for entry in c.model.layer_blocks or () if "|" in entry), None)


def _block_needs(name: str, option: str, lacks: Callable[["RuleContext"], bool], way_out: str) -> Rule:
    """A kind of block that another option excludes."""
    return Rule(
        f"{name} blocks and {option}",
        "model.layer_blocks",
        lambda c: any(name in names for names in _listed(c)) and lacks(c),
        value=lambda _: name,
        message=f"is incompatible with {{model.{option}}}",
        legal=way_out,
    )


RULES: tuple[Rule, ...] = (
    Rule(
        "an entry of layer_blocks for each layer",
        "model.layer_blocks",
        lambda c: c.model.layer_blocks is not None and len(c.model.layer_blocks) != c.model.num_hidden_layers,
        value=lambda c: len(c.model.layer_blocks or ()),
        message="is the number of entries, which must be {model.num_hidden_layers}",
        legal="Write one entry for each layer.",
    ),
    Rule(
        "layer_blocks are known",
        "model.layer_blocks",
        _unknown_block,
        value=_unknown_block,
        message="is not a kind of block",
        legal=lambda c: f"Known kinds: {', '.join(LAYER_BLOCKS)}.",
    ),
    Rule(
        "a slot for each block of a layer",
        "model.layer_blocks",
        _same_slot,
        value=_same_slot,
        message="names two kinds for the same part of a layer",
        legal="Name one kind of attention, or one in its place, and one of feed_forward and mixture.",
    ),
    Rule(
        "attention beside a block with a state",
        "model.layer_blocks",
        _two_mixers,
        value=_two_mixers,
        message="has attention and a block with a state after each other, which have the same norm",
        legal="Write | in place of +, or two layers.",
    ),
    Rule(
        "one way to place blocks beside each other",
        "model.layer_blocks",
        lambda c: c.model.parallel_block != "none" and _beside(c),
        value=_beside,
        message="has blocks beside each other, and so have all layers with {model.parallel_block}",
        legal="Set model.parallel_block to none, or write + in place of |.",
    ),
    Rule(
        "blocks beside each other with norms before",
        "model.layer_blocks",
        lambda c: c.model.norm_placement != "pre" and _beside(c),
        value=_beside,
        message="is incompatible with {model.norm_placement}: blocks beside each other have a norm at their "
        "input only",
        legal="Set model.norm_placement to pre, or write + in place of |.",
    ),
    _block_needs(
        "mixture",
        "num_experts",
        lambda c: not c.model.num_experts,
        "Set model.num_experts, or name feed_forward.",
    ),
    _block_needs(
        "latent_attention",
        "kv_lora_rank",
        lambda c: c.model.kv_lora_rank is None,
        "Set model.kv_lora_rank, or name attention.",
    ),
    _block_needs(
        "indexed_attention",
        "index_topk",
        lambda c: c.model.index_topk is None,
        "Set model.index_topk, or name latent_attention.",
    ),
    _block_needs(
        "attention",
        "kv_lora_rank",
        lambda c: c.model.kv_lora_rank is not None,
        "Name latent_attention, or remove model.kv_lora_rank.",
    ),
)
