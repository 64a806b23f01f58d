"""Which options a rule reads, and which of them a file leaves open.

A rule that reads an open option is judged by a default.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import fields
from typing import Any

from megalite.config.rule import Rule
from megalite.config.rules.context import RuleContext
from megalite.config.schema import Config

SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
"""Fields of the model for which no default is meant: those of the default model are no one's choice."""
SHAPE = frozenset(f"model.{name}" for name in SIZES)
OPEN = frozenset({"parallel.dp", "train.steps", "train.micro_batch_size", "data.train"})
"""Other options that a run gives, or derives from its processes, where a file does not have them."""
_OF_DIMS = {
    **{axis: (f"parallel.{axis}",) for axis in ("pp", "dp", "cp", "tp", "ep", "context_inner")},
    "virtual_stages": ("parallel.schedule", "parallel.virtual_stages"),
    "microbatches": ("train.global_batch_size", "train.micro_batch_size", "parallel.dp"),
    "sharded": ("parallel.zero",),
    "experts": ("model.num_experts",),
}
"""Field of ParallelDims → the options that it is computed from; dp_shard depends on what is given."""


def read_by(rule: Rule, context: RuleContext) -> set[str]:
    """Return the options that a rule reads to judge a context, section.key."""
    reads: set[str] = set()
    rule.broken(_recording(context, reads))
    return reads


def left_open(options: set[str], given: Container[str], to_set: Container[str], has_shape: bool) -> list[str]:
    """Return the options that neither a file nor its model gives.

    Args:
        given: options of the file and its model.
        to_set: options that the user has to set.
        has_shape: whether there are sizes of a model, which is complete with its other fields at their
            defaults.
    """

    def is_open(option: str) -> bool:
        if option in given:
            return False
        if option.startswith("model."):
            return option in SHAPE or not has_shape
        return option in OPEN or option in to_set

    return sorted(filter(is_open, options))


def _recording(context: RuleContext, reads: set[str]) -> RuleContext:
    """Return a context that records in `reads` which options are read.

    Sizes of the mesh count as the options that they depend on.
    """
    names = [section.name for section in fields(Config)]
    dims, shards = (
        context.dims,
        ("parallel.dp_shard",) if context.parallel.dp_shard else ("parallel.dp", "parallel.cp"),
    )
    parts: dict[str, Any] = {
        name: _watched(
            getattr(context, name), {key: (f"{name}.{key}",) for key in vars(getattr(context, name))}, reads
        )
        for name in names
    }
    parts["dims"] = _watched(dims, {**_OF_DIMS, "dp_shard": (*shards, "parallel.zero")}, reads)
    whole = _watched(context, {"world_size": ("parallel.dp",)}, reads, parts)
    assert isinstance(whole, RuleContext)
    return whole


def _watched(
    value: Any, names: Mapping[str, tuple[str, ...]], reads: set[str], parts: Mapping[str, Any] | None = None
) -> Any:
    """Return a copy of an object that adds names[attribute] to `reads` when an attribute is read.

    Args:
        parts: attributes with other values.
    """

    class Watched(type(value)):  # type: ignore[misc]
        def __getattribute__(self, attribute: str) -> Any:
            reads.update(names.get(attribute, ()))
            return parts[attribute] if parts and attribute in parts else super().__getattribute__(attribute)

    copy = object.__new__(Watched)
    copy.__dict__.update(vars(value))
    return copy
