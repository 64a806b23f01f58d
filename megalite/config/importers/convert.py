"""DeepSpeed's ds_config.json and Accelerate's default_config.yaml → our options. Pure: trees in, values and reasons out.

A table for each, one row a key, says what becomes of the keys that those files have; a key without a row has no counterpart here.
Every key of a file is honoured, or remarked upon, or both.
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
"""Options whose rules look at others: while the file leaves one of those open, a broken rule says what is still to be set."""


class Remark(NamedTuple):
    """A key that is not simply honoured, and why."""

    key: str
    value: Any
    kind: Kind
    why: str


@dataclass
class Imported:
    """What a file comes to: our options, section.key → value; the options that each key sets; remarks on keys; and the keys' values,
    those included that the file leaves out."""

    format: str
    options: dict[str, Any] = field(default_factory=dict)
    honoured: dict[str, list[str]] = field(default_factory=dict)
    remarks: list[Remark] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)

    def set(self, key: str, options: dict[str, Any]) -> None:
        """Take over what a key sets. Raises ConfigError where another key has set something else."""
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
        """Take an option back; what set it is lost."""
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
    """The DeepSpeed file that an Accelerate configuration names, a path from the directory that it lies in."""
    return accelerate.linked_file(Source(leaves_of(tree)))


def convert(tree: Any, dp: int | None = None, linked: Any = None) -> Imported:
    """What a file's content comes to.

    dp: number of data-parallel ranks, where the file does not say it; linked: content of the file that `linked_file` names.
    Raises ConfigError where the content is of neither format, or contradicts itself.
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
    """Give every leaf, and every default that is left out, its place in `found`."""
    for key, value in (defaults | source.leaves).items():
        found.values[prefix + key] = value
        sections = [f"{key[:end]}.*" for end, letter in enumerate(key) if letter == "."]
        row = next((table[name] for name in (key, *reversed(sections)) if name in table), None)
        if value in (None, {}, []):
            verdict = harmless("it is empty")
        elif row is None:
            verdict = lost("there is nothing like it here")
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
    """`auto` leaves an option to the program that reads the file, here to whoever runs it, unless another key sets it."""
    for place, (key, value, kind, option) in enumerate(found.remarks):
        if kind != "open":
            continue
        if not option:
            kind, why = "harmless", "it is left open, and nothing here depends on it"
        elif option in found.options:
            kind, why = "harmless", f"{found.setter(option)} says {option}"
        else:
            why = f"set {option}, or leave it at {show(attrgetter(option)(Config()))}"
        found.remarks[place] = Remark(key, value, kind, why)


def _check(found: Imported) -> None:
    """Take back what is of a wrong type or what a rule forbids, so that a run accepts the rest; where the rule hangs on what the file
    leaves open, say what is to be set."""
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
