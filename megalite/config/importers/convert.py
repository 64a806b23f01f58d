"""DeepSpeed's ds_config.json and Accelerate's default_config.yaml → our options. Pure functions of the files' content.

A table for each format has one row per key; a key without a row has no counterpart here. Every key of a file sets options, or has a remark,
or both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, NamedTuple

from megalite.config.dims import ParallelDims
from megalite.config.importers import accelerate, deepspeed
from megalite.config.importers.verdict import Kind, Source, Table, harmless, lost
from megalite.config.load import OPTIONS, build_parser, from_dict, nest, parse_values
from megalite.config.rule import RuleContext, show
from megalite.config.rules import RULES
from megalite.config.schema import Config, ConfigError

NEEDS = {"train.global_batch_size": ("train.micro_batch_size", "parallel.dp"), "optimizer.warmup_steps": ("train.steps",)}
"""Option → other options that its rules read: if the file leaves one of those open, a violated rule is reported as what is still to be
set."""


class Remark(NamedTuple):
    """A key that is not fully honoured, and why."""

    key: str
    value: Any
    kind: Kind
    why: str


@dataclass
class Imported:
    """The result for a file: our options, section.key → value; the options that each key sets; remarks on keys; and the values of keys,
    including defaults of keys that the file does not have."""

    format: str
    options: dict[str, Any] = field(default_factory=dict)
    honoured: dict[str, list[str]] = field(default_factory=dict)
    remarks: list[Remark] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)

    def set(self, key: str, options: dict[str, Any]) -> None:
        """Set the options of a key. Raises ConfigError if another key has set a different value."""
        for option, value in options.items():
            if self.options.setdefault(option, value) != value:
                found = f"{show(self.options[option])} by {self.setter(option)} and {show(value)} by {key}"
                raise ConfigError(f"{self.setter(option)} and {key} contradict each other: {option} would be {found}. Correct one of them.")
        self.honoured[key] = [*options]

    def setter(self, option: str) -> str:
        """The first key that sets an option."""
        return next(key for key, names in self.honoured.items() if option in names)

    def remark(self, key: str, kind: Kind, why: str) -> None:
        self.remarks.append(Remark(key, self.values[key], kind, why))

    def drop(self, option: str, why: str) -> None:
        """Remove an option; the keys that set it are marked as lost."""
        del self.options[option]
        for key in [key for key, names in self.honoured.items() if option in names]:
            self.honoured[key].remove(option)
            self.remark(key, "lost", why)


def leaves_of(tree: Any) -> dict[str, Any]:
    """section.key → value of every leaf; an empty section is a leaf."""

    def walk(tree: dict[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        for key, value in tree.items():
            if isinstance(value, dict) and value:
                yield from walk(value, f"{prefix}{key}.")
            else:
                yield f"{prefix}{key}", value

    return dict(walk(tree, "")) if isinstance(tree, dict) else {}


def linked_file(tree: Any) -> str | None:
    """The DeepSpeed file named by an Accelerate configuration, a path relative to the configuration's directory; None if there is none."""
    return accelerate.linked_file(Source(leaves_of(tree)))


def convert(tree: Any, dp: int | None = None, linked: Any = None) -> Imported:
    """Convert a file's content.

    dp: number of data-parallel ranks, if the file does not have it; linked: content of the file that `linked_file` names.
    Raises ConfigError if the content has neither format, or contradicts itself.
    """
    leaves = leaves_of(tree)
    if accelerate.MARK in leaves:
        found, source = Imported("Accelerate"), Source(leaves, accelerate.ranks(Source(leaves)) or dp)
        _judge(found, accelerate.table(source), source, accelerate.defaults(source))
    elif any(key.startswith(deepspeed.MARKS) for key in leaves):
        found, linked = Imported("DeepSpeed"), tree
        source = Source(leaves, dp)
    else:
        marks = ", ".join(deepspeed.MARKS)
        raise ConfigError(f"the file is neither DeepSpeed's configuration (none of {marks}) nor Accelerate's (no {accelerate.MARK}).")
    if linked is not None:
        prefix = "" if linked is tree else f"{leaves[accelerate.LINKED]}: "
        inner = Source(leaves_of(linked), source.dp)
        _judge(found, deepspeed.table(inner), inner, deepspeed.defaults(inner), prefix)
    _settle_auto(found)
    _check(found)
    found.honoured = {key: names for key, names in found.honoured.items() if names}
    found.options = {option: found.options[option] for option in OPTIONS if option in found.options}
    return found


def _judge(found: Imported, table: Table, source: Source, defaults: dict[str, Any], prefix: str = "") -> None:
    """Add every leaf of the file, and every default of a key that it does not have, to `found`."""
    for key, value in (defaults | source.leaves).items():
        found.values[prefix + key] = value
        sections = [f"{key[:end]}.*" for end, letter in enumerate(key) if letter == "."]
        row = next((table[name] for name in (key, *reversed(sections)) if name in table), None)
        if value in (None, {}, []):
            verdict = harmless("it is empty")
        elif row is None:
            verdict = lost("it has no counterpart here")
        elif value == "auto":
            found.remark(prefix + key, "open", row.option or "")
            continue
        else:
            verdict = row.judge(value, source)
        kind, why = verdict.kind, verdict.why
        if key not in source.leaves:
            if kind == "harmless":
                continue
            kind, why = ("assumed", "it is the default there") if kind == "honoured" else ("approximate", f"by default; {why}")
        if verdict.options:
            found.set(prefix + key, verdict.options)
        if kind != "honoured":
            found.remark(prefix + key, kind, why)


def _settle_auto(found: Imported) -> None:
    """Complete the remarks on `auto`, which leaves an option to the program that reads the file: here to the user, unless another key sets
    it."""
    for place, (key, value, kind, option) in enumerate(found.remarks):
        if kind != "open":
            continue
        if not option:
            kind, why = "harmless", "it is left open, and nothing here depends on it"
        elif option in found.options:
            kind, why = "harmless", f"{found.setter(option)} sets {option}"
        else:
            why = f"set {option}, or leave it at {show(attrgetter(option)(Config()))}"
        found.remarks[place] = Remark(key, value, kind, why)


def _check(found: Imported) -> None:
    """Drop options of a wrong type and those that violate a rule, so that a run accepts the rest; if the rule depends on options that the
    file leaves open, report what is to be set."""
    parser = build_parser()
    for option, value in [*found.options.items()]:
        whole = int(value) if isinstance(value, float) and value.is_integer() and "int" in str(OPTIONS[option].type) else value
        try:
            found.options |= parse_values(parser, {option: whole}, "in it")
        except ConfigError as error:
            found.drop(option, str(error))
    for rule in RULES:
        if rule.option in found.options:
            config = from_dict(nest(found.options))
            values = {section.name: getattr(config, section.name) for section in fields(Config)}
            context = RuleContext(**values, world_size=ParallelDims.of(config).world)
            if rule.broken(context) and all(other in found.options for other in NEEDS.get(rule.option, ())):
                found.drop(rule.option, rule.describe(context))
            elif rule.broken(context):
                found.remark(found.setter(rule.option), "open", rule.describe(context))
