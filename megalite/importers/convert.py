"""Configurations of other projects → our options. Pure functions of the files' content.

A table for each project has one row per key; a key without a row is unknown. Every key of a file sets
options, or has a remark, or both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from operator import attrgetter
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple, get_args

from megalite.config import run_length
from megalite.config.dims import ParallelDims
from megalite.config.errors import ConfigError
from megalite.config.load import from_dict
from megalite.config.repository_id import is_repository_id
from megalite.config.rule import Rule, show
from megalite.config.rules import RULES
from megalite.config.rules.context import RuleContext
from megalite.config.schema import OPTIONS, Config
from megalite.config.values import amount_value, nest, parse_values
from megalite.families import hub
from megalite.families.model_config import hf_shape
from megalite.families.peft_names import with_own_names
from megalite.families.presets import preset
from megalite.importers import accelerate, deepspeed, megatron, torchtune
from megalite.importers.projects import PROJECTS, Project, recognize
from megalite.importers.rule_options import SHAPE, left_open, read_by
from megalite.importers.verdict import (
    ImportedFile,
    KeyRule,
    Kind,
    Table,
    Verdict,
    harmless,
    left,
    lost,
    plain,
    row_of,
)

FILES = ("run.dir", "model.from_hf", "model.init_from", "data.train", "data.validation", "lora.init_from")
"""Options that name files, which may be on another machine: they are kept, and what is missing is reported.
"""


class Remark(NamedTuple):
    """A key that is not fully honoured, and why."""

    key: str
    value: Any
    kind: Kind
    why: str


@dataclass
class Imported:
    """The result of importing a file.

    Attributes:
        format: the project's name.
        options: our options, section.key → value.
        honoured: key → the options that it sets.
        remarks: on keys that are not fully honoured.
        values: of all keys, including defaults of keys that the file does not have.
        auto: key with the value `auto` → its option.
        to_set: options that the user has to set.
        is_empty: whether no key of the file sets an option or leaves it open as `auto`.
        dp: number of data-parallel ranks, or None if it is unknown.
        corresponding: key → the option that corresponds to it, whether it is honoured or not.
    """

    format: str
    options: dict[str, Any] = field(default_factory=dict)
    honoured: dict[str, list[str]] = field(default_factory=dict)
    remarks: list[Remark] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    auto: dict[str, str] = field(default_factory=dict)
    to_set: set[str] = field(default_factory=set)
    is_empty: bool = False
    dp: int | None = None
    corresponding: dict[str, str] = field(default_factory=dict)

    def set(self, key: str, options: dict[str, Any]) -> None:
        """Set the options of a key. Raises ConfigError if another key has set a different value."""
        for option, value in options.items():
            if self.options.setdefault(option, value) != value:
                values = f"{show(self.options[option])} by {self.setter(option)} and {show(value)} by {key}"
                raise ConfigError(
                    f"{self.setter(option)} and {key} are inconsistent: {option} would be set to {values}. "
                    "Correct one of them."
                )
        self.honoured[key] = [*options]

    def setter(self, option: str) -> str:
        """Return the first key that sets an option."""
        return next(key for key, names in self.honoured.items() if option in names)

    def add(self, key: str, verdict: Verdict, option: str | None, *, given: bool) -> None:
        """Add a verdict.

        Args:
            option: the option that corresponds to the key.
            given: whether the file has the key. A default only sets options that no key sets.
        """
        kind, options, why = verdict
        if not given:
            options = {name: size for name, size in options.items() if name not in self.options}
            if kind == "harmless" or (kind == "honoured" and not options):
                return
            kind, why = (
                ("assumed", "default of the project")
                if kind == "honoured"
                else ("approximate", f"default of the project; {why}")
            )
        if options:
            self.set(key, options)
        if kind != "honoured":
            self.remark(key, kind, why)
        if kind == "open" and option:
            self.to_set.add(option)

    def remark(self, key: str, kind: Kind, why: str) -> None:
        self.remarks.append(Remark(key, self.values[key], kind, why))

    def drop(self, option: str, why: str) -> None:
        """Remove an option; the keys that set it are marked as lost."""
        del self.options[option]
        for key in [key for key, names in self.honoured.items() if option in names]:
            self.honoured[key].remove(option)
            self.remark(key, "lost", why)


def leaves_of(tree: Any) -> dict[str, Any]:
    """Return section.key → value of all leaves. An empty section is a leaf."""

    def walk(tree: dict[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        for key, value in tree.items():
            if isinstance(value, dict) and value:
                yield from walk(value, f"{prefix}{key}.")
            else:
                yield f"{prefix}{key}", value

    return dict(walk(tree, "")) if isinstance(tree, dict) else {}


def linked_file(tree: Any) -> str | None:
    """Return the DeepSpeed file of an Accelerate configuration, or None.

    Its path is relative to the directory of the configuration.
    """
    return accelerate.linked_file(ImportedFile(leaves_of(tree)))


def convert(tree: Any, dp: int | None = None, linked: Any = None, project: str | None = None) -> Imported:
    """Convert a file's content.

    Args:
        dp: number of data-parallel ranks, if the file does not have it.
        linked: content of the file that `linked_file` names.
        project: a name of PROJECTS; by default the project is recognized by the keys.

    Raises:
        ConfigError: the project is not recognized, or the content contradicts itself.
    """
    leaves = leaves_of(tree)
    module = PROJECTS[project or recognize(leaves)]
    imported = Imported(module.NAME)
    source = _judge(imported, module, ImportedFile(leaves, dp))
    if linked is not None:
        linked_source = ImportedFile(leaves_of(linked), source.dp)
        _judge(imported, deepspeed, linked_source, f"{leaves[accelerate.LINKED]}: ")
    imported.dp = source.dp
    _settle_auto(imported)
    _doubt_defaults(imported, source.unsettled())
    _check(imported, source.dp)
    imported.honoured = {key: names for key, names in imported.honoured.items() if names}
    given = {*leaves, *(f"{leaves.get(accelerate.LINKED)}: {key}" for key in leaves_of(linked))}
    imported.is_empty = not imported.auto and given.isdisjoint(imported.honoured)
    if imported.is_empty:  # defaults alone are no configuration
        imported.options, imported.honoured = {}, {}
    imported.options = {option: imported.options[option] for option in OPTIONS if option in imported.options}
    return imported


def _judge(imported: Imported, module: Project, source: ImportedFile, prefix: str = "") -> ImportedFile:
    """Add all leaves of the file and the defaults of missing keys to `imported`.

    Returns the completed source.
    """
    written = source.leaves
    # an empty key has its default
    given = {key: value for key, value in written.items() if value is not None}
    if module is not megatron:  # whose arguments are typed
        given = {key: plain(value) for key, value in given.items()}
    source = replace(source, leaves=given)
    source = replace(source, dp=module.ranks(source))
    source = replace(source, defaults=module.defaults(source))
    table = module.table(source)
    nulls = _of_nulls(table, written)
    defaults = {key: value for key, value in source.defaults.items() if key not in nulls}
    source = replace(source, defaults=defaults)
    rest = {key: value for key, value in source.defaults.items() if key not in source.leaves}
    for key, value in (source.leaves | rest).items():
        row = row_of(table, key)
        imported.values[prefix + key] = written.get(key, value)
        if row and row.option:
            imported.corresponding[prefix + key] = row.option
        if row and row.option and _takes_text_only(row.option) and type(value) in (int, float):
            value = str(written.get(key, value))
        if value == "auto" and row and module in (accelerate, deepspeed):
            imported.auto[prefix + key] = row.option or ""
        else:
            verdict = _verdict(value, row, module, source)
            imported.add(prefix + key, verdict, row.option if row else None, given=key in source.leaves)
    for key, (verdict, option) in nulls.items():
        imported.values[prefix + key] = None
        imported.add(prefix + key, verdict, option, given=True)
    for key in (prefix + key for key, value in written.items() if value is None):
        if key not in imported.values:
            imported.values[key] = None
            imported.remark(key, "harmless", "empty value")
    return source


def _of_nulls(table: Table, written: dict[str, Any]) -> dict[str, tuple[Verdict, str | None]]:
    """Return the verdicts on empty keys to which that has a meaning of its own, and their options."""
    rows = {key: row_of(table, key) for key, value in written.items() if value is None}
    return {key: (row.of_null, row.option) for key, row in rows.items() if row and row.of_null}


def _verdict(value: Any, row: KeyRule | None, module: Project, source: ImportedFile) -> Verdict:
    if value in (None, "", {}, []):
        return harmless("empty value")
    if row is None:
        return lost(f"unknown key of {module.NAME}: see `megalite train --help` for a similar option")
    if module not in (megatron, torchtune) and isinstance(value, str) and _is_from_outside(value):
        return left(f"its value is not set in the file{f': set {row.option}' if row.option else ''}")
    return row.judge(value, source)


def _takes_text_only(option: str) -> bool:
    hint = OPTIONS[option].type
    return {*(get_args(hint) or (hint,))} <= {str, NoneType}


def _is_from_outside(value: str) -> bool:
    """Return whether a value is to be replaced by a variable's, ${NAME} or $NAME.

    A chat template has braces of its own.
    """
    return "{{" not in value and "{%" not in value and bool(re.search(r"\$(?:\{[^}]+\}|[A-Za-z_])", value))


def _doubt_defaults(imported: Imported, unsettled: list[str]) -> None:
    """Add to the remarks on defaults what a script does not set, which may have those keys."""
    if unsettled:
        unless = f", unless {' or '.join(unsettled)} overrides it"
        imported.remarks = [
            remark._replace(why=remark.why + unless) if remark.kind == "assumed" else remark
            for remark in imported.remarks
        ]


def _settle_auto(imported: Imported) -> None:
    """Add remarks on values `auto`, which the user has to set unless another key sets the option."""
    for key, option in imported.auto.items():
        if not option:
            imported.remark(key, "harmless", "auto, and no option depends on it")
        elif option in imported.options:
            imported.remark(key, "harmless", f"{imported.setter(option)} sets {option}")
        else:
            imported.remark(
                key, "open", f"set {option} or keep the default {show(attrgetter(option)(Config()))}"
            )


def _check(imported: Imported, dp: int | None) -> None:
    """Drop options with an invalid type or value, so that a run accepts the rest.

    If a rule depends on options that the file does not set, these are reported instead.
    """
    imported.options |= {
        option: int(value) for option, value in imported.options.items() if _is_whole(option, value)
    }
    try:
        parsed = parse_values(imported.options, "in it")
    except ConfigError:
        parsed = {}
        for option, value in [*imported.options.items()]:
            try:
                parsed |= parse_values({option: value}, "in it")
            except ConfigError as error:
                imported.drop(option, str(error))
    imported.options |= {option: value for option, value in parsed.items() if not isinstance(value, Fraction)}
    known = _shape(imported) | ({"parallel.dp": dp} if dp else {})
    for rule in RULES:
        if rule.option in imported.options:
            _check_rule(imported, rule, known)


def _shape(imported: Imported) -> dict[str, Any]:
    """Return the options of the model: of a preset, or of a Hugging Face model on this machine.

    A model that is not supported is marked as lost.
    """
    name, directory = imported.options.get("model.preset"), imported.options.get("model.from_hf")
    try:
        shape = preset(name) if name else _hf_shape(directory) if directory else {}
    except ConfigError as error:
        for option in ("model.from_hf", "model.init_from"):
            if option in imported.options:
                imported.drop(option, str(error))
        return {}
    return {f"model.{key}": value for key, value in shape.items()}


def _hf_shape(name: str) -> dict[str, Any]:
    """Return the architecture of a model's directory or of a model in the Hub's cache.

    It is empty if the model is not on this machine.
    """
    directory = hub.cached(name, "shape") if is_repository_id(name) else Path(name).expanduser()
    return hf_shape(str(directory)) if directory and (directory / "config.json").is_file() else {}


def _is_whole(option: str, value: Any) -> bool:
    return isinstance(value, float) and value.is_integer() and "int" in str(OPTIONS[option].type)


def _check_rule(imported: Imported, rule: Rule, known: dict[str, Any]) -> None:
    """Drop the rule's option if it is violated.

    A rule that reads what the file leaves open does not judge: a run checks it with the model and the data;
    what else is to be set is reported.

    Args:
        known: further options, of the model that the file names and its ranks.
    """
    options = known | imported.options
    options |= with_own_names(options)
    config = from_dict(
        nest({option: amount_value(option, value, "in it") for option, value in options.items()})
    )
    run_length.resolve_steps(config)
    world, cp = ParallelDims.of(config).world, config.parallel.cp
    context = RuleContext(
        **{section.name: getattr(config, section.name) for section in fields(Config)}, world_size=world
    )
    if not rule.broken(context):
        return
    open_options = left_open(
        read_by(rule, context), options, imported.to_set, has_shape=not SHAPE.isdisjoint(options)
    )
    if rule.option in FILES and not isinstance(options[rule.option], float):
        if not (
            rule.option in ("model.init_from", "model.from_hf")
            and is_repository_id(str(options[rule.option]).removeprefix("hf:"))
        ):
            imported.remark(imported.setter(rule.option), "open", rule.describe(context))
    elif open_options:
        if not any(option.startswith(("model.", "data.")) for option in open_options):
            ranks = (
                f"{rule.option} depends on parallel.dp, which the file does not set: pass --dp N to check it"
            )
            why = (
                ranks
                if "parallel.dp" in open_options
                else f"adjust {' and '.join(open_options)}: {rule.describe(context)}"
            )
            imported.remark(imported.setter(rule.option), "open", why)
    elif rule.option == "parallel.cp" and cp > 1:
        without = (
            f"Without it, the run uses {world // cp} processes instead of {world} and the same batch size."
        )
        imported.drop(rule.option, f"{rule.describe(context)} {without}")
    else:
        imported.drop(rule.option, rule.describe(context))
